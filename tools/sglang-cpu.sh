#!/bin/sh
# Makes an environment in which the real SGLang runs without a GPU: sglang-cpu.sh DIRECTORY. About 1.8 GB on disk.
# Without dependencies on purpose: SGLang's own list brings CUDA. celld/sglang/cpu stands in for what is left out.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
target=$1
[ -x "$target/bin/python" ] || "${PYTHON:-python3}" -m venv "$target"
"$target/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || {
	echo "error: the pinned SGLang wheel is for Python 3.11; name one: make test-sglang PYTHON=python3.11" >&2
	exit 2
}
# the store of keys and values compiles its hash when it is first used
if ! command -v g++ >/dev/null 2>&1 || ! command -v ninja >/dev/null 2>&1; then
	if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends g++ ninja-build
	else
		echo "error: g++ and ninja are missing; install them (Debian: apt-get install g++ ninja-build) and run make again" >&2
		exit 2
	fi
fi
pip() { "$target/bin/python" -m pip install -q --disable-pip-version-check --no-deps ${PIP_ARGS:-} "$@"; }
pip "torch==2.13.0"
pip -r "$here/sglang-cpu.txt"

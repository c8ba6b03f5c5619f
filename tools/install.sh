#!/bin/sh
# Makes the virtual environment that `make run` and `make test` use. Needs Python >= 3.11; on Debian as root it fetches what is missing.
set -eu
fail() { echo "error: $1" >&2; exit 2; }

as_root_debian() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; }
need() { # need COMMAND... : Debian packages in $PACKAGES
	as_root_debian || fail "$1 is missing; install it (Debian: apt-get install $PACKAGES) and run make again"
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $PACKAGES
}

PACKAGES="python3 python3-venv"
command -v "$PYTHON" >/dev/null 2>&1 || need "$PYTHON"
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "$PYTHON is older than 3.11; name a newer one: make PYTHON=python3.12 ..."
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || need "the venv module"

# walls for executions (tasks.workspace = "bwrap"); without it only plain and container workspaces run
command -v bwrap >/dev/null 2>&1 || ! as_root_debian || { PACKAGES="bubblewrap"; need "bubblewrap"; }

# what mooncake is linked against; without it weights and gradients go over the bus
ldconfig -p 2>/dev/null | grep -q libibverbs.so.1 || ! as_root_debian || { PACKAGES="libibverbs1"; need "libibverbs1"; }

[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
CONSTRAINTS=""
"$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' && CONSTRAINTS="-c constraints.txt"
# torch first and pinned: whatever follows then finds it and does not fetch another build
"$VENV/bin/python" -m pip install -q --disable-pip-version-check $PIP_ARGS $CONSTRAINTS "torch==2.13.0" numpy packaging
"$VENV/bin/python" -m pip install -q --disable-pip-version-check $PIP_ARGS $CONSTRAINTS -e ".[train,mooncake,report,launch,dev]"

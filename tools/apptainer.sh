#!/bin/sh
# Fetches Apptainer for the tests of `tasks.workspace = "apptainer"` where no Debian release has it: the unstable
# package, with the C library that it needs, into a folder of its own. Needs root on Debian; nothing else is changed but
# patchelf and squashfs-tools being installed. Use: sh tools/apptainer.sh FOLDER; then FOLDER/bin/apptainer runs.
set -eu
fail() { echo "apptainer: $1" >&2; exit 1; }

[ $# = 1 ] || fail "name one folder"
mkdir -p "$1"
folder=$(cd "$1" && pwd)
[ -x "$folder/bin/apptainer" ] && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || fail "needs root on Debian; install it as your site does"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mirror=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null | head -n 1)
[ -n "$mirror" ] || fail "no Debian mirror in this machine's sources"
key=/usr/share/keyrings/debian-archive-keyring.gpg
mkdir -p "$work/lists/partial" "$work/cache/archives/partial"
echo "deb [signed-by=$key] $mirror sid main" >"$work/sid.list"
apart="-qq -o Dir::Etc::sourcelist=$work/sid.list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists=$work/lists"
apart="$apart -o Dir::Cache=$work/cache -o APT::Sandbox::User=root"
apt-get $apart update || fail "the unstable packages can't be listed"
cd "$work"
apt-get $apart download apptainer libc6 libseccomp2 libsqlite3-0 || fail "the packages can't be had"
command -v patchelf >/dev/null 2>&1 || DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends patchelf

for package in *.deb; do dpkg -x "$package" "$folder"; done
mv "$folder/etc" "$folder/usr/etc"
mkdir -p "$folder/usr/lib/var/lib/apptainer/mnt/session"
ln -s ../etc "$folder/usr/lib/etc"
libraries=$(dirname "$(find "$folder/usr/lib" -name libc.so.6 | head -n 1)")
loader=$(find "$folder/usr" -name 'ld-linux*.so.*' | head -n 1)
for program in "$folder/usr/bin/apptainer" "$(find "$folder/usr/lib" -path '*/apptainer/bin/starter')"; do
	patchelf --set-interpreter "$loader" "$program"
	patchelf --force-rpath --set-rpath "$libraries" "$program"
done
rm -rf "$folder/usr/share"
mkdir -p "$folder/bin"
ln -s ../usr/bin/apptainer "$folder/bin/apptainer"
"$folder/bin/apptainer" --version || fail "it does not start here"

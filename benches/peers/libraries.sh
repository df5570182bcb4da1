#!/usr/bin/env bash
# The Debian libraries that Mooncake's wheel needs: installed where that is allowed, otherwise unpacked into the
# environment given as $1 (benches/peers/environment.py finds them there). Never fails: a peer without its libraries is a
# row that says so.
set -uo pipefail
into=$1
loads() { PATH=$PATH:/sbin:/usr/sbin ldconfig -p 2>/dev/null | grep -q "$1"; }
missing=()
while read -r library package; do
	loads "$library" || missing+=("$package")
done <<'LIST'
libibverbs.so.1 libibverbs1
librdmacm.so.1 librdmacm1
libnuma.so.1 libnuma1
liburing.so.2 liburing2
libnl-3.so.200 libnl-3-200
libnl-route-3.so.200 libnl-route-3-200
libcurl.so.4 libcurl4
LIST
[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
	echo "no apt-get: ${missing[*]} not installed"
	exit 0
fi
if [ "$(id -u)" -eq 0 ]; then
	apt-get install -y -qq "${missing[@]}" >/dev/null 2>&1 && exit 0
	apt-get update -qq >/dev/null 2>&1
	apt-get install -y -qq "${missing[@]}" >/dev/null 2>&1 && exit 0
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for package in "${missing[@]}"; do
	if (cd "$folder" && apt-get download -qq "$package" >/dev/null 2>&1); then
		dpkg -x "$folder/$package"_*.deb "$into/debian"
	else
		echo "$package: could not be fetched"
	fi
done
exit 0

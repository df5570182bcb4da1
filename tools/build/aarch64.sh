#!/usr/bin/env bash
# Builds and runs code for 64-bit Arm on an x86-64 machine: aarch64.sh prepare | fetch [PYTHON] | run COMMAND...
# The programs come from Debian's unstable suite, through the mirror that apt of this machine uses. They are unpacked into
# target/aarch64/root, not installed: nothing outside target/ changes, and no root is needed. Commands run in a user
# namespace with that folder as its root, the checkout at its own path, and an emulator for Arm programs. With
# CARGO_TARGET_DIR, its folder aarch64 takes the place of target/aarch64, so that checkouts can share one.
set -euo pipefail
cd "$(dirname "$0")/../.."
checkout=$PWD
base=$(realpath -m "${CARGO_TARGET_DIR:-target}/aarch64")
root=$base/root
# Packages of the root: the shell, the compilers, the emulator, Python for Arm, and herd7.
packages="base-files bash coreutils dash findutils grep sed gzip tar mawk hostname procps util-linux make
	rustc:amd64 cargo:amd64 libstd-rust-dev:arm64 gcc-aarch64-linux-gnu libc6-dev:arm64
	qemu-user python3:arm64 ca-certificates herdtools7"
# The venv module of Python and its pip. Their dependencies are not installed: apt finds them only for amd64, and they are not needed.
loose='?and(?name(^python3\.[0-9]+-venv$),?architecture(arm64)) python3-pip-whl'
keys=/usr/share/keyrings/debian-archive-keyring.gpg

die() {
	echo "aarch64.sh: $*" >&2
	exit 1
}

# Gives apt its own lists, cache and record of installed packages. Of the settings of this machine, only those of downloads are kept
# (proxies, certificates), because hooks would run programs of this machine.
own_apt() {
	mkdir -p "$base"/apt/{lists,archives}/partial
	[ -e "$base/apt/status" ] || : > "$base/apt/status"
	{
		apt-config dump | grep '^Acquire::'
		cat <<-CONF
			Dir::State::lists "$base/apt/lists";
			Dir::State::status "$base/apt/status";
			Dir::State::extended_states "$base/apt/extended_states";
			Dir::Cache "$base/apt";
			Dir::Etc::main "/dev/null";
			Dir::Etc::parts "/dev/null";
			Dir::Etc::sourcelist "$base/apt/sources.list";
			Dir::Etc::sourceparts "/dev/null";
			Dir::Etc::preferences "/dev/null";
			Dir::Etc::preferencesparts "/dev/null";
			Dir::Log "$base/apt";
			Debug::NoLocking "true";
			APT::Architecture "amd64";
			APT::Architectures { "amd64"; "arm64"; };
			APT::Sandbox::User "";
			APT::Install-Recommends "false";
			Acquire::Check-Valid-Until "false";
			Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
		CONF
	} > "$base/apt/apt.conf"
}

# Prints the mirror from which this machine gets the packages of Debian.
mirror() {
	apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(LABEL)' 'Created-By: Packages' |
		awk '$2 == "Debian" && $3 == "Debian" && !found++ { print $1 }'
}

# Makes the root, unless the same packages and functions have made it already. Holds a lock until this script and its command have ended,
# so that no other checkout replaces the root meanwhile.
prepare() {
	local want
	want=$({ declare -f unpack furnish && echo "$packages $loose"; } | sha256sum | cut -d ' ' -f 1)
	mkdir -p "$base"
	exec 9>> "$base/lock"
	flock --shared 9
	[ "$(cat "$root/stamp" 2> /dev/null)" != "$want" ] || return 0
	flock 9
	[ "$(cat "$root/stamp" 2> /dev/null)" = "$want" ] || make_root "$want"
	flock --shared 9
}

make_root() {
	[ "$(uname -m)" = x86_64 ] || die "needs an x86-64 machine, and this one is $(uname -m)"
	command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || die "needs apt-get and dpkg-deb"
	[ -e "$keys" ] || die "needs $keys (package debian-archive-keyring)"
	unshare --user --map-root-user --mount true 2> /dev/null || die "this machine allows no user namespaces"
	local uri
	uri=$(mirror)
	[ -n "$uri" ] || die "apt knows no mirror of Debian yet: run 'apt-get update' once"
	own_apt
	echo "deb [signed-by=$keys] $uri unstable main" > "$base/apt/sources.list"
	export APT_CONFIG=$base/apt/apt.conf
	apt-get update -qq || die "apt-get update failed"
	# Essential packages that no list above names are not needed, so nothing is removed for lack of them.
	# shellcheck disable=SC2086
	apt-get install -qq --yes --download-only $packages > /dev/null || die "the packages cannot be fetched"
	# shellcheck disable=SC2086
	(cd "$base/apt/archives" && apt-get download -qq $loose) || die "the packages of the venv module cannot be fetched"
	unpack
	furnish
	run true || die "the new root does not run a program"
	echo "$1" > "$root/stamp"
}

# Replaces the root. Runs no program of the packages.
unpack() {
	rm -rf "$root"
	mkdir -p "$root"
	local archive
	for archive in "$base"/apt/archives/base-files_*.deb "$base"/apt/archives/*.deb; do
		dpkg-deb --extract "$archive" "$root" || die "$archive cannot be unpacked"
	done
	rm -f "$base"/apt/archives/*.deb
}

# Writes the files that the scripts of the packages would have written.
furnish() {
	mkdir -p "$root"/{etc,tmp,proc,sys,dev,root} "$root/cargo"
	printf 'root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n' > "$root/etc/passwd"
	printf 'root:x:0:\nnogroup:x:65534:\n' > "$root/etc/group"
	printf '127.0.0.1 localhost\n::1 localhost\n' > "$root/etc/hosts"
	# Debian's pip does not start without certificates.
	mkdir -p "$root/etc/ssl/certs"
	cat "$root"/usr/share/ca-certificates/mozilla/*.crt > "$root/etc/ssl/certs/ca-certificates.crt"
	ln -sf mawk "$root/usr/bin/awk"
	ln -sf gcc "$root/usr/bin/cc"
}

# Fetches the crates, because commands in the root work offline. Given a Python, also fetches with it the packages that the Python tests
# import, for the Python of the root. Type checkers only read the sources, so they are left out.
fetch() {
	cargo fetch --locked
	[ -n "${1:-}" ] || return 0
	local version wanted
	version=$(cd "$root/usr/bin" && echo python3.*)
	version=${version#python}
	wanted=$(echo "# Python $version" && grep -hvE '^(#|maturin|mypy|pyright|ruff)' requirements-build.txt requirements-dev.txt)
	[ "$(cat "$base/wheels/requirements.txt" 2> /dev/null)" != "$wanted" ] || return 0
	rm -rf "$base/wheels"
	"$1" -m pip download --quiet --disable-pip-version-check --dest "$base/wheels" --only-binary=:all: \
		--platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 --platform manylinux_2_28_aarch64 \
		--implementation cp --python-version "$version" --abi "cp${version/./}" --abi abi3 --requirement <(echo "$wanted")
	echo "$wanted" > "$base/wheels/requirements.txt"
}

# ELF, 64 bits, little endian, for Arm; both kinds of program files (ET_EXEC and ET_DYN).
arm_program='\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00'
arm_mask='\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff'

# Runs as the first process of the namespace. Mounts the folders, and has the kernel pass Arm programs to the emulator. Both apply only
# to this namespace.
enter() {
	mount --bind "$root" "$root"
	# The checkout may be below /tmp.
	mount -t tmpfs tmpfs "$root/tmp"
	local folder
	for folder in "$checkout" "$base"; do
		mkdir -p "$root$folder"
		mount --bind "$folder" "$root$folder"
	done
	# `cargo fetch` has filled this folder outside the namespace.
	mount --bind -o ro "$CARGO_HOME" "$root/cargo"
	mount --rbind /dev "$root/dev"
	mount --rbind /sys "$root/sys"
	mount -t proc proc "$root/proc"
	mount -t binfmt_misc binfmt_misc "$root/proc/sys/fs/binfmt_misc" ||
		die "this kernel has no binfmt_misc for user namespaces (Linux 6.7 has)"
	# The kernel opens the emulator now (flag F), by its path outside the new root.
	printf '%s' ":arm64:M::$arm_program:$arm_mask:$root/usr/bin/qemu-aarch64:PF" > "$root/proc/sys/fs/binfmt_misc/register"
	# No exec: this shell stays the first process of the namespace, and reaps its orphans.
	chroot "$root" /usr/bin/env -C "$checkout" "$@"
}

# Sets up cargo for this root. Passes on the caller's variables for tests, builds and the emulator. With Zig, no other linker is set.
run() {
	export CARGO_HOME=${CARGO_HOME:-$HOME/.cargo}
	mkdir -p "$CARGO_HOME"
	local passed linker=()
	[ -n "${CARGO_ZIGBUILD_ZIG_PATH:-}" ] ||
		linker=({CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER,CC_aarch64_unknown_linux_gnu}=aarch64-linux-gnu-gcc)
	mapfile -t passed < <(env | grep -E '^(QEMU_|PROPTEST_|RUST_|LLM_DATADIST_|CARGO_BUILD_JOBS|CARGO_PROFILE_|CARGO_ZIGBUILD_)[A-Z_]*=|^(CI|TERM|V)=' || true)
	CARGO_HOME=$CARGO_HOME unshare --user --map-root-user --mount --pid --fork --kill-child \
		"$checkout/tools/build/aarch64.sh" enter -i "${passed[@]}" \
		PATH=/usr/local/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 TMPDIR=/tmp CARGO_HOME=/cargo CARGO_NET_OFFLINE=true \
		CARGO_TARGET_DIR="$base/cargo" CARGO_BUILD_TARGET=aarch64-unknown-linux-gnu CARGO_INCREMENTAL=0 \
		"${linker[@]}" "$@"
}

command=${1:-}
shift || true
case $command in
prepare) prepare ;;
fetch)
	prepare
	fetch "$@"
	;;
run)
	prepare
	run "$@"
	;;
enter) enter "$@" ;;
*) die "use: aarch64.sh prepare | fetch [PYTHON] | run COMMAND..." ;;
esac

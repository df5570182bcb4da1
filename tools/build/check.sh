#!/bin/sh
# Checks that the programs a build needs are present: check.sh VENV RUST_VERSION PYTHON
# Prints one line with the remedy for each that is missing, and ends with 1. TESTS=1 also checks what only tests need; SKIP_CPP=1
# leaves out what the C++ tests need.
venv=$1 rust=$2 python=$3
failed=

missing() {
	failed=1
	echo "Missing: $1" >&2
}

# Whether version $1 is at least $2; both are MAJOR.MINOR, with or without more.
at_least() {
	[ "${1%%.*}" -gt "${2%%.*}" ] && return 0
	[ "${1%%.*}" = "${2%%.*}" ] || return 1
	first=${1#*.} second=${2#*.}
	[ "${first%%.*}" -ge "${second%%.*}" ]
}

if [ "$(uname -s)" != Linux ]; then
	missing "Linux. llm_datadist runs on 64-bit Linux only; this is $(uname -s)"
fi

# A virtual environment that exists already needs no other Python.
if [ ! -x "$venv/bin/python" ]; then
	if ! command -v "$python" > /dev/null; then
		missing "$python (Python 3.9 or newer). Debian: apt-get install python3-venv"
	elif ! version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2> /dev/null); then
		missing "a $python that starts. Debian: apt-get install python3-venv"
	elif ! at_least "$version" 3.9; then
		missing "Python 3.9 or newer ($python is $version). Name another one: make PYTHON=/path/to/python3"
	elif ! "$python" -c 'import venv, ensurepip' 2> /dev/null; then
		missing "the venv module of $python. Debian: apt-get install python$version-venv"
	fi
fi

rustup_command="curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y (Debian: apt-get install curl ca-certificates)"
if ! command -v rustc > /dev/null || ! command -v cargo > /dev/null; then
	if command -v rustup > /dev/null; then
		missing "rustc and cargo (Rust $rust or newer). Install them: rustup default stable"
	elif [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
		missing "rustc and cargo on the PATH. Run: . \"${CARGO_HOME:-$HOME/.cargo}/env\""
	else
		missing "rustc and cargo (Rust $rust or newer). Install them: $rustup_command"
	fi
elif ! version=$(rustc --version 2> /dev/null); then
	missing "a Rust toolchain (rustup has none). Install one: rustup default stable"
else
	version=$(echo "$version" | cut -d ' ' -f 2)
	if ! at_least "$version" "$rust"; then
		if command -v rustup > /dev/null; then
			missing "Rust $rust or newer (rustc is $version). Update it: rustup update stable && rustup default stable"
		else
			missing "Rust $rust or newer (rustc is $version). Install it with rustup: $rustup_command"
		fi
	fi
fi

# Rust links with `cc`. On Debian, gcc without libc6-dev exists and links nothing.
if ! command -v cc > /dev/null; then
	missing "cc (a C compiler, with which Rust links). Debian: apt-get install build-essential"
elif ! echo 'int main(void) { return 0; }' | cc -x c -o /dev/null - 2> /dev/null; then
	missing "a cc that can link (are the C library's files there?). Debian: apt-get install build-essential"
fi

if [ -n "$TESTS" ] && [ -z "$SKIP_CPP" ]; then
	if ! command -v g++ > /dev/null && ! command -v clang++ > /dev/null; then
		missing "g++ or clang++, for the C++ tests (make test SKIP_CPP=1 leaves them out). Debian: apt-get install build-essential"
	fi
	for program in pkg-config cmake readelf; do
		command -v "$program" > /dev/null && continue
		package=$program
		[ "$program" = readelf ] && package=binutils
		missing "$program, for the C++ tests (make test SKIP_CPP=1 leaves them out). Debian: apt-get install $package"
	done
fi
if [ -n "$TESTS" ] && [ "$(id -u)" = 0 ] && ! command -v ip > /dev/null; then
	missing "ip, for the tests of network namespaces, which run as root. Debian: apt-get install iproute2"
fi

[ -z "$failed" ] && exit 0
echo "Nothing was built. Install what is missing, then run the command again." >&2
exit 1

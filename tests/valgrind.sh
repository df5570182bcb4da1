#!/usr/bin/env bash
# Runs the Rust tests of the memory code under valgrind, few cases each.
#
# Valgrind sees reads of memory that was never written, which the address sanitizer does not. It knows no memory of other
# processes and no huge pages, and it is some thirty times slower, so tests that link engines are left out. Not for: CPUs
# whose instructions valgrind lacks (the kernels of wide vectors are tested where it knows them).
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v valgrind > /dev/null; then
	echo "valgrind was not found (Debian: apt-get install valgrind)" >&2
	exit 1
fi
tests=(kernel:: region:: foreign:: pin:: heap::)
binary=$(cargo test --locked --no-run --message-format=json -p llm-datadist-core --test rust |
	sed -n 's/.*"executable":"\([^"]*\/rust-[^"]*\)".*/\1/p' | tail -n 1)
[ -x "$binary" ] || { echo "the test program was not built" >&2; exit 1; }
PROPTEST_CASES=${PROPTEST_CASES:-4} valgrind --quiet --error-exitcode=99 --num-callers=30 --fair-sched=yes \
	"$binary" --test-threads=1 "${tests[@]}" "$@"

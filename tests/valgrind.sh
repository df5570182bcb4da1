#!/usr/bin/env bash
# Runs the Rust tests of the memory code under valgrind, few cases each.
#
# Valgrind sees reads of memory that was never written, which the address sanitizer does not. It is some thirty times
# slower, and the one of Debian 12 knows neither pidfds nor where the kernel's vDSO is, nor mappings of a tebibyte: tests that
# need those, threads that race, or other processes are left out. The last line counts what ran.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v valgrind > /dev/null; then
	echo "valgrind was not found (Debian: apt-get install valgrind)" >&2
	exit 1
fi
tests=(
	kernels::every kernels::a_batch kernels::overlapping kernels::pieces kernels::refuses kernels::tensors kernels::windows
	row_pins:: region::
)
left_out=(row_pins::exclusion region::the_number_of_this_process region::a_region_costs_nothing)
binary=$(cargo test --locked --no-run --message-format=json -p llm-datadist-core --test integration |
	sed -n 's/.*"executable":"\([^"]*\/integration-[^"]*\)".*/\1/p' | tail -n 1)
[ -x "$binary" ] || { echo "the test program was not built" >&2; exit 1; }
list=$("$binary" --list)
for name in "${tests[@]}" "${left_out[@]}"; do
	grep -q "^[a-z_:]*$name" <<< "$list" || { echo "no test is named $name" >&2; exit 1; }
done
PROPTEST_CASES=${PROPTEST_CASES:-2} valgrind --quiet --error-exitcode=99 --num-callers=30 --fair-sched=yes \
	"$binary" --test-threads=1 "${tests[@]}" "${left_out[@]/#/--skip=}" "$@"
echo "valgrind: no errors"

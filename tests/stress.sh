#!/usr/bin/env bash
# Runs the test phases of `make test` again and again beside busy loops: stress.sh <rounds> <log folder> <python> <loops>.
#
# Rounds that run at the same time need a checkout each, and a network namespace each because of fixed ports (docs/testing.md).
# Each round has a log of its own; `summary` has a line for each phase. Ends with 1 if any phase of any round failed.
set -uo pipefail
cd "$(dirname "$0")/.."
rounds=${1:?rounds} logs=${2:?log folder} python=${3:?python} busy=${4:-2}
mkdir -p "$logs"
loops=()
for _ in $(seq "$busy"); do
	(while :; do :; done) &
	loops+=("$!")
done
trap 'kill ${loops[@]+"${loops[@]}"} 2> /dev/null' EXIT
failed=0
{
	echo "commit $(git rev-parse HEAD 2> /dev/null || echo unknown)$(git diff --quiet HEAD 2> /dev/null || echo ', changed')"
	echo "$(nproc) cores, $busy busy loops, $rounds rounds, from $(date --utc --iso-8601=seconds)"
} | tee "$logs/summary"
phase() {
	local round=$1 name=$2 began=$SECONDS result=passed
	shift 2
	"$@" > "$logs/$round-$name.log" 2>&1 < /dev/null || { result=FAILED; failed=1; }
	local counts
	counts=$(grep -hE '^(test result:|=+ .*(passed|failed).* in |[0-9]+ (passed|failed).* in )' "$logs/$round-$name.log" | tail -n 2 | tr '\n' ' ')
	echo "round $round $name: $result in $((SECONDS - began)) s, load $(cut -d ' ' -f 1 /proc/loadavg): $counts" |
		tee -a "$logs/summary"
	[ "$result" = passed ] || grep -hE '^(FAILED|ERROR|test .* FAILED)' "$logs/$round-$name.log" | tee -a "$logs/summary"
}
for round in $(seq "$rounds"); do
	phase "$round" rust cargo test --workspace --exclude llm-datadist-py
	phase "$round" python "$python" -m pytest -q
done
[ "$failed" = 0 ] && echo "all $rounds rounds passed" | tee -a "$logs/summary"
exit "$failed"

#!/usr/bin/env bash
# Runs the tests of `make test` again and again beside busy loops: stress.sh <rounds> <log folder> <python> <loops>.
#
# Each round has a log and a folder of logs; `summary` has a line for each round. Ends with 1 if any round failed.
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
for round in $(seq "$rounds"); do
	began=$SECONDS result=passed
	"$python" tools/build/run_tests.py --logs "$logs/$round" > "$logs/$round.log" 2>&1 < /dev/null || { result=FAILED; failed=1; }
	echo "round $round: $result in $((SECONDS - began)) s, load $(cut -d ' ' -f 1 /proc/loadavg): $(grep '^total: ' "$logs/$round.log")" |
		tee -a "$logs/summary"
	grep -E '^  FAILED|^skipped without permission' "$logs/$round.log" | tee -a "$logs/summary"
done
[ "$failed" = 0 ] && echo "all $rounds rounds passed" | tee -a "$logs/summary"
exit "$failed"

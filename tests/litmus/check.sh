#!/usr/bin/env bash
# Checks the litmus tests of docs/memory-order.md with herd7. `check.sh FOLDER` checks those of another folder.
# X.litmus describes an outcome that must never occur. X_weak.litmus lacks a barrier, and the same outcome must be possible.
set -euo pipefail
folder=${1:-$(dirname "$0")}
fail=0

complain() {
	echo "$*" >&2
	fail=1
}

# Prints the result of herd7: Never, Sometimes or Always.
outcome() {
	herd7 "$1" | sed -n 's/^Observation [^ ]* \([A-Za-z]*\) .*/\1/p'
}

count=0
for strong in "$folder"/*.litmus; do
	[[ $strong != *_weak.litmus ]] || continue
	name=$(basename "$strong" .litmus)
	weak=$folder/${name}_weak.litmus
	count=$((count + 1))
	[ -e "$weak" ] || {
		complain "$name: has no weak twin"
		continue
	}
	[ "$(grep '^exists' "$strong")" = "$(grep '^exists' "$weak")" ] || complain "$name: its weak twin describes another outcome"
	found="$(outcome "$strong") $(outcome "$weak")"
	echo "$name: $found"
	[ "$found" = "Never Sometimes" ] || complain "$name: found '$found', and must be 'Never Sometimes'"
done
[ "$(find "$folder" -name '*.litmus' | wc -l)" -eq $((2 * count)) ] || complain "there is a weak test without the strong one"
[ "$count" -ge 10 ] || complain "only $count tests"
exit "$fail"

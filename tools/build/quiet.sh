#!/usr/bin/env bash
# Runs a command with its output in a log file, and prints progress instead: quiet.sh LABEL LOG COMMAND...
# On failure, prints the end of the log and its path. V=1 shows the output itself and writes no log.
set -uo pipefail
label=$1 log=$2
shift 2
if [ "${V:-0}" != 0 ]; then
	echo "$label: $*"
	exec "$@"
fi
EVERY_S=10      # between two lines where the output is no terminal
TAIL_LINES=60   # of the log, on failure
mkdir -p "$(dirname "$log")"
terminal=
[ -t 1 ] && terminal=1

# Cargo draws its own bar only on a terminal. Asked for it, it writes "Building [==> ] 34/62: crate, crate" to the log.
export CARGO_TERM_PROGRESS_WHEN=always CARGO_TERM_PROGRESS_WIDTH=100
: > "$log" # the first look may come before the command has opened it
began=$SECONDS
set -m # a process group for the command, so that Ctrl-C also ends the compilers that it started
"$@" > "$log" 2>&1 < /dev/null &
child=$!
set +m
trap 'kill -TERM -- "-$child" 2> /dev/null; echo; echo "$label: interrupted" >&2; exit 130' INT TERM

state() {
	local seen
	seen=$(tail -c 4000 "$log" | tr '\r' '\n' | sed -n -E \
		-e 's/.*Building \[.*\] ([0-9]+)\/([0-9]+): ([^(,.]*).*/\1 of \2 crates, now \3/;Tx;s/ +$//p;:x' \
		-e 's/^ *Downloading ([0-9]+) crates.*/downloading crates/p' \
		-e 's/^ *Blocking waiting for file lock.*/waiting for another cargo in this folder to end/p' | tail -n 1)
	echo "$label: ${seen:+$seen, }$((SECONDS - began)) s"
}

shown=$SECONDS
[ -n "$terminal" ] || echo "$label ..."
while kill -0 "$child" 2> /dev/null; do
	if [ -n "$terminal" ]; then
		printf '\r\033[K%s' "$(state | cut -c "1-$(($(tput cols 2> /dev/null || echo 80) - 1))")"
	elif [ $((SECONDS - shown)) -ge $EVERY_S ]; then
		shown=$SECONDS
		state
	fi
	sleep 0.3
done
wait "$child"
status=$?
[ -z "$terminal" ] || printf '\r\033[K'

# What remains of a line after its last carriage return is what a terminal would show; bars are dropped.
sed -i -E -e 's/.*\r//' -e '/^ *Building \[.*\] [0-9]+\/[0-9]+/d' "$log"
if [ "$status" != 0 ]; then
	echo "$label: failed after $((SECONDS - began)) s. The end of $log (V=1 shows everything):" >&2
	tail -n $TAIL_LINES "$log" | sed 's/^/    /' >&2
	echo "$label: failed; the whole log is $log" >&2
	exit "$status"
fi
warnings=$(grep -c '^warning' "$log")
[ "$warnings" = 0 ] || echo "$label: $warnings warnings in $log"
echo "$label: done in $((SECONDS - began)) s"

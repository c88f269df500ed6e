# make demo: see it work. make test: check it. make help: the rest.
# Everything is installed into .venv; nothing outside this folder changes.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
CUDA ?= cuda-bindings>=13.0.3,<14
NVRTC ?= nvidia-cuda-nvrtc>=13,<14

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
BUILT_FROM := pyproject.toml setup.py $(wildcard native/*.py $(foreach e,c h cu,native/*.$e native/*/*.$e native/*/*/*.$e))
# Side by side, threads of one numpy would wait for those of the others: a second's work took a minute.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest
SIDE_BY_SIDE := --numprocesses=4 --dist=worksteal
# Fault tests that run where the master collects all votes, too. The others have calls among theirs where it does.
BOTH := late_abort master_restart
# Tests start hundreds of processes: each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo help wheel test check nightly torch-suite gpu-check chaos docs fuzz sim bench bench-wan lint san san-fuzz fuzz-native clean
.DELETE_ON_ERROR:

# After `pip uninstall wancoll` the stamps say what is no more.
$(if $(wildcard $(BIN)/wancoll),,$(shell rm -f $(VENV)/.demo $(VENV)/.dev))

# Trains a small network on this machine, and kills a peer on the way: half a minute.
demo: $(VENV)/.demo
	$(BIN)/wancoll demo

# These lines: each target, and the comment above it.
help:
	@awk '/^# /{said=said substr($$0,2); next} /^[a-z-]+:/&&said{sub(/:.*/,""); printf "%-12s%s\n",$$0,said} {said=""}' Makefile

# A wheel for Python 3.11 and newer and this machine's kind, in dist: it installs without a compiler.
wheel: $(VENV)/.made
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

# What every change must pass, four tests at a time: each waits half of its time. PYTEST_OPTIONS=... for more.
test: $(VENV)/.dev $(VENV)/.torch
	$(PYTEST) $(SIDE_BY_SIDE) -m "not check and not nightly" $(PYTEST_OPTIONS)

# What `make test` has no time for.
check: $(VENV)/.dev $(VENV)/.torch $(VENV)/.docs
	$(PYTEST) $(SIDE_BY_SIDE) -m "check and not nightly" $(PYTEST_OPTIONS)
	WANCOLL_VOTERS=0 $(PYTEST) $(SIDE_BY_SIDE) -m "not check and not nightly" $(BOTH:%=tests/faults/test_%.py)

# What takes long, one after the other.
nightly: $(VENV)/.dev $(VENV)/.torch
	HYPOTHESIS_PROFILE=nightly $(PYTEST) -m nightly --timeout=1800 $(PYTEST_OPTIONS)
	WANCOLL_VOTERS=0 $(PYTEST) --timeout=1800 tests/chaos $(BOTH:%=tests/faults/test_%.py)
	$(MAKE) $(SAN_DIR)/test_tls.address
	$(SAN_DIR)/test_tls.address 1 10000

# torch's own tests, with gloo and with wancoll; FAULT_TOLERANCE=FILE adds torch's test_c10d_fault_tolerance.py (2.14).
torch-suite: $(VENV)/.dev $(VENV)/.torch
	$(PIP) install --quiet expecttest
	$(BIN)/python -m tests.torch $(if $(FAULT_TOLERANCE),--fault-tolerance $(FAULT_TOLERANCE))

# Tensors of CUDA devices, on a device.
gpu-check: $(VENV)/.dev $(VENV)/.torch
	$(BIN)/python -m tests.cuda

# Simulated clusters, many of them, or with SEED=... one and all that happens in it. VOTERS=0: the master collects votes.
sim: $(VENV)/.dev
	for voters in $(or $(VOTERS),0 32); do \
		$(BIN)/python -m tests.sim --voters $$voters --shards $(or $(SHARDS),1) $(if $(SEED),--seed $(SEED) --trace,--seeds $(or $(SEEDS),0:20000)) \
			|| exit 1; done

# Hostile input: a million sequences of messages, ten million inputs of the decoders; then by coverage, a minute each.
fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz
	$(PIP) install --quiet --editable '.[fuzz]'
	for target in decoders master peer; do mkdir -p build/fuzz/$$target; \
		$(BIN)/python -m tests.fuzz.guided $$target build/fuzz/$$target tests/fuzz/corpus/$$target \
			-max_total_time=60 -max_len=1000 || exit 1; done

# Ten minutes under faults: every 0.5 to 2 s a kill, stop, cut or join, the master killed every 30 s.
chaos: $(VENV)/.demo
	$(BIN)/wancoll chaos --peers $(or $(PEERS),10) --seconds $(or $(SECONDS),600) --seed $(or $(SEED),1) \
		--json chaos.json

# The documentation as a site, in build/docs. A link that leads nowhere, or any other warning, is an error.
docs: $(VENV)/.dev $(VENV)/.torch $(VENV)/.docs
	$(BIN)/python -m sphinx --quiet --nitpicky --fail-on-warning --jobs auto --conf-dir docs \
		--doctree-dir build/doctrees --builder html . build/docs

# Figures against gloo and a bare C ring.
bench: $(VENV)/.dev $(VENV)/.torch
	$(BIN)/python -m tests.bench

# Figures over a wide area network on this machine. Needs root: see tests/wan.
bench-wan: $(VENV)/.dev $(VENV)/.torch
	$(BIN)/python -m tests.bench.wan

# ruff, its formatter and mypy.
lint: $(VENV)/.dev $(VENV)/.torch
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# ---- the virtual environment: one stamp for each set of packages ----------------------------------------

$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; none was found (set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made $(BUILT_FROM)
	$(PIP) install --quiet --editable '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.made $(BUILT_FROM)
	$(PIP) install --quiet --editable '.[demo,test,lint]'
	@touch $@

# The extra's packages alone: with the package itself its extension would be built once more.
EXTRA := import sys, tomllib; print(*tomllib.load(sys.stdin.buffer)["project"]["optional-dependencies"]["docs"], sep="\n")
$(VENV)/.docs: $(VENV)/.made pyproject.toml
	@$(BIN)/python -c '$(EXTRA)' <pyproject.toml >$@
	$(PIP) install --quiet --requirement $@

# What not every platform has: tests that need it skip where it is missing.
$(VENV)/.torch: $(VENV)/.made
	@for what in "$(TORCH)" "$(CUDA)" "$(NVRTC)"; do \
		echo "$(PIP) install $$what"; \
		if ! $(PIP) install --quiet $$what >$@.log 2>&1; then \
			cat $@.log >&2; \
			grep -q "No matching distribution" $@.log || exit 1; \
			echo "make: no $$what for this machine; tests that need it will be skipped" >&2; \
		fi; \
	done
	@touch $@

# ---- sanitizers: the C test drivers and the fuzzer's target, twice ---------------------------------------

SAN_TESTS := test_kernels test_engine test_calls test_lost test_tls
SAN_FLAGS := -std=c11 -O2 -g -ffp-contract=off -fno-omit-frame-pointer -Wall -Wextra -pthread -Inative -Inative/engine -DWC_TEST_ALLOCATOR
SAN_DIR := build/san
# The kernels' tests have one thread.
SAN_BINARIES := $(SAN_TESTS:%=$(SAN_DIR)/%.address) $(patsubst %,$(SAN_DIR)/%.thread,$(filter-out test_kernels,$(SAN_TESTS)))
SAN_SOURCES := $(wildcard native/*.c native/engine/*.c native/engine/*/*.c native/kernels/*.c)
SAN_HEADERS := $(wildcard native/*.h native/*/*.h native/*/*/*.h)

# The thread sanitizer needs its fixed address ranges free: newer kernels randomise over them.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

# The fuzzer's target replays its corpus, then mutates it for FUZZ_SECONDS.
FUZZ_SECONDS ?= 3
FUZZ_CORPUS := native/tests/corpus
FUZZ_BINARIES := $(SAN_DIR)/fuzz_engine.address $(SAN_DIR)/fuzz_engine.thread

SAN_RUNS := $(SAN_BINARIES:%=run-%)
.PHONY: $(SAN_RUNS)
# The C code's tests under the sanitizers.
san: $(SAN_RUNS)
$(SAN_RUNS): run-%: %
	$(FIXED_ADDRESSES) $<

# Hostile frames for the engine, under the sanitizers.
san-fuzz: $(FUZZ_BINARIES)
	@set -e; for binary in $(FUZZ_BINARIES); do \
		echo "$$binary"; $(FIXED_ADDRESSES) $$binary $(FUZZ_CORPUS) $(FUZZ_SECONDS); done

CLANG ?= $(firstword $(foreach c,clang clang-18 clang-17 clang-16 clang-15 clang-14,$(shell command -v $c)))

# libFuzzer needs clang: `make fuzz-native FUZZ_SECONDS=600`. What it finds is kept in build/fuzz.
fuzz-native: $(SAN_SOURCES) $(SAN_HEADERS)
	@test -n "$(CLANG)" || { echo "make: libFuzzer needs clang; make san-fuzz does without it" >&2; exit 1; }
	@mkdir -p build/fuzz/corpus
	$(CLANG) $(SAN_FLAGS) -DWC_LIBFUZZER -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
		-o build/fuzz/fuzz_engine native/tests/fuzz_engine.c $(SAN_SOURCES) -lm -ldl
	cd build/fuzz && ./fuzz_engine -max_len=600 -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 corpus ../../$(FUZZ_CORPUS)

# What is tested is compiled once for each sanitizer, not once more for each test.
ADDRESS := -fsanitize=address,undefined -fno-sanitize-recover=all
THREAD := -fsanitize=thread
.SECONDARY: $(foreach sanitizer,address thread,$(SAN_SOURCES:%.c=$(SAN_DIR)/$(sanitizer)/%.o))

$(SAN_DIR)/address/%.o: %.c $(SAN_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SAN_FLAGS) $(ADDRESS) -c -o $@ $<

$(SAN_DIR)/thread/%.o: %.c $(SAN_HEADERS)
	@mkdir -p $(@D)
	$(CC) $(SAN_FLAGS) $(THREAD) -c -o $@ $<

$(SAN_DIR)/%.address: native/tests/%.c $(SAN_SOURCES:%.c=$(SAN_DIR)/address/%.o)
	$(CC) $(SAN_FLAGS) $(ADDRESS) -o $@ $^ -lm -ldl

$(SAN_DIR)/%.thread: native/tests/%.c $(SAN_SOURCES:%.c=$(SAN_DIR)/thread/%.o)
	$(CC) $(SAN_FLAGS) $(THREAD) -o $@ $^ -lm -ldl

# Takes away what make and the tools have made.
clean:
	rm -rf $(VENV) build dist *.egg-info wancoll/_native*.so wancoll/_native.c .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

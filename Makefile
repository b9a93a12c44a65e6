# The two commands that matter are `make demo` and `make test`; both install what they need into .venv first.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
BENCH_READY := $(VENV)/.ready-bench
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: help setup demo test test-all test-fast test-crash bench lint format clean

help:
	@echo "make demo       two simulated nodes with separate disks: train, kill, wipe a disk, resume, merge"
	@echo "make test       lint, types, and the test suite (under 25 minutes on two cores)"
	@echo "make test-fast  unit tests only (seconds)"
	@echo "make test-crash a kill at every file system operation, a power cut after each; prints the table"
	@echo "make test-all   the whole tables: every engine on every kind of disk"
	@echo "make test-fs    real shared file systems between hosts, as root (an hour; skips what is not installed)"
	@echo "make bench      what saving costs beside other means: table and plots in benchmarks/results (half an hour)"
	@echo "make format     format the code"

setup: $(READY)

# torch first: DeepSpeed looks for it while it is being built.
$(READY): setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch numpy setuptools wheel ninja
	$(PIP) --no-build-isolation deepspeed
	$(PIP) --no-build-isolation --editable '.[test]'
	touch $@

demo: $(READY)
	$(BIN)/python -m tests.demo

test: lint
	$(BIN)/python -m pytest tests

test-all: lint
	$(BIN)/python -m pytest tests --all

test-fast: $(READY)
	$(BIN)/python -m pytest tests/unit

test-crash: $(READY)
	$(BIN)/python -m tests.faults.crash

test-fs: $(READY)
	$(BIN)/python -m pytest tests/filesystems --file-systems -ra -o log_cli=true --log-cli-level=INFO

bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks $(BENCH)

# rsync and an ssh server come with the system; without them their rows say so.
$(BENCH_READY): $(READY)
	$(PIP) --no-build-isolation --editable '.[bench]'
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

# The only commands that CI calls. Everything runs in .venv, which `make` sets up itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
TEST_PROCESSES ?= 2
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest tests --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed

.PHONY: demo test test-rest test-all test-portable fuzz soak browser serve lint types bench docs clean help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: $(PYTHON) is missing; install Python 3.11 or set PYTHON=..." >&2; exit 2; }
	@echo "setting up $(VENV), once: about a minute, more where torch has to be downloaded"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## Build the demo model, serve it with two workers, ask it questions (2 minutes)
	$(BIN)/moeless demo

test: $(STAMP)  ## Set up, check style, types and import rules, run the tests that say whether it works (5 minutes)
	$(MAKE) --no-print-directory lint
	$(PYTEST) -m "not slow"

test-rest: $(STAMP)  ## What make test leaves out: slow tests, and those of hypothesis with all examples
	MOELESS_TESTS=all $(PYTEST) -m "slow or hypothesis"

test-all: test test-rest  ## All tests (10 minutes)

# A processor without bfloat16 and AVX-512, whose memory keeps no order, and a system that grants no real-time priority.
PORTABLE := ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2,+fma,+f16c,+bmi2 \
	MOELESS_WITHOUT="bfloat16 float16 amx-loops bfloat16-loops ordered-memory real-time"
# What depends on any of that: arithmetic, what processes share, who goes first, which dtype is chosen.
PORTABLE_TESTS := $(addprefix tests/unit/,functions/test_host.py functions/test_panels.py \
	functions/test_rows.py functions/test_team.py functions/test_channel.py functions/test_board.py functions/test_load_intake.py \
	functions/test_ordering.py core/test_processor.py bootstrap/test_precedence.py bootstrap/test_dtype_choice.py) \
	$(addprefix tests/integration/,equality functions/test_engines.py generation/test_dtype.py)

test-portable: $(STAMP)  ## What depends on the processor once more, with its abilities switched off
	$(PORTABLE) $(BIN)/python -m pytest $(PORTABLE_TESTS) --numprocesses $(TEST_PROCESSES) --dist loadfile

fuzz: $(STAMP)  ## Requests made up from the OpenAPI document, against a real server (3 minutes)
	MOELESS_FUZZ_EXAMPLES=60 $(BIN)/python -m pytest tests/integration/serving/test_fuzz.py

soak: $(STAMP)  ## Serve while workers are killed, hung, paused, throttled and drained (7 minutes)
	$(BIN)/python benchmarks/soak.py --minutes 2 --peace-minutes 1 --faults 10

browser: $(STAMP)  ## The dashboard in headless Chromium, where there is one (1 minute)
	MOELESS_BROWSER=1 $(BIN)/python -m pytest tests/browser

lint: $(STAMP)  ## Style, types, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

serve: $(STAMP)  ## Serve the demo model on port 8000
	$(BIN)/moeless serve demo

bench: $(STAMP)  ## MoE layer benchmarks (several minutes; leave the machine alone meanwhile)
	$(BIN)/python benchmarks/bench_moe_layer.py --mode inline
	$(BIN)/python benchmarks/bench_moe_layer.py --mode process
	$(BIN)/python benchmarks/bench_decisions.py

docs: $(STAMP)  ## Write the generated parts of docs/
	$(BIN)/python docs/generate.py

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

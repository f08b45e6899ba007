# The only commands that CI calls. Everything runs in .venv, which `make` sets up itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
TEST_PROCESSES ?= 2
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest tests --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
STAMP := $(VENV)/.installed

.PHONY: demo test test-rest test-all fuzz soak browser serve lint types bench docs clean help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

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

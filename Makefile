# Everything a newcomer or CI needs. Each target sets up what it needs and can be repeated.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := penstock common jobmanager taskmanager deploy tests examples benchmarks docs
PROTO := $(shell find proto -name '*.proto')

.DEFAULT_GOAL := help
.PHONY: help setup servers proto proto-check docs docs-check format format-check lint type collected kernels test test-all transcripts chaos chain soak large restore-matrix sim sim-chain sim-elections check bench demo up-local down-local clean

help: ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv with Penstock and its development tools

$(STAMP): pyproject.toml
	@echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Penstock needs Python 3.11 or newer"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
	@echo "setup: done"

servers: ## Install the Debian packages that tests use (root or sudo)
	@bash tests/support/install_servers.sh

proto: setup ## Generate the protobuf and gRPC code
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I proto \
	  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTO)

proto-check: proto # the committed code is what the sources give
	@git diff --exit-code --stat -- '*_pb2*' || { echo "generated code is stale: commit the result of make proto"; exit 1; }

docs: setup ## Generate the documentation of the configuration from its model
	@$(BIN)/python docs/generate_configuration.py

docs-check: setup
	@$(BIN)/python docs/generate_configuration.py --check

format: setup ## Format the code
	@$(BIN)/ruff check --quiet --select I --fix $(SOURCES)
	@$(BIN)/ruff format --quiet $(SOURCES)

format-check: setup
	@$(BIN)/ruff format --check --quiet $(SOURCES) || { echo "run make format"; exit 1; }

lint: setup ## Lint, and check who imports whom
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/lint-imports
	@echo "largest files:" && git ls-files '*.py' | grep -v _pb2 | xargs wc -l | sort -rn | sed -n '2,6p'

type: setup ## Check the types
	@$(BIN)/mypy penstock common jobmanager taskmanager

collected: setup # every test module is compiled once, and not in each process that runs tests
	@listed=$$($(BIN)/python -m pytest --collect-only -qq 2>&1) || { tail -n 200 <<< "$$listed"; exit 1; }

kernels: setup # of the tests: no start of a cluster has to wait for the compiler
	@NUMBA_CACHE_DIR=$(CURDIR)/.pytest_cache/kernels $(BIN)/python -c 'from taskmanager.kernels import warm_up; warm_up()'

test: setup servers kernels ## Run the tests
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10

test-all: setup servers kernels ## Run the tests, those too of which CI takes a sample
	@PENSTOCK_TESTS=all $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

transcripts: setup ## Write into tests/transcripts what its scripts give now; read the diff
	@PENSTOCK_TRANSCRIPTS=rewrite $(BIN)/python -m pytest -q tests/transcripts
	@git --no-pager diff --stat -- tests/transcripts

chaos: setup servers ## Kill, pause and cut off the processes of jobs; SEED=n repeats a run
	@PENSTOCK_CHAOS_SEED="$(SEED)" $(BIN)/python -m pytest -s -m chaos tests/chaos

chain: setup ## Real daemons on a checkpoint store that fails, hangs and lies: SEED= MINUTES=2
	@$(BIN)/python -m tests.support.chain $(or $(SEED),$(shell od -An -N2 -tu2 /dev/urandom)) $(or $(MINUTES),2)

soak: setup servers ## The ledger on a whole topology under random faults of all kinds: SEED= MINUTES=20
	@$(BIN)/python -m tests.support.soak $(or $(SEED),$(shell od -An -N2 -tu2 /dev/urandom)) $(or $(MINUTES),20)

restore-matrix: setup ## Start jobs again from all that they may have kept, with all that they may be run with
	@PENSTOCK_TESTS=all $(BIN)/python -m pytest -n 2 --dist loadfile tests/integration/test_restore_matrix.py \
	  tests/integration/test_changed_backend.py tests/integration/test_nexmark_rescaled.py tests/integration/test_golden_set.py

large: setup servers ## Columns of more than 2 GiB, big clusters, a thousand jobs: needs 10 GB of memory
	@$(BIN)/python -m pytest -m large tests/large

check: proto-check docs-check ## What CI runs
	@$(MAKE) --no-print-directory --jobs=3 --output-sync=target type servers collected kernels lint format-check
	@$(MAKE) --no-print-directory test

sim: setup ## Simulate elections and jobs with failures; jobs: SEED=first COUNT=how many BACKEND=of state JOB=name of one STORY=1
	@$(if $(SEED)$(COUNT)$(BACKEND)$(JOB)$(STORY),,$(MAKE) --no-print-directory sim-elections)
	@$(BIN)/python -m tests.support.simulated_run $(or $(SEED),0) $(or $(COUNT),$(if $(STORY),1,1000)) \
	  $(or $(BACKEND),hashmap) "$(JOB)" $(or $(STORY),0)

sim-chain: setup ## Simulate one long job on a store that fails, hangs and lies: SEED= MINUTES=200
	@$(BIN)/python -m tests.support.simulated_chain $(or $(SEED),0) $(or $(MINUTES),200)

sim-elections: setup ## Simulate elections in which calls, sessions and processes end anywhere: SEED=first COUNT=how many
	@$(BIN)/python -m tests.support.simulated_election $(or $(SEED),0) $(or $(COUNT),100000)

bench: setup ## Run the benchmarks of docs/benchmarks.md
	@$(BIN)/python -m benchmarks all

demo: setup ## Run the main job on a local cluster
	@$(BIN)/python examples/hot_items.py

up-local: setup servers ## Start what docker-compose.yml describes as plain processes; DIR=build/local
	@$(BIN)/python deploy/local/up_local.py up $(or $(DIR),build/local)

down-local: setup ## End it; jobs, checkpoints and logs stay in DIR
	@$(BIN)/python deploy/local/up_local.py down $(or $(DIR),build/local)

clean: ## Remove what the targets made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

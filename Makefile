# `make serve` and `make test` are each the only command needed on a machine with make and Python 3.10 to 3.13.
# Nothing that is already done is done again. `make help` lists the targets and the variables.

PYTHON ?= python3
VENV ?= .venv
HOST ?= 127.0.0.1
PORT ?= 3000
SERVICE ?= integration.service:LLM
DEMO_MODEL ?= smollm2-135m-instruct
# A second package index to take torch from, e.g. one that holds CPU builds. The default index serves a CUDA build on
# Linux, which brings several GB of libraries.
TORCH_INDEX ?=
# Tests compile and interpret the Triton kernels without a GPU. CUDA builds of torch bring their own Triton.
TRITON ?= triton==3.9.0
TESTS ?= tests
PYTEST_ARGS ?=

export BENTOML_DO_NOT_TRACK ?= True
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The kernels are compiled by a second Triton too, the one of earlier CUDA builds of torch.
TRITON_36 := $(VENV)/triton36/triton/__init__.py
CLIENTS := $(VENV)/.clients
NATIVE_SOURCES := $(wildcard setup.py kernels/cb_kernels/cpu/build.py kernels/cb_kernels/cpu/src/*)

.DEFAULT_GOAL := help
.PHONY: help install model serve bento kernels-report test clients clients-test packaging-test image-test load fuzz soak calibration docs lint type imports check clean

help: ## List the targets and the variables.
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables (now): PYTHON=$(PYTHON) VENV=$(VENV) HOST=$(HOST) PORT=$(PORT) SERVICE=$(SERVICE)"
	@echo "  TORCH_INDEX=$(TORCH_INDEX) TRITON=$(TRITON) TESTS=$(TESTS) PYTEST_ARGS=$(PYTEST_ARGS)"
	@echo "  BENTOML_HOME=$${BENTOML_HOME:-$$HOME/bentoml (default)} holds the models; CB_<FIELD> sets the engine (README.md)."

install: $(STAMP) ## Create the virtual environment with everything that serving and testing need.

$(STAMP): pyproject.toml constraints.txt $(NATIVE_SOURCES)
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 10) <= v[:2] <= (3, 13) else \
	    f"Python 3.10 to 3.13 is needed, $(PYTHON) is {v[0]}.{v[1]}: set PYTHON=")'
	@test -x $(BIN)/python || { echo "== creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "== installing (the first time takes some minutes)"
	$(BIN)/python -m pip install --prefer-binary $(addprefix --extra-index-url ,$(TORCH_INDEX)) \
	    -c constraints.txt -e '.[dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python -m pip install --no-deps $(TRITON) \
	    || echo "== no Triton for this Python or platform: its kernels' tests will say so"
	@touch $@

model: $(STAMP) ## Fetch the demo model into the BentoML model store.
	@$(BIN)/python -m cb_backend.bento.models fetch $(DEMO_MODEL)

serve: model ## Serve on http://HOST:PORT (HOST=0.0.0.0 opens it to the network).
	$(BIN)/python -m cb_backend.bento.serve $(SERVICE) --host $(HOST) --port $(PORT)

$(TRITON_36): $(STAMP)
	@$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/triton36 triton==3.6.0 && touch $@ \
	    || echo "== no Triton 3.6 for this Python or platform: the tests that compile with it will say so"

kernels-report: $(STAMP) $(TRITON_36) ## Compile every Triton kernel for every GPU target, with both Tritons (minutes).
	$(BIN)/python -m cb_kernels.aot
	@test -e $(TRITON_36)
	PYTHONPATH=$(VENV)/triton36 $(BIN)/python -m cb_kernels.aot

test: model $(TRITON_36) ## Run the tests.
	$(BIN)/python -m pytest $(TESTS) $(PYTEST_ARGS)

$(CLIENTS): $(STAMP) pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --prefer-binary -c constraints.txt -e '.[clients]'
	@touch $@

clients: $(CLIENTS) ## Install other people's clients and suites, for the tests that point them at the server.

clients-test: clients model ## Run LangChain's suite, lm-eval, openai and litellm against the server (minutes).
	CB_REQUIRE_CLIENTS=1 $(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

bento: model ## Build the Bento of the demo service into the BentoML store, with compiled kernels.
	$(BIN)/bentoml build

packaging-test: model ## Install wheel and sdist in clean environments and serve a Bento without a network (minutes).
	$(BIN)/python -m tests.packaging.matrix

image-test: model ## Build the CPU image with buildah and run it as a cluster would (Debian, root, minutes).
	CB_INSTALL_TOOLS=1 VENV=$(VENV) integration/container/build_and_check.sh

load: $(STAMP) ## 10,000 requests of 500 clients with trouble, answers checked against an offline engine (minutes).
	$(BIN)/python -m tests.reliability.load --requests 10000 --clients 500

fuzz: $(STAMP) ## 100,000 bodies that no client should send, with a clock on the event loop (an hour); FUZZ_COUNT= changes it.
	$(BIN)/python -m tests.reliability.fuzz_bodies --count $(or $(FUZZ_COUNT),100000)

soak: $(STAMP) ## The same for 30 minutes; SOAK_MINUTES= changes it.
	$(BIN)/python -m tests.reliability.load --minutes $(or $(SOAK_MINUTES),30) --clients 40

calibration: $(STAMP) ## Replay workloads through the scheduler: is the share of overflows the accepted risk? (minutes)
	$(BIN)/python -m integration.benchmarks.replay

docs: $(STAMP) ## Build the documentation site into site/.
	@test -x $(BIN)/mkdocs || $(BIN)/python -m pip install -q --prefer-binary -c constraints.txt -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

lint: $(STAMP) ## Check style and formatting.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP) ## Check types.
	$(BIN)/mypy

imports: $(STAMP) ## Check that each room imports only what stands below it, without circles.
	$(BIN)/lint-imports

check: lint type imports ## Everything that reads the code without running it.

clean: ## Remove the virtual environment and what builds and tests left.
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis *.egg-info kernels/*.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
	find kernels -name '*.so' -delete

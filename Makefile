# Needs Python 3.11 to 3.13 with venv, and make. Everything else goes into .venv.
# `make demo` and `make test` are the two commands; `make help` lists the rest.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?=
TORCH ?= torch==2.13.0
ARGS ?=
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
# Each process that a test starts would compile Tandem anew, and each worker of pytest every test.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest
# In collection order: the tests of whole clusters take longest and begin first.
IN_PARALLEL = -n $(JOBS) --dist loadgroup --no-loadscope-reorder
RUNTIME := $(VENV)/.stamp-runtime
DEV := $(VENV)/.stamp-dev

.PHONY: help setup demo up test test-all check-deploy check-cluster check-wheel clients test-vllm soak bench-handoff bench-router bench-engine bench-structured bench-speculation bench-planner bench-pools bench-vllm check format proto docs site sbom wheel helm-tools lock clean

help:  ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A stamp is newer than pyproject.toml when what it names is installed; nothing is looked up again until that changes.
$(RUNTIME): pyproject.toml scripts/setup.sh scripts/constraints.txt
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' scripts/setup.sh runtime $(VENV)

$(DEV): pyproject.toml scripts/setup.sh scripts/constraints.txt
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' scripts/setup.sh dev $(VENV)

setup: $(DEV)  ## Create .venv with Tandem (editable) and the development tools

demo: $(RUNTIME)  ## Start 1 prefill and 1 decode worker, answer three prompts, show where the time went
	@$(BIN)/tandem demo $(ARGS)

up: $(RUNTIME)  ## Start a cluster and keep it up (ARGS="--prefill 2 --decode 1")
	@$(BIN)/tandem up $(ARGS)

test: $(DEV)  ## Run the tests, at most 8 minutes on two cores (JOBS=3, ARGS="tests/unit/planner -k roofline")
	$(PYTEST) $(IN_PARALLEL) $(ARGS)

test-all: $(DEV)  ## Run the tests and those marked slow, as CI does
	$(PYTEST) $(IN_PARALLEL) -m "not soak_only and not system" $(ARGS)

check-deploy: $(DEV)  ## Run the tests that drive a browser, Prometheus and whole nodes
	@scripts/system-tools.sh chromium curl docker-registry ip prometheus promtool redis-server
	$(PYTEST) -m system $(ARGS)

check-cluster: $(DEV)  ## Run the chart's examples through the API server in KUBEBUILDER_ASSETS (ARGS="-k secured")
	@scripts/system-tools.sh curl ip
	$(PYTEST) -m system -vv -rs tests/kubernetes $(ARGS)

clients: $(DEV)  ## Run client libraries, in an environment of their own, against a cluster (ARGS="-k langchain")
	@PYTHON=$(BIN)/python TORCH='$(TORCH)' scripts/clients.sh $(ARGS)

test-vllm: $(DEV)  ## Run workers whose engine is vLLM, in an environment of their own (ARGS="-k pair")
	@PYTHON=$(BIN)/python TORCH='$(TORCH)' scripts/vllm.sh test $(ARGS)

soak: $(DEV)  ## Run the tests of failures with their full number of rounds (hours)
	TANDEM_SOAK=1 $(PYTEST) -m "soak or soak_only" --timeout=14400 $(ARGS)

bench-handoff: $(DEV)  ## Measure KV handoffs beside memcpy, gloo and sockets (ARGS="--figure mapped")
	@$(BIN)/python -m benchmarks.handoff $(ARGS)

bench-router: $(DEV)  ## Measure the router and its prefix index (ARGS="--figure index")
	@$(BIN)/python -m benchmarks.router $(ARGS)

bench-engine: $(DEV)  ## Measure the engine on this CPU (peers: scripts/engine-peers.sh; ARGS="--figure decode")
	@$(BIN)/python -m benchmarks.engine $(ARGS)

bench-structured: $(DEV)  ## Measure what constrained answers cost on this CPU (ARGS="--figure masks")
	@$(BIN)/python -m benchmarks.structured $(ARGS)

bench-speculation: $(DEV)  ## Measure what speculation gains on this CPU (ARGS="--figure exactness")
	@$(BIN)/python -m benchmarks.speculation $(ARGS)

bench-planner: $(DEV)  ## Measure simulator and search (ARGS="--figure search"; some need --traces FOLDER)
	@$(BIN)/python -m benchmarks.planner $(ARGS)

bench-pools: $(DEV)  ## Measure live changes of the pools and predictions (ARGS="--folder FOLDER", which keeps what was measured)
	@$(BIN)/python -m benchmarks.pools $(ARGS)

bench-vllm: $(DEV)  ## Measure Tandem with vLLM's engine beside vLLM's own pair (ARGS="--figure handoff")
	@PYTHON=$(BIN)/python TORCH='$(TORCH)' scripts/vllm.sh bench $(ARGS)

check: $(DEV)  ## Lint, types, import rules, generated files, chart
	@PYTHON=$(BIN)/python scripts/check.sh

format: $(DEV)  ## Format the code and fix what ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

proto: $(DEV)  ## Generate tandem/v1, tandem/oip and tandem/vllm_api from proto/
	@PYTHON=$(BIN)/python scripts/generate-proto.sh

docs: $(DEV)  ## Generate the pages, lists, schemas and dashboards that come from code
	@$(BIN)/python scripts/generate-config-doc.py
	@$(BIN)/python scripts/generate-chart-schema.py
	@$(BIN)/python scripts/generate-chart-readme.py
	@$(BIN)/python scripts/generate-dashboards.py
	@$(BIN)/python scripts/generate-api-pages.py
	@$(BIN)/python scripts/generate-acceptance-page.py
	@$(BIN)/python scripts/generate-quickstart.py
	@$(BIN)/python scripts/generate-router-requirements.py
	@$(BIN)/python scripts/generate-schema-table.py
	@$(BIN)/python scripts/generate-edit-table.py
	@$(BIN)/python scripts/generate-planner-pages.py
	@$(BIN)/python scripts/generate-figures.py
	@$(BIN)/python scripts/generate-speculation-picture.py
	@$(BIN)/python scripts/generate-client-fields.py

site: $(DEV)  ## Build the documentation as a site in .cache/site
	@PYTHON=$(BIN)/python scripts/site.sh

sbom: $(DEV)  ## List what is installed (dist/sbom.cdx.json) and ask for known vulnerabilities
	@PYTHON=$(BIN)/python scripts/sbom.sh

wheel: $(DEV)  ## Build dist/*.whl
	@rm -rf dist
	@$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

check-wheel: wheel  ## Install dist/*.whl in a clean environment and import every module
	@PYTHON=$(BIN)/python scripts/check-wheel.sh

helm-tools:  ## Fetch the pinned helm and kubectl into .cache/tools
	@scripts/fetch-helm.sh helm
	@scripts/fetch-helm.sh kubectl

lock: $(DEV)  ## Renew the versions and hashes that the images install
	@PYTHON=$(BIN)/python scripts/lock.sh

clean:  ## Remove everything that was made here
	rm -rf $(VENV) .cache dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

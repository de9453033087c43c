# `make train` and `make test` work on a fresh machine: they make a virtual environment in .venv,
# install the pinned dependencies there, and touch nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A CPU-only Linux machine that finds only CUDA builds of torch can name PyTorch's CPU index here.
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: train test check format clean

train: $(VENV)/.installed
	$(BIN)/asyncmesh train

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses 2

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the pinned dependencies into $(VENV) (once, a few minutes)"
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) install --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt --editable '.[dev,gpt2]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

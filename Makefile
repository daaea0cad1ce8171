# Quatrain: `make demo` and `make test` set themselves up; see scripts/setup.sh for what that means.
PYTHON ?= python3
export PYTHON
BIN := .venv/bin

.PHONY: help setup demo test lint format data kernels

help: ## show these lines
	@sed -n 's/^\([a-z]*\): .*## /make \1\t/p' Makefile

setup: ## make .venv with pinned packages (quick when nothing changed)
	@bash scripts/setup.sh

demo: setup ## fine-tune SmolLM2-135M on smart home requests and compare before with after
	$(BIN)/python examples/demo.py

test: lint ## lint, types, then the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto

lint: setup ## ruff and mypy, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## apply ruff's fixes and layout
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernels: setup ## compile every Triton kernel for every GPU architecture -> build/kernels.json (no GPU needed)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/compile_kernels.py

data: setup ## write the smart home data set again from its phrasings
	$(BIN)/python scripts/make_smart_home.py

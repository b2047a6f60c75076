# Each target makes the virtual environment it needs; nothing to type before.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

.PHONY: demo test lint docs wheel-check bench sweep clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   patch, calibrate, train and reload a real pretrained model (under 5 minutes)"
	@echo "make test   the tests                    make lint   ruff and mypy"
	@echo "make docs   the pages of docs/ as a site in site/"
	@echo "make wheel-check  wheel and sdist, and the demo from the wheel"
	@echo "make bench  speed and memory             make sweep  every transformers and timm architecture (hours)"

# The stamp changes with the dependencies, so an old environment is brought up to date.
$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing torch, transformers and the rest into $(VENV): some minutes, without further words."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[all]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/hf-autonorm demo --output runs/demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel-check: $(VENV)/.installed
	$(BIN)/python -m pytest -m slow tests/test_wheel.py

docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks

sweep: $(VENV)/.installed
	$(BIN)/python -m tests.sweep

clean:
	rm -rf $(VENV) runs site .pytest_cache .ruff_cache .hypothesis

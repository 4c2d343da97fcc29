# Two commands for a newcomer: `make pareto` and `make test`. Both install what they need into .venv first.

# the first that runs: a version manager's shim may be there and not work
PYTHON ?= $(shell for p in python3.12 python3.11 python3; do $$p -c '' 2>/dev/null && echo $$p && break; done)
VENV := .venv
REQUIREMENTS := pyproject.toml $(wildcard pipeline/requirements/*.txt pipeline/formats/*/requirements.txt)
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: setup pareto test check bench

setup: $(VENV)/.installed

$(VENV)/.installed: $(REQUIREMENTS)
	$(PYTHON) -m venv $(VENV)
	python -m pip install --quiet --upgrade pip
	python -m pip install --editable '.[gguf,mlx,coreml,reference,hub,dvc,dev]'
	touch $@

pareto: setup
	dvc repro
	@echo "Read reports/pareto.md"

test: setup
	python -m pytest

check: setup
	ruff check .
	ruff format --check .
	mypy
	lint-imports

bench: setup
	python -m benchmarks.equality
	python -m benchmarks.convert
	python -m benchmarks.mlx
	python -m benchmarks.coreml
	python -m benchmarks.perplexity
	python -m benchmarks.sequential
	python -m benchmarks.prefill

# make demo | test | test-all | lint | protos | bench
#
# TORCH_INDEX   wheel index for torch, for example a CPU or CUDA one. Empty: whatever pip is configured to find.

PYTHON ?= python3
TORCH_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PROTOS := $(sort $(wildcard protos/tercet/v1/*.proto))

.PHONY: demo test test-all lint format protos bench clean

.venv/installed: pyproject.toml clients/python/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PIP) --index-url $(TORCH_INDEX) torch==2.13.0)
	$(PIP) -e clients/python -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m services.cli demo

test: .venv/installed
	$(BIN)/tercet pull smollm2-135m
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out=clients/python --grpc_python_out=clients/python \
	  --mypy_out=clients/python --mypy_grpc_out=clients/python $(PROTOS)

clean:
	rm -rf .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis

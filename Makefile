# make demo | test | test-all | lint | protos | bench
#
# TORCH_INDEX   wheel index for torch, for example a CPU or CUDA one. Empty: whatever pip is configured to find.
# TRACES        folder of request traces for the simulator's tests. Empty: they are left out, visibly.

PYTHON ?= python3
TRACES ?=
TORCH_INDEX ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
APT_DOWNLOAD := apt-get -o APT::Sandbox::User=root download prometheus
PROTOS := $(sort $(wildcard protos/tercet/v1/*.proto))

.PHONY: demo test test-all lint format protos bench clients-openai clients-smg clients-aiperf clients-guidellm clean

.venv/installed: pyproject.toml clients/python/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(if $(TORCH_INDEX),$(PIP) --no-deps --index-url $(TORCH_INDEX) torch==2.13.0)
	$(PIP) -e clients/python -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m services.cli demo

test: .venv/installed
	$(BIN)/tercet pull smollm2-135m
	$(BIN)/python -m pytest

# Everything. A skip is a failure here, and the test runner speaks last.
test-all: .venv/installed .venv-tools/installed clients/node/node_modules/installed lint
	$(BIN)/tercet pull smollm2-135m
	PATH="$(CURDIR)/.venv-tools/bin:$$PATH" TERCET_TESTS_REQUIRE_ALL=1 \
	  TERCET_TESTS_TRACES="$(TRACES)" $(BIN)/python -m pytest

# promtool is one file of Debian's package prometheus. It is taken out of the package, not installed with it: that would
# start a server and add a user. Where there is no apt-get, promtool has to be on PATH already.
.venv-tools/installed: deploy/tools.txt
	$(PYTHON) -m venv .venv-tools
	.venv-tools/bin/python -m pip install --quiet --disable-pip-version-check -r deploy/tools.txt
	if command -v apt-get && ! command -v promtool; then \
	  cd .venv-tools && rm -f prometheus_*.deb && \
	  { $(APT_DOWNLOAD) || { apt-get update && $(APT_DOWNLOAD); }; } && \
	  dpkg-deb --fsys-tarfile prometheus_*.deb > package.tar && \
	  tar --extract --file package.tar --directory bin --strip-components 3 ./usr/bin/promtool && \
	  rm package.tar prometheus_*.deb; \
	fi
	touch $@

clients/node/node_modules/installed: clients/node/package-lock.json
	cd clients/node && npm ci --no-audit --no-fund --loglevel=error
	touch $@

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	$(BIN)/buf breaking protos --against tests/golden/contract_v1.binpb

format: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: .venv/installed
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos --python_out=clients/python --grpc_python_out=clients/python \
	  --mypy_out=clients/python --mypy_grpc_out=clients/python $(PROTOS)

bench: .venv/installed
	$(BIN)/tercet pull smollm2-135m
	$(BIN)/tercet bench

# Other people's clients against the chain; docs/clients.md keeps what they say. The load tools are large, so each has an
# environment of its own, and nothing else needs them.
clients-openai: .venv/installed
	$(BIN)/tercet pull smollm2-135m
	$(BIN)/python benchmarks/clients.py openai

clients-smg: .venv/installed .venv-tools/installed
	$(BIN)/tercet pull smollm2-135m
	$(BIN)/python benchmarks/clients.py smg --program "$(CURDIR)/.venv-tools/bin/smg"

clients-aiperf: .venv/installed .venv-aiperf/installed
	$(BIN)/tercet pull smollm2-135m
	$(BIN)/python benchmarks/clients.py aiperf --program "$(CURDIR)/.venv-aiperf/bin/aiperf"

clients-guidellm: .venv/installed .venv-guidellm/installed
	$(BIN)/tercet pull smollm2-135m
	$(BIN)/python benchmarks/clients.py guidellm --program "$(CURDIR)/.venv-guidellm/bin/guidellm"

.venv-aiperf/installed:
	$(PYTHON) -m venv .venv-aiperf
	.venv-aiperf/bin/python -m pip install --quiet --disable-pip-version-check aiperf==0.13.0
	touch $@

.venv-guidellm/installed:
	$(PYTHON) -m venv .venv-guidellm
	$(if $(TORCH_INDEX),.venv-guidellm/bin/python -m pip install --quiet --no-deps --index-url $(TORCH_INDEX) torch==2.13.0)
	.venv-guidellm/bin/python -m pip install --quiet --disable-pip-version-check guidellm==0.8.1
	touch $@

clean:
	rm -rf .venv .venv-* clients/node/node_modules clients/node/dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# `make run` starts the cluster; `make test` runs the suite; `make help` says the rest.
# Where pip was told of a folder of wheels (PIP_FIND_LINKS), uv is told of it too.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients-installed
ARGS ?=
WORKERS ?= 2
# Clients leave sockets to the garbage collector, and whichever test it runs in is not the one at fault.
LEFT := -W ignore::pytest.PytestUnraisableExceptionWarning

.DEFAULT_GOAL := help
.PHONY: help install run down test test-more chaos check format protos manifests bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(STAMP) ## the virtual environment

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; try make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m uv --version >/dev/null 2>&1 || $(BIN)/python -m pip install --quiet uv || echo "no uv; pip will do"
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/python -m uv pip install --compile-bytecode -p $(BIN)/python -c constraints.txt -e '.[test]' \
		|| $(BIN)/python -m pip install -c constraints.txt -e '.[test]'
	@touch $@

run: $(STAMP) ## start the cluster with the default model (ARGS="--decode 2" for options); Ctrl-C ends it
	@$(BIN)/pronghorn up $(ARGS)

down: $(STAMP) ## end a cluster that was started with --detach, or what is left of one
	@$(BIN)/pronghorn down $(ARGS)

test: $(STAMP) ## the default suite, with one real cluster (WORKERS=1 for one thing at a time)
	$(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --ignore=tests/more --ignore=tests/clients $(ARGS)

test-more: $(STAMP) $(CLIENTS) ## the longer tests, and a cluster driven by clients that nobody here wrote
	$(BIN)/python -m pytest tests/clients/test_schemathesis.py $(ARGS)
	$(BIN)/python -m pytest tests/clients tests/more -m "not chaos" --ignore=tests/clients/test_schemathesis.py $(LEFT) $(ARGS)

$(CLIENTS): $(STAMP) tests/clients/llamaindex.txt
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/python -m uv pip install -p $(BIN)/python -c constraints.txt -e '.[test,clients]' \
		|| $(BIN)/python -m pip install -c constraints.txt -e '.[test,clients]'
	test -x $(VENV)/llamaindex/bin/python || $(BIN)/python -m venv $(VENV)/llamaindex
	$(BIN)/python -m uv pip install -p $(VENV)/llamaindex/bin/python -r tests/clients/llamaindex.txt \
		|| $(VENV)/llamaindex/bin/python -m pip install -r tests/clients/llamaindex.txt
	@touch $@

chaos: $(STAMP) ## every fault at every moment, which takes its time (ARGS="--seed 7")
	$(BIN)/pronghorn chaos run --all $(ARGS)
	$(BIN)/python -m pytest tests/more -m chaos

check: $(STAMP) ## ruff, ruff format and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP) ## let ruff repair what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(STAMP) ## make the committed protobuf stubs anew
	$(BIN)/python -m protos.generate

manifests: $(STAMP) ## the Helm chart as manifests (ARGS="--values FILE --out FOLDER")
	@$(BIN)/python -m k8s.render $(ARGS)

bench: $(STAMP) ## the engine beside transformers, the cluster beside the engine
	$(BIN)/python -m bench.engine $(ARGS)
	$(BIN)/python -m bench.serve --quick $(ARGS)

clean: ## remove the virtual environment and every cache of the tools
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info

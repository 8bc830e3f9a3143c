# Every target prepares what it needs; only make and a Python 3.11, 3.12 or 3.13 with its venv module must be there.
#
#   make test PYTHON_VERSION=3.11 VENV=.venv311    another Python, in another folder
#   make venv PYTHON=/path/to/python               one particular interpreter
#   make test JOBS=1 ARGS="-k routes -x"           pytest's own arguments

VENV ?= .venv
PY = $(VENV)/bin/python
# One more than the cores, since tests of several processes often wait.
JOBS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ "$$n" -lt 4 ] && echo "$$((n + 1))" || echo 4)
# The Python that `make wheel` installs the wheel on; empty means the newest.
WHEEL_PYTHON_VERSION ?=
# The environment of `make test-tpu`: the compiler for TPUs stays out of the other one.
TPU_VENV ?= $(VENV)-tpu
ARGS ?=

export VENV PYTHON PYTHON_VERSION
# It would announce newer releases of itself, and ask the network for them.
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1
# The theme's announcement of its successor.
export NO_MKDOCS_2_WARNING = 1

.PHONY: help venv demo test test-tpu lint format types docs examples bench wheel constraints clean distclean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: ## Build the development environment, or bring it up to date
	@sh scripts/make_venv.sh

demo: venv ## Embed sentences with a real model, sharded over this machine's devices
	@$(PY) examples/embed_sentences.py

test: venv ## Run the tests
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-tpu: ## Run the tests and documentation that need the TPU compiler, but no TPU
	@VENV=$(TPU_VENV) EXTRAS=dev,tpu-compiler sh scripts/make_venv.sh
	$(TPU_VENV)/bin/python -m pytest tests/tpu -n $(JOBS) --dist worksteal $(ARGS)
	$(TPU_VENV)/bin/python scripts/run_docs_code.py docs/compile-for-other-hardware.md

lint: venv ## Check style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: venv ## Mend style and formatting where that can be done safely
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: venv ## Check the types
	$(PY) -m pyright --pythonpath $(PY)

docs: venv ## Build the documentation into site/
	$(PY) -m mkdocs build --strict

examples: venv ## Run every example, and all code in the README and the documentation
	@set -e; for example in examples/*.py; do \
		echo "running $$example"; $(PY) "$$example" || { echo "FAILED $$example" >&2; exit 1; }; done
	$(PY) scripts/run_docs_code.py

bench: venv ## Run the benchmarks
	$(PY) -m benchmarks $(ARGS)

wheel: venv ## Build the wheel into dist/ and try it in an environment of its own
	@sh scripts/try_wheel.sh $(WHEEL_PYTHON_VERSION)

constraints: ## Resolve constraints.txt anew for every supported Python
	@python=$$(sh scripts/find_python.sh) && "$$python" scripts/make_constraints.py

clean: ## Remove everything built except environments
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name '.venv*' -prune -o -name .nox -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean ## Remove the environments too
	rm -rf .nox
	@for venv in "$(VENV)" "$(TPU_VENV)"; do if [ -f "$$venv/pyvenv.cfg" ]; then rm -rf "$$venv"; fi; done

# `make demo` and `make test` need only make and Python >= 3.11: each creates .venv
# and installs what it needs. The newest tested Python that runs here, or PYTHON=...

PYTHON ?= $(shell for python in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python \
  python3.11 $(HOME)/.pyenv/versions/3.11.*/bin/python python3.13 python3.14; do \
  $$python -c "" 2>/dev/null && { echo $$python; exit; }; done; echo python3)
DATA ?=
RUN := .venv/bin/python
# Python compiles what it imports, and keeps that, also where the shell says not to: 2 s
# a process. pip would compile everything that it installs, for 25 s of 66.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: demo test fuzz lint typecheck docs clean

demo: .venv/demo
	JAX_PLATFORMS=$${JAX_PLATFORMS-$$(test -e /dev/nvidia0 || echo cpu)} \
	  $(RUN) examples/quickstart.py $(if $(DATA),--data "$(DATA)")

test: .venv/dev
	$(RUN) -m pytest -n auto --maxprocesses=8 --dist worksteal --quick

# Random programs, judged against JAX: `make fuzz FUZZ=10000 SEED=300`.
FUZZ ?= 300
SEED ?= 0
fuzz: .venv/dev
	PYTHONPATH=.:kernels:tests $(RUN) -m fuzz --count $(FUZZ) --seed $(SEED) --jobs 2

lint: .venv/dev
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check

typecheck: .venv/dev
	$(RUN) -m pyright --pythonpath $(RUN)

docs: .venv/dev
	$(RUN) -m sphinx -W -q -b html examples/docs build/docs
	@echo build/docs/index.html

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis

# The stamps are older than pyproject.toml exactly when the environment is stale.
.venv/demo: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "jaxact needs Python >= 3.11: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(PIP) --editable '.[examples,plots,targets]' || { \
	  echo "Without the GPU compiler (targets), for the reason above:" >&2; \
	  $(PIP) --editable '.[examples,plots]'; }
	@touch $@

.venv/dev: .venv/demo
	$(PIP) --editable '.[dev]'
	@touch $@

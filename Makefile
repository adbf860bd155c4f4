# The commands of this repository; `make help` lists them.
#
# Each one first makes the virtual environment .venv, if it is missing or older
# than setup.py. Nothing is installed outside .venv.

PYTHON ?= python3
VENV ?= .venv
# Processes that run the tests side by side.
JOBS ?= 2
# Argument string of configs/ablation.py for `make ablation`.
ABLATION ?= table4,size=tiny

BIN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: help env ablation test lint format clean
.DEFAULT_GOAL := help

help:
	@echo "make ablation  the paper's ablation table at size tiny (about 10 minutes"
	@echo "               on 2 CPU cores) -> results/table4_tiny.md and .png"
	@echo "make test      lint, then the whole test suite"
	@echo "make lint      ruff: lint and formatting"
	@echo "make format    ruff: apply formatting and safe fixes"
	@echo "make env       only the virtual environment $(VENV)"
	@echo "make clean     removes $(VENV) and caches; keeps runs/ and results/"
	@echo
	@echo "PYTHON=python3.12 picks the interpreter; ABLATION=figure6,size=tiny"
	@echo "picks another table."

# The TPU compiler, in the version that the installed jax names. It stays out of
# the environment's packages: there, every start of jax would look for a TPU.
define LIBTPU
from importlib.metadata import requires
(name,) = (r for r in requires("jax") if r.startswith("libtpu"))
print(name.split(";")[0])
endef
export LIBTPU

# A venv whose interpreter is gone (say, after an upgrade) is made again.
env:
	@$(BIN) -c "" 2>/dev/null || rm -f $(STAMP)
	@$(MAKE) -s --no-print-directory $(STAMP)

$(STAMP): setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is missing or older than 3.11;" \
	    "choose another one with PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: $(PYTHON) comes without the venv module;" \
	    "install it (on Debian: apt install python3-venv)" \
	    "or choose another interpreter with PYTHON=..."; exit 1; }
	@$(BIN) -c "" 2>/dev/null || { \
	  echo "== Making the virtual environment $(VENV)" \
	    "with $$($(PYTHON) --version) =="; \
	  rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	@echo "== Installing attnres_jax and its development tools into $(VENV)" \
	  "(some 100 packages, 1-3 minutes) =="
	@PYTHONWARNINGS=ignore $(BIN) -m pip install --quiet --disable-pip-version-check \
	  --editable ".[dev]"
	@PYTHONWARNINGS=ignore $(BIN) -m pip install --quiet --disable-pip-version-check \
	  --no-deps --upgrade --target $(VENV)/libtpu "$$($(BIN) -c "$$LIBTPU")"
	@touch $@

ablation: env
	@echo "== Ablation $(ABLATION): finished rows are skipped, Ctrl-C saves =="
	@$(BIN) -m scripts.ablate --config=configs/ablation.py:$(ABLATION)

test: lint
	@echo "== Tests, $(JOBS) at a time =="
	@$(BIN) -m pytest -n $(JOBS) $(PYTEST_ARGS)

lint: env
	@echo "== Lint and formatting (ruff) =="
	@$(BIN) -m ruff check .
	@$(BIN) -m ruff format --check .

format: env
	@$(BIN) -m ruff check --fix .
	@$(BIN) -m ruff format .

clean:
	rm -rf $(VENV) .cache .hypothesis .pytest_cache .ruff_cache

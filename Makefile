# make demo    train a small Llama on real text with usp_2x2 on 4 processes, beside one process
# make test    install and run the tests
# make check   format, lint, types, import layers, tests
# Each target installs what it needs into .venv, once, and again only when pyproject.toml changes.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip install --disable-pip-version-check --quiet
# The one place that reads the pin is pyproject.toml.
TORCH   = $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

.PHONY: setup demo test check format layers clean

setup: $(VENV)/.installed-dev

demo: $(VENV)/.installed-demo
	$(PY) examples/train_text.py

test: $(VENV)/.installed-dev
	$(PY) -m pytest -n 2 --dist loadfile

check: $(VENV)/.installed-dev
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) tools/check_layers.py
	$(PY) -m pytest -n 2 --dist loadfile

format: $(VENV)/.installed-dev
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

layers: $(VENV)/.created
	$(PY) tools/check_layers.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "seqcomp needs Python 3.11 or newer; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-torch: pyproject.toml | $(VENV)/.created
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) "$(TORCH)"
	@touch $@

$(VENV)/.installed-demo: pyproject.toml $(VENV)/.installed-torch
	@echo "installing seqcomp[demo] into $(VENV)"
	@$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed-torch
	@echo "installing seqcomp[dev] into $(VENV)"
	@$(PIP) -e ".[dev]"
	@touch $@

# make demo, make test, make lint, make bench, make chaos: each makes $(VENV) first, and
# again when what it is made of has changed. It needs python3 (3.11 or newer) and make.
#
#   make test PYTHON=python3.13                               another interpreter
#   make test VENV=.venv52 DJANGO='Django>=5.2,<5.3'          another Django
#   make test ARGS='tests/unit -k cursor'                     some tests
#   make test WORKERS=2                                       shared between two processes
#   make test-postgres POSTGRES_BIN=/usr/lib/postgresql/15/bin
#   make bench BENCH='append --json'                          one benchmark

PYTHON ?= python3
VENV ?= .venv
DJANGO ?=
ARGS ?=
# Processes that share the tests, each with servers of its own; 0: all in this one.
WORKERS ?= 0
BENCH ?= all

PY := $(VENV)/bin/python
PARALLEL := -n $(WORKERS) --dist loadfile
INSTALLED := $(VENV)/.installed
PIP := $(PY) -m pip install --quiet --disable-pip-version-check

# Tasks are built in from Django 6.0 on.
comma := ,
BACKPORT := $(if $(findstring 5.2,$(DJANGO)),'django-tasks>=0.12$(comma)<1')

# The file says for which Django it was made; for another one it is made again.
ifneq ($(strip $(shell cat $(INSTALLED) 2>/dev/null)),$(strip $(DJANGO)))
.PHONY: $(INSTALLED)
endif

.PHONY: demo test test-sqlite test-postgres lint format bench chaos clean

demo: $(INSTALLED)
	@$(PY) -m project.demo

# Both, also when the first fails.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory test-sqlite; sqlite=$$?; \
	$(MAKE) --no-print-directory test-postgres && exit $$sqlite

test-sqlite: $(INSTALLED)
	$(PY) -m pytest --database=sqlite $(PARALLEL) -o cache_dir=.pytest_cache/sqlite-$(VENV) $(ARGS) $(if $(ARGS),$(NONE_IS_FINE))

# What uses no database has run on SQLite already. That may be all that ARGS selects, and
# then pytest ends with 5.
NONE_IS_FINE := || test $$? -eq 5

test-postgres: $(INSTALLED)
	$(PY) -m pytest --database=postgres -m database $(PARALLEL) -o cache_dir=.pytest_cache/postgres-$(VENV) $(ARGS) $(if $(ARGS),$(NONE_IS_FINE))

lint: $(INSTALLED)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: $(INSTALLED)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

chaos: $(INSTALLED)
	$(PY) -m pytest --database=sqlite --hypothesis-profile=chaos --timeout=1800 tests/chaos $(ARGS)
	$(PY) -m pytest --database=postgres -m database --hypothesis-profile=chaos --timeout=1800 \
		tests/chaos $(ARGS) $(NONE_IS_FINE)

# The peers that we measure against stay out of the environment of the tests.
bench:
	@$(MAKE) --no-print-directory VENV=$(VENV)-bench $(VENV)-bench/.peers
	$(VENV)-bench/bin/python -m tests.benchmarks $(BENCH)

$(VENV)/.peers: tests/benchmarks/requirements.txt $(INSTALLED)
	$(PIP) -r requirements.txt -r tests/benchmarks/requirements.txt
	@touch $@

$(INSTALLED): requirements.txt pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON). Install Python 3.11 or newer, or say where: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>&1), and 3.11 or newer is needed: make PYTHON=python3.13" >&2; exit 1; }
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
			echo "$(PYTHON) can't make a virtual environment with pip. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }; \
		echo "Making $(VENV) with $$($(PYTHON) --version)"; \
		if test -e $(VENV)/pyvenv.cfg; then $(PYTHON) -m venv --clear $(VENV); else $(PYTHON) -m venv $(VENV); fi; }
	@echo "Installing into $(VENV)"
	@$(PIP) -r requirements.txt $(if $(DJANGO),'$(DJANGO)') $(BACKPORT)
	@printf '%s\n' '$(DJANGO)' > $@

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

# make demo    install everything into .venv and run the whole pipeline on the shipped samples
# make test    run every test       make lint    formatting, style and types
# make docs    the documentation site into site/, without a network
# make bench   the benchmarks that this machine can run, with their tables
# make coverage   the core's own tests, and how much of the core they run
# make serve   Prefect server, worker and all deployments, until Ctrl-C
# All paths are relative, so that the checkout may lie anywhere, also below a folder with a space in its name.

SHELL := /bin/sh
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install

# At a terminal pip has its own bars; elsewhere it is quiet, and a line every TICK seconds says that it is at work.
TICK := 10
define pip_install
	@if [ -t 1 ]; then exec $(PIP) $(1); fi; \
	( n=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do \
		n=$$((n + 1)); [ $$((n % $(TICK))) != 0 ] || echo "  still installing ($$n s)"; done ) & \
	ticker=$$!; status=0; $(PIP) --quiet $(1) || status=$$?; kill $$ticker; exit $$status
endef

.PHONY: help demo test lint docs bench coverage serve install install-dev clean

help:
	@sed -n 's/^# make/make/p' Makefile

demo: .venv/.installed
	@$(PY) -m flows.cli run

test: .venv/.installed-dev
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: .venv/.installed-dev
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

docs: .venv/.installed-dev
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "site/index.html"

bench: .venv/.installed-dev
	@$(PY) benchmarks/everything.py

# Child processes (training workers) are measured too; two processes of pytest, since many tests wait for others.
coverage: .venv/.installed-dev
	@$(PY) -m coverage erase
	@$(PY) -m coverage run -m pytest --numprocesses 2 $(addprefix --ignore=tests/,flows tasks deployments benchmarks docs)
	@$(PY) -m coverage combine --quiet
	@$(PY) -m coverage report

serve: .venv/.installed
	@$(PY) -m deployments.serve

install: .venv/.installed

install-dev: .venv/.installed-dev

clean:
	rm -rf .venv

# Some launchers answer to a name without having that Python behind it, so each candidate has to run and show its version.
.venv/bin/python:
	@for python in python3.13 python3.12 python3.11 python3; do \
		if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "Making a virtual environment in .venv with $$("$$python" --version)"; \
			"$$python" -m venv .venv && exit 0; \
		fi; \
	done; \
	rm -rf .venv; \
	echo "TraceForge needs Python 3.11 or newer with its venv module, and none of python3.13, python3.12, python3.11" >&2; \
	echo "and python3 is that. Install one (on Debian: apt-get install python3 python3-venv) and try again." >&2; \
	exit 1

.venv/.installed: requirements.lock pyproject.toml | .venv/bin/python
	@echo "Installing the pinned packages (once, some minutes)"
	$(call pip_install,--requirement requirements.lock)
	$(call pip_install,--no-deps --editable .)
	@touch $@

.venv/.installed-dev: requirements-dev.lock .venv/.installed
	@echo "Installing what tests, checks and documentation need (once)"
	$(call pip_install,--requirement requirements-dev.lock)
	@touch $@

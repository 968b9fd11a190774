# On a fresh machine `make demo` and `make test` set up everything they need in .venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed

.PHONY: demo test hosts lint format bench docs clean

demo: $(STAMP)
	$(RUN)logitless demo

test: $(STAMP)
	$(RUN)python -m pytest -n 2 --dist loadfile

# The adapters' tests on every host that is found: LOGITLESS_HOSTS names a folder of checkouts.
hosts: $(STAMP)
	$(RUN)python tests/adapters/matrix.py
	$(RUN)python docs/make_hosts.py

# The hooks of .pre-commit-config.yaml, on all committed files.
lint: $(STAMP)
	$(RUN)pre-commit run --all-files --show-diff-on-failure

format: $(STAMP)
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

bench: $(STAMP)
	$(RUN)logitless bench

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict

# Nothing else needs these packages, so they are installed when the site is first built.
$(VENV)/.docs: $(STAMP)
	$(RUN)python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $(VENV)/.docs

# Torch first and pinned: a looser request would pull a CUDA build.
$(STAMP): pyproject.toml constraints.txt constraints-hosts.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(RUN)python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(RUN)python -m pip install --quiet --no-deps --upgrade --target $(VENV)/hosts -r constraints-hosts.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) out site .pytest_cache .ruff_cache .hypothesis

# On a fresh machine `make demo` and `make test` set up everything they need in .venv.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/
STAMP := $(VENV)/.installed

# Modules are compiled when they are first imported, and then once: most of what is installed never is. To pip, 0 is yes.
export PIP_NO_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=

# Each part of the library against float64, once; no hosts, no commands.
QUICK := test_architecture call/test_errors operands/test_kept rows/test_layouts route/test_linear_plans score/test_logprobs objectives/test_objective_terms score/test_policy_head rows/test_rows score/test_special_values rows/test_exchange

# What `make test312` runs: what has to do with hosts, some of which ask for Python 3.12.
OF_HOSTS := tests/adapters tests/engines tests/test_provider.py

.PHONY: changelog checkouts demo test test312 gpu check hosts engines hosts312 drift families fuzz soak lint format bench cards faults mutants versions docs serve dist smoke bare release-tag clean

demo: $(STAMP)
	$(RUN)python -m examples.demo

# Tests run side by side, one to a core: threads of theirs would wait for each other.
test check: export OMP_NUM_THREADS := 1

test: $(STAMP)
	$(RUN)python -m pytest -n 3 --dist worksteal $(TESTS)

# The newest Megatron-Core, and SkyRL on it, install under Python 3.12 alone. With pyenv, python3.12 is the one it has.
test312: export PYENV_VERSION ?= 3.12
test312:
	$(MAKE) test VENV=.venv312 PYTHON=python3.12 TESTS="$(OF_HOSTS)"

# On a machine with a GPU, whose environment has a CUDA build of torch: kernels compiled, not interpreted. Three minutes
# of the most important tests, with a record; GPU="--seconds 900 tests" for all of them.
gpu:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu_suite.py $(GPU)

# While working: two minutes.
check: lint
	$(RUN)python -m pytest -n 3 --dist worksteal $(QUICK:%=tests/%.py)

# Random calls against float64; FUZZ="--seconds 600 --jobs 8" and the like, see docs/reliability.md.
fuzz: $(STAMP)
	PYTHONPATH=src $(RUN)python tests/fuzz/run.py $(FUZZ)

soak: $(STAMP)
	PYTHONPATH=src $(RUN)python tests/fuzz/run.py --soak 1000 $(FUZZ)

# What holds our pages to the hosts that are found, of several hosts in one process.
HELD := adapters/test_own_tests adapters/test_claims adapters/test_hooks adapters/test_host_distillation test_provider

# The adapters' tests on every host that is found: LOGITLESS_HOSTS names a folder of checkouts.
hosts: $(STAMP)
	$(RUN)python tests/adapters/matrix.py
	$(RUN)python -m pytest -q $(HELD:%=tests/%.py)
	$(RUN)python docs/make_hosts.py

# The plug-ins' tests on each version of a rollout engine: vllm-0.32.0, sglang-0.5.23, ..., unpacked from their wheels.
engines: $(STAMP)
	for folder in $(wildcard $(LOGITLESS_HOSTS)/vllm-* $(LOGITLESS_HOSTS)/sglang-*); do \
		LOGITLESS_HOSTS=$$folder $(RUN)python -m pytest -q tests/engines tests/operands/test_engine_supports.py || exit 1; done

# The folder of checkouts, cloned or brought up to date.
checkouts:
	$(PYTHON) tests/adapters/repositories.py "$(LOGITLESS_HOSTS)"

# The same in an environment of Python 3.12, which some hosts ask for.
hosts312:
	$(MAKE) hosts VENV=.venv312 PYTHON=python3.12

# Newest releases of the hosts, from the package index, and checkouts, against what `make hosts` recorded.
drift: $(STAMP)
	PYTHONPATH=src $(RUN)python tests/adapters/drift.py

# Every causal language model of Transformers, small, with and without ``defer``: two minutes, and a record.
families: $(STAMP)
	PYTHONPATH=tests:. $(RUN)python tests/deferred/families.py benchmarks/results/families.jsonl

# The hooks of .pre-commit-config.yaml, on all committed files.
lint: $(STAMP)
	$(RUN)pre-commit run --all-files --show-diff-on-failure

format: $(STAMP)
	$(RUN)ruff check --fix .
	$(RUN)ruff format .

bench: $(STAMP)
	$(RUN)python -m benchmarks bench

# Every Triton kernel compiled for every card that docs/cards.md names, without having one: ten minutes.
cards: $(STAMP)
	$(RUN)python benchmarks/cards.py --json benchmarks/results/cards.jsonl
	$(RUN)python docs/make_cards.py

# Every fault of the tests, injected everywhere; writes the record and the tables of docs/reliability.md.
faults: $(STAMP)
	$(RUN)python benchmarks/inject_faults.py

# Bugs seeded into a copy of the source, one at a time: the tests must notice each. Then random changes, for five minutes.
mutants: $(STAMP)
	$(RUN)python tests/mutants/run.py --json benchmarks/results/mutants.jsonl
	$(RUN)python tests/mutants/sample.py --seed $$(date +%j) --seconds 300

# Every torch and Triton that pyproject.toml claims, each in an environment of its own; NOX="--python 3.12" for one Python.
versions:
	$(PYTHON) -m venv .nox/tool
	.nox/tool/bin/python -m pip install --quiet nox
	.nox/tool/bin/nox $(NOX)

# The site, and then its search, its pages on a phone and its figures in the dark, where there is a browser.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs build --strict
	$(RUN)python -m pytest -q -rs tests/documents/test_site.py

# The same site while writing: every saved change is shown.
serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(RUN)mkdocs serve

# Wheel and source distribution, into dist; the wheel is built from the latter, so that it too is known to build.
dist: $(STAMP)
	rm -rf dist
	$(RUN)python -m build --no-isolation

# The wheel in fresh environments with nothing but what each extra declares; EXTRAS="none cli" for some of them.
smoke: dist
	$(RUN)python tests/smoke/environments.py $(EXTRAS)

# The same where torch and numpy are alone, without Triton; the commands are added after that.
bare: dist
	$(RUN)python tests/smoke/environments.py none+cli

# Before a release: what CHANGELOG.md has under Unreleased goes into the section of the version, with today's date.
changelog:
	$(PYTHON) docs/fold_changelog.py

# Before a release: the tag that was pushed is the version that will be built, and nothing is left under Unreleased.
release-tag:
	! sed -n '/^## Unreleased/,/^## [0-9]/p' CHANGELOG.md | grep '^- '
	test "$(TAG)" = "v$$(sed -n 's/^__version__ = "\(.*\)"$$/\1/p' src/logitless/__init__.py)"

# Nothing else needs these packages, so they are installed when the site is first built.
$(VENV)/.docs: $(STAMP)
	$(RUN)python -m pip install --quiet -c constraints.txt -e ".[docs]"
	touch $(VENV)/.docs

# Torch first and pinned: a looser request would pull a CUDA build. The pip that comes with Python resolves three times as long.
$(STAMP): pyproject.toml constraints.txt constraints-hosts.txt constraints-deepspeed.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)python -m pip install --quiet --upgrade -c constraints.txt pip
	$(RUN)python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(RUN)python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(RUN)python -m pip install --quiet --no-deps --ignore-requires-python --upgrade --target $(VENV)/hosts -r constraints-hosts.txt
	DS_BUILD_OPS=0 $(RUN)python -m pip install --quiet --no-deps --upgrade --target $(VENV)/deepspeed -r constraints-deepspeed.txt
	touch $(STAMP)

clean:
	rm -rf $(VENV) .venv312 out site dist .pytest_cache .ruff_cache .hypothesis

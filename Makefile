# make train   a trained model, its score, a sample and a picture of its spans, in a few minutes
# make test    linters, types and the tests that are not slow
# make lock    constraints.lock: the versions of constraints.txt, with hashes of their files
# make audit   known vulnerabilities of the locked dependencies
# make test-slow          the tests that take more than ten seconds
# make test-distributed   trainings in 2 and 4 processes of torchrun, against one process
# make test-more          both of these in one run, which is shorter
# make test-faults   kills of runs, searches and ranks, which end as if nothing had happened; minutes
# make test-browser  the pages in Debian's chromium; installs it if it is missing, which needs root
# make test-cluster  Debian's Slurm on this machine, as two nodes; installs it and needs root

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CHECKED := src tests benchmarks examples
AUDIT := .venv-audit
LOCK := .venv-lock
CPP := $(wildcard src/longspan/kernels/*/*.cpp)
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

# The tests start many processes, which need not compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: train test test-slow test-distributed test-more test-faults test-browser test-cluster lint lock audit clean

train: $(VENV)/installed
	$(BIN)/longspan train

test: $(VENV)/installed-dev lint
	$(PYTEST)

test-slow: $(VENV)/installed-dev
	$(PYTEST) -m slow tests

test-distributed: $(VENV)/installed-dev
	$(PYTEST) -m 'distributed and not faults' tests

test-more: $(VENV)/installed-dev
	$(PYTEST) -m 'slow or distributed and not faults' tests

test-faults: $(VENV)/installed-dev
	$(BIN)/python -m pytest -m faults tests

test-browser: $(VENV)/installed-dev
	command -v chromium >/dev/null || (apt-get update && apt-get install --yes --no-install-recommends chromium)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m browser tests/browser

test-cluster: $(VENV)/installed-dev
	command -v slurmctld >/dev/null || (apt-get update && apt-get install --yes --no-install-recommends slurm-wlm munge)
	$(BIN)/python -m pytest -m cluster tests/cluster

lint: $(VENV)/installed-dev
	$(BIN)/ruff check $(CHECKED)
	$(BIN)/ruff format --check $(CHECKED)
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy
	$(BIN)/lint-imports

# uv asks the package index for the hashes. torch is left out: its builds for CPUs and for GPUs are different
# files with one version number, and the build for CPUs comes from an index of its own.
lock: $(LOCK)/bin/uv
	@{ echo "# Made by 'make lock' from constraints.txt. torch has no hash, since its builds for CPUs and GPUs"; \
	   echo "# share a version number: install it first, with --constraint constraints.txt. Then:"; \
	   echo "#     pip install --require-hashes --no-deps --requirement constraints.lock"; \
	   echo "#     pip install --no-deps --editable ."; } > constraints.lock.partial
	grep -v '^torch==' constraints.txt | $(LOCK)/bin/uv pip compile --quiet --no-deps --generate-hashes \
	    --no-header --no-annotate - >> constraints.lock.partial
	mv constraints.lock.partial constraints.lock

$(LOCK)/bin/uv:
	$(PYTHON) -m venv $(LOCK)
	$(LOCK)/bin/python -m pip install --quiet uv

# pip-audit asks PyPI. It has an environment of its own, since its dependencies are not locked.
audit:
	@if ! $(PYTHON) -c "import urllib.request as web; web.urlopen('https://pypi.org/pypi/pip/json', timeout=5)" \
	    2>/dev/null; then \
	    echo "audit: PyPI cannot be reached, nothing was checked"; \
	elif ! $(MAKE) --silent $(AUDIT)/bin/pip-audit >/dev/null 2>&1; then \
	    echo "audit: pip-audit cannot be installed, nothing was checked"; \
	else \
	    found=$$($(AUDIT)/bin/pip-audit --requirement constraints.txt --no-deps --disable-pip \
	        --progress-spinner off 2>&1); status=$$?; \
	    echo "$$found"; \
	    skipped=$$(echo "$$found" | grep -c 'could not be audited'); \
	    test "$$skipped" -eq 0 || echo "audit: PyPI does not know $$skipped of the versions: not checked"; \
	    exit $$status; \
	fi

$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet pip-audit

# A stamp beside the environment: it is made again when what it was made from changes.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(VENV)/installed $@

clean:
	rm -rf $(VENV) $(AUDIT) $(LOCK) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# What can be run here? `make` lists it.
#
# The first target sets up .venv with torch and NumPy, once; tests, checks and docs add their packages, once. To use a
# Python that already has torch instead, with no .venv and nothing installed:   make test PYTHON=/path/to/python

PYTHON ?=
RANKS ?= 2
UPDATE_FREQ ?= 4
TRACE ?=
STEPS ?=
ARGS ?=
# Ranks of a test wait for each other much of the time: more than cores.
WORKERS ?= 4
# The kind of a device besides the CPU: make test runs the tests for devices there, and no others.
DEVICE ?=
BENCH ?=
# Not empty: make package refuses metadata that lacks what a release needs.
RELEASE ?=
# The interpreters of make test-oldest and make test-newest.
OLDEST_PYTHON ?= python3.11
NEWEST_PYTHON ?= python3

# One thread per rank; torchrun would set the same and print a warning about it.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS
# Bytecode is kept: without it each program of a test compiles the package, and each worker rewrites all tests.
unexport PYTHONDONTWRITEBYTECODE
# Scripts in examples/ import legacy_ddp from here, installed or not.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

VENV := .venv
PY := $(or $(strip $(PYTHON)),$(VENV)/bin/python)
# Written last, so an interrupted set-up starts over; not needed with PYTHON=. CORE: torch and NumPy. READY: everything.
CORE := $(if $(strip $(PYTHON)),,$(VENV)/.core)
READY := $(if $(strip $(PYTHON)),,$(VENV)/.ready)
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
LAUNCH := $(PY) -m torch.distributed.run --standalone --nproc-per-node
TORCHRUN := $(LAUNCH) $(RANKS)

TEST_PACKAGES := torch pytest xdist hypothesis numpy sklearn tqdm bokeh selenium
DOCS_PACKAGES := torch lightning sphinx myst_parser pydata_sphinx_theme sphinx_copybutton
PYTEST_OPTIONS = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST = $(PY) -m pytest $(PYTEST_OPTIONS)
# Tests that need torch and pytest alone.
CORE_TESTS = $(addprefix tests/,call memory ranks replicas reproducible steps watchdog \
	debug/cross_check debug/operations) $(wildcard tests/test_*.py)

# Folders with tests that run on a device, too.
DEVICE_TESTS = $(addprefix tests/,call memory ranks replicas reproducible steps test_devices.py \
	debug/cross_check debug/diff debug/operations debug/trace) $(wildcard tests/debug/test_*.py)

# $(call needs,modules): with PYTHON=, say what is missing before a traceback does.
needs = $(if $(strip $(PYTHON)),@$(PY) -c "$$CHECK" $(1))
define CHECK
import importlib.util, sys
NAMES = {"sklearn": "scikit-learn", "xdist": "pytest-xdist"}
if sys.version_info < (3, 11):
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, expected 3.11 or newer")
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if "torch" in missing:
    sys.exit(f"{sys.executable} has no torch; leave PYTHON= out and make sets up its own .venv")
if missing:
    packages = " ".join(NAMES.get(name, name.replace("_", "-")) for name in missing)
    sys.exit(f"missing; run: {sys.executable} -m pip install -c constraints.txt {packages}")
import torch
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 8):
    sys.exit(f"torch {torch.__version__} found, expected 2.8 or newer")
endef
export CHECK

.DEFAULT_GOAL := help
.PHONY: help demo digits hunt culprit replay restart test test-all test-oldest test-newest soak package browser picture docs lint bench bench-full clean
.DELETE_ON_ERROR:

help: ## list what can be run
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "PYTHON=/path/to/python   use this Python and its torch, not a .venv"
	@echo "RANKS=$(RANKS)   UPDATE_FREQ=$(UPDATE_FREQ)   STEPS=...   WORKERS=$(WORKERS)   ARGS='-k name' for pytest"

demo: $(CORE) ## train a language model on RANKS ranks; UPDATE_FREQ, STEPS
	$(call needs,torch)
	$(TORCHRUN) examples/train_lm.py --update-freq $(UPDATE_FREQ) $(if $(STEPS),--steps $(STEPS))
	@echo "next: make hunt flips one bit of one weight on one of 3 ranks, and finds it; make without a target lists all commands."
	@echo "The loop to copy is in README.md, Quickstart; docs/index.md leads to the tutorial."

digits: $(READY) ## train on the handwritten digits of scikit-learn
	$(call needs,torch sklearn)
	$(TORCHRUN) examples/train_digits.py

hunt: $(CORE) ## flip one bit of one weight on one of 3 ranks, find it; HUNTS
	$(call needs,torch)
	$(LAUNCH) 3 examples/hunt.py $(if $(HUNTS),--times $(HUNTS))

culprit: $(CORE) ## let a matrix product go wrong on one of 3 ranks, find it; CULPRITS
	$(call needs,torch)
	$(LAUNCH) 3 examples/culprit.py $(if $(CULPRITS),--times $(CULPRITS))

replay: $(CORE) ## one training on 1, 2, 4 and 8 ranks, to the same bits; STEPS
	$(call needs,torch)
	$(PY) examples/replay.py $(if $(STEPS),--steps $(STEPS))

restart: $(CORE) ## kill ranks of the main job, compare its weights; KILLS
	$(call needs,torch)
	$(PY) examples/restart.py --ranks $(RANKS) $(if $(KILLS),--kills $(KILLS))

test: $(READY) ## test every behaviour once, six minutes; WORKERS files at a time, DEVICE=cuda
	$(call needs,$(if $(DEVICE),torch pytest xdist hypothesis numpy,$(TEST_PACKAGES)))
	$(if $(DEVICE),TEST_DEVICE=$(DEVICE) $(PYTEST) -m "(device or gpu) and not thorough" $(DEVICE_TESTS),$(PYTEST) -m "not thorough") $(ARGS)

test-all: $(READY) ## run all tests, as CI does
	$(call needs,$(TEST_PACKAGES))
	$(PYTEST) $(ARGS)

test-oldest: .venv-oldest/.ready ## run the tests of the core with torch 2.8, several GB in an environment of its own
	.venv-oldest/bin/python -m pytest $(PYTEST_OPTIONS) $(CORE_TESTS) $(ARGS)

test-newest: .venv-newest/.ready ## the same with torch 2.15; NEWEST_PYTHON=python3.13
	.venv-newest/bin/python -m pytest $(PYTEST_OPTIONS) $(CORE_TESTS) $(ARGS)

soak: $(READY) ## run the tests with every repetition: twenty kills, not three
	$(call needs,$(TEST_PACKAGES))
	SOAK=1 $(PYTEST) $(ARGS)

package: $(READY) ## build wheel and sdist into dist/, and try both, also with other torches; RELEASE=1
	RELEASE=$(RELEASE) bash .ci/check-package $(PY)

browser: ## install Debian's Chromium for the tests of the page
	@$(foreach program,chromium chromedriver,command -v $(program) >/dev/null &&) exit 0; \
	if command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
	    apt-get update -q && apt-get install -qy --no-install-recommends chromium chromium-driver; \
	else \
	    echo "the tests of the page need chromium and chromedriver; install them first" \
	        "(on Debian, as root: apt-get install chromium chromium-driver)" >&2; exit 1; \
	fi

picture: $(READY) ## redo docs/report.png from TRACE (one folder, or "A B")
	$(call needs,torch bokeh selenium)
	$(if $(TRACE),,@echo "TRACE=... is missing: the folder of a trace" >&2; exit 1)
	$(PY) docs/picture.py $(TRACE) $(ARGS)

docs: $(READY) ## build the documentation site; start at build/docs/index.html
	$(call needs,$(DOCS_PACKAGES))
	$(PY) -m sphinx -q -n -W --keep-going -d build/doctrees docs build/docs

lint: $(READY) ## check style (ruff) and types (mypy)
	$(call needs,torch ruff mypy bokeh)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy legacy_ddp

bench: $(CORE) ## run the benchmarks briefly, a few minutes; BENCH="name name"
	$(call needs,torch)
	$(PY) benchmarks/run_all.py $(if $(BENCH),--only $(BENCH))

bench-full: $(CORE) ## measure in full, over an hour; writes benchmarks/results/
	$(call needs,torch)
	$(PY) benchmarks/run_all.py --full $(if $(BENCH),--only $(BENCH))

clean: ## remove .venv and everything else that was made here
	rm -rf $(VENV) .venv-oldest .venv-newest build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv-oldest/.ready: INTERPRETER = $(OLDEST_PYTHON)
.venv-newest/.ready: INTERPRETER = $(NEWEST_PYTHON)
# uv takes a third of the time of pip for several GB.
.venv-%/.ready: .ci/constraints-%.txt
	@echo "setting up .venv-$* with $(INTERPRETER) (once; downloads torch with CUDA, several GB)"
	$(INTERPRETER) -m venv --clear .venv-$*
	.venv-$*/bin/python -m pip --disable-pip-version-check install --quiet -c $< uv
	.venv-$*/bin/python -m uv pip install --quiet --python .venv-$*/bin/python -c $< torch numpy hypothesis pytest pytest-xdist
	@touch $@

# torch.distributed needs NumPy to send objects. setuptools comes first and without build isolation, so that its
# version is pinned too.
$(VENV)/.core: setup.cfg setup.py constraints.txt
	@echo "setting up $(VENV) with torch (once; downloads torch)"
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "python3 is too old: expected 3.11 or newer")'
	python3 -m venv --clear $(VENV)
	$(PIP) install -c constraints.txt setuptools
	$(PIP) install -c constraints.txt --no-build-isolation --use-pep517 -e . numpy
	@touch $@

$(VENV)/.ready: $(VENV)/.core
	@echo "adding the packages of tests, checks and docs to $(VENV) (once)"
	$(PIP) install -c constraints.txt --no-build-isolation --use-pep517 -e '.[demo,test,lint,docs]'
	@touch $@

# What a contributor types. Each target first creates the environment in .venv (or brings it up to date).
#
#   make demo     a pretrained encoder and a training run through fusedops, with a picture: demo.png
#   make test     every test that this machine can run
#   make lint     ruff and mypy
#   make docs     the documentation site, in site/
#   make bench    the host's overhead; on a GPU machine also every operator and whole models beside other libraries';
#                 elsewhere what the compiled kernels consist of (benchmarks/README.md)
#   make static-baseline
#                 compile every default configuration and write what came of it to benchmarks/static_baseline.json
#   make clean    remove .venv and everything that was built
#
# Another interpreter: make test PYTHON=python3.12
# An environment of your own, with what pyproject.toml's `dev` extra lists (and timm and torchvision, or else their tests
# are skipped): make test VENV= PYTHON=python

PYTHON ?= python3
VENV ?= .venv
DEMO_ARGS ?=
TEST_ARGS ?= -n 2 --dist worksteal

ifeq ($(strip $(VENV)),)
RUN := $(PYTHON)
INSTALLED :=
else
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
endif

# Builds of torch for CUDA and ROCm bring their own Triton; only where none came with it this one is installed, for
# its interpreter and its compiler. There is none for macOS and Windows: the tests that run kernels are left out there.
TRITON := triton==3.9.0; sys_platform == 'linux'

# pip leaves the packages' sources uncompiled (--no-compile): each module is compiled where it is first imported. Where
# the environment forbids to keep that, every process that imports torch would spend seconds on it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test lint docs bench static-baseline clean

demo: $(INSTALLED)
	$(RUN) -m fusedops demo $(DEMO_ARGS)

# One thread a worker: the tests' tensors are too small for more, and two workers share the cores.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest $(TEST_ARGS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# Warnings are errors. mkdocs-material tells of its successor in every build.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

bench: $(INSTALLED)
	if $(RUN) -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then $(RUN) -m benchmarks --quick; \
	elif $(RUN) -c "import triton" 2>/dev/null; then $(RUN) -m benchmarks --static --quick; \
	else $(RUN) benchmarks/cpu_overhead.py; fi

static-baseline: $(INSTALLED)
	$(RUN) -m benchmarks.static_gate --update

clean:
	rm -rf .venv build dist site fusedops.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis demo.png
	find fusedops tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

ifneq ($(INSTALLED),)
$(INSTALLED): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --no-compile -c constraints.txt torch
	$(RUN) -c "import triton" 2>/dev/null || $(RUN) -m pip install --quiet --no-compile "$(TRITON)"
	$(RUN) -m pip install --quiet --no-compile -c constraints.txt -e ".[dev]"
	$(RUN) -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/vision -c constraints.txt timm torchvision
	touch $@
endif

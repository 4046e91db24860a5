# Two commands: `make test` and `make bench`.  Each installs all it needs into .venv first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
EXTRAS := bench,checkpoints,test

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A constraint for what is installed only: the build's own environment needs no torch.
PIP := $(PY) -m pip install --quiet --constraint constraints.txt

SOURCES := $(shell find csrc cmake python -name '*.[ch]*' -o -name '*.py' -o -name '*.pyi')

.PHONY: cublas test bench lint format stubs gpu-test clean install

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Rebuilt when a source changes; build/ keeps the objects, so only what changed is compiled.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	$(PIP) '.[$(EXTRAS)]'
	touch $@

# A real libcublasLt, about 600 MB, for the tests that create its objects and read them back.
cublas: $(VENV)/.cublas

$(VENV)/.cublas: $(VENV)/bin/python
	$(PIP) --no-deps 'nvidia-cublas-cu12>=12.8'
	touch $@

test: install
	$(PY) -m pytest $(PYTEST_ARGS)

bench: install
	$(PY) -m benchmarks.moe_decode $(BENCH_ARGS)

$(VENV)/.linters: $(VENV)/.installed
	$(PIP) '.[lint,$(EXTRAS)]'
	touch $@

lint: $(VENV)/.linters
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')
	$(VENV)/bin/gersemi --check CMakeLists.txt cmake
	$(PY) tools/stubs.py --check

format: $(VENV)/.linters
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')
	$(VENV)/bin/gersemi -i CMakeLists.txt cmake

stubs: $(VENV)/.linters
	$(PY) tools/stubs.py

gpu-test:
	tools/gpu.sh

clean:
	rm -rf $(VENV) build

# Two commands: `make test` and `make bench`.  Each installs all it needs into .venv first.
# `make test-sglang` runs the plug-in inside a real SGLang, in an environment of its own.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
EXTRAS := bench,checkpoints,test
# SGLang's wheel is for this Python.
SGLANG_PYTHON ?= python3.11
SGLANG_VENV ?= .venv-sglang

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# A constraint for what is installed only: the build's own environment needs no torch.
PIP := $(PY) -m pip install --quiet --constraint constraints.txt

SOURCES := $(shell find csrc cmake python -name '*.[ch]*' -o -name '*.py' -o -name '*.pyi')

.PHONY: test test-sglang bench lint format stubs gpu-test clean install

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Rebuilt when a source changes; build/ keeps the objects, so only what changed is compiled.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	$(PIP) '.[$(EXTRAS)]'
	touch $@

test: install
	$(PY) -m pytest $(PYTEST_ARGS)

# SGLang without its own requirements, which are a CUDA stack with another torch; no device code.
$(SGLANG_VENV)/.installed: tests/sglang/requirements.txt pyproject.toml CMakeLists.txt constraints.txt $(SOURCES)
	test -x $(SGLANG_VENV)/bin/python || $(SGLANG_PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --no-deps -r tests/sglang/requirements.txt
	FP4LT_CUDA=OFF $(SGLANG_VENV)/bin/python -m pip install --quiet --constraint constraints.txt \
		-Cbuild-dir=build/sglang '.[checkpoints,test]'
	touch $@

test-sglang: $(SGLANG_VENV)/.installed
	$(SGLANG_VENV)/bin/python -m pytest tests/sglang $(PYTEST_ARGS)

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
	rm -rf $(VENV) $(SGLANG_VENV) build

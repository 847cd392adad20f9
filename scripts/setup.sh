#!/usr/bin/env bash
# Brings what a run on a real browser needs and this machine lacks: Chromium
# and Node.js from the distribution, Playwright's driver from the npm registry.
# Does nothing, in well under a second, where all of it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

as_root() {
  if [ "$(id -u)" -eq 0 ]; then
    "$@"
  elif command -v sudo >/dev/null; then
    sudo "$@"
  else
    echo "setup: this needs root, and there is no sudo: $*" >&2
    exit 1
  fi
}

packages=()
has_browser() {
  [ -n "${BERTH_CHROMIUM:-}" ] || command -v chromium || command -v chromium-browser || command -v google-chrome ||
    compgen -G "${HOME:-/root}/.cache/ms-playwright/chromium-*/chrome-linux*/chrome"
}
has_browser >/dev/null || packages+=(chromium fonts-dejavu-core)
[ -n "${PLAYWRIGHT_NODEJS_PATH:-}" ] || command -v node >/dev/null || packages+=(nodejs)

if [ ${#packages[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    echo "setup: please install ${packages[*]}; this machine has no apt-get" >&2
    exit 1
  fi
  echo "setup: installing ${packages[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${packages[@]}"
fi
exec bin/berth setup --quiet

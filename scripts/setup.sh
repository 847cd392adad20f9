#!/usr/bin/env bash
# Brings what a run on a real browser needs and this machine lacks: Chromium
# and Node.js from the distribution, Playwright's driver from the npm registry.
# With the argument `desktop` it brings what desktops are made of instead.
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
desktop=(Xvfb:xvfb setxkbmap:x11-xkb-utils openbox:openbox xterm:xterm l3afpad:l3afpad pcmanfm:pcmanfm slirp4netns:slirp4netns x11vnc:x11vnc)
has_browser() {
  [ -n "${BERTH_CHROMIUM:-}" ] || command -v chromium || command -v chromium-browser || command -v google-chrome ||
    compgen -G "${HOME:-/root}/.cache/ms-playwright/chromium-*/chrome-linux*/chrome"
}
has_browser >/dev/null || packages+=(chromium fonts-dejavu-core)
has_node() { # Playwright's driver needs version 20
  [ -n "${PLAYWRIGHT_NODEJS_PATH:-}" ] && return
  command -v node >/dev/null && [ "$(node --version | sed 's/^v\([0-9]*\).*/\1/')" -ge 20 ]
}
if [ "${1:-}" = desktop ]; then
  command -v chromium >/dev/null || packages+=(chromium fonts-dejavu-core)
  for pair in "${desktop[@]}"; do
    command -v "${pair%%:*}" >/dev/null || packages+=("${pair#*:}")
  done
else
  has_node || packages+=(nodejs)
fi

if [ ${#packages[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null; then
    echo "setup: please install ${packages[*]}; this machine has no apt-get" >&2
    exit 1
  fi
  echo "setup: installing ${packages[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -q
  if [ "${1:-}" != desktop ] && ! has_node; then
    offered=$(apt-cache policy nodejs | sed -n 's/^ *Candidate: \([0-9]*\).*/\1/p')
    if [ "${offered:-0}" -lt 20 ]; then
      echo "setup: Playwright's driver needs Node.js 20 or newer and this distribution offers version ${offered:-none};" >&2
      echo "setup: install a newer one (nodejs.org) and put it into PATH, or name it in PLAYWRIGHT_NODEJS_PATH" >&2
      exit 1
    fi
  fi
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qy --no-install-recommends "${packages[@]}"
fi
[ "${1:-}" = desktop ] || exec bin/berth setup --quiet

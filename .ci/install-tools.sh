#!/usr/bin/env bash
# Tools that some tests drive and no user needs: Prometheus with promtool, Chromium (which Playwright of the virtual
# environment drives), and Arize Phoenix (a trace back end, in an environment of its own: CB_PHOENIX_VENV). What is
# already there is left alone. With CB_REQUIRE_TOOLS=1 the tests fail where one is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
phoenix=${CB_PHOENIX_VENV:-.phoenix}
phoenix_version=20.26.1

# Mirrors and indexes have bad minutes.
retry() {
    local pause
    for pause in 5 20 60; do
        "$@" && return
        echo "failed: $*; again in $pause s" >&2
        sleep "$pause"
    done
    "$@"
}

install_phoenix() {
    [ "$(cat "$phoenix/.version" 2>/dev/null)" != "$phoenix_version" ] || return 0
    "$python" -m venv "$phoenix"
    retry "$phoenix/bin/python" -m pip install -q --prefer-binary "arize-phoenix==$phoenix_version"
    echo "$phoenix_version" > "$phoenix/.version"
}

install_packages() {
    local policy=/usr/sbin/policy-rc.d
    # Packages start their daemons; this machine's init, if it has one, is asked not to.
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' > "$policy"
        chmod +x "$policy"
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    fi
    retry apt-get update -q
    DEBIAN_FRONTEND=noninteractive retry apt-get install -y -q --no-install-recommends "$@"
}

missing=()
command -v prometheus >/dev/null && command -v promtool >/dev/null || missing+=(prometheus)
command -v chromium >/dev/null || missing+=(chromium)
if ((${#missing[@]})) && { ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; }; then
    echo "missing: ${missing[*]}. They come from Debian's apt, which needs root: install them and run again" >&2
    exit 1
fi

# The index and the mirror at once.
install_phoenix &
phoenix_job=$!
if ((${#missing[@]})); then
    install_packages "${missing[@]}" || { wait "$phoenix_job" || true; exit 1; }
fi
wait "$phoenix_job"
for tool in prometheus promtool chromium "$phoenix/bin/phoenix"; do
    command -v "$tool" >/dev/null || { echo "$tool is still missing after the installation" >&2; exit 1; }
done

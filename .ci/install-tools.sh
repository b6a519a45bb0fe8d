#!/usr/bin/env bash
# Tools that some tests drive and no user needs: Prometheus with promtool, Chromium, and Arize Phoenix (a trace back
# end, in an environment of its own: CB_PHOENIX_VENV). With CB_REQUIRE_TOOLS=1 the tests fail where one is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
phoenix=${CB_PHOENIX_VENV:-.phoenix}

missing=()
command -v promtool >/dev/null || missing+=(prometheus)
command -v chromium >/dev/null || missing+=(chromium)
if ((${#missing[@]})); then
    if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
        echo "missing: ${missing[*]}; install them and run again" >&2
        exit 1
    fi
    # Packages start their daemons; this machine's init, if it has one, is asked not to.
    policy=/usr/sbin/policy-rc.d
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' > "$policy" && chmod +x "$policy"
        trap 'rm -f "$policy"' EXIT
    fi
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi
if [ ! -x "$phoenix/bin/phoenix" ]; then
    "$python" -m venv "$phoenix"
    "$phoenix/bin/python" -m pip install -q --prefer-binary arize-phoenix==20.26.1
fi

#!/usr/bin/env bash
# Before a release: scan the new checkpoint over the baseline's text and stop when its sinks moved.
#
#   examples/pre-release.sh MODEL [BASELINE]
#
# The first call writes the baseline; commit it. Exit 0 passed, 1 moved too far, 2 bad input.
set -euo pipefail
model=${1:?usage: pre-release.sh MODEL [BASELINE]}
baseline=${2:-sinks.json}
if [ ! -e "$baseline" ]; then
    sinkscope baseline "$model" -o "$baseline"
    echo "wrote $baseline: commit it"
    exit 0
fi
sinkscope check "$model" --baseline "$baseline" --junit sinks.xml

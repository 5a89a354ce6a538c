#!/usr/bin/env bash
# Save a built-in model, look at the archive, restore it and prove it. Needs Python >= 3.11 and g++.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"

show() {
    echo
    echo "\$ $*"
    "$@"
}

show graphpack save tiny-llama archive --batch-sizes 1,4
show graphpack inspect archive
show graphpack load archive
show graphpack load archive --verify

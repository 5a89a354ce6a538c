#!/usr/bin/env bash
# Everything that has to hold: style, types, tests, coverage. Needs Python >= 3.11 and g++.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh test

log="$(mktemp)"
trap 'rm -f "$log"' EXIT

step() {
    echo "== $*"
    "$@"
}

step ruff check .
step ruff format --check .
step mypy
# Each process begins with a part of its own, so that they seldom wait for the same archive to be saved.
step pytest -n "${TEST_PROCESSES:-2}" --dist worksteal --cov --cov-report= "$@" | tee "$log"
# What decides whether to trust an archive is tested line by line and branch by branch.
step coverage report --precision=1 --fail-under=97 --include='graphpack/archive/*'
step coverage report --precision=1 --fail-under=95 --include='graphpack/identity/*'
tail -n 1 "$log"

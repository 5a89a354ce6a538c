#!/usr/bin/env bash
# Everything that has to hold: style, types, tests, coverage. Needs Python >= 3.11 and g++.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh test
# Tests start many processes, which would compile the same modules again and again.
unset PYTHONDONTWRITEBYTECODE

log="$(mktemp)"
types="$(mktemp)"
trap 'rm -f "$log" "$types"' EXIT

step() {
    echo "== $*"
    "$@"
}

step ruff check .
step ruff format --check .
# For most of its time mypy keeps one processor busy, and the first tests are saves, which wait for compilers.
mypy >"$types" 2>&1 &
checking=$!
# Each process begins with a part of its own, so that they seldom wait for the same archive to be saved. A third one
# works while two processors would wait for processes that the tests let wait.
step pytest -n "${TEST_PROCESSES:-3}" --dist worksteal --cov --cov-report= "$@" | tee "$log"
echo "== mypy"
wait "$checking" || { cat "$types"; exit 1; }
cat "$types"
# What decides whether to trust an archive is tested line by line and branch by branch.
step coverage report --precision=1 --fail-under=97 --include='graphpack/archive/*'
step coverage report --precision=1 --fail-under=95 --include='graphpack/identity/*'
tail -n 1 "$log"

# Sourced by the other scripts: `. scripts/setup.sh [EXTRA]` leaves a current .venv, first on PATH.
# Needs Python >= 3.11 with venv. Takes no time when .venv is as pyproject.toml wants it.

extra="${1:-}"

find_python() {
    local name
    for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            command -v "$name"
            return
        fi
    done
    echo "Python 3.11 or later is needed; set PYTHON to its path" >&2
    return 1
}

stamp=".venv/graphpack-${extra:-core}.stamp"
wanted="$(sha256sum pyproject.toml scripts/setup.sh)"
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
    echo "setting up .venv"
    [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
    # torch by its exact version and first, so that nothing else chooses the build.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 numpy
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".${extra:+[$extra]}"
    echo "$wanted" >"$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"

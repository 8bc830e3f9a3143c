#!/bin/sh
# Builds the development environment in $VENV (default .venv), or brings it up to date; does nothing where it is.
#
#   PYTHON_VERSION=3.11   of this minor version
#   PYTHON=/path          of this very interpreter
#   VENV=folder           somewhere else
#   EXTRAS=dev            with these extras, instead of dev,docs
set -eu
cd "$(dirname "$0")/.."

venv=${VENV:-.venv}
python=$venv/bin/python
stamp=$venv/.namedshard-stamp
extras=${EXTRAS:-dev,docs}

# The contents and not the times of the files, which a checkout touches. The folder too: an environment knows its own
# path and that of the sources, so one that was moved or copied along with them would use the old ones.
state=$(pwd -P; echo "$extras"; cat pyproject.toml constraints.txt requirements-demo.txt | cksum)

identity() {
    "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null || echo none
}

runs_wanted_python() {
    [ -x "$python" ] || return 1
    if [ -n "${PYTHON:-}" ]; then
        [ "$(identity "$python")" = "$(identity "$(sh scripts/find_python.sh)")" ]
    else
        "$python" -c 'import sys; sys.exit(sys.argv[1] not in ("", "%d.%d" % sys.version_info[:2]))' \
            "${PYTHON_VERSION:-}" 2>/dev/null
    fi
}

if runs_wanted_python; then
    if [ "$(cat "$stamp" 2>/dev/null)" = "$state" ]; then
        exit 0
    fi
else
    found=$(sh scripts/find_python.sh)
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
        echo "make_venv: $venv is not a virtual environment: remove it, or set VENV= to another folder" >&2
        exit 1
    fi
    echo "creating $venv with $found"
    rm -rf "$venv"
    "$found" -m venv "$venv"
fi

rm -f "$stamp"
echo "installing the development environment into $venv (a few minutes the first time)"
# Twice -q: pip's own warnings are about the machine's pip configuration; its errors still show.
if ! {
    "$python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".[$extras]" &&
        "$python" -m pip install -qq --disable-pip-version-check --no-deps -r requirements-demo.txt
}; then
    echo "make_venv: pip failed; for all it has to say: $python -m pip install -c constraints.txt -e '.[$extras]'" >&2
    exit 1
fi
echo "$state" >"$stamp"

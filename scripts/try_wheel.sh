#!/bin/sh
# Builds the wheel and runs scripts/wheel_smoke.py on it, in a throwaway environment and an empty folder, where nothing
# but the wheel can supply the import.
#
#   try_wheel.sh [MINOR_VERSION]   of the Python to install it on; the newest by default
set -eu
cd "$(dirname "$0")/.."
root=$(pwd -P)

python=$(PYTHON='' PYTHON_VERSION=${1:-} sh scripts/find_python.sh)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM

"${VENV:-.venv}/bin/python" -m build --wheel --outdir "$scratch/dist" . >"$scratch/build.log" 2>&1 || {
    cat "$scratch/build.log" >&2
    exit 1
}
mkdir -p dist "$scratch/empty"
cp "$scratch"/dist/*.whl dist/

echo "trying $(basename "$scratch"/dist/*.whl) on $python"
"$python" -m venv "$scratch/venv"
"$scratch/venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt "$scratch"/dist/*.whl
cd "$scratch/empty"
env -u PYTHONPATH JAX_PLATFORMS=cpu "$scratch/venv/bin/python" "$root/scripts/wheel_smoke.py" "$root"

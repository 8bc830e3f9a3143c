#!/bin/sh
# Prints the path of the newest supported Python that really runs, or says in one line what to install.
#
#   PYTHON=/path/or/command   use this one and no other
#   PYTHON_VERSION=3.11       only this minor version
set -u

supported="3.13 3.12 3.11"
wanted=${PYTHON_VERSION:-$supported}

fail() {
    echo "find_python: $*" >&2
    exit 1
}

case " $supported " in
    *" $wanted "*) ;;
    *) fail "PYTHON_VERSION=$wanted is not supported: choose one of $supported" ;;
esac

# A version manager's python3.13 is often a shim that fails unless that version is selected, so select them all.
# Newest last in pyenv's list, first here: the first match wins.
if command -v pyenv >/dev/null 2>&1; then
    versions=$(pyenv versions --bare 2>/dev/null | awk '{ all = $1 (NR > 1 ? ":" : "") all } END { print all }')
    if [ -n "$versions" ]; then
        PYENV_VERSION=$versions
        export PYENV_VERSION
    fi
fi

# Prints "ok PATH", "lacks PATH MODULES" or "other VERSION". The base executable, not sys.executable: started from an
# active virtual environment, a new one must not depend on the old one, which may be the very folder to be replaced.
probe='
import sys, sysconfig
version = "%d.%d" % sys.version_info[:2]
usable = sys.implementation.name == "cpython" and sys.maxsize > 2**32 and not sysconfig.get_config_var("Py_GIL_DISABLED")
if version not in sys.argv[1].split() or not usable:
    print("other " + version)
    sys.exit()
missing = []
for module in ("venv", "ensurepip", "ssl"):
    try:
        __import__(module)
    except ImportError:
        missing.append(module)
path = getattr(sys, "_base_executable", None) or sys.executable
print("lacks %s %s %s" % (version, path, ",".join(missing)) if missing else "ok " + path)
'

incomplete=""
others=""

# Prints the path and ends the search if the candidate will do; else remembers why not.
try() {
    answer=$("$1" -I -c "$probe" "$2" 2>/dev/null </dev/null) || return 0
    case $answer in
        "ok "*)
            echo "${answer#ok }"
            exit 0
            ;;
        "lacks "*) [ -n "$incomplete" ] || incomplete=${answer#lacks } ;;
        "other "*) others="${answer#other }" ;;
    esac
}

explain_incomplete() {
    # shellcheck disable=SC2086
    set -- $incomplete
    case $3 in
        *ssl*) fail "$2 was built without its $3 module: install a complete Python $1, or set PYTHON=" ;;
        *) fail "$2 lacks its $3 module: install python$1-venv (Debian, Ubuntu: apt-get install python$1-venv)" ;;
    esac
}

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null 2>&1 || fail "PYTHON=$PYTHON is not a command: name a Python $wanted"
    try "$PYTHON" "$wanted"
    [ -z "$incomplete" ] || explain_incomplete
    fail "PYTHON=$PYTHON ${others:+is Python $others and }cannot be used: name a CPython of version $wanted"
fi

# Every folder of PATH, not only the first that has the name: a working Python may stand behind a broken shim.
for version in $wanted; do
    for name in "python$version" python3 python; do
        old_ifs=$IFS
        IFS=:
        for folder in $PATH; do
            IFS=$old_ifs
            if [ -x "$folder/$name" ] && [ ! -d "$folder/$name" ]; then
                try "$folder/$name" "$version"
            fi
        done
        IFS=$old_ifs
    done
done

[ -z "$incomplete" ] || explain_incomplete
one=$(echo "$wanted" | sed 's/ \([^ ]*\)$/ or \1/; s/ \([0-9]\)/, \1/; s/,* or/ or/')
package=python${PYTHON_VERSION:-3}
fail "no Python $one runs here${others:+ (only $others)}: install one" \
    "(Debian, Ubuntu: apt-get install $package $package-venv; macOS: brew install python@${PYTHON_VERSION:-3.13})"

# Makes the environment the other scripts run in; sourced, not called.
#
# Uses the active virtual or conda environment, else .venv in the checkout (made if absent). Installs
# farhorizon with its test extra, editable, at the versions of constraints.txt, and skips that
# while pyproject.toml and constraints.txt are those of the last installation.
# Leaves ROOT set and the environment first on PATH.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

_works() { # a Python that runs and is new enough
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

_environment() {
    local prefix="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" python
    if [[ -n "$prefix" ]] && _works "$prefix/bin/python"; then
        echo "$prefix"
        return
    fi
    prefix="$ROOT/.venv"
    if ! _works "$prefix/bin/python"; then
        for python in python3 python3.11 python3.12 python3.13; do
            _works "$python" && break
            python=
        done
        if [[ -z "$python" ]]; then
            echo "setup: no Python 3.11 or newer found on PATH" >&2
            return 1
        fi
        echo "setup: making $prefix with $("$python" --version)" >&2
        rm -rf "$prefix"
        if ! "$python" -m venv "$prefix" >&2; then
            echo "setup: $python -m venv failed (Debian and Ubuntu: install python3-venv)" >&2
            return 1
        fi
    fi
    echo "$prefix"
}

_install() {
    local python="$1/bin/python" pins="$1/farhorizon-constraints.txt"
    echo "setup: installing into $1 (the first time this takes minutes)"
    grep -v '^#' "$ROOT/launch/constraints.txt" >"$pins"
    "$python" -m pip install -qq --upgrade pip 'setuptools>=77' wheel
    # torch first: deepspeed is built from source against it.
    "$python" -m pip install -qq "$(grep '^torch==' "$pins")"
    if "$python" -c 'from importlib.metadata import version; version("triton")' 2>/dev/null; then
        grep -v '^triton==' "$ROOT/launch/constraints.txt" >"$pins"
    fi
    "$python" -m pip install -qq --no-build-isolation -c "$pins" -e "$ROOT[test]"
    # What tests are held against is read from files: where transformers finds the package, it takes
    # kernels that need a GPU for models on a CPU as well.
    "$python" -m pip install -qq --no-deps --upgrade --target "$1/references" \
        "$(grep '^fla-core==' "$ROOT/launch/constraints.txt")"
}

_setup() {
    local prefix stamp wanted
    prefix="$(_environment)" || return
    export PATH="$prefix/bin:$PATH"
    stamp="$prefix/farhorizon-installed"
    wanted="$ROOT $(cat "$ROOT/pyproject.toml" "$ROOT/launch/constraints.txt" | cksum)"
    if [[ ! -f "$stamp" || "$(<"$stamp")" != "$wanted" ]]; then
        rm -f "$stamp"
        _install "$prefix" || return
        echo "$wanted" >"$stamp"
    fi
}

_setup || exit 1

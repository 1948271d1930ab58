# Sourced by demo, test and check: finds a Python and keeps one virtual environment for each Python version in the repository.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
supported="3.13 3.12 3.11"  # newest first: a newer Python brings a newer JAX

die() {
    echo "error: $*" >&2
    exit 1
}

# python_version EXE: its version as "3.13", if it runs at all (a version manager's dead shim does not) and can make environments.
python_version() {
    "$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

# candidates VERSION: executables that may be this Python, one a line: on the PATH, of pyenv, of uv.
candidates() {
    type -ap "python$1" python3 python || true
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1"*/bin/python 2>/dev/null | sort -rV || true
    ls -d "${XDG_DATA_HOME:-$HOME/.local/share}"/uv/python/cpython-"$1"*/bin/python3 2>/dev/null | sort -rV || true
}

# find_python [VERSION | EXE]: the named Python, or the newest supported one that runs; dies if there is none.
find_python() {
    local wanted=${1:-} version exe
    if [[ -n $wanted && ! $wanted =~ ^[0-9]+\.[0-9]+$ ]]; then
        version=$(python_version "$wanted") || die "--python $wanted does not run, or lacks the venv or ensurepip module; give a version ($supported) or another path"
        [[ " $supported " == *" $version "* ]] || die "--python $wanted is Python $version; supported: $supported"
        echo "$wanted"
        return
    fi
    [[ -z $wanted || " $supported " == *" $wanted "* ]] || die "--python $wanted is not supported; supported: $supported"
    for version in ${wanted:-$supported}; do
        while IFS= read -r exe; do
            if [[ $(python_version "$exe") == "$version" ]]; then
                echo "$exe"
                return
            fi
        done < <(candidates "$version")
    done
    die "no Python ${wanted:-among $supported} that runs and has the venv and ensurepip modules was found on the PATH, in pyenv or in uv; install one, or name one by --python /path/to/python"
}

# ensure_venv PYTHON EXTRA...: sets $python to the environment's interpreter, with jaxserve (editable) and these extras installed.
# A stamp for each extra, the hash of pyproject.toml, tells whether anything is left to do.
ensure_venv() {
    local base=$1 venv stamp extra missing=()
    shift
    venv=$root/.venv-$(python_version "$base")
    python=$venv/bin/python
    stamp=$("$base" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' "$root/pyproject.toml")
    if ! "$python" -m pip --version >/dev/null 2>&1; then
        echo "Making ${venv##*/} with $("$base" -V) ..." >&2
        "$base" -m venv --clear "$venv"
    fi
    for extra in "$@"; do
        [[ $(cat "$venv/jaxserve-$extra.stamp" 2>/dev/null) == "$stamp" ]] || missing+=("$extra")
    done
    ((${#missing[@]})) || return 0
    echo "Installing jaxserve and its dependencies (${missing[*]}) into ${venv##*/}, about a minute ..." >&2
    quietly "$python" -m pip install --disable-pip-version-check -q -e "$root[$(IFS=,; echo "${missing[*]}")]"
    for extra in "${missing[@]}"; do
        echo "$stamp" >"$venv/jaxserve-$extra.stamp"
    done
}

# quietly COMMAND...: runs it, without pip's notices about places it does not look at; errors stay.
quietly() {
    "$@" 2> >(grep -v 'Location .* is ignored' >&2 || true)
}

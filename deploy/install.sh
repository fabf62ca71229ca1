#!/usr/bin/env bash
# The steps that install Eyas into an image. The Dockerfile runs them, and `make image-check` runs the same
# ones in a clean Debian root, so that they are proven where there is no container engine.
#
#   install.sh system host|cpu|cuda-build|cuda   packages of the distribution (Debian or Ubuntu), as root; host:
#                                                for a machine without containers, Python included
#   install.sh packages cpu|cuda   a virtual environment in PREFIX with every pinned Python package
#   install.sh kernels             flashinfer's kernels, compiled into PREFIX (needs nvcc, no GPU)
#   install.sh app                 Eyas itself and the shipped model, into PREFIX
#   install.sh user                the account that the service runs as
set -euo pipefail

SOURCE="$(cd "$(dirname "$0")/.." && pwd)"
PREFIX="${PREFIX:-/opt/eyas}"
PYTHON="${PYTHON:-python3}"
# The index that has the build of torch that is wanted; empty for the one that pip is configured with.
# TORCH chooses another version than that of the lock.
TORCH_INDEX="${TORCH_INDEX-}"

pip_install() {
    "$PREFIX/bin/pip" install --no-cache-dir --disable-pip-version-check --no-input "$@"
}

system() {
    local packages=(tini)
    case "$1" in
        cpu) ;;
        host) packages=(python3 python3-venv) ;;
        cuda-build) packages+=(python3 python3-venv python3-dev g++ ninja-build) ;;
        # Triton compiles its launchers, not its kernels, with the host's compiler at first use.
        cuda) packages+=(python3 python3-dev gcc libc6-dev) ;;
        *) echo "install.sh system: host, cpu, cuda-build or cuda, not '$1'" >&2; exit 2 ;;
    esac
    export DEBIAN_FRONTEND=noninteractive
    apt-get update
    apt-get install --yes --no-install-recommends "${packages[@]}"
    # What an image does not need; a host does.
    [ "$1" = host ] || rm -rf /var/lib/apt/lists/*
}

packages() {
    local torch="${TORCH:-$(grep '^torch==' "$SOURCE/requirements.lock")}"
    "$PYTHON" -m venv "$PREFIX"
    # First and by itself: nothing else may choose its build.
    pip_install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$torch"
    local lock="$PREFIX/requirements.txt"
    if [ "$1" = cuda ]; then
        # What the cuda list pins takes the place of the lock's pin.
        local names
        names="$(sed -n 's/^\([a-z][a-z0-9-]*\).*==.*/^\1==/p' "$SOURCE/deploy/requirements-cuda.txt")"
        grep -v -e '^torch==' -f <(echo "$names") "$SOURCE/requirements.lock" > "$lock"
        grep -v '^#' "$SOURCE/deploy/requirements-cuda.txt" >> "$lock"
    else
        grep -v '^torch==' "$SOURCE/requirements.lock" > "$lock"
    fi
    echo "$torch" > "$PREFIX/torch-constraint.txt"
    pip_install --constraint "$PREFIX/torch-constraint.txt" --requirement "$lock"
    "$PREFIX/bin/pip" --disable-pip-version-check check
    # After the check: it goes without some of what it asks for (the file says why).
    pip_install --no-deps --requirement "$SOURCE/requirements-grammar.lock"
}

kernels() {
    "$PREFIX/bin/python" "$SOURCE/deploy/build_kernels.py"
}

app() {
    # Built from a copy: setuptools writes beside the sources, which may be read-only.
    local build
    build="$(mktemp -d)"
    cp -r "$SOURCE"/{pyproject.toml,README.md,LICENSE,engine,service} "$build"
    pip_install --no-deps --no-build-isolation "$build"
    rm -rf "$build"
    mkdir -p "$PREFIX/models"
    cp -r "$SOURCE/models/eyas-14m" "$PREFIX/models"
    chmod -R a+rX "$PREFIX"
}

user() {
    groupadd --gid 10001 eyas
    useradd --uid 10001 --gid eyas --home-dir /tmp --no-create-home --shell /usr/sbin/nologin eyas
}

case "${1:-}" in
    system) system "${2:-cpu}" ;;
    packages) packages "${2:-cpu}" ;;
    kernels | app | user) "$1" ;;
    *) sed -n '2,/^set/{/^#/p}' "$0" >&2; exit 2 ;;
esac

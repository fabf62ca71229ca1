#!/usr/bin/env bash
# Proves the Dockerfile's steps without a container engine: runs deploy/install.sh in a clean Debian root, then
# starts the server there as the image does (unprivileged, read-only root, tmpfs on /tmp, tini), asks for a
# completion, scrapes the metrics, and stops it. As root: needs debootstrap, curl and unshare.
#
#   ROOT     where the Debian root goes (default build/image-root); kept, a second run reuses it
#   SUITE, MIRROR   of Debian; debootstrap's own mirror by default
#   TORCH_INDEX     as in install.sh; empty for pip's own configuration
#   BIND     paths of this machine to show inside while installing, such as a pip configuration
set -euo pipefail
cd "$(dirname "$0")/.."

ROOT="$(realpath -m "${ROOT:-build/image-root}")"
SUITE="${SUITE:-bookworm}"
MIRROR="${MIRROR:-}"
PORT="${PORT:-18000}"
BIND="${BIND:-}"
START=$SECONDS
mounted=()

say() { printf '%4d s  %s\n' $((SECONDS - START)) "$*"; }

unmount() {
    local i
    for ((i = ${#mounted[@]} - 1; i >= 0; i--)); do umount "${mounted[i]}"; done
    mounted=()
}
trap unmount EXIT

mount_inside() {
    local path
    for path in $BIND; do
        if [ -d "$path" ]; then mkdir -p "$ROOT$path"; else mkdir -p "$(dirname "$ROOT$path")"; touch "$ROOT$path"; fi
        mount --bind "$path" "$ROOT$path"
        mounted+=("$ROOT$path")
    done
    mount -t proc proc "$ROOT/proc"
    mounted+=("$ROOT/proc")
}

inside() { chroot "$ROOT" env PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin "$@"; }

install_all() {
    if [ ! -e "$ROOT/etc/debian_version" ]; then
        debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv "$SUITE" "$ROOT" ${MIRROR:+"$MIRROR"} > /dev/null
    fi
    say "clean root of Debian $(cat "$ROOT/etc/debian_version")"
    rm -rf "$ROOT/src" "$ROOT/opt/eyas"
    mkdir -p "$ROOT/src/deploy"
    # What the Dockerfile copies.
    cp -r requirements.lock requirements-grammar.lock pyproject.toml README.md LICENSE engine service models "$ROOT/src"
    cp deploy/install.sh "$ROOT/src/deploy"
    cp /etc/resolv.conf "$ROOT/etc/resolv.conf"
    mount_inside
    inside /src/deploy/install.sh system cpu > /dev/null
    say "install.sh system cpu"
    inside /src/deploy/install.sh packages cpu > /dev/null
    say "install.sh packages cpu"
    inside /src/deploy/install.sh app > /dev/null
    say "install.sh app"
    inside id eyas > /dev/null 2>&1 || inside /src/deploy/install.sh user
    unmount
    rm -rf "$ROOT/src"
    say "size of /opt/eyas: $(du -sm "$ROOT/opt/eyas" | cut -f1) MiB, of the root: $(du -smx "$ROOT" | cut -f1) MiB"
}

serve() {
    # The image's environment, from the Dockerfile's last stage. exec, so that a signal reaches tini.
    exec unshare --mount bash -c '
        set -e
        root="$1" port="$2"
        mount --bind "$root" "$root"
        mount -t proc proc "$root/proc"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs -o size=1g,mode=1777 tmpfs "$root/tmp"
        mount -o remount,bind,ro "$root"
        exec chroot --userspec=10001:10001 "$root" /usr/bin/env -i PATH=/opt/eyas/bin:/usr/bin:/bin HOME=/tmp \
            PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 EYAS_HOST=127.0.0.1 EYAS_PORT="$port" \
            EYAS_LOG_FORMAT=json EYAS_MODEL=/opt/eyas/models/eyas-14m EYAS_MAX_NUM_SEQS=8 \
            /usr/bin/tini -s -- /opt/eyas/bin/eyas serve
    ' serve "$ROOT" "$PORT"
}

check() {
    local url="http://127.0.0.1:$PORT" begin=$SECONDS pid answer tries=0
    serve 2> "$ROOT.log" &
    pid=$!
    until curl -fsS "$url/ready" > /dev/null 2>&1; do
        tries=$((tries + 1))
        if ! kill -0 "$pid" 2> /dev/null || [ "$tries" -gt 600 ]; then
            tail -n 20 "$ROOT.log" >&2
            say "the server did not become ready"
            return 1
        fi
        sleep 0.2
    done
    say "ready $((SECONDS - begin)) s after its start, as user $(ps -o uid= -p "$pid" | tr -d ' ')"
    answer="$(curl -fsS "$url/v1/completions" -H 'Content-Type: application/json' \
        -d '{"prompt": "def add(a, b):\n    ", "max_tokens": 16, "temperature": 0}')"
    say "completion: $(printf '%s' "$answer" | cut -c 1-160)"
    curl -fsS "$url/dashboard" | grep -c '<title>Eyas</title>' > /dev/null
    say "the live page is there"
    # Read whole before it is searched: a pipe that closes early is an error to curl.
    answer="$(curl -fsS "$url/metrics")"
    grep -E '^eyas_(ready|generation_tokens_total|spec_accept_length) ' <<< "$answer"
    if ! grep -q '^eyas_generation_tokens_total 16.0$' <<< "$answer"; then
        say "the metrics do not tell the 16 tokens"
        return 1
    fi
    kill -TERM "$pid"
    wait "$pid"
    say "SIGTERM: exit code 0"
}

install_all
check
say "all steps passed"

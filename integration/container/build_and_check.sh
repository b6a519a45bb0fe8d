#!/usr/bin/env bash
# From a checkout to a checked CPU image, without a container engine or an image registry: debootstrap makes the base,
# `bentoml containerize` builds with buildah, check_image.py runs the result in namespaces of its own. Debian, as root:
#
#     make image-test          or          integration/container/build_and_check.sh [WORK_FOLDER]
#
# Needs buildah, debootstrap and .venv (`make install model`); `CB_INSTALL_TOOLS=1` installs the first two. Python
# packages come through this machine's pip, which must know an index or folder with CPU builds of torch. What is in
# WORK_FOLDER already (base, packages) is not fetched again. Nothing of it runs or listens outside the namespaces.
set -Eeuo pipefail
cd "$(dirname "$0")/../.."
root=$PWD
work=$(realpath -m "${1:-build/image}")
bin=$(realpath "${VENV:-.venv}/bin")
release=bookworm # its Python is the 3.11 of the Bento
base=localhost/cb-base:$release
image=localhost/cb-llm:check
bento=integration/container/bentofile.yaml
export BENTOML_DO_NOT_TRACK=True BUILDAH_ISOLATION=chroot

fail() {
    echo "error: $*" >&2
    exit 1
}

step="looking around"
trap 'echo "error: $step failed; the output above says why (logs: $work)" >&2' ERR

# Mirrors and indexes have bad minutes.
retry() {
    local pause
    for pause in 5 20; do
        "$@" && return
        echo "failed: $1; again in $pause s" >&2
        sleep "$pause"
    done
    "$@"
}

timed() { # name, command...: a row of the table
    local begin=$SECONDS
    step=$1
    "${@:2}"
    rows+=("| $step | $((SECONDS - begin)) |")
}

((EUID == 0)) || fail "run as root: it mounts, changes root and makes namespaces"
missing=()
for tool in buildah debootstrap; do command -v $tool >/dev/null || missing+=($tool); done
if ((${#missing[@]})); then
    [ "${CB_INSTALL_TOOLS:-}" = 1 ] || fail "missing: ${missing[*]}; install them, or set CB_INSTALL_TOOLS=1"
    retry apt-get update -q && DEBIAN_FRONTEND=noninteractive retry apt-get install -y -q --no-install-recommends "${missing[@]}"
fi
[ -x "$bin/bentoml" ] || fail "no BentoML in $bin: run \`make install model\`, or set VENV="
mkdir -p "$work"/{bin,uv/wheels}
free=$(df --output=avail -BG "$work" | tail -1 | tr -dc 0-9)
[ "$free" -ge 8 ] || fail "8 GB are needed in $work, $free are free: name another folder"
rows=()

# BentoML calls plain `buildah`: this one keeps its images in the work folder.
printf '#!/bin/sh\nexec %s --root %s/storage --runroot %s/run "$@"\n' "$(command -v buildah)" "$work" "$work" \
    > "$work/bin/buildah"
chmod +x "$work/bin/buildah"
export PATH=$work/bin:$bin:$PATH

wheels() {
    "$bin/python" - "$bento" <<'EOF' > "$work/requirements.txt"
import sys, yaml
print(*yaml.safe_load(open(sys.argv[1]))["python"]["packages"], "uv==0.13.9", sep="\n")
EOF
    "$bin/python" -m pip download -q --prefer-binary --python-version 3.11 --only-binary :all: \
        -d "$work/uv/wheels" -r "$work/requirements.txt" 2> "$work/pip.log" || { tail -3 "$work/pip.log"; return 1; }
    # Read by uv in the build, through a mount: neither the packages nor this file get into the image.
    printf 'no-index = true\nno-cache = true\nfind-links = ["/etc/uv/wheels"]\n' > "$work/uv/uv.toml"
}

base_image() {
    local folder=$work/rootfs container
    if [ ! -e "$folder/.complete" ]; then
        [ ! -e "$folder" ] || fail "$folder is not whole: see that nothing is mounted in it, and remove it"
        retry debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
            "$release" "$folder" ${DEBIAN_MIRROR:-} > "$work/debootstrap.log"
        umount -q "$folder/proc" "$folder/sys" || true
        rm -rf "$folder"/var/lib/apt/lists/* "$folder"/var/cache/apt/*.bin "$folder"/var/cache/apt/archives/*.deb
        touch "$folder/.complete"
    fi
    container=$(buildah from scratch)
    buildah add -q "$container" "$folder" / > /dev/null
    buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd /bin/bash "$container"
    # Debian's pip is told that this image is no Debian system to be kept whole.
    buildah run -v "$work/uv/wheels:/wheels:ro" "$container" -- pip install -q --break-system-packages \
        --root-user-action=ignore --no-cache-dir --no-index --find-links /wheels uv
    buildah commit -q --rm "$container" "$base" > /dev/null
}

build_bento() {
    # The kernels are compiled here, by this machine's compiler; they need glibc 2.14 of the image (docs/packaging.md).
    PYTHONPATH=$root/kernels "$bin/python" -m cb_kernels.cpu.build || echo "no native kernels: the image will be slower" >&2
    tag=$(CB_BASE_IMAGE=$base bentoml build -f "$bento" -o tag . | sed -n 's/^__tag__://p')
    [ -n "$tag" ]
}

containerize() {
    bentoml containerize "$tag" --backend buildah -t "$image" --opt isolation=chroot --opt pull-never --opt layers \
        --opt volume="$work/uv:/etc/uv:ro" > "$work/containerize.log" 2>&1 || { tail -20 "$work/containerize.log"; return 1; }
}

check() {
    local container mounted outcome=0
    container=$(buildah from --pull-never "$image")
    mounted=$(buildah mount "$container")
    ROOTFS=$mounted CHECK="$bin/python $root/integration/container/check_image.py" LOG=$work/serve.log \
        unshare --net --mount --propagation private bash -euc '
        ip link set lo up
        mount --bind "$ROOTFS" "$ROOTFS"
        mount -o remount,ro,bind "$ROOTFS"
        mount -t tmpfs -o mode=1777,size=256m tmpfs "$ROOTFS/tmp"
        mount --rbind /dev "$ROOTFS/dev"
        mount -t tmpfs -o ro,size=4k tmpfs "$ROOTFS/dev/shm" # no shared memory: none is used
        printf "127.0.0.1 localhost\n" > "$ROOTFS/tmp/hosts"
        mount --bind "$ROOTFS/tmp/hosts" "$ROOTFS/etc/hosts"
        exec $CHECK "$ROOTFS" --log "$LOG"' || outcome=$?
    buildah rm "$container" > /dev/null
    return $outcome
}

timed "Python packages" retry wheels
timed "base image ($release)" base_image
timed "bentoml build" build_bento
timed "bentoml containerize (buildah)" containerize
timed "checks" check

printf '\n| step | seconds |\n|---|---|\n'
printf '%s\n' "${rows[@]}"
printf '\n| image | size |\n|---|---|\n'
buildah images --format '| {{.Name}}:{{.Tag}} | {{.Size}} |' --filter "reference=localhost/cb-*"

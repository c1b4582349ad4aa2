#!/usr/bin/env bash
# The tests on arm64, emulated: `make test-arm` calls this. Steps, each into the folder FOLDER:
#
#   arm.sh root FOLDER       a Debian root for arm64, by debootstrap
#   arm.sh wheel FOLDER      llama-cpp-python, cross-compiled
#   arm.sh packages FOLDER   what the tests need, in a virtual environment inside of the root
#   arm.sh test FOLDER       the tests, once for each size of pages
#
# Mounts are made in a namespace of their own and are gone with the step. Nothing is named here
# that the host's own apt and pip know: the mirror, certificates, indexes.
set -euo pipefail
cd "$(dirname "$0")/../.."

# A phone's or a board's processor: dot products and fp16, no SVE.
CPU=${ARM_CPU:-cortex-a76}
LLAMA_ARCH=armv8.2-a+dotprod
# The last release whose wheel for arm64 on the package index is one for CPUs alone: later ones want
# several GB of CUDA libraries.
TORCH=${ARM_TORCH:-2.10.0}
PAGES=${ARM_PAGES:-4096 16384}
TESTS=(
    tests/offload tests/specdec/verification tests/specdec/sampling
    tests/backends/contract tests/backends/hf/test_self_test.py
    tests/backends/gguf/test_exactness.py tests/backends/llama/test_exact.py
)
# What depends on the size of pages: repeated for all but the first size.
PAGE_TESTS=(
    tests/offload/storage tests/offload/paging tests/offload/ring tests/offload/experts
    tests/backends/llama/test_exact.py
)
if [ -n "${ARM_TESTS:-}" ]; then  # others, with every size of pages
    read -r -a TESTS <<<"$ARM_TESTS"
    PAGE_TESTS=("${TESTS[@]}")
fi

fail() { echo "arm.sh: error: $*" >&2; exit 2; }

check_host() {
    local tool missing=()
    for tool in qemu-aarch64-static debootstrap aarch64-linux-gnu-g++ unshare; do
        command -v "$tool" >/dev/null || missing+=("$tool")
    done
    [ ${#missing[@]} = 0 ] || fail "${missing[*]} missing: apt-get install" \
        "qemu-user-static binfmt-support debootstrap crossbuild-essential-arm64"
    [ "$(id -u)" = 0 ] || fail "a root file system is made and entered by root"
    local binfmt=/proc/sys/fs/binfmt_misc
    [ -e $binfmt/status ] || mount -t binfmt_misc binfmt_misc $binfmt
    [ -e $binfmt/qemu-aarch64 ] || update-binfmts --enable qemu-aarch64
    # Flag F: the kernel keeps the emulator open, so that it need not lie in the root.
    grep -q '^flags:.*F' $binfmt/qemu-aarch64 || fail "binfmt of qemu-aarch64 lacks the flag F"
}

# in_root COMMAND ...: inside of the root, with this checkout at /specdec.
in_root() {
    # shellcheck disable=SC2016
    unshare --mount --propagation private bash -c '
        set -e
        mount -t proc proc "$0/proc"
        mount --rbind /dev "$0/dev"
        mount --rbind /sys "$0/sys"
        mkdir -p "$0/specdec" && mount --bind . "$0/specdec"
        exec chroot "$0" env --chdir=/specdec "$@"
    ' "$folder/root" -i PATH=/venv/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 \
        QEMU_CPU="$CPU" "${passed[@]}" "$@"
}

pinned() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" constraints.txt; }

make_root() {
    local suite=${ARM_SUITE:-$(. /etc/os-release && echo "$VERSION_CODENAME")} mirror
    mirror=${ARM_MIRROR:-$(apt-get indextargets --format '$(SITE)' 'Created-By: Packages' \
        "Codename: $suite" | head -n 1)}
    [ -n "$mirror" ] || fail "apt knows no source of $suite: set ARM_SUITE and ARM_MIRROR"
    rm -rf "$folder/root"
    unshare --mount --propagation private debootstrap --arch=arm64 --variant=minbase \
        --include=python3,python3-venv,procps,libgomp1 "$suite" "$folder/root" "$mirror"
    rm -rf "$folder"/root/var/cache/apt/archives/*.deb
}

make_wheel() {
    CMAKE_ARGS="-DCMAKE_TOOLCHAIN_FILE=$PWD/tests/arm/toolchain.cmake -DGGML_NATIVE=OFF
        -DGGML_CPU_ARM_ARCH=$LLAMA_ARCH -DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_CURL=OFF" \
        _PYTHON_HOST_PLATFORM=linux-aarch64 "${PYTHON:-python3}" -m pip wheel --quiet --no-deps \
        --no-binary llama-cpp-python --wheel-dir "$folder/wheels" \
        "llama-cpp-python==$(pinned llama-cpp-python)"
}

install_packages() {
    local root=$folder/root name
    # The host's way to the package index.
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    mkdir -p "$root/etc/ssl/certs"
    cp -L "${PIP_CERT:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/host.crt"
    passed+=(PIP_CERT=/etc/ssl/certs/host.crt PIP_DISABLE_PIP_VERSION_CHECK=1)
    for name in PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_DEFAULT_TIMEOUT http_proxy https_proxy; do
        [ -z "${!name:-}" ] || passed+=("$name=${!name}")
    done
    { grep -v '^torch==' constraints.txt; echo "torch==$TORCH"; } >"$folder/constraints.txt"
    "${PYTHON:-python3}" - >"$folder/requirements.txt" <<'END'
import pathlib, re

text = pathlib.Path("pyproject.toml").read_text()  # tomllib is in no Python 3.10
wanted = re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S).group(1)
print(*re.findall(r'^    "([^"]*)"', wanted, re.M), sep="\n")
END
    printf '%s\n' gguf llama-cpp-python llguidance numba scipy hypothesis \
        pytest pytest-timeout pytest-xdist >>"$folder/requirements.txt"
    in_root python3 -m venv /venv
    in_root python -m pip install --quiet --no-compile --no-cache-dir --only-binary=:all: \
        --find-links "$folder/wheels" -c "$folder/constraints.txt" -r "$folder/requirements.txt"
}

# run_tests PAGE_BYTES TEST ...: prints one line of figures; fails where a test does.
run_tests() {
    local page=$1 code=0 report=$folder/results-$1.xml
    shift
    passed+=("QEMU_PAGESIZE=$page")
    [ "$(in_root python -c 'import mmap; print(mmap.PAGESIZE)')" = "$page" ] ||
        { echo "pages of $page bytes: this emulator has none"; return 0; }
    in_root python -m pytest -q -n "$(nproc)" --maxprocesses 4 --dist worksteal --timeout 1800 \
        -p no:cacheprovider --junitxml "$report" "$@" || code=$?
    [ "$code" -le 1 ] || return "$code"
    "${PYTHON:-python3}" - "$report" "$page" <<'END' | tee -a "$folder/figures.txt"
import sys
import xml.etree.ElementTree as xml

counts = xml.parse(sys.argv[1]).getroot().find("testsuite").attrib
n, failed, errors, skipped = (int(counts[k]) for k in ("tests", "failures", "errors", "skipped"))
print(
    f"pages of {sys.argv[2]} bytes: {n - failed - errors - skipped} passed, {failed + errors} failed, "
    f"{skipped} skipped, {float(counts['time']) / 60:.1f} minutes"
)
END
    return "$code"
}

test_all() {
    local page code=0 first=1 own=("${passed[@]}")
    : >"$folder/figures.txt"
    for page in $PAGES; do
        passed=("${own[@]}")
        if [ $first = 1 ]; then run_tests "$page" "${TESTS[@]}" || code=$?
        else run_tests "$page" "${PAGE_TESTS[@]}" || code=$?; fi
        first=0
    done
    cat "$folder/figures.txt"
    return $code
}

[ $# = 2 ] || fail "usage: arm.sh root|wheel|packages|test FOLDER"
folder=$2
passed=()
mkdir -p "$folder"
check_host
case $1 in
root) make_root ;;
wheel) make_wheel ;;
packages) install_packages ;;
test) test_all ;;
*) fail "no step $1" ;;
esac

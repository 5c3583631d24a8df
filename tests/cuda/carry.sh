#!/usr/bin/env bash
# Makes what on_gpu.sh needs on a machine without a network, below build and dist, and prints which
# paths to carry there beside the tree, and how large all of it is: docs/develop/gpu.md.
#
# PYTHON=EXE      a Python with pip (python3)
# VERSION=3.12    the Python of that machine
# KEEP_WHEEL=1    keeps the wheel that dist/wheels has of the same C++, as it takes minutes to make
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
VERSION="${VERSION:-3.12}"
PYTHON="${PYTHON:-python3}"
WHEELS=build/on_gpu/wheels
LIMIT_MIB=64

tree="$(mktemp -d)"
trap 'rm -rf "$tree"' EXIT
git archive HEAD setup.py csrc | tar -x -C "$tree"
made_of="$("$PYTHON" tests/cuda/gpu_install.py --digest "$tree")"
if [ -z "${KEEP_WHEEL:-}" ] || ! compgen -G "dist/wheels/torch_dcpx-*-cp${VERSION/./}-*.whl" >/dev/null \
  || [ "$made_of" != "$(cat dist/wheels/csrc.sha256 2>/dev/null)" ]; then
  echo "== the wheel of the commit, for Python $VERSION"
  rm -f dist/wheels/csrc.sha256
  make wheels WHEEL_ARGS="--pythons $VERSION --machines x86_64"
  echo "$made_of" >dist/wheels/csrc.sha256 # of another tree the wheel is refused there
fi

echo "== wheels of the packages that such a machine may lack"
rm -rf "$WHEELS"
mkdir -p "$WHEELS"
for package in $("$PYTHON" tests/cuda/gpu_carried.py); do
  # The release that the tests are pinned to, where they are.
  pin="$(sed -nE "s/^($package==[^; ]+)(;.*\"3\.11\")?\$/\1/p" requirements/test.txt | head -1)"
  "$PYTHON" -m pip download -q --no-deps --only-binary=:all: --python-version "$VERSION" \
    --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
    -d "$WHEELS" "${pin:-$package}" 2>&1 | grep -v '^WARNING: Location' >&2 || true
  compgen -G "$WHEELS/${package//-/_}-*.whl" >/dev/null \
    || echo "   no wheel of $package: what needs it is left out there"
done

paths=(dist/wheels "$WHEELS")
tree_bytes="$(git ls-files -z -co --exclude-standard | du -c --apparent-size --block-size=1 --files0-from=- | tail -1 | cut -f1)"
carried="$(du -sc --apparent-size --block-size=1 "${paths[@]}" | tail -1 | cut -f1)"
mib() { awk "BEGIN { printf \"%.1f\", $1 / 1048576 }"; }
echo "== carry these paths: ${paths[*]}"
echo "   $(mib "$carried") MiB, with the tree $(mib $((carried + tree_bytes))) MiB"
if [ $((carried + tree_bytes)) -gt $((LIMIT_MIB * 1048576)) ]; then
  echo "that is more than $LIMIT_MIB MiB" >&2
  exit 1
fi

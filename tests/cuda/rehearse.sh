#!/usr/bin/env bash
# Runs on_gpu.sh on the fake driver, without a GPU: every stage to its end, or it says why it cannot.
#
#   tests/cuda/rehearse.sh quick [arguments of on_gpu.sh]
#
# STRETCH=N   multiplies every limit (8): a rehearsal has two cores where the machine has sixteen
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export ON_GPU_REHEARSAL=1
export DCPX_CUDA_DRIVER="$PWD/build/fake_cuda/libfakecuda.so"
export COMPUTE_SANITIZER="${COMPUTE_SANITIZER:-$PWD/tests/cuda/stand_in_sanitizer.py}"
exec tests/cuda/on_gpu.sh "$@" --stretch "${STRETCH:-8}"

#!/usr/bin/env bash
# Tries the tree on a machine with an NVIDIA GPU, in minutes that are rare: docs/develop/gpu.md.
#
#   tests/cuda/on_gpu.sh [quick|full] [--only STAGE ...]     in the root of the tree
#
# OUT=DIR     where logs, results.jsonl, figures and summary.txt go (build/on_gpu/out)
# PYTHON=EXE  the Python that has torch (python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-python3}" tests/cuda/on_gpu.py "$@"

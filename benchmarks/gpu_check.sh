#!/usr/bin/env bash
# Everything that a GPU can show of the kernels, in 8 minutes: correctness, bandwidth, Tflop/s, whole steps, recorded steps.
# Needs a python with torch, triton and numpy (PYTHON=...), no network, and installs nothing.
#   benchmarks/gpu_check.sh [--out FOLDER]      on a GPU
#   benchmarks/gpu_check.sh --tiny              the same script without one: tiny sizes in Triton's interpreter, no figures
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD:$PWD/tests" TRITON_DEFAULT_FP_FUSION=1
for flag in "$@"; do
  if [ "$flag" = --tiny ]; then export TRITON_INTERPRET=1; fi
done
exec timeout 480 "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"

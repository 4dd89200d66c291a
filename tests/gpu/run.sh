#!/usr/bin/env bash
# Runs tests/gpu on a machine that has an NVIDIA driver for CUDA 13 and Python 3.11 to 3.13, in under 8 minutes.
#
#   tests/gpu/run.sh                        makes an environment below .cache, from the package index
#   INFERQ_WHEELS=DIR tests/gpu/run.sh      the same from a folder of wheels, without a network
#   INFERQ_PYTHON=PATH tests/gpu/run.sh     uses an interpreter that has everything already
#   TENSORRT=0 tests/gpu/run.sh             leaves TensorRT (2 GB) out
#
# The report with all figures is written to $OUT, or else to .cache/gpu.
set -euo pipefail
cd "$(dirname "$0")/../.."
install_limit_s=240 test_limit_s=230
out="${OUT:-.cache/gpu}"
mkdir -p "$out"

if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=name,driver_version,compute_cap,memory.total --format=csv | tee "$out/gpu.csv"
fi

python="${INFERQ_PYTHON:-}"
if [ -z "$python" ]; then
    environment=.cache/gpu-environment
    python="$environment/bin/python"
    [ -x "$python" ] || "${PYTHON:-python3}" -m venv "$environment"
    extra=()
    [ -z "${INFERQ_WHEELS:-}" ] || extra=(--no-index --find-links "$INFERQ_WHEELS")
    packages=('.[dev,cuda]')
    [ "${TENSORRT:-1}" = 0 ] || packages+=('tensorrt-cu13>=10.13,<11')
    timeout "$install_limit_s" "$python" -m pip install --quiet "${extra[@]}" "${packages[@]}"
fi

export PYTHONPATH="$PWD/schemas:$PWD/producer:$PWD/worker:$PWD${PYTHONPATH:+:$PYTHONPATH}"
# A machine without a GPU would skip everything and look green.
"$python" -c 'import sys; from inferq_worker.runtime.hardware import driver_present
sys.exit(0 if driver_present() else "no GPU: the NVIDIA driver (libcuda.so.1) does not load")'
"$python" -c 'import onnxruntime; print("onnxruntime", onnxruntime.__version__)'
exec timeout "$test_limit_s" "$python" -m pytest tests/gpu -q --junitxml="$out/report.xml" -o junit_family=legacy

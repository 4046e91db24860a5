#!/usr/bin/env bash
# Build for the GPU of this machine, run the GPU tests, then the benchmark; results go to $1, $OUT or
# build/gpu.  One call does it all, offline, in the Python that has torch and the build tools.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-${OUT:-build/gpu}}"
mkdir -p "$out"

arch="${FP4LT_GPU_ARCH:-$(python3 - <<'PY'
import torch
major, minor = torch.cuda.get_device_capability()
print(f"{major}{minor}{'a' if major >= 9 else ''}-real")
PY
)}"
python3 -m pip install --quiet --no-build-isolation --no-deps \
  -Ccmake.define.FP4LT_CUDA=ON -Ccmake.define.CMAKE_CUDA_ARCHITECTURES="$arch" .
python3 -m pytest -m gpu -p no:cacheprovider --junitxml="$out/gpu-tests.xml" tests

# The torch loops are left out: on a GPU they take longer than all the others together.
contenders=fp4lt-fused,fp4lt-dequant,fp4lt-cublaslt,fp4lt-cublaslt_grouped,torch-grouped
contenders+=,flashinfer-cutlass,marlin,humming,triton-mxfp4
if [ -z "${FP4LT_PEERS:-}" ] && [ ! -d .peers ]; then
  echo "no .peers here: marlin, humming and triton-mxfp4 will be absent (make peers fetches them)"
fi
python3 -m benchmarks.moe_decode --preset deepseek-v3 --preset glm5-tp8 --preset qwen3-30b \
  --tokens 1,4,16,64,256,1024,4096 --contenders "$contenders" --json "$out/moe_decode.json"

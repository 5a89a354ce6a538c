#!/usr/bin/env bash
# Compiles the kernel that hashes weights on a device, after its source was edited.
#
#     NVCC=/usr/local/cuda-13.0/bin/nvcc bash scripts/build_leaf_hash.sh
#
# Its images are kept, so that neither an installation nor a load needs a compiler. Use one of CUDA 13.0: drivers do not
# take images of a newer one than themselves.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../graphpack/backends/cuda/kernels"
NVCC="${NVCC:-nvcc}"

for processor in 80 86 89 90 100 120; do
    "$NVCC" -cubin -O3 -std=c++17 "-arch=sm_$processor" -o "leaf_hash.sm_$processor.cubin" leaf_hash.cu
done
{
    echo "# nvcc $("$NVCC" --version | sed -n 's/.*, V\([0-9.]*\)$/\1/p')"
    sha256sum leaf_hash.cu leaf_hash.sm_*.cubin
} >leaf_hash.sha256
cat leaf_hash.sha256

#!/usr/bin/env bash
# Compiles the kernels in graphpack/backends/cuda/kernels/ after a source was edited.
#
#     NVCC=/usr/local/cuda-13.0/bin/nvcc bash scripts/build_kernels.sh
#
# Their images are kept, so that neither an installation nor a load needs a compiler. Use one of CUDA 13.0: drivers do
# not take images of a newer one than themselves.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../graphpack/backends/cuda/kernels"
NVCC="${NVCC:-nvcc}"

for source in *.cu; do
    for processor in 80 86 89 90 100 120; do
        "$NVCC" -cubin -O3 -std=c++17 "-arch=sm_$processor" -o "${source%.cu}.sm_$processor.cubin" "$source"
    done
done
{
    echo "# nvcc $("$NVCC" --version | sed -n 's/.*, V\([0-9.]*\)$/\1/p')"
    sha256sum ./*.cu ./*.cubin | sed 's:\./::'
} >kernels.sha256
cat kernels.sha256

// What the compiler for devices knows of itself, so that g++ compiles the kernel's source: one thread after another.

#define __device__
#define __constant__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct uint4 {
    unsigned int x, y, z, w;
};

struct Place {
    unsigned int x;
};

static Place blockIdx, threadIdx, blockDim;

// Byte i of the result is the byte of (y, x) that hexadecimal digit i of the selector names.
static unsigned int __byte_perm(unsigned int x, unsigned int y, unsigned int selector) {
    const unsigned long long both = (unsigned long long)y << 32 | x;
    unsigned int result = 0;
    for (int byte = 0; byte < 4; ++byte) result |= (both >> 8 * (selector >> 4 * byte & 7) & 0xff) << 8 * byte;
    return result;
}

#include "leaf_hash.cu"

extern "C" void leaf_hash(const Leaf* leaves, Word* digests, Word count, Word blocks) {
    blockDim.x = 32;
    for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) graphpack_leaf_hash(leaves, digests, count);
}

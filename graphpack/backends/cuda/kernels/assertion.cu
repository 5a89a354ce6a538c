// Makes the driver prepare for kernels with assertions, see assertions.py; it never runs.
// `scripts/build_kernels.sh` compiles this.

#undef NDEBUG
#include <cassert>

extern "C" __global__ void graphpack_assertion(int value) {
    assert(value);
}

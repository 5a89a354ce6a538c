// Digests of leaves, as docs/format.md, section "Digests", has them: SHA-256 of a zero byte and the leaf's bytes.
// One thread hashes one leaf. `scripts/build_kernels.sh` compiles this.

typedef unsigned int Word;

struct Leaf {
    unsigned long long address;  // a multiple of 16
    Word length;                 // bytes, fewer than 2^29
    Word unused;
};

static __device__ __constant__ const Word CONSTANTS[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static __device__ __forceinline__ Word rotated(Word x, int bits) {
    return x >> bits | x << (32 - bits);
}

// Rounds of SHA-256 over one block, whose words are overwritten.
static __device__ __forceinline__ void add_block(Word state[8], Word w[16]) {
    Word a = state[0], b = state[1], c = state[2], d = state[3];
    Word e = state[4], f = state[5], g = state[6], h = state[7];
#pragma unroll
    for (int round = 0; round < 64; ++round) {
        const int at = round % 16;
        if (round >= 16) {
            const Word x = w[(round + 1) % 16], y = w[(round + 14) % 16];
            w[at] += w[(round + 9) % 16] + (rotated(x, 7) ^ rotated(x, 18) ^ x >> 3) +
                     (rotated(y, 17) ^ rotated(y, 19) ^ y >> 10);
        }
        const Word one = h + CONSTANTS[round] + w[at] + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +
                         ((e & f) ^ (~e & g));
        const Word two = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g, g = f, f = e, e = d + one;
        d = c, c = b, b = a, a = one + two;
    }
    state[0] += a, state[1] += b, state[2] += c, state[3] += d;
    state[4] += e, state[5] += f, state[6] += g, state[7] += h;
}

// 64 bytes of a leaf from `start` on, as they lie in memory; behind its end a byte 0x80 and zeros. Reads no word that
// has none of its bytes.
static __device__ __forceinline__ void read_block(Word raw[16], const unsigned char* leaf, Word length, Word start) {
    if (start + 64 <= length) {
        const uint4* from = reinterpret_cast<const uint4*>(leaf + start);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const uint4 four = from[part];
            raw[4 * part] = four.x, raw[4 * part + 1] = four.y;
            raw[4 * part + 2] = four.z, raw[4 * part + 3] = four.w;
        }
        return;
    }
#pragma unroll
    for (int word = 0; word < 16; ++word) {
        const Word first = start + 4 * word;
        raw[word] = first < length ? *reinterpret_cast<const Word*>(leaf + first) : 0;
        if (first <= length && length < first + 4) {
            const Word bits = 8 * (length - first);
            raw[word] = (raw[word] & ((1u << bits) - 1)) | 0x80u << bits;
        }
    }
}

// Digest i, of `leaves[i]`, goes to `digests[8 * i]`, as 8 words whose most significant byte is the digest's first.
extern "C" __global__ void __launch_bounds__(32)
    graphpack_leaf_hash(const Leaf* leaves, Word* digests, Word count) {
    const Word index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count) return;
    const unsigned char* leaf = reinterpret_cast<const unsigned char*>(leaves[index].address);
    const Word length = leaves[index].length;
    // The message: a zero byte, the leaf, a byte 0x80, zeros, and its own length in bits as 8 bytes.
    const Word blocks = (1 + length + 8) / 64 + 1;
    Word state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    Word raw[16], words[16];
    Word before = 0;
    read_block(raw, leaf, length, 0);
    for (Word block = 0; block < blocks; ++block) {
        // The zero byte shifts all others: a word begins with the last byte of the one before.
#pragma unroll
        for (int word = 0; word < 16; ++word) words[word] = __byte_perm(word ? raw[word - 1] : before, raw[word], 0x3456);
        before = raw[15];
        if (block + 1 == blocks) words[15] = 8 * (1 + length);
        // The next block travels while this one is hashed.
        else read_block(raw, leaf, length, 64 * (block + 1));
        add_block(state, words);
    }
#pragma unroll
    for (int word = 0; word < 8; ++word) digests[8 * index + word] = state[word];
}

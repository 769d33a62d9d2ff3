// XXH3 (64 bits, no seed) of bytes as they are copied or read. Implements
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md for inputs of more than 240 bytes, in any number of
// calls with whole stripes of 64 bytes each. AVX2.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

enum { STRIPE = 64, STRIPES = 16, AHEAD = 512, DIMS = 4 };
enum how { READ, COPY, PAST_CACHE };

#define PRIME32_1 0x9E3779B1ULL
#define PRIME32_2 0x85EBCA77ULL
#define PRIME32_3 0xC2B2AE3DULL
#define PRIME64_1 0x9E3779B185EBCA87ULL
#define PRIME64_2 0xC2B2AE3D27D4EB4FULL
#define PRIME64_3 0x165667B19E3779F9ULL
#define PRIME64_4 0x85EBCA77C2B2AE63ULL
#define PRIME64_5 0x27D4EB2F165667C5ULL
#define PRIME_MX1 0x165667919E3779F9ULL

static const uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};
enum { SCRAMBLE_KEY = sizeof SECRET - STRIPE, LAST_KEY = SCRAMBLE_KEY - 7, MERGE_KEY = 11 };

typedef struct {
    uint64_t lanes[8];
    uint64_t total;   // total bytes
    uint64_t left;    // remaining bytes
    uint64_t stripe;  // in the current block of 16
} Digest;

static inline __m256i load(const void *from) { return _mm256_loadu_si256((const __m256i *)from); }

static inline __m256i mixed(__m256i lanes, __m256i data, const uint8_t *key)
{
    __m256i keyed = _mm256_xor_si256(data, load(key));
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(lanes, _mm256_add_epi64(product, swapped));
}

static inline __m256i scrambled(__m256i lanes, const uint8_t *key)
{
    __m256i prime = _mm256_set1_epi32((int)PRIME32_1);
    lanes = _mm256_xor_si256(lanes, _mm256_srli_epi64(lanes, 47));
    lanes = _mm256_xor_si256(lanes, load(key));
    __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(lanes, 32), prime);
    return _mm256_add_epi64(_mm256_mul_epu32(lanes, prime), _mm256_slli_epi64(high, 32));
}

static inline __attribute__((always_inline)) void
stripe(__m256i *low, __m256i *high, const uint8_t *source, uint8_t *target, const uint8_t *key, enum how how)
{
    _mm_prefetch((const char *)source + AHEAD, _MM_HINT_T0);
    __m256i first = load(source), second = load(source + 32);
    if (how == COPY) {
        _mm256_storeu_si256((__m256i *)target, first);
        _mm256_storeu_si256((__m256i *)(target + 32), second);
    } else if (how == PAST_CACHE) {
        _mm256_stream_si256((__m256i *)target, first);
        _mm256_stream_si256((__m256i *)(target + 32), second);
    }
    *low = mixed(*low, first, key);
    *high = mixed(*high, second, key + 32);
}

// Processes one row of whole stripes.
static inline __attribute__((always_inline)) void
row(Digest *digest, const uint8_t *source, uint8_t *target, uint64_t size, enum how how)
{
    __m256i low = load(digest->lanes), high = load(digest->lanes + 4);
    uint64_t number = digest->stripe;
    uint64_t is_end = size == digest->left;  // the final stripe has its own key
    for (const uint8_t *end = source + size - (is_end ? STRIPE : 0); source < end;) {
        if (number == 0 && end - source >= STRIPES * STRIPE) {
            #pragma GCC unroll 16
            for (; number < STRIPES; number++)
                stripe(&low, &high, source + STRIPE * number, target + STRIPE * number, SECRET + 8 * number, how);
            source += STRIPES * STRIPE;
            target += STRIPES * STRIPE;
        } else {
            stripe(&low, &high, source, target, SECRET + 8 * number++, how);
            source += STRIPE;
            target += STRIPE;
        }
        if (number == STRIPES) {
            low = scrambled(low, SECRET + SCRAMBLE_KEY);
            high = scrambled(high, SECRET + SCRAMBLE_KEY + 32);
            number = 0;
        }
    }
    if (is_end) stripe(&low, &high, source, target, SECRET + LAST_KEY, how);
    digest->stripe = number;
    digest->left -= size;
    _mm256_storeu_si256((__m256i *)digest->lanes, low);
    _mm256_storeu_si256((__m256i *)(digest->lanes + 4), high);
}

void tandem_digest_begin(Digest *digest, uint64_t total)
{
    static const uint64_t LANES[8] = {
        PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1,
    };
    memcpy(digest->lanes, LANES, sizeof LANES);
    digest->total = digest->left = total;
    digest->stripe = 0;
}

// Processes an array of `counts` rows of `size` bytes, `source_steps` and `target_steps` apart. Without a target it is
// only read. The caller has checked that `size` is a multiple of a stripe and at most the remaining bytes.
void tandem_digest_move(Digest *digest, const uint8_t *source, uint8_t *target, uint64_t size, const int64_t *counts,
                        const int64_t *source_steps, const int64_t *target_steps, int past_cache)
{
    for (int64_t i = 0; i < counts[0]; i++)
        for (int64_t j = 0; j < counts[1]; j++)
            for (int64_t k = 0; k < counts[2]; k++)
                for (int64_t l = 0; l < counts[3]; l++) {
                    const int64_t at[DIMS] = {i, j, k, l};
                    const uint8_t *from = source;
                    uint8_t *to = target;
                    for (int dim = 0; dim < DIMS; dim++) {
                        from += at[dim] * source_steps[dim];
                        if (target) to += at[dim] * target_steps[dim];
                    }
                    if (!target) row(digest, from, to, size, READ);
                    else if (past_cache && ((uintptr_t)to & 31) == 0) row(digest, from, to, size, PAST_CACHE);
                    else row(digest, from, to, size, COPY);
                }
    if (past_cache) _mm_sfence();
}

static uint64_t folded(uint64_t a, uint64_t b)
{
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

uint64_t tandem_digest_end(const Digest *digest)
{
    uint64_t sum = digest->total * PRIME64_1, keys[8];
    memcpy(keys, SECRET + MERGE_KEY, sizeof keys);
    for (int lane = 0; lane < 8; lane += 2)
        sum += folded(digest->lanes[lane] ^ keys[lane], digest->lanes[lane + 1] ^ keys[lane + 1]);
    sum = (sum ^ sum >> 37) * PRIME_MX1;
    return sum ^ sum >> 32;
}

// Look-ups in the prefix index. router/prefix_index/block_table.py defines slots, and implements the same in numpy.

#include <stdint.h>
#include <string.h>

enum { SLOTS = 8, SET_BITS = 24, AHEAD = 16 };
#define MAX_SET ((1ULL << SET_BITS) - 1)
#define USED (1ULL << 63)

typedef struct {
    const uint64_t *slots;
    uint64_t buckets;
    uint64_t multiplier;
} Table;

// A hash has 16 bytes; the first half is the key.
static inline uint64_t hashed_key(Table table, const char *hashes, int64_t at)
{
    uint64_t key;
    memcpy(&key, hashes + 16 * at, sizeof key);
    return key * table.multiplier;
}

static inline const uint64_t *bucket(Table table, uint64_t hashed)
{
    return table.slots + ((hashed >> 32) * table.buckets >> 32) * SLOTS;
}

// Finds where the number of the owner set changes along the hashes, and its new value. Both arrays have room for
// `count` entries; returns the number of entries.
int64_t tandem_prefix_runs(const uint64_t *slots, uint64_t buckets, uint64_t multiplier, const char *hashes,
                           int64_t count, int64_t *where, int64_t *numbers)
{
    Table table = {slots, buckets, multiplier};
    int64_t runs = 0;
    for (int64_t at = 0; at < count && at < AHEAD; at++)
        __builtin_prefetch(bucket(table, hashed_key(table, hashes, at)));
    for (int64_t at = 0; at < count; at++) {
        if (at + AHEAD < count)
            __builtin_prefetch(bucket(table, hashed_key(table, hashes, at + AHEAD)));
        uint64_t hashed = hashed_key(table, hashes, at), tag = hashed << SET_BITS | USED, number = 0;
        const uint64_t *slot = bucket(table, hashed);
        for (int each = 0; each < SLOTS; each++)
            number = (slot[each] ^ tag) <= MAX_SET ? slot[each] ^ tag : number;
        if (!runs || (int64_t)number != numbers[runs - 1]) {
            where[runs] = at;
            numbers[runs++] = (int64_t)number;
        }
    }
    return runs;
}

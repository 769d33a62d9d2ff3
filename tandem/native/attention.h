/* Stores keys and values in the blocks of a KV pool, and attends to them in place. */

#pragma once

#include "matrices.h"

/* Formats of a cell, one token in one head: fp32 [dim]; int8 [dim] followed by its fp32 scale; or e4m3 [dim], fp8 with
   four exponent bits (bias 7), three fraction bits, no infinity, and NaN as all ones. */
enum { F32, INT8, E4M3 };

INLINE size cell_bytes(size dim, int kind) { return kind == F32 ? 4 * dim : kind == INT8 ? dim + 4 : dim; }

/* Eight values as e4m3, one per lane: round to nearest even, clipped to ±448. NaN and infinity become NaN. */
INLINE __m256i to_e4m3(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), low = _mm256_set1_epi32(0x7F), base = _mm256_set1_epi32(0x46800000);
  __m256i most = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)); /* magnitudes order like their bits */
  const __m256i nan = _mm256_cmpgt_epi32(most, _mm256_set1_epi32(0x7F7FFFFF));
  most = _mm256_min_epi32(most, _mm256_set1_epi32(0x43E00000)); /* 448 */
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(most, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(most, _mm256_add_epi32(_mm256_set1_epi32(0x7FFFF), odd));
  const __m256i usual = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32((127 - 7) << 3));
  /* Below 2^-6 values are 2^-9 apart, as fp32 values are from 2^14 (`base`) on, so an addition rounds them. */
  const __m256 moved = _mm256_add_ps(_mm256_castsi256_ps(most), _mm256_castsi256_ps(base));
  const __m256i tiny = _mm256_sub_epi32(_mm256_castps_si256(moved), base);
  const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), most); /* 2^-6 */
  const __m256i code = _mm256_or_si256(_mm256_blendv_epi8(usual, tiny, is_tiny), _mm256_and_si256(nan, low));
  return _mm256_or_si256(code, _mm256_andnot_si256(low, _mm256_srli_epi32(bits, 24))); /* and the sign */
}

/* Converts through fp16, which can represent all of e4m3, with exponents smaller by 8. */
INLINE __m256 from_e4m3(__m128i eight_bytes) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(eight_bytes), 7), ones = _mm_set1_epi16(0x3F80);
  const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(_mm_and_si128(wide, ones), ones), _mm_set1_epi16(0x7C00));
  const __m128i half = _mm_or_si128(_mm_andnot_si128(_mm_set1_epi16(0x4000), wide), nan); /* clears the duplicate sign */
  return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}

static void store_cell(uint8_t *cell, const float *x, size dim, int kind) {
  if (kind == F32) {
    memcpy(cell, x, 4 * dim);
    return;
  }
  if (kind == E4M3) {
    for (size i = 0; i < dim; i += 8) {
      const __m256i codes = to_e4m3(_mm256_loadu_ps(x + i));
      const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
      _mm_storel_epi64((__m128i *)(cell + i), _mm_packus_epi16(words, words));
    }
    return;
  }
  float largest = 0;
  int is_finite = 1;
  for (size i = 0; i < dim; i++) {
    largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
    is_finite &= fabsf(x[i]) < INFINITY;
  }
  const float factor = largest > 0 ? 127.0f / largest : 0.0f, scale = is_finite ? largest / 127.0f : NAN;
  for (size i = 0; i < dim; i++) ((int8_t *)cell)[i] = is_finite ? (int8_t)lrintf(x[i] * factor) : 0;
  memcpy(cell + dim, &scale, 4); /* NaN: all of the cell is NaN to its readers */
}

typedef struct {
  uint8_t *layer;
  const float *k, *v;
  const int64_t *blocks, *offsets;
  size block_bytes, stride, kv_heads, block_tokens, dim;
  int kind;
  cut tokens;
} storing;

static void store_tokens(const void *job, int64_t part, int worker) {
  const storing *own = job;
  const size dim = own->dim, cell = cell_bytes(dim, own->kind);
  for (size t = part * own->tokens.each; t < end_of(own->tokens, part); t++)
    for (size h = 0; h < own->kv_heads; h++) {
      uint8_t *at = own->layer + own->blocks[t] * own->block_bytes + (h * own->block_tokens + own->offsets[t]) * cell;
      store_cell(at, own->k + t * own->stride + h * dim, dim, own->kind);
      store_cell(at + own->kv_heads * own->block_tokens * cell, own->v + t * own->stride + h * dim, dim, own->kind);
    }
}

/* Stores k, v [tokens, kv_heads, dim], tokens `stride` apart, in a layer's pool [block][2 · kv_heads][block_tokens] of
   cells at `layer`, blocks block_bytes apart. blocks, offsets [tokens] locate each token's cells. */
void tandem_store_kv(uint8_t *layer, size block_bytes, const float *k, const float *v, size stride, const int64_t *blocks,
                     const int64_t *offsets, size tokens, size kv_heads, size block_tokens, size dim, int kind,
                     int threads) {
  const storing job = {layer, k, v, blocks, offsets, block_bytes, stride, kv_heads, block_tokens, dim, kind,
                       cut_for(tokens, threads)};
  share(threads_for(tokens * kv_heads * dim, threads), parts_of(job.tokens), store_tokens, &job);
}

INLINE __m256 cell8(const uint8_t *cell, size i, int kind) {
  if (kind == F32) return _mm256_loadu_ps((const float *)cell + i);
  const __m128i bytes = _mm_loadl_epi64((const __m128i *)(cell + i));
  return kind == E4M3 ? from_e4m3(bytes) : _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
}

INLINE float cell_scale(const uint8_t *cell, size dim) {
  float scale;
  memcpy(&scale, cell + dim, 4);
  return scale;
}

enum { KEYS = 64 }; /* per tile; tiles start at multiples of KEYS, so they do not depend on the batch */

INLINE void transpose8(__m256 rows[8]) {
  __m256 pairs[8], fours[8];
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    pairs[2 * j] = _mm256_unpacklo_ps(rows[2 * j], rows[2 * j + 1]);
    pairs[2 * j + 1] = _mm256_unpackhi_ps(rows[2 * j], rows[2 * j + 1]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m256 a = pairs[j / 2 * 4 + j % 2], b = pairs[j / 2 * 4 + j % 2 + 2];
    fours[j / 2 * 4 + j % 2 * 2] = _mm256_shuffle_ps(a, b, 0x44);
    fours[j / 2 * 4 + j % 2 * 2 + 1] = _mm256_shuffle_ps(a, b, 0xEE);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    rows[j] = _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x20);
    rows[j + 4] = _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x31);
  }
}

/* A head's keys and values as panels for products: keys [KEYS / PANEL][dim][PANEL], values [dim / PANEL][KEYS][PANEL]. */
typedef struct {
  float *keys, *values;
} tile;

/* Loads eight consecutive keys into the tile from `at` on. */
INLINE void pack_keys(const uint8_t *cells, float *keys, size at, size dim, const int kind) {
  const size cell = cell_bytes(dim, kind);
  float *to = keys + at / PANEL * dim * PANEL + at % PANEL, scales[8];
  for (int j = 0; kind == INT8 && j < 8; j++) scales[j] = cell_scale(cells + j * cell, dim);
  for (size i = 0; i < dim; i += 8) {
    __m256 rows[8];
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) rows[j] = cell8(cells + j * cell, i, kind);
    transpose8(rows);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
      _mm256_storeu_ps(to + (i + j) * PANEL, kind == INT8 ? _mm256_mul_ps(rows[j], _mm256_loadu_ps(scales)) : rows[j]);
  }
}

/* Loads one value into the tile at index `at`. */
INLINE void pack_value(const uint8_t *cell, float *values, size at, size dim, const int kind) {
  const __m256 scale = _mm256_set1_ps(kind == INT8 ? cell_scale(cell, dim) : 1.0f);
  for (size i = 0; i < dim; i += 8) {
    const __m256 part = cell8(cell, i, kind), whole = kind == INT8 ? _mm256_mul_ps(part, scale) : part;
    _mm256_storeu_ps(values + (i / PANEL * KEYS + at) * PANEL + i % PANEL, whole);
  }
}

/* Loads keys and values [first, end) of the tile that starts at `base`. Others are set to zero, because unused memory
   may contain NaN. `keys` is this head's address in block 0; values are v_offset behind. */
INLINE void fill_tile(tile to, const uint8_t *keys, size block_bytes, size v_offset, const int64_t *table,
                      size block_tokens, size dim, size base, size first, size end, const int kind) {
  const size cell = cell_bytes(dim, kind);
  for (size j = first / 8 * 8; j < end; j += 8) {
    const uint8_t *cells = keys + table[j / block_tokens] * block_bytes + j % block_tokens * cell;
    pack_keys(cells, to.keys, j - base, dim, kind);
    for (size i = j; i < j + 8; i++) {
      if (i >= first && i < end)
        pack_value(cells + v_offset + (i - j) * cell, to.values, i - base, dim, kind);
      else
        for (size c = 0; c < dim; c += 8)
          _mm256_storeu_ps(to.values + (c / PANEL * KEYS + i - base) * PANEL + c % PANEL, _mm256_setzero_ps());
    }
  }
}

/* A query's state during the online softmax ( Milakov and Gimelshein 2018, arXiv:1805.02867). */
typedef struct {
  size first, last; /* visible keys */
  float top, sum;   /* largest score and sum of the weights so far */
  float worth;      /* factor of the sums before the current tile */
} query;

/* Caps and masks the scores of keys [start, count), multiples of 8, of the tile that starts at `base`, and finds the
   largest. */
INLINE void find_top(query *own, float *scores, size base, size start, size count, float softcap) {
  if (softcap > 0)
    for (size j = start; j < count; j += 8) {
      __m256 v = tanh8(_mm256_mul_ps(_mm256_loadu_ps(scores + j), _mm256_set1_ps(1.0f / softcap)));
      _mm256_storeu_ps(scores + j, _mm256_mul_ps(v, _mm256_set1_ps(softcap)));
    }
  for (size j = start; j < count && base + j < own->first; j++) scores[j] = -INFINITY;
  for (size j = count; j > start && base + j - 1 > own->last; j--) scores[j - 1] = -INFINITY;
  __m256 top = _mm256_set1_ps(own->top);
  for (size j = start; j < count; j += 8) top = _mm256_max_ps(_mm256_loadu_ps(scores + j), top);
  const float highest = max8(top);
  own->worth = highest > own->top ? _mm256_cvtss_f32(exp8(_mm256_set1_ps(own->top - highest))) : 1.0f;
  own->top = highest;
}

/* Scores → weights, in units of e^top. */
INLINE void soften(query *own, float *scores, size start, size count) {
  const __m256 none = _mm256_set1_ps(-INFINITY), top = _mm256_set1_ps(own->top);
  __m256 sum = _mm256_setzero_ps();
  for (size j = start; j < count; j += 8) {
    const __m256 v = _mm256_loadu_ps(scores + j);
    const __m256 e = _mm256_andnot_ps(_mm256_cmp_ps(v, none, _CMP_EQ_OQ), exp8(_mm256_sub_ps(v, top)));
    sum = _mm256_add_ps(sum, e);
    _mm256_storeu_ps(scores + j, e);
  }
  own->sum = own->sum * own->worth + sum8(sum);
}

/* Some queries over a tile's keys up to `count`; values before `start` are not loaded. q [rows, dim], scores
   [rows, KEYS], sums [rows, width]. */
INLINE void meet(const int rows, query *own, const float *q, tile with, float *scores, float *sums, size base,
                 size start, size count, size dim, size width, float softcap) {
  for (size j = start / PANEL * PANEL; j < count; j += PANEL) {
    __m256 parts[MOST_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) parts[r][0] = parts[r][1] = _mm256_setzero_ps();
    add_products(rows, parts, q, 1, dim, with.keys + j * dim, 0, dim, 0);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      _mm256_storeu_ps(scores + r * KEYS + j, parts[r][0]);
      _mm256_storeu_ps(scores + r * KEYS + j + 8, parts[r][1]);
    }
  }
  for (int r = 0; r < rows; r++) find_top(own + r, scores + r * KEYS, base, start, count, softcap);
  for (int r = 0; r < rows; r++) soften(own + r, scores + r * KEYS, start, count);
  for (size i = 0; i < width; i += PANEL) {
    __m256 parts[MOST_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m256 worth = _mm256_set1_ps(own[r].worth);
      parts[r][0] = _mm256_mul_ps(_mm256_loadu_ps(sums + r * width + i), worth);
      parts[r][1] = _mm256_mul_ps(_mm256_loadu_ps(sums + r * width + i + 8), worth);
    }
    add_products(rows, parts, scores, 1, KEYS, with.values + i * KEYS, start, count, 0);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      _mm256_storeu_ps(sums + r * width + i, parts[r][0]);
      _mm256_storeu_ps(sums + r * width + i + 8, parts[r][1]);
    }
  }
}

/* All `rows` queries of one item over keys [from, end) of a tile, except queries that see none of them. */
static void meet_all(query *own, size rows, const float *q, tile with, float *scores, float *sums, size base, size from,
                     size end, size dim, size width, float softcap) {
  const size groups = (rows + MOST_ROWS - 1) / MOST_ROWS, start = (from - base) / 8 * 8;
  for (size g = 0, r = 0; g < groups; g++) {
    const size next = tile_end(rows, groups, g);
    const size seen = own[next - 1].last + 1 < end ? own[next - 1].last + 1 : end; /* later queries see later keys */
    if (seen > from && own[r].first < end) {
      const size count = (seen - base + 7) / 8 * 8;
#define MEET(some)                                                                                               \
  case some:                                                                                                     \
    meet(some, own + r, q + r * dim, with, scores, sums + r * width, base, start, count, dim, width, softcap);   \
    break;
      switch (next - r) { MEET(1) MEET(2) MEET(3) MEET(4) MEET(5) MEET(6) }
#undef MEET
    }
    r = next;
  }
}

typedef struct {
  const uint8_t *layer;
  const float *q;
  const int64_t *tables, *table_of, *positions, *items;
  float *scratch, *out;
  size block_bytes, q_stride, width, item_count, heads, kv_heads, block_tokens, dim, window, room;
  float scale, softcap;
  int kind;
} attention;

/* Attention of one run of a request's tokens, for one KV head. */
static void attend_item(const void *job, int64_t item, int worker) {
  const attention *own = job;
  const size dim = own->dim, wide = (dim + PANEL - 1) / PANEL * PANEL, heads = own->heads, window = own->window;
  const size per_kv = heads / own->kv_heads, head_bytes = own->block_tokens * cell_bytes(dim, own->kind);
  const size h = item / own->item_count, begin = own->items[item % own->item_count];
  const size rows = (own->items[item % own->item_count + 1] - begin) * per_kv;
  const size low = own->positions[begin], high = low + rows / per_kv - 1;
  const size first = window && low + 1 > window ? low + 1 - window : 0;
  const int64_t *table = own->tables + own->table_of[begin] * own->width;
  const uint8_t *keys = own->layer + h * head_bytes;
  float *scratch = own->scratch + worker * own->room;
  const tile with = {scratch, scratch + KEYS * wide};
  float *scores = with.values + KEYS * wide, *sums = scores + MOST_ROWS * KEYS, *asked = sums + rows * wide;
  query *each = (query *)(asked + rows * dim);
  if (wide > dim) memset(with.values, 0, KEYS * wide * sizeof(float)); /* padding of a panel */
  memset(sums, 0, rows * wide * sizeof(float));
  for (size r = 0; r < rows; r++) {
    const size t = begin + r / per_kv, at = own->positions[t];
    const float *q = own->q + t * own->q_stride + (h * per_kv + r % per_kv) * dim;
    each[r] = (query){window && at + 1 > window ? at + 1 - window : 0, at, -INFINITY, 0.0f, 1.0f};
    for (size i = 0; i < dim; i++) asked[r * dim + i] = q[i] * own->scale;
  }
  for (size base = first / KEYS * KEYS; base <= high; base += KEYS) {
    const size from = first > base ? first : base, end = high + 1 < base + KEYS ? high + 1 : base + KEYS;
    const size v_bytes = own->kv_heads * head_bytes;
#define FILL(kind)                                                                                               \
  case kind:                                                                                                     \
    fill_tile(with, keys, own->block_bytes, v_bytes, table, own->block_tokens, dim, base, from, end, kind);      \
    break;
    switch (own->kind) { FILL(F32) FILL(INT8) FILL(E4M3) }
#undef FILL
    meet_all(each, rows, asked, with, scores, sums, base, from, end, dim, wide, own->softcap);
  }
  for (size r = 0; r < rows; r++) {
    float *to = own->out + ((begin + r / per_kv) * heads + h * per_kv + r % per_kv) * dim;
    const __m256 by = _mm256_set1_ps(1.0f / each[r].sum);
    for (size i = 0; i < dim; i += 8)
      _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_loadu_ps(sums + r * wide + i), by));
  }
}

/* out [tokens, heads, dim]: each token's queries attend to its request's keys up to its own position, read in place.

   q [tokens, heads, dim], tokens q_stride apart; tables [.., width] block numbers; table_of, positions [tokens]; items
   [item_count + 1]: start of each run of one request's tokens that is processed together, and the end; window 0: none;
   scratch [threads, room], sized by tandem/native/library.py. dim and block_tokens are multiples of 8. */
void tandem_attend(const uint8_t *layer, size block_bytes, const float *q, size q_stride, const int64_t *tables,
                   size width, const int64_t *table_of, const int64_t *positions, const int64_t *items,
                   size item_count, size heads, size kv_heads, size block_tokens, size dim, size window, float scale,
                   float softcap, int kind, float *scratch, size room, float *out, int threads) {
  const attention job = {layer, q, tables, table_of, positions, items, scratch, out, block_bytes, q_stride, width,
                         item_count, heads, kv_heads, block_tokens, dim, window, room, scale, softcap, kind};
  share(threads, item_count * kv_heads, attend_item, &job);
}

/* Matrix products: int8 and int4, packed fp32, and fp32 in torch's layout. */

#pragma once

#include "vectors.h"

/* Rows per tile: as equal as possible, at most MOST_ROWS. */
INLINE size tile_end(size rows, size tiles, size tile) { return rows * (tile + 1) / tiles; }

INLINE size rows_of_block(size row_bytes, size bytes) {
  const size rows = bytes / row_bytes / MOST_ROWS * MOST_ROWS;
  return rows < MOST_ROWS ? MOST_ROWS : rows;
}

/* w int8 [outputs, k] in rows → [outputs / PANEL][k / 2][PANEL][2], k even, outputs a multiple of PANEL. */
void tandem_pack_i8(const int8_t *w, int8_t *packed, size outputs, size k) {
  for (size o = 0; o < outputs; o++)
    for (size i = 0; i < k; i++) packed[(o / PANEL * (k / 2) + i / 2) * 2 * PANEL + o % PANEL * 2 + i % 2] = w[o * k + i];
}

/* A panel's weights for a group of inputs: least + scale * (0 to 15). A byte of `pairs` holds the weights of outputs
   number / 2 (low) and 8 + number / 2 (high) for input number % 2 of its pair. */
typedef struct {
  uint16_t scale[PANEL], least[PANEL]; /* fp16 */
  uint8_t pairs[GROUP / 2][PANEL];
} GroupI4;

/* w uint8 [outputs, k] of 0 to 15, scale and least fp16 [outputs, k / GROUP] → [outputs / PANEL][k / GROUP] of GroupI4;
   k a multiple of GROUP, outputs of PANEL. */
void tandem_pack_i4(const uint8_t *w, const uint16_t *scale, const uint16_t *least, GroupI4 *packed, size outputs,
                    size k) {
  const size groups = k / GROUP;
  for (size p = 0; p < outputs / PANEL; p++)
    for (size g = 0; g < groups; g++, packed++) {
      for (size o = 0; o < PANEL; o++) {
        packed->scale[o] = scale[(p * PANEL + o) * groups + g];
        packed->least[o] = least[(p * PANEL + o) * groups + g];
      }
      for (size i = 0; i < GROUP / 2; i++)
        for (size b = 0; b < PANEL; b++) {
          const uint8_t *low = w + (p * PANEL + b / 2) * k + g * GROUP + 2 * i + b % 2;
          packed->pairs[i][b] = (uint8_t)(low[0] | low[PANEL / 2 * k] << 4);
        }
    }
}

/* w [outputs, k] in rows → [outputs / PANEL][k][PANEL]. */
void tandem_pack_f32(const float *w, float *packed, size outputs, size k) {
  for (size o = 0; o < outputs; o++)
    for (size i = 0; i < k; i++) packed[(o / PANEL * k + i) * PANEL + o % PANEL] = w[o * k + i];
}

/* Quantises one row to int16 within ±most, padded to `wide`; returns its scale. */
static float quantise_row(const float *x, int16_t *q, size k, size wide, float most) {
  __m256 top = _mm256_setzero_ps(), odd = _mm256_setzero_ps();
  const __m256 sign = _mm256_set1_ps(-0.0f);
  size i = 0;
  for (; i + 8 <= k; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    top = _mm256_max_ps(_mm256_andnot_ps(sign, v), top);
    odd = _mm256_or_ps(odd, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  }
  float largest = _mm256_movemask_ps(odd) ? NAN : max8(top);
  for (; i < k; i++) largest = fabsf(x[i]) <= largest ? largest : fabsf(x[i]);
  const float factor = largest > 0 ? most / largest : 0.0f;
  const __m256 by = _mm256_set1_ps(factor);
  for (i = 0; i + 8 <= k; i += 8) {
    __m256i v = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + i), by));
    _mm_storeu_si128((__m128i *)(q + i), _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
  }
  for (; i < k; i++) q[i] = (int16_t)lrintf(x[i] * factor);
  memset(q + k, 0, (wide - k) * sizeof *q);
  return isfinite(largest) ? largest / most : NAN; /* propagates NaN and infinity */
}

static void sum_groups(const int16_t *q, float *sums, size groups) {
  for (size g = 0; g < groups; g++, q += GROUP) {
    int32_t sum = 0;
    for (size i = 0; i < GROUP; i++) sum += q[i];
    sums[g] = (float)sum; /* exact: below 2^24 */
  }
}

typedef struct {
  const float *x;
  const void *w;
  const float *w_scale, *bias;
  float *out;
  int16_t *scratch;
  float *x_scale, *x_sums, *tiles;
  size m, k, wide, n, block; /* block: rows multiplied by all panels before the next rows */
  float most;
  cut rows, panels;
} product;

static void quantise_rows(const void *job, int64_t part, int worker) {
  const product *own = job;
  const size wide = own->wide, groups = wide / GROUP;
  for (size r = part * own->rows.each; r < end_of(own->rows, part); r++) {
    own->x_scale[r] = quantise_row(own->x + r * own->k, own->scratch + r * wide, own->k, wide, own->most);
    if (own->x_sums) sum_groups(own->scratch + r * wide, own->x_sums + r * groups, groups);
  }
}

/* Both widths give the same bits for quantised matrices. */
#define LANES 8
#define TARGET
#define FLOATS __m256
#define INTS __m256i
#define ZERO _mm256_setzero_ps
#define ZERO_INTS _mm256_setzero_si256
#define LOAD _mm256_loadu_ps
#define STORE _mm256_storeu_ps
#define EACH _mm256_set1_ps
#define EACH_INT _mm256_set1_epi32
#define TO_FLOATS _mm256_cvtepi32_ps
#define FROM_HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define TIMES _mm256_mul_ps
#define MULTIPLY_ADD _mm256_fmadd_ps
#define SUM sum8
#define TO_INT16(p) _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p)))
/* In assembly, because gcc moves every sum between registers: 40 instead of 67 billion products per second. */
#define ADD_PAIRS(sum, x, w)                                       \
  do {                                                             \
    const __m256i products = _mm256_madd_epi16(x, w);              \
    __asm__("vpaddd %1, %0, %0" : "+x"(sum) : "x"(products));      \
  } while (0)
#define UNPACK(parts, p)                                                                    \
  do {                                                                                      \
    const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p)));       \
    parts[0] = _mm256_and_si256(both, _mm256_set1_epi16(15)), parts[1] = _mm256_srli_epi16(both, 4); \
  } while (0)
#define TILE_ROWS 6
#define ALL_TILES TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
#define DOT_ROWS 3
#define DOT_OUTPUTS 4
#define ALL_DOTS DOTS_OF(1) DOTS_OF(2) DOTS_OF(3)
#define DOTS_OF(count) DOTS(count, 1) DOTS(count, 2) DOTS(count, 3) DOTS(count, 4)
#include "tiles.h"

#define LANES 16
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vnni")))
#define FLOATS __m512
#define INTS __m512i
#define ZERO _mm512_setzero_ps
#define ZERO_INTS _mm512_setzero_si512
#define LOAD _mm512_loadu_ps
#define STORE _mm512_storeu_ps
#define EACH _mm512_set1_ps
#define EACH_INT _mm512_set1_epi32
#define TO_FLOATS _mm512_cvtepi32_ps
#define FROM_HALVES(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define TIMES _mm512_mul_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#define SUM _mm512_reduce_add_ps
#define TO_INT16(p) _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p)))
#define ADD_PAIRS(sum, x, w) sum = _mm512_dpwssd_epi32(sum, x, w)
#define UNPACK(parts, p)                                                                                        \
  do {                                                                                                          \
    const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(p)));                           \
    const __m256i low = _mm256_and_si256(both, _mm256_set1_epi16(15)), high = _mm256_srli_epi16(both, 4);       \
    parts[0] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);                                        \
  } while (0)
#define TILE_ROWS 12
#define ALL_TILES \
  TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#define DOT_ROWS 4
#define DOT_OUTPUTS 6
#define ALL_DOTS DOTS_OF(1) DOTS_OF(2) DOTS_OF(3) DOTS_OF(4)
#define DOTS_OF(count) DOTS(count, 1) DOTS(count, 2) DOTS(count, 3) DOTS(count, 4) DOTS(count, 5) DOTS(count, 6)
#include "tiles.h"

static int is_wide(int lanes) {
  return lanes >= 16 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vnni");
}

/* out [m, n] = x [m, k] times a packed int8 or int4 matrix, plus bias. Rows of x are quantised one by one to ±most, so
   that no sum can overflow. An int8 matrix has one w_scale per output; an int4 matrix (x_sums not null) has scales per
   group. `wide`: k padded to even or to whole groups. scratch int16 [m, wide], x_scale [m], x_sums [m, wide /
   GROUP] or null; w_scale and bias are padded to whole panels. Vectors have 16 numbers where the processor has AVX-512
   with VNNI and `lanes` allows it, otherwise 8. */
void tandem_linear_quantised(const float *x, size m, size k, size wide, const void *w, const float *w_scale,
                             const float *bias, float *out, size n, int16_t *scratch, float *x_scale, float *x_sums,
                             float most, int threads, int lanes) {
  const product job = {x, w, w_scale, bias, out, scratch, x_scale, x_sums, 0, m, k, wide, n,
                       rows_of_block(2 * wide, ROW_BYTES), most, cut_for(m, threads),
                       cut_for((n + PANEL - 1) / PANEL, threads)};
  /* One or two rows of int8 have too few sums to hide how long an addition takes. */
  const part_of_job chosen = is_wide(lanes) && (m > 2 || x_sums) ? multiply_quantised16 : multiply_quantised8;
  share(threads_for(m * k, threads), parts_of(job.rows), quantise_rows, &job);
  share(threads, parts_of((cut){m, job.block}) * parts_of(job.panels), chosen, &job);
}

/* sums += x · w over [from, to) of both: number i of row r of x is at i · step + r · x_stride; w a panel. Each sum has
   one order. `ahead`: weights to fetch meanwhile, panels further on; 0: none. */
INLINE void add_products(const int rows, __m256 sums[][2], const float *x, size step, size x_stride, const float *w,
                         size from, size to, const size ahead) {
  for (size i = from; i < to; i++) {
    if (ahead) _mm_prefetch((const char *)(w + (i + ahead) * PANEL), _MM_HINT_T0);
    const __m256 w0 = _mm256_loadu_ps(w + i * PANEL), w1 = _mm256_loadu_ps(w + i * PANEL + 8);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m256 value = _mm256_broadcast_ss(x + i * step + r * x_stride);
      sums[r][0] = _mm256_fmadd_ps(value, w0, sums[r][0]);
      sums[r][1] = _mm256_fmadd_ps(value, w1, sums[r][1]);
    }
  }
}

/* x [k][rows], from `interleave`. */
INLINE void tile_f32(const int rows, const float *x, const float *w, const float *bias, float *out, size k, size from,
                     size to, size stride, size columns, const size ahead) {
  __m256 sums[MOST_ROWS][2];
  float values[PANEL];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    if (from) { /* continues the previous stretch of k */
      memset(values, 0, sizeof values);
      memcpy(values, out + r * stride, columns * sizeof(float));
      sums[r][0] = _mm256_loadu_ps(values), sums[r][1] = _mm256_loadu_ps(values + 8);
    } else {
      sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    }
  }
  add_products(rows, sums, x, rows, 1, w, from, to, ahead);
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    for (int half = 0; half < 2; half++) {
      __m256 value = sums[r][half];
      if (bias && to == k) value = _mm256_add_ps(value, _mm256_loadu_ps(bias + 8 * half));
      _mm256_storeu_ps(values + 8 * half, value);
    }
    memcpy(out + r * stride, values, columns * sizeof(float));
  }
}

INLINE void interleave(const int rows, const float *x, float *tile, size k) {
  for (size i = 0; i < k; i++)
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) tile[i * rows + r] = x[r * k + i];
}

/* Rows of a tile next to each other, number by number: rows of 4 KB apart would displace each other from L1. */
static void interleave_rows(const void *job, int64_t part, int worker) {
  const product *own = job;
  const size k = own->k, first = part * own->block, left = own->m - first, rows = left < own->block ? left : own->block;
  const size tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (size t = 0, r = 0; t < tiles; t++) {
    const size end = tile_end(rows, tiles, t);
    const float *x = own->x + (first + r) * k;
    float *tile = own->tiles + (first + r) * k;
#define TILE(count) \
  case count: interleave(count, x, tile, k); break;
    switch (end - r) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
    r = end;
  }
}

static void multiply_f32(const void *job, int64_t part, int worker) {
  enum { STRETCH = 256 }; /* part of k for which a panel stays in L1 */
  const product *own = job;
  const size k = own->k, n = own->n, cuts = parts_of(own->panels);
  const size first = part / cuts * own->block, left = own->m - first, rows = left < own->block ? left : own->block;
  const size tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (size p = part % cuts * own->panels.each; p < end_of(own->panels, part % cuts); p++) {
    const size columns = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
    const float *w = (const float *)own->w + p * PANEL * k, *bias = own->bias ? own->bias + p * PANEL : 0;
    for (size from = 0; from < k; from += STRETCH) {
      const size to = from + STRETCH < k ? from + STRETCH : k;
      for (size t = 0, r = 0; t < tiles; t++) {
        const size end = tile_end(rows, tiles, t), at = first + r;
#define TILE(count)                                                                                              \
  case count:                                                                                                    \
    if (t)                                                                                                       \
      tile_f32(count, own->tiles + at * k, w, bias, own->out + at * n + p * PANEL, k, from, to, n, columns, 0);       \
    else                                                                                                         \
      tile_f32(count, own->tiles + at * k, w, bias, own->out + at * n + p * PANEL, k, from, to, n, columns, STRETCH); \
    break;
        switch (end - r) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
        r = end;
      }
    }
  }
}

/* The same in fp32: each output is one sum over k from the first to the last. tiles fp32 [m, k]; a single row is its own
   tile. */
void tandem_linear_f32(const float *x, size m, size k, const float *w, const float *bias, float *out, size n,
                       float *tiles, int threads) {
  const product job = {.x = x, .w = w, .bias = bias, .out = out, .tiles = m > 1 ? tiles : (float *)x, .m = m, .k = k, .n = n,
                       .block = rows_of_block(4 * k, TILE_BYTES), .panels = cut_for((n + PANEL - 1) / PANEL, threads)};
  const size blocks = parts_of((cut){m, job.block});
  if (m > 1) share(threads_for(m * k, threads), blocks, interleave_rows, &job);
  share(threads, blocks * parts_of(job.panels), multiply_f32, &job);
}

/* The same for an unpacked matrix w [n, k]. A weight is read once for as many rows as stay in L2, and for 48 at least:
   more rows from L3 cost less than more reads of w. */
void tandem_linear_dense(const float *x, size m, size k, const float *w, const float *bias, float *out, size n,
                         int threads, int lanes) {
  const int wide = is_wide(lanes), outputs = wide ? MOST_OUTPUTS_16 : MOST_OUTPUTS_8;
  const size stay = rows_of_block(4 * k, TILE_BYTES);
  const product job = {.x = x, .w = w, .bias = bias, .out = out, .m = m, .k = k, .n = n,
                       .block = stay < 48 ? 48 : stay, .panels = cut_for((n + outputs - 1) / outputs, threads)};
  share(threads_for(m * n * k, threads), parts_of(job.panels), wide ? multiply_dense16 : multiply_dense8, &job);
}

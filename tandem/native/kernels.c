/* CPU kernels of the engine, for x86-64 with AVX2 and FMA. Built and checked by tandem/native/, called through ctypes.

   Every output value is computed in one fixed order that depends neither on how many rows there are nor on which
   thread has them, so a row's result is the same alone and in any batch. Sizes are checked by the callers. */

#include <math.h>
#include <string.h>

#include "team.h"

#define PANEL 16          /* outputs that lie side by side in a packed matrix: two vectors */
#define MOST_ROWS 6       /* rows at a time: 12 sums stay in registers */
#define GROUP 32          /* inputs of an int4 matrix that share a scale and a least value */
#define ROW_BYTES 163840  /* of rows that are multiplied by all panels before the next ones: they stay in L2 */
#define INLINE static inline __attribute__((always_inline))

typedef int64_t size;

/* Of a loop over `count` things, shared by threads. Parts are small: a helper that loses its core within one keeps the
   caller waiting. What takes microseconds is not worth sharing. */
typedef struct { size count, each; } cut;
INLINE cut cut_for(size count, int threads) { return (cut){count, count / (8 * threads) + 1}; }
INLINE size parts_of(cut by) { return (by.count + by.each - 1) / by.each; }
INLINE size end_of(cut by, size part) { return by.count < (part + 1) * by.each ? by.count : (part + 1) * by.each; }
INLINE int threads_for(size numbers, int threads) { return numbers > 16384 ? threads : 1; }

/* --- small vector functions ------------------------------------------------------------------------------------ */

INLINE float sum8(__m256 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE float max8(__m256 v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* e^x to about one unit in the last place (Cephes); below -87 it is 0 or next to it. NaN stays NaN. */
INLINE __m256 exp8(__m256 x) {
  x = _mm256_min_ps(_mm256_set1_ps(88.3f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x)); /* of NaN and another the second */
  __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_add_ps(_mm256_fmadd_ps(p, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

INLINE __m256 tanh8(__m256 x) { /* 1 - 2 / (e^2x + 1) */
  const __m256 one = _mm256_set1_ps(1.0f);
  __m256 e = exp8(_mm256_add_ps(x, x));
  return _mm256_sub_ps(one, _mm256_div_ps(_mm256_set1_ps(2.0f), _mm256_add_ps(e, one)));
}

/* --- matrices -------------------------------------------------------------------------------------------------- */

/* Rows of a tile: as equal as can be, at most MOST_ROWS. */
INLINE size tile_end(size rows, size tiles, size tile) { return rows * (tile + 1) / tiles; }

INLINE size rows_of_block(size row_bytes) {
  const size rows = ROW_BYTES / row_bytes / MOST_ROWS * MOST_ROWS;
  return rows < MOST_ROWS ? MOST_ROWS : rows;
}

/* w int8 [outputs, k] in rows → [outputs / PANEL][k / 2][PANEL][2], k even, outputs a multiple of PANEL. */
void tandem_pack_i8(const int8_t *w, int8_t *packed, size outputs, size k) {
  for (size o = 0; o < outputs; o++)
    for (size i = 0; i < k; i++) packed[(o / PANEL * (k / 2) + i / 2) * 2 * PANEL + o % PANEL * 2 + i % 2] = w[o * k + i];
}

/* A panel's weights for a group of inputs, each worth least + scale * (0 to 15). A byte of `pairs` holds what output
   number / 2 (low) and 8 + number / 2 (high) do with input number % 2 of its pair. */
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

/* One row as int16 within ±most, padded to `wide`; returns what one unit is worth. */
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
  return isfinite(largest) ? largest / most : NAN; /* what is no number stays visible */
}

INLINE void tile_i8(const int rows, const int16_t *x, const float *x_scale, const int8_t *w, const float *w_scale,
                    const float *bias, float *out, size k, size stride, size columns) {
  __m256i sums[MOST_ROWS][2];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (size i = 0; i < k; i += 2, w += 2 * PANEL) {
    const __m256i w0 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)w));
    const __m256i w1 = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16)));
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      int32_t pair;
      memcpy(&pair, x + r * k + i, 4);
      const __m256i both = _mm256_set1_epi32(pair);
      const __m256i part0 = _mm256_madd_epi16(both, w0), part1 = _mm256_madd_epi16(both, w1);
      /* By hand, for gcc moves every sum to another register and back: 40 instead of 67 billion products a second. */
      __asm__("vpaddd %1, %0, %0" : "+x"(sums[r][0]) : "x"(part0));
      __asm__("vpaddd %1, %0, %0" : "+x"(sums[r][1]) : "x"(part1));
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    float values[PANEL];
    for (int half = 0; half < 2; half++) {
      __m256 scale = _mm256_mul_ps(_mm256_loadu_ps(w_scale + 8 * half), _mm256_set1_ps(x_scale[r]));
      __m256 value = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][half]), scale);
      if (bias) value = _mm256_add_ps(value, _mm256_loadu_ps(bias + 8 * half));
      _mm256_storeu_ps(values + 8 * half, value);
    }
    memcpy(out + r * stride, values, columns * sizeof(float));
  }
}

static void sum_groups(const int16_t *q, float *sums, size groups) {
  for (size g = 0; g < groups; g++, q += GROUP) {
    int32_t sum = 0;
    for (size i = 0; i < GROUP; i++) sum += q[i];
    sums[g] = (float)sum; /* exact: below 2^24 */
  }
}

/* x_sums [rows, groups]: of each group of x. */
INLINE void tile_i4(const int rows, const int16_t *x, const float *x_scale, const float *x_sums, const GroupI4 *w,
                    const float *bias, float *out, size k, size stride, size columns) {
  const size groups = k / GROUP;
  const __m256i low = _mm256_set1_epi16(15);
  __m256 sums[MOST_ROWS][2];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  for (size g = 0; g < groups; g++, w++) {
    __m256i parts[MOST_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) parts[r][0] = parts[r][1] = _mm256_setzero_si256();
    for (size i = 0; i < GROUP / 2; i++) {
      const __m256i both = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)w->pairs[i]));
      const __m256i w0 = _mm256_and_si256(both, low), w1 = _mm256_srli_epi16(both, 4);
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * k + g * GROUP + 2 * i, 4);
        const __m256i wide = _mm256_set1_epi32(pair);
        const __m256i part0 = _mm256_madd_epi16(wide, w0), part1 = _mm256_madd_epi16(wide, w1);
        __asm__("vpaddd %1, %0, %0" : "+x"(parts[r][0]) : "x"(part0)); /* as in tile_i8 */
        __asm__("vpaddd %1, %0, %0" : "+x"(parts[r][1]) : "x"(part1));
      }
    }
    for (int half = 0; half < 2; half++) {
      const __m256 scale = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w->scale + 8 * half)));
      const __m256 least = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(w->least + 8 * half)));
#pragma GCC unroll 6
      for (int r = 0; r < rows; r++) {
        sums[r][half] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(parts[r][half]), scale, sums[r][half]);
        sums[r][half] = _mm256_fmadd_ps(_mm256_broadcast_ss(x_sums + r * groups + g), least, sums[r][half]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    float values[PANEL];
    for (int half = 0; half < 2; half++) {
      __m256 value = _mm256_mul_ps(sums[r][half], _mm256_set1_ps(x_scale[r]));
      if (bias) value = _mm256_add_ps(value, _mm256_loadu_ps(bias + 8 * half));
      _mm256_storeu_ps(values + 8 * half, value);
    }
    memcpy(out + r * stride, values, columns * sizeof(float));
  }
}

typedef struct {
  const float *x;
  const void *w;
  const float *w_scale, *bias;
  float *out;
  int16_t *scratch;
  float *x_scale, *x_sums;
  size m, k, wide, n, block; /* block: rows that are multiplied by all panels before the next ones */
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

static void multiply_quantised(const void *job, int64_t part, int worker) {
  const product *own = job;
  const size wide = own->wide, n = own->n, groups = wide / GROUP, cuts = parts_of(own->panels);
  const size first = part / cuts * own->block, left = own->m - first, rows = left < own->block ? left : own->block;
  const size tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (size p = part % cuts * own->panels.each; p < end_of(own->panels, part % cuts); p++) {
    const size columns = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
    const float *bias = own->bias ? own->bias + p * PANEL : 0;
    for (size t = 0, r = 0; t < tiles; t++) {
      const size end = tile_end(rows, tiles, t), at = first + r;
      const int16_t *x = own->scratch + at * wide;
      float *out = own->out + at * n + p * PANEL;
#define TILE(count)                                                                                              \
  case count:                                                                                                    \
    if (own->x_sums)                                                                                             \
      tile_i4(count, x, own->x_scale + at, own->x_sums + at * groups, (const GroupI4 *)own->w + p * groups, bias, \
              out, wide, n, columns);                                                                            \
    else                                                                                                         \
      tile_i8(count, x, own->x_scale + at, (const int8_t *)own->w + p * PANEL * wide, own->w_scale + p * PANEL,    \
              bias, out, wide, n, columns);                                                                      \
    break;
      switch (end - r) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
      r = end;
    }
  }
}

/* out [m, n] = x [m, k] times a packed int8 or int4 matrix, plus bias. Rows of x are quantised one by one to ±most, so
   that no sum can overflow. Of an int8 matrix outputs are worth w_scale each; of an int4 matrix (x_sums not null) a group
   has its own. `wide`: k padded to even or to whole groups. scratch int16 [m, wide], x_scale [m], x_sums [m, wide /
   GROUP] or null; w_scale and bias are padded to whole panels. */
void tandem_linear_quantised(const float *x, size m, size k, size wide, const void *w, const float *w_scale,
                             const float *bias, float *out, size n, int16_t *scratch, float *x_scale, float *x_sums,
                             float most, int threads) {
  const product job = {x, w, w_scale, bias, out, scratch, x_scale, x_sums, m, k, wide, n, rows_of_block(2 * wide), most,
                       cut_for(m, threads), cut_for((n + PANEL - 1) / PANEL, threads)};
  share(threads_for(m * k, threads), parts_of(job.rows), quantise_rows, &job);
  share(threads, parts_of((cut){m, job.block}) * parts_of(job.panels), multiply_quantised, &job);
}

/* sums += x · w over [from, to) of both: x [rows], x_stride apart; w a panel. Each sum in one order. */
INLINE void add_products(const int rows, __m256 sums[][2], const float *x, size x_stride, const float *w, size from,
                         size to) {
  for (size i = from; i < to; i++) {
    const __m256 w0 = _mm256_loadu_ps(w + i * PANEL), w1 = _mm256_loadu_ps(w + i * PANEL + 8);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      const __m256 value = _mm256_broadcast_ss(x + r * x_stride + i);
      sums[r][0] = _mm256_fmadd_ps(value, w0, sums[r][0]);
      sums[r][1] = _mm256_fmadd_ps(value, w1, sums[r][1]);
    }
  }
}

INLINE void tile_f32(const int rows, const float *x, const float *w, const float *bias, float *out, size k, size from,
                     size to, size stride, size columns) {
  __m256 sums[MOST_ROWS][2];
  float values[PANEL];
#pragma GCC unroll 6
  for (int r = 0; r < rows; r++) {
    if (from) { /* goes on where the last stretch of k ended */
      memset(values, 0, sizeof values);
      memcpy(values, out + r * stride, columns * sizeof(float));
      sums[r][0] = _mm256_loadu_ps(values), sums[r][1] = _mm256_loadu_ps(values + 8);
    } else {
      sums[r][0] = sums[r][1] = _mm256_setzero_ps();
    }
  }
  add_products(rows, sums, x, k, w, from, to);
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

static void multiply_f32(const void *job, int64_t part, int worker) {
  enum { STRETCH = 256 }; /* of k: a panel of so many stays in L1 */
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
    tile_f32(count, own->x + at * k, w, bias, own->out + at * n + p * PANEL, k, from, to, n, columns);            \
    break;
        switch (end - r) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) }
#undef TILE
        r = end;
      }
    }
  }
}

/* The same in fp32: each output is one sum over k from the first to the last. */
void tandem_linear_f32(const float *x, size m, size k, const float *w, const float *bias, float *out, size n,
                       int threads) {
  const product job = {.x = x, .w = w, .bias = bias, .out = out, .m = m, .k = k, .n = n, .block = rows_of_block(4 * k),
                       .panels = cut_for((n + PANEL - 1) / PANEL, threads)};
  share(threads, parts_of((cut){m, job.block}) * parts_of(job.panels), multiply_f32, &job);
}

/* --- element-wise work ----------------------------------------------------------------------------------------- */

typedef struct {
  const float *x, *weight;
  float *out;
  size x_stride, width;
  float eps;
  int gelu;
  cut rows;
} row_work;

static void norm_rows(const void *job, int64_t part, int worker) {
  const row_work *own = job;
  const size width = own->width;
  for (size r = part * own->rows.each; r < end_of(own->rows, part); r++) {
    const float *in = own->x + r * own->x_stride;
    float *to = own->out + r * width;
    __m256 squares = _mm256_setzero_ps();
    size i = 0;
    for (; i + 8 <= width; i += 8) {
      const __m256 v = _mm256_loadu_ps(in + i);
      squares = _mm256_fmadd_ps(v, v, squares);
    }
    float sum = sum8(squares);
    for (; i < width; i++) sum += in[i] * in[i];
    const float scale = 1.0f / sqrtf(sum / (float)width + own->eps);
    const __m256 by = _mm256_set1_ps(scale);
    for (i = 0; i + 8 <= width; i += 8) {
      const __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(in + i), by);
      _mm256_storeu_ps(to + i, _mm256_mul_ps(scaled, _mm256_loadu_ps(own->weight + i)));
    }
    for (; i < width; i++) to[i] = in[i] * scale * own->weight[i];
  }
}

/* out [rows, width] = x / sqrt(mean(x²) + eps) · weight; rows of x lie x_stride apart. */
void tandem_rms_norm(const float *x, size x_stride, const float *weight, float *out, size rows, size width, float eps,
                     int threads) {
  const row_work job = {x, weight, out, x_stride, width, eps, 0, cut_for(rows, threads)};
  share(threads_for(rows * width, threads), parts_of(job.rows), norm_rows, &job);
}

INLINE __m256 activated(__m256 v, int gelu) {
  const __m256 one = _mm256_set1_ps(1.0f);
  if (!gelu) return _mm256_div_ps(v, _mm256_add_ps(one, exp8(_mm256_sub_ps(_mm256_setzero_ps(), v))));
  __m256 cube = _mm256_mul_ps(_mm256_mul_ps(v, v), v);
  __m256 inner = _mm256_mul_ps(_mm256_set1_ps(0.79788456f), _mm256_fmadd_ps(cube, _mm256_set1_ps(0.044715f), v));
  return _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps(0.5f), v), _mm256_add_ps(one, tanh8(inner)));
}

static void gate_rows(const void *job, int64_t part, int worker) {
  const row_work *own = job;
  const size width = own->width;
  for (size r = part * own->rows.each; r < end_of(own->rows, part); r++) {
    const float *gates = own->x + 2 * r * width;
    for (size i = 0; i < width; i += 8) {
      const __m256 gate = activated(_mm256_loadu_ps(gates + i), own->gelu);
      _mm256_storeu_ps(own->out + r * width + i, _mm256_mul_ps(gate, _mm256_loadu_ps(gates + width + i)));
    }
  }
}

/* out [rows, width] = act(x[:, :width]) · x[:, width:]; act is SiLU, or GELU by tanh. width is a multiple of 8. */
void tandem_gated(const float *x, float *out, size rows, size width, int gelu, int threads) {
  const row_work job = {.x = x, .out = out, .width = width, .gelu = gelu, .rows = cut_for(rows, threads)};
  share(threads_for(rows * width, threads), parts_of(job.rows), gate_rows, &job);
}

typedef struct {
  float *x;
  const float *cos, *sin;
  size x_stride, heads, head_dim, dims;
  cut rows;
} rotation;

static void rotate_rows(const void *job, int64_t part, int worker) {
  const rotation *own = job;
  const size dims = own->dims, half = dims / 2;
  for (size r = part * own->rows.each; r < end_of(own->rows, part); r++)
    for (size h = 0; h < own->heads; h++) {
      float *head = own->x + r * own->x_stride + h * own->head_dim;
      for (size i = 0; i < half; i += 8) {
        const __m256 a = _mm256_loadu_ps(head + i), b = _mm256_loadu_ps(head + half + i);
        const float *c = own->cos + r * dims + i, *s = own->sin + r * dims + i;
        _mm256_storeu_ps(head + i, _mm256_fmadd_ps(a, _mm256_loadu_ps(c), _mm256_mul_ps(b, _mm256_loadu_ps(s))));
        _mm256_storeu_ps(head + half + i, _mm256_fmadd_ps(b, _mm256_loadu_ps(c + half),
                                                          _mm256_mul_ps(a, _mm256_loadu_ps(s + half))));
      }
    }
}

/* Turns the first `dims` of each head in place. x [rows, heads, head_dim], rows x_stride apart; cos, signed sin
   [rows, dims] as in tandem/model/rope.py. dims is a multiple of 16. */
void tandem_rotate(float *x, size x_stride, const float *cos, const float *sin, size rows, size heads, size head_dim,
                   size dims, int threads) {
  const rotation job = {x, cos, sin, x_stride, heads, head_dim, dims, cut_for(rows, threads)};
  share(threads_for(rows * heads * head_dim, threads), parts_of(job.rows), rotate_rows, &job);
}

typedef struct {
  const float *x;
  int64_t *best;
  size width;
} search;

static void search_row(const void *job, int64_t row, int worker) {
  const search *own = job;
  const float *x = own->x + row * own->width;
  __m256 largest = _mm256_set1_ps(-INFINITY), no_number = _mm256_setzero_ps();
  size i = 0;
  for (; i + 8 <= own->width; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    no_number = _mm256_or_ps(no_number, _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    largest = _mm256_max_ps(largest, v);
  }
  float most = max8(largest);
  int finite = !_mm256_movemask_ps(no_number);
  for (; i < own->width; i++) most = x[i] > most ? x[i] : most, finite &= !isnan(x[i]);
  own->best[row] = -1;
  if (!finite || isinf(most)) return;
  for (i = 0; x[i] != most;) i++;
  own->best[row] = i;
}

/* best [rows]: where each row of x [rows, width] is largest, of equals the first; -1 where that is no finite number. */
void tandem_best(const float *x, int64_t *best, size rows, size width, int threads) {
  const search job = {x, best, width};
  share(threads_for(rows * width, threads), rows, search_row, &job);
}

/* --- paged attention ------------------------------------------------------------------------------------------- */

/* What a cell holds of one token in one head: fp32 [dim]; int8 [dim] and then what one unit is worth, in fp32; or e4m3
   [dim], which is fp8 with four bits of exponent (bias 7), three of fraction, no infinity, and NaN as all ones. */
enum { F32, INT8, E4M3 };

INLINE size cell_bytes(size dim, int kind) { return kind == F32 ? 4 * dim : kind == INT8 ? dim + 4 : dim; }

/* Eight values as e4m3, in a lane each: to the nearest, of two the even one; ±448 what is larger. NaN stays NaN. */
INLINE __m256i to_e4m3(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), low = _mm256_set1_epi32(0x7F), base = _mm256_set1_epi32(0x46800000);
  __m256i most = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF)); /* magnitudes are ordered as their bits */
  const __m256i nan = _mm256_cmpgt_epi32(most, _mm256_set1_epi32(0x7F800000));
  most = _mm256_min_epi32(most, _mm256_set1_epi32(0x43E00000)); /* 448 */
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(most, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(most, _mm256_add_epi32(_mm256_set1_epi32(0x7FFFF), odd));
  const __m256i usual = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32((127 - 7) << 3));
  /* Below 2^-6 all lie 2^-9 apart, as fp32 does from 2^14 (`base`) on: an addition rounds. */
  const __m256 moved = _mm256_add_ps(_mm256_castsi256_ps(most), _mm256_castsi256_ps(base));
  const __m256i tiny = _mm256_sub_epi32(_mm256_castps_si256(moved), base);
  const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), most); /* 2^-6 */
  const __m256i code = _mm256_or_si256(_mm256_blendv_epi8(usual, tiny, is_tiny), _mm256_and_si256(nan, low));
  return _mm256_or_si256(code, _mm256_andnot_si256(low, _mm256_srli_epi32(bits, 24))); /* and the sign */
}

/* Through fp16, which has room for all of e4m3: exponents are 8 too small there. */
INLINE __m256 from_e4m3(__m128i eight_bytes) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(eight_bytes), 7), ones = _mm_set1_epi16(0x3F80);
  const __m128i nan = _mm_and_si128(_mm_cmpeq_epi16(_mm_and_si128(wide, ones), ones), _mm_set1_epi16(0x7C00));
  const __m128i half = _mm_or_si128(_mm_andnot_si128(_mm_set1_epi16(0x4000), wide), nan); /* of two signs one */
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
  for (size i = 0; i < dim; i++) largest = fabsf(x[i]) > largest ? fabsf(x[i]) : largest;
  const float factor = largest > 0 ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
  for (size i = 0; i < dim; i++) ((int8_t *)cell)[i] = (int8_t)lrintf(x[i] * factor);
  memcpy(cell + dim, &scale, 4);
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

/* k, v [tokens, kv_heads, dim], tokens `stride` apart → the pool [block][2 · kv_heads][block_tokens] cells, at `layer`,
   whose blocks lie block_bytes apart. blocks, offsets [tokens]: where each token's cells are. */
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

enum { KEYS = 64 }; /* of a tile, from a multiple of KEYS on, so that a query meets the same ones in any batch */

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

/* Eight keys side by side, which become the tile's from `at` on. */
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

/* One value, which becomes the tile's number `at`. */
INLINE void pack_value(const uint8_t *cell, float *values, size at, size dim, const int kind) {
  const __m256 scale = _mm256_set1_ps(kind == INT8 ? cell_scale(cell, dim) : 1.0f);
  for (size i = 0; i < dim; i += 8) {
    const __m256 part = cell8(cell, i, kind), whole = kind == INT8 ? _mm256_mul_ps(part, scale) : part;
    _mm256_storeu_ps(values + (i / PANEL * KEYS + at) * PANEL + i % PANEL, whole);
  }
}

/* The keys and values [first, end) of the tile that begins at `base`. Others count as zero: nobody sees them, and what
   lies there may be no number. `keys`: of this head in block 0; values lie v_offset behind. */
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

/* A query's way through its keys (online softmax: Milakov and Gimelshein 2018, arXiv:1805.02867). */
typedef struct {
  size first, last; /* keys it sees */
  float top, sum;   /* largest score so far, and what the weights sum up to */
  float worth;      /* of what was added before the tile at hand */
} query;

/* Caps and hides scores of the keys [start, count) of the tile that begins at `base`, multiples of 8, and looks for the
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

/* Some queries over a tile's keys up to `count`; values before `start` are not there. q [rows, dim], scores
   [rows, KEYS], sums [rows, width]. */
INLINE void meet(const int rows, query *own, const float *q, tile with, float *scores, float *sums, size base,
                 size start, size count, size dim, size width, float softcap) {
  for (size j = start / PANEL * PANEL; j < count; j += PANEL) {
    __m256 parts[MOST_ROWS][2];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) parts[r][0] = parts[r][1] = _mm256_setzero_ps();
    add_products(rows, parts, q, dim, with.keys + j * dim, 0, dim);
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
    add_products(rows, parts, scores, KEYS, with.values + i * KEYS, start, count);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++) {
      _mm256_storeu_ps(sums + r * width + i, parts[r][0]);
      _mm256_storeu_ps(sums + r * width + i + 8, parts[r][1]);
    }
  }
}

/* All `rows` queries of one item over the keys [from, end) of a tile. Queries that see none of them are left out. */
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

/* One run of tokens of one request over one KV head. */
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
  if (wide > dim) memset(with.values, 0, KEYS * wide * sizeof(float)); /* what pads a panel */
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

/* out [tokens, heads, dim]: each token's queries over its request's keys up to its own position, read where they lie.

   q [tokens, heads, dim], tokens q_stride apart; tables [.., width] block numbers; table_of, positions [tokens]; items
   [item_count + 1]: where each run of tokens of one request begins that is worked on at once, and the end; window 0:
   none; scratch [threads, room], as much as tandem/native/library.py says. dim and block_tokens are multiples of 8. */
void tandem_attend(const uint8_t *layer, size block_bytes, const float *q, size q_stride, const int64_t *tables,
                   size width, const int64_t *table_of, const int64_t *positions, const int64_t *items,
                   size item_count, size heads, size kv_heads, size block_tokens, size dim, size window, float scale,
                   float softcap, int kind, float *scratch, size room, float *out, int threads) {
  const attention job = {layer, q, tables, table_of, positions, items, scratch, out, block_bytes, q_stride, width,
                         item_count, heads, kv_heads, block_tokens, dim, window, room, scale, softcap, kind};
  share(threads, item_count * kv_heads, attend_item, &job);
}

/* Shared by all kernels: vectors of eight numbers, and loops divided among threads. */

#pragma once

#include <math.h>
#include <string.h>

#include "team.h"

#define PANEL 16          /* contiguous outputs in a packed matrix: two vectors */
#define MOST_ROWS 6       /* rows per tile: 12 sums stay in registers */
#define GROUP 32          /* inputs of an int4 matrix with a common scale and minimum */
#define ROW_BYTES 163840  /* rows multiplied by all panels before the next rows: they stay in L2 */
#define TILE_BYTES 655360 /* the same for interleaved rows, which are read in order: most of an L2 of 1 MiB */
#define INLINE static inline __attribute__((always_inline))

typedef int64_t size;

/* Number of parts of a loop over `count` items, for several threads. Parts are small, because a helper that loses its
   core within one delays the caller. Work of a few microseconds is not divided. */
typedef struct { size count, each; } cut;
INLINE cut cut_for(size count, int threads) { return (cut){count, count / (8 * threads) + 1}; }
INLINE size parts_of(cut by) { return (by.count + by.each - 1) / by.each; }
INLINE size end_of(cut by, size part) { return by.count < (part + 1) * by.each ? by.count : (part + 1) * by.each; }
INLINE int threads_for(size numbers, int threads) { return numbers > 16384 ? threads : 1; }

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

/* e^x to about one unit in the last place (Cephes); below -87 it is about 0. NaN stays NaN. */
INLINE __m256 exp8(__m256 x) {
  x = _mm256_min_ps(_mm256_set1_ps(88.3f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x)); /* of NaN, the second operand */
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

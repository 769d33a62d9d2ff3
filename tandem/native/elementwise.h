/* Norms, gates, rotations and argmax. */

#pragma once

#include "vectors.h"

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

/* out [rows, width] = x / sqrt(mean(x²) + eps) · weight; rows of x are x_stride apart. */
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

/* out [rows, width] = act(x[:, :width]) · x[:, width:]; act is SiLU or GELU (tanh). width is a multiple of 8. */
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

/* Rotates the first `dims` of each head in place. x [rows, heads, head_dim], rows x_stride apart; cos, signed sin
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

/* best [rows]: index of the largest value in each row of x [rows, width], the first of equals; -1 if not finite. */
void tandem_best(const float *x, int64_t *best, size rows, size width, int threads) {
  const search job = {x, best, width};
  share(threads_for(rows * width, threads), rows, search_row, &job);
}

/* Products of the rows of x with the rows of w in torch's layout, by vectors of LANES numbers. matrices.h includes this
   once for each width. A tile has at most DOT_ROWS rows of x and DOT_OUTPUTS rows of w, whose sums stay in registers. */

#define JOINED(name, lanes) name##lanes
#define NAMED(name, lanes) JOINED(name, lanes)
#define OF_WIDTH(name) NAMED(name, LANES)

enum { OF_WIDTH(MOST_OUTPUTS_) = DOT_OUTPUTS };

/* Each sum has one order, whatever the tile. */
TARGET INLINE void OF_WIDTH(tile_dots)(const int rows, const int outputs, const float *x, const float *w,
                                       const float *bias, float *out, size k, size stride) {
  VECTOR sums[DOT_ROWS][DOT_OUTPUTS];
  size i = 0;
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) sums[r][o] = ZERO();
  for (; i + LANES <= k; i += LANES) {
    VECTOR values[DOT_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) values[r] = LOAD(x + r * k + i);
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) {
      const VECTOR weight = LOAD(w + o * k + i);
#pragma GCC unroll 8
      for (int r = 0; r < rows; r++) sums[r][o] = MULTIPLY_ADD(values[r], weight, sums[r][o]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) {
      float sum = SUM(sums[r][o]);
      for (size j = i; j < k; j++) sum += x[r * k + j] * w[o * k + j];
      out[r * stride + o] = bias ? sum + bias[o] : sum;
    }
}

TARGET static void OF_WIDTH(multiply_dense)(const void *job, int64_t part, int worker) {
  const product *own = job;
  const size k = own->k, n = own->n, from = part * own->panels.each * DOT_OUTPUTS;
  const size last = end_of(own->panels, part) * DOT_OUTPUTS, to = last < n ? last : n;
  for (size first = 0; first < own->m; first += own->block) {
    const size rows = own->m - first < own->block ? own->m - first : own->block;
    const size tiles = (rows + DOT_ROWS - 1) / DOT_ROWS;
    for (size o = from; o < to; o += DOT_OUTPUTS) {
      const size outputs = to - o < DOT_OUTPUTS ? to - o : DOT_OUTPUTS;
      const float *w = (const float *)own->w + o * k, *bias = own->bias ? own->bias + o : 0;
      for (size t = 0, r = first; t < tiles; t++) {
        const size end = first + tile_end(rows, tiles, t);
        const float *x = own->x + r * k;
        float *out = own->out + r * n + o;
#define DOTS(count, wide) \
  case 8 * count + wide: OF_WIDTH(tile_dots)(count, wide, x, w, bias, out, k, n); break;
        switch (8 * (end - r) + outputs) { ALL_DOTS }
#undef DOTS
        r = end;
      }
    }
  }
}

#undef JOINED
#undef NAMED
#undef OF_WIDTH
#undef LANES
#undef VECTOR
#undef ZERO
#undef LOAD
#undef MULTIPLY_ADD
#undef SUM
#undef TARGET
#undef DOT_ROWS
#undef DOT_OUTPUTS
#undef DOTS_OF
#undef ALL_DOTS

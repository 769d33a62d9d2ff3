/* Tiles of matrix products, by vectors of LANES numbers. matrices.h includes this once for each width. A tile's sums stay
   in registers: those of TILE_ROWS rows and a panel, or of DOT_ROWS rows of x and DOT_OUTPUTS rows of w in torch's
   layout. */

#define JOINED(name, lanes) name##lanes
#define NAMED(name, lanes) JOINED(name, lanes)
#define OF_WIDTH(name) NAMED(name, LANES)
#define VECTORS (PANEL / LANES) /* in a panel */

enum { OF_WIDTH(MOST_OUTPUTS_) = DOT_OUTPUTS };

/* `ahead`: bytes of weights to fetch meanwhile, further on; 0: none. Without it each panel begins with a wait. */
TARGET INLINE void OF_WIDTH(tile_i8)(const int rows, const int16_t *x, const float *x_scale, const int8_t *w,
                                     const float *w_scale, const float *bias, float *out, size k, size stride,
                                     size columns, const size ahead) {
  INTS sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = ZERO_INTS();
  for (size i = 0; i < k; i += 2, w += 2 * PANEL) {
    INTS weights[VECTORS];
    if (ahead) _mm_prefetch((const char *)(w + ahead), _MM_HINT_T0);
    for (int v = 0; v < VECTORS; v++) weights[v] = TO_INT16(w + 2 * LANES * v);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
      int32_t pair;
      memcpy(&pair, x + r * k + i, 4);
      const INTS both = EACH_INT(pair);
      for (int v = 0; v < VECTORS; v++) ADD_PAIRS(sums[r][v], both, weights[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    float values[PANEL];
    for (int v = 0; v < VECTORS; v++) {
      const FLOATS sum = TO_FLOATS(sums[r][v]), scale = TIMES(LOAD(w_scale + LANES * v), EACH(x_scale[r]));
      STORE(values + LANES * v, bias ? MULTIPLY_ADD(sum, scale, LOAD(bias + LANES * v)) : TIMES(sum, scale));
    }
    memcpy(out + r * stride, values, columns * sizeof(float));
  }
}

/* x_sums [rows, groups]: sums of each group of x. `ahead`: groups. */
TARGET INLINE void OF_WIDTH(tile_i4)(const int rows, const int16_t *x, const float *x_scale, const float *x_sums,
                                     const GroupI4 *w, const float *bias, float *out, size k, size stride,
                                     size columns, const size ahead) {
  const size groups = k / GROUP;
  FLOATS sums[TILE_ROWS][VECTORS];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
    for (int v = 0; v < VECTORS; v++) sums[r][v] = ZERO();
  for (size g = 0; g < groups; g++, w++) {
    INTS parts[TILE_ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
      for (int v = 0; v < VECTORS; v++) parts[r][v] = ZERO_INTS();
    for (size i = 0; i < GROUP / 2; i++) {
      INTS weights[VECTORS];
      if (ahead) _mm_prefetch((const char *)(w + ahead) + i * sizeof(GroupI4) / (GROUP / 2), _MM_HINT_T0);
      UNPACK(weights, w->pairs[i]);
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        int32_t pair;
        memcpy(&pair, x + r * k + g * GROUP + 2 * i, 4);
        const INTS wide = EACH_INT(pair);
        for (int v = 0; v < VECTORS; v++) ADD_PAIRS(parts[r][v], wide, weights[v]);
      }
    }
    for (int v = 0; v < VECTORS; v++) {
      const FLOATS scale = FROM_HALVES(w->scale + LANES * v), least = FROM_HALVES(w->least + LANES * v);
#pragma GCC unroll 12
      for (int r = 0; r < rows; r++) {
        sums[r][v] = MULTIPLY_ADD(TO_FLOATS(parts[r][v]), scale, sums[r][v]);
        sums[r][v] = MULTIPLY_ADD(EACH(x_sums[r * groups + g]), least, sums[r][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++) {
    float values[PANEL];
    for (int v = 0; v < VECTORS; v++) {
      const FLOATS sum = sums[r][v], scale = EACH(x_scale[r]);
      STORE(values + LANES * v, bias ? MULTIPLY_ADD(sum, scale, LOAD(bias + LANES * v)) : TIMES(sum, scale));
    }
    memcpy(out + r * stride, values, columns * sizeof(float));
  }
}

TARGET static void OF_WIDTH(multiply_quantised)(const void *job, int64_t part, int worker) {
  const product *own = job;
  const size wide = own->wide, n = own->n, groups = wide / GROUP, cuts = parts_of(own->panels);
  const size first = part / cuts * own->block, left = own->m - first, rows = left < own->block ? left : own->block;
  const size tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  for (size p = part % cuts * own->panels.each; p < end_of(own->panels, part % cuts); p++) {
    const size columns = n - p * PANEL < PANEL ? n - p * PANEL : PANEL;
    const float *bias = own->bias ? own->bias + p * PANEL : 0;
    for (size t = 0, r = 0; t < tiles; t++) {
      const size end = tile_end(rows, tiles, t), at = first + r;
      const int16_t *x = own->scratch + at * wide;
      float *out = own->out + at * n + p * PANEL;
      const float *scale = own->x_scale + at;
#define TILE_OF(count, more)                                                                                         \
  if (own->x_sums)                                                                                                   \
    OF_WIDTH(tile_i4)(count, x, scale, own->x_sums + at * groups, (const GroupI4 *)own->w + p * groups, bias, out,   \
                      wide, n, columns, more * groups);                                                              \
  else                                                                                                               \
    OF_WIDTH(tile_i8)(count, x, scale, (const int8_t *)own->w + p * PANEL * wide, own->w_scale + p * PANEL, bias,    \
                      out, wide, n, columns, more * PANEL * wide)
#define TILE(count)        \
  case count:              \
    if (t) {               \
      TILE_OF(count, 0);   \
    } else {               \
      TILE_OF(count, 1);   \
    }                      \
    break;
      switch (end - r) { ALL_TILES }
#undef TILE
#undef TILE_OF
      r = end;
    }
  }
}

/* Each sum has one order, whatever the tile. */
TARGET INLINE void OF_WIDTH(tile_dots)(const int rows, const int outputs, const float *x, const float *w,
                                       const float *bias, float *out, size k, size stride) {
  FLOATS sums[DOT_ROWS][DOT_OUTPUTS];
  size i = 0;
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) sums[r][o] = ZERO();
  for (; i + LANES <= k; i += LANES) {
    FLOATS values[DOT_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) values[r] = LOAD(x + r * k + i);
#pragma GCC unroll 8
    for (int o = 0; o < outputs; o++) {
      const FLOATS weight = LOAD(w + o * k + i);
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
#undef VECTORS
#undef LANES
#undef TARGET
#undef FLOATS
#undef INTS
#undef ZERO
#undef ZERO_INTS
#undef LOAD
#undef STORE
#undef EACH
#undef EACH_INT
#undef TO_FLOATS
#undef FROM_HALVES
#undef TIMES
#undef MULTIPLY_ADD
#undef SUM
#undef TO_INT16
#undef ADD_PAIRS
#undef UNPACK
#undef TILE_ROWS
#undef ALL_TILES
#undef DOT_ROWS
#undef DOT_OUTPUTS
#undef ALL_DOTS
#undef DOTS_OF

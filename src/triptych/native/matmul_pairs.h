/* Products of packed weights with many vectors: two bands are unpacked once, some columns at a time, and every vector
   of the call is then multiplied with them.

   A tile is 32 rows by up to six vectors, whose sums stay in registers: a line of weights serves all of these vectors,
   and four bytes of a vector serve two lines.  The unpacked bytes stay in the cache nearest to the processor.  Between
   two ranges of columns the sums wait in y, so every sum is made in the order of add_group.  */

#define PAIR_VECTORS 12 /* from which on this is faster */
#define GROUPS 20 /* that are unpacked at a time: in LAYOUT_S8X16 a supergroup */

struct panel {
    vb lines[GROUPS][GROUP / 4][2];
    vf scales[GROUPS][3][2]; /* minimums and offsets; in LAYOUT_S8X16 factors, [2][2] */
    vf last_scales[2];       /* of a supergroup */
};

INLINE void unpack_block(struct panel *panel, int32_t g, int b, const uint8_t *block, const enum layout layout)
{
    const uint8_t *scales = scales_of(block, layout);
    for (int32_t i = 0; i < block_columns(layout) / GROUP; i++) {
        unpack_half(&panel->lines[g + i][0][b], block + 8 * LINE * i, 0, 2, layout);
        unpack_half(&panel->lines[g + i][4][b], block + 8 * LINE * i, 1, 2, layout);
        if (layout == LAYOUT_S8X16)
            for (int h = 0; h < 2; h++) panel->scales[i][h][b] = vint8(block + 64 * LINE + BAND * (2 * i + h));
    }
    if (layout == LAYOUT_S8X16) {
        panel->last_scales[b] = vhalves(scales);
    } else {
        panel->scales[g][0][b] = vhalves(scales);
        panel->scales[g][1][b] = layout < LAYOUT_S8 ? vhalves(scales + 2 * BAND) : vall(0);
        panel->scales[g][2][b] = offset_of(panel->scales[g][0][b]);
    }
}

/* The first `groups` groups of a panel times `count` vectors, added to y, or put there where `before` is 0. */
INLINE void pair_tile(const struct panel *panel, int32_t groups, struct vectors x, float *y, ptrdiff_t y_stride,
                      int before, const float *bias, const int count, const enum layout layout)
{
    const int is_super = layout == LAYOUT_S8X16;
    vf total[2 * VECTORS];
    for (int i = 0; i < 2 * count; i++)
        total[i] = before && !is_super ? vload_some(y + i / 2 * y_stride + i % 2 * BAND, BAND) : vall(0);
    for (int32_t g = 0; g < groups; g++) {
        const struct group group = {NULL, panel->lines[g][0], panel->scales[g][0], panel->scales[g][1],
                                    panel->scales[g][2]};
        add_group(total, &group, &x, (size_t)g, count, 2, layout);
    }
    for (int i = 0; i < 2 * count; i++) {
        float *to = y + i / 2 * y_stride + i % 2 * BAND;
        if (is_super) total[i] = vfma(panel->last_scales[i % 2], total[i], before ? vload_some(to, BAND) : vall(0));
        vstore_some(to, bias ? vadd(total[i], vload_some(bias + i % 2 * BAND, BAND)) : total[i], BAND);
    }
}

/* All of `multiply` for the bands `band` and `band + 1`, which have 32 rows of the matrix. */
INLINE void multiply_pair(const struct matrix *w, int32_t band, const struct input *in, float *y, ptrdiff_t y_stride,
                          const float *bias, const enum layout layout)
{
    struct panel panel;
    const int32_t block = block_columns(layout), wide = layout == LAYOUT_S8X16 ? 4 : 6;
    const int32_t all = w->columns / GROUP, pieces = layout == LAYOUT_S8X16 ? all / 8 : (all + GROUPS - 1) / GROUPS;
    for (int32_t piece = 0; piece < pieces; piece++) {
        const int32_t from = all * piece / pieces, to = all * (piece + 1) / pieces;
        for (int b = 0; b < 2; b++) {
            const uint8_t *blocks = band_of(w, band + b, layout);
            for (int32_t i = from * GROUP / block; i < to * GROUP / block; i++)
                unpack_block(&panel, i * block / GROUP - from, b, blocks + (size_t)i * block_bytes(layout), layout);
        }
        const float *added = bias && piece == pieces - 1 ? bias + (ptrdiff_t)band * BAND : NULL;
        for (int32_t m = 0; m < in->count; m += wide) {
            float *out = y + m * y_stride + (ptrdiff_t)band * BAND;
#define PAIR_TILE(n) pair_tile(&panel, to - from, vectors_from(in, m, from), out, y_stride, piece, added, n, layout)
            FOR_COUNT(in->count - m, wide, PAIR_TILE)
        }
    }
}

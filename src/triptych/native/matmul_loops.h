/* The loops of the products of matmul.h, over the operations that each of the files kernels_*.c defines before it
   includes this one.  They fix the order of every sum, so all kernels give the same bits.

   A function for `count` vectors is compiled for every count up to VECTORS, so that all sums stay in registers and the
   weights are read and unpacked once for these vectors.  */

#include <float.h>

#ifndef MANY_REGISTERS /* enough for the sums of several bands */
#define MANY_REGISTERS 0
#endif
#define L1_BYTES (1 << 15)
#define DECODE_VECTORS 8 /* up to which a product is bound by reading the weights from memory */

#define PAIR_VECTORS 12 /* from which on two bands are multiplied together */
#define GROUPS 20       /* of them that are unpacked at a time: in LAYOUT_S8X16 a supergroup */

/* The scale is the largest magnitude over 127; numbers are rounded to the nearest, halves to even, by adding
   1.5 * 2^23.  Among the bits of magnitudes, as integers, those of infinity and NaN are larger than all others.  */
TARGET static void ISA(round)(struct input *in, int32_t vector, int32_t first, int32_t last)
{
    for (int32_t g = first; g < last; g++) {
        size_t at = (size_t)vector * (size_t)(in->columns / GROUP) + (size_t)g;
        const float *x = in->dense + vector * in->stride + (ptrdiff_t)g * GROUP;
        int8_t *rounded = in->rounded + GROUP * at;
        int32_t most = 0, bits[GROUP], sums[2];
        float largest;
        memcpy(bits, x, sizeof bits);
        for (int i = 0; i < GROUP; i++) most = (bits[i] & 0x7fffffff) > most ? bits[i] & 0x7fffffff : most;
        memcpy(&largest, &most, sizeof largest);
        int finite = most < 0x7f800000;
        float scale = largest / 127, inverse = scale >= FLT_MIN ? 1 / scale : 0; /* 1 / scale must not overflow */
        for (int half = 0; half < 2; half++) {
            float shifted[16];
            sums[half] = 0;
            for (int i = 0; i < 16; i++) shifted[i] = (finite ? x[16 * half + i] * inverse : 0.0f) + 12582912.0f;
            memcpy(bits, shifted, sizeof shifted);
            for (int i = 0; i < 16; i++) {
                rounded[16 * half + i] = (int8_t)(bits[i] - 0x4b400000);
                sums[half] += bits[i] - 0x4b400000;
            }
        }
        in->scales[at] = finite ? scale : NAN;
        in->sums[2 * at] = (float)(sums[0] + sums[1]);
        in->sums[2 * at + 1] = (float)sums[0];
    }
}

/* Rounded vectors, from one of an input and a group on. */
struct vectors {
    const int8_t *rounded;
    const float *scales, *sums;
    size_t columns, groups;
};

INLINE struct vectors vectors_from(const struct input *in, int32_t vector, int32_t group)
{
    size_t groups = (size_t)in->columns / GROUP, at = (size_t)vector * groups + (size_t)group;
    return (struct vectors){in->rounded + GROUP * at, in->scales + at, in->sums + 2 * at, GROUP * groups, groups};
}

/* Columns 16 h to 16 h + 15 of a group: line i, of `bands` of which this is one, has columns 16 h + 4 i to + 3. */
INLINE void unpack_half(vb *lines, const uint8_t *group, const int h, const int bands, const enum layout layout)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vb line;
        if (layout >= LAYOUT_S8)
            line = signed_line(group + LINE * (4 * h + i));
        else
            line = half_bytes(unsigned_line(group + LINE * (2 * h + i / 2)), i % 2);
        if (layout == LAYOUT_U5) line = with_fifth_bits(line, unsigned_line(group + 4 * LINE), 4 * h + i);
        lines[bands * i] = line;
    }
}

/* A group of one band as it lies in memory, or of two bands with their lines unpacked, [8][2]. */
struct group {
    const uint8_t *packed; /* or NULL */
    const vb *lines;
    const vf *scales, *minimums, *offsets; /* of each band; in LAYOUT_S8X16 the factors, [2][bands], and nothing */
};

/* Adds a group times `count` vectors to their sums, total[m * bands + b]. */
INLINE void add_group(vf *total, const struct group *w, const struct vectors *x, size_t g, const int count,
                      const int bands, const enum layout layout)
{
    const int is_signed = layout >= LAYOUT_S8, is_super = layout == LAYOUT_S8X16;
    vi dot[2 * VECTORS];
    vf products[2 * VECTORS];
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
        vb unpacked[4];
        const vb *lines = w->lines + 4 * bands * h;
        if (bands == 1) {
            unpack_half(unpacked, w->packed, h, 1, layout);
            lines = unpacked;
        }
        for (int i = 0; i < count * bands && (h == 0 || is_super); i++) dot[i] = no_products();
        add_products(dot, lines, x->rounded + GROUP * g + 16 * (size_t)h, x->columns, count, bands, is_signed);
        for (int i = 0; i < count * bands && is_super; i++) {
            const float *sums = x->sums + 2 * ((size_t)(i / bands) * x->groups + g);
            vf product = whole(dot[i], h ? sums[0] - sums[1] : sums[1], 1), factor = w->scales[h * bands + i % bands];
            products[i] = h ? vfma(factor, product, products[i]) : vmul(factor, product);
        }
    }
    for (int m = 0; m < count; m++) {
        const size_t at = (size_t)m * x->groups + g;
        const float sum = x->sums[2 * at];
        for (int b = 0; b < bands; b++) {
            const int i = m * bands + b;
            vf product = is_super    ? products[i]
                         : is_signed ? vmul(w->scales[b], whole(dot[i], sum, 1))
                                     : vfma(w->minimums[b], vall(sum), scaled(dot[i], w->scales[b], w->offsets[b]));
            total[i] = vfma(vall(x->scales[at]), product, total[i]);
        }
    }
}

/* Adds a block of one band, which begins at group g, times `count` vectors to their sums.  The scale of a supergroup is
   applied once, to the sum of its eight groups. */
INLINE void add_block(vf *total, const uint8_t *block, const struct vectors *x, size_t g, const int count,
                      const enum layout layout)
{
    const size_t bytes = block_bytes(layout), groups = (size_t)block_columns(layout) / GROUP;
    const vf scale = vhalves(scales_of(block, layout));
    if (groups == 1) {
        const vf minimum = layout >= LAYOUT_S8 ? vall(0) : vhalves(block + bytes - 2 * BAND);
        prefetch(block, bytes);
        const vf offset = offset_of(scale);
        add_group(total, &(struct group){block, NULL, &scale, &minimum, &offset}, x, g, count, 1, layout);
        return;
    }
    vf partial[VECTORS];
    for (int m = 0; m < count; m++) partial[m] = vall(0);
    for (size_t i = 0; i < groups; i++) {
        const uint8_t *factors = block + 64 * LINE + 2 * BAND * i;
        const vf both[2] = {vint8(factors), vint8(factors + BAND)};
        prefetch(block + 8 * LINE * i, 8 * LINE);
        add_group(partial, &(struct group){block + 8 * LINE * i, NULL, both, NULL, NULL}, x, g + i, count, 1, layout);
    }
    for (int m = 0; m < count; m++) total[m] = vfma(scale, partial[m], total[m]);
}

/* The rows of a band, with their biases where there are any, into a vector of the result. */
INLINE void put(float *y, vf sums, const struct matrix *w, int32_t band, const float *bias)
{
    int32_t row = band * BAND, rows = w->rows - row;
    vstore_some(y + row, bias ? vadd(sums, vload_some(bias + row, rows)) : sums, rows);
}

/* `streams` bands, `apart` bands from one another, times `count` vectors from `first` on. */
INLINE void packed_tile(const struct matrix *w, int32_t band, int32_t apart, const struct input *in, int32_t first,
                        float *y, ptrdiff_t y_stride, const float *bias, const int streams, const int count,
                        const enum layout layout)
{
    const struct vectors x = vectors_from(in, first, 0);
    const uint8_t *blocks[STREAMS];
    vf total[VECTORS];
    for (int z = 0; z < streams; z++) blocks[z] = band_of(w, band + z * apart, layout);
    for (int i = 0; i < streams * count; i++) total[i] = vall(0);
    for (size_t g = 0; g < x.groups; g += (size_t)block_columns(layout) / GROUP)
#pragma GCC unroll 4
        for (int z = 0; z < streams; z++, blocks[z - 1] += block_bytes(layout))
            add_block(total + z * count, blocks[z], &x, g, count, layout);
    for (int z = 0; z < streams; z++)
        for (int m = 0; m < count; m++)
            put(y + (first + m) * y_stride, total[z * count + m], w, band + z * apart, bias);
}

#if MANY_REGISTERS
/* Products with many vectors: two bands are unpacked once, some columns at a time, and every vector of the call is then
   multiplied with them.  A tile is 32 rows by up to six vectors, whose sums stay in registers: a line of weights serves
   all of these vectors, and four bytes of a vector serve two lines.  The unpacked bytes stay in the cache nearest to the
   processor.  Between two ranges of columns the sums wait in y, so every sum is made in the order of add_group.  */
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
#endif

INLINE void multiply_packed(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride,
                            const float *bias, int32_t band, int32_t last, const enum layout layout)
{
#define PACKED_TILE(n) packed_tile(w, band, 0, in, first, y, y_stride, bias, 1, n, layout)
#if MANY_REGISTERS
    if (in->count == 1) {
        int32_t apart = (last - band) / STREAMS, end = band + apart;
        for (; band < end; band++) packed_tile(w, band, apart, in, 0, y, y_stride, bias, STREAMS, 1, layout);
        band += (STREAMS - 1) * apart;
    }
    for (; in->count >= PAIR_VECTORS && band + 2 <= last && (band + 2) * BAND <= w->rows; band += 2)
        multiply_pair(w, band, in, y, y_stride, bias, layout);
#endif
    for (; band < last; band++)
        for (int32_t first = 0; first < in->count; first += VECTORS) FOR_COUNT(in->count - first, VECTORS, PACKED_TILE)
}

/* Columns k to k + n - 1, n <= 16, of rows[4 i] for first <= i < end, added to the lanes sums[m][i]. */
INLINE void add_columns(vf (*sums)[4], const void *const *rows, const float *const *x, int32_t k, int32_t n,
                        size_t ahead, const int first, const int end, const int count, const int bf16)
{
    vf weights[4];
    for (int i = first; i < end; i++) {
        const char *at = (const char *)rows[4 * i] + (ptrdiff_t)k * (bf16 ? 2 : 4);
        if (!bf16 || k % 32 == 0) __builtin_prefetch((const void *)((uintptr_t)at + ahead));
        weights[i] = bf16 ? vbf16_some((const uint16_t *)at, n) : vload_some((const float *)at, n);
    }
    for (int m = 0; m < count; m++) {
        vf part = vload_some(x[m] + k, n);
        for (int i = first; i < end; i++) sums[m][i] = vfma(weights[i], part, sums[m][i]);
    }
}

/* The sums of 16 rows of fp32 or bf16 numbers times `count` vectors: column k is added to lane k % 16, then the upper
   half of the lanes to the lower half until one is left.  Rows are read by fours, 0, 4, 8 and 12 first; `ahead`: bytes
   from one of these to what is read after it, `after`: from one of the last four. */
INLINE void rows_times_vectors(vf *out, const void *const *rows, const float *const *x, const int32_t columns,
                               size_t ahead, size_t after, const int count, const int bf16)
{
    const int height = DENSE_SUMS / count < 4 ? DENSE_SUMS / count : 4;
    vf fours[DENSE][4];
    for (int u = 0; u < 4; u++) {
        const size_t next = u < 3 ? ahead : after;
        vf sums[DENSE][4];
#pragma GCC unroll 4
        for (int first = 0; first < 4; first += height) {
            const int end = first + height < 4 ? first + height : 4;
            int32_t k = 0;
            for (int i = first; i < end; i++)
                for (int m = 0; m < count; m++) sums[m][i] = vall(0);
            for (; k + 16 <= columns; k += 16) add_columns(sums, rows + u, x, k, 16, next, first, end, count, bf16);
            if (k < columns) add_columns(sums, rows + u, x, k, columns - k, next, first, end, count, bf16);
        }
        for (int m = 0; m < count; m++) fours[m][u] = quarters(sums[m]);
    }
    for (int m = 0; m < count; m++) out[m] = sums_of_quarters(fours[m]);
}

/* A row that the matrix lacks is the last one again.  Rows are short streams, which the processor itself does not
   foresee: the next ones are asked for, where they are near enough to stay in the cache.  */
INLINE void multiply_dense(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride,
                           const float *bias, int32_t band, int32_t last, const int bf16)
{
    const size_t bytes = (size_t)w->columns * (bf16 ? 2 : 4);
    const int32_t all = in->count;
    const size_t ahead = all > DECODE_VECTORS ? 0 : 4 * bytes <= L1_BYTES ? bytes : AHEAD;
    const size_t after = ahead == bytes ? 13 * bytes : ahead;
    for (; band < last; band++) {
        const void *rows[BAND];
        for (int r = 0; r < BAND; r++) {
            int32_t row = band * BAND + r < w->rows ? band * BAND + r : w->rows - 1;
            rows[r] = (const char *)w->data + (size_t)row * bytes;
        }
        for (int32_t first = 0, count; first < all; first += count) {
            const float *x[DENSE] = {in->dense};
            vf sums[DENSE];
            count = all - first < DENSE ? all - first : DENSE;
            if (all - first > DENSE && all - first < 2 * DENSE) count = (all - first + 1) / 2;
            for (int m = 0; m < count; m++) x[m] = in->dense + (first + m) * in->stride;
#define DENSE_TILE(n) rows_times_vectors(sums, rows, x, w->columns, ahead, after, n, bf16)
            FOR_COUNT(count, DENSE, DENSE_TILE)
            for (int m = 0; m < count; m++) put(y + (first + m) * y_stride, sums[m], w, band, bias);
        }
    }
}

#define KERNEL(NAME, LOOP, HOW)                                                                                  \
    TARGET static void ISA(NAME)(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride,   \
                                 const float *bias, int32_t first_band, int32_t last_band)                       \
    {                                                                                                            \
        LOOP(w, in, y, y_stride, bias, first_band, last_band, HOW);                                              \
    }

KERNEL(f32, multiply_dense, 0)
KERNEL(bf16, multiply_dense, 1)
KERNEL(u4, multiply_packed, LAYOUT_U4)
KERNEL(u5, multiply_packed, LAYOUT_U5)
KERNEL(s8, multiply_packed, LAYOUT_S8)
KERNEL(s8x16, multiply_packed, LAYOUT_S8X16)

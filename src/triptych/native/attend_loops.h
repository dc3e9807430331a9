/* The loops of attention (attend.h), over the operations that each of the files kernels_*.c defines.  */

#include "attend.h"
#include "matmul_loops.h"
#include "step_loops.h"

INLINE void some_scores(float (*scores)[SCORES], const struct query *queries, const struct tile *keys,
                        const int32_t width, const int count)
{
    const float *q[DENSE];
    for (int i = 0; i < count; i++) q[i] = queries[i].q;
    for (int32_t j = 0, seen; j < TILE_KEYS; j += 16) {
        vf sums[DENSE];
        int32_t place = keys->place + j;
        for (int i = seen = 0; i < count; i++) seen |= queries[i].from < place + 16 && place < queries[i].to;
        if (!seen) continue;
        rows_times_vectors(sums, keys->rows + j, q, width, AHEAD, AHEAD, count, 0);
        for (int i = 0; i < count; i++) vstore_some(scores[i] + place, sums[i], 16);
    }
}

INLINE void all_scores(float (*scores)[SCORES], const struct query *queries, int32_t count, const struct tile *keys,
                       const int32_t width)
{
#define SOME_SCORES(n) some_scores(scores + i, queries + i, keys, width, n)
    for (int32_t i = 0; i < count; i += DENSE) FOR_COUNT(count - i, DENSE, SOME_SCORES)
}

/* The usual widths have loops of a known length. */
TARGET static void ISA(scores)(float (*scores)[SCORES], const struct query *queries, int32_t count,
                               const struct tile *keys, int32_t width)
{
    switch (width) {
    case 32: all_scores(scores, queries, count, keys, 32); break;
    case 64: all_scores(scores, queries, count, keys, 64); break;
    case 128: all_scores(scores, queries, count, keys, 128); break;
    default: all_scores(scores, queries, count, keys, width); break;
    }
}

/* e^(x - top) in place of each x, none larger than top: x - top = n ln 2 + r with |r| <= ln 2 / 2, then the series of
   e^r to r^7 / 7!.  Exactly 0 below -87.3; a NaN stays one.  */
INLINE void exponentials(float *x, int32_t count, float top)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, in the low bits */
    for (int32_t i = 0; i < count; i++) {
        float own = x[i] - top, y = own < -87.3f ? -87.3f : own;
        float shifted = y * 1.44269504088896341f + magic, n = shifted - magic;
        float r = fmaf(n, 2.12194440e-4f, fmaf(-n, 0.693359375f, y));
        float p = fmaf(1.0f / 5040, r, 1.0f / 720);
        p = fmaf(p, r, 1.0f / 120);
        p = fmaf(p, r, 1.0f / 24);
        p = fmaf(p, r, 1.0f / 6);
        p = fmaf(p, r, 0.5f);
        p = fmaf(p, r, 1.0f);
        p = fmaf(p, r, 1.0f);
        x[i] = own < -87.3f ? 0.0f : p * float_of_bits((bits_of_float(shifted) + 127) << 23);
    }
}

TARGET static void ISA(softmax)(float *scores, struct query *query, const struct instruction *it)
{
    int32_t begin = query->from / 16 * 16, end = (query->to + 15) / 16 * 16;
    float lanes[16];
    vf most = vall(-INFINITY), sum = vall(0);
    for (int32_t j = begin; j < end; j++) scores[j] *= it->attend.scale;
    for (int32_t j = begin; it->attend.softcap > 0.0f && j < end; j += 16)
        store16(scores + j, it->attend.softcap * tanh16(load16(scores + j) / it->attend.softcap));
    for (int32_t j = query->from; query->bias && j < query->to; j++) scores[j] += query->bias[-j];
    for (int32_t j = begin; j < query->from; j++) scores[j] = -INFINITY;
    for (int32_t j = query->to; j < end; j++) scores[j] = -INFINITY;
    for (int32_t j = begin; j < end; j += 16) most = vmax(vload_some(scores + j, 16), most); /* passes over a NaN */
    vstore_some(lanes, most, 16);
    query->range.most = max16(load16(lanes));
    exponentials(scores + begin, end - begin, query->range.most);
    for (int32_t j = begin; j < end; j += 16) sum = vadd(sum, vload_some(scores + j, 16));
    vstore_some(lanes, sum, 16);
    query->range.total = sum16(load16(lanes));
}

/* Numbers [d, d + 16 * parts) of the values at places [from, to) of a tile, times their weights, to the sums. */
INLINE void add_part(const struct query *queries, float (*weights)[SCORES], const struct tile *tile, int32_t from,
                     int32_t to, int32_t d, int32_t width, const int count, const int parts)
{
    vf sums[QUERIES_OF_VALUES][4];
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++)
            sums[i][p] = vload_some(queries[i].range.out + d + 16 * p, width - d - 16 * p);
    for (int32_t j = from; j < to; j++) {
        vf values[4];
        for (int p = 0; p < parts; p++) {
            const float *value = (const float *)tile->rows[j] + d + 16 * p;
            values[p] = vload_some(value, width - d - 16 * p);
            if (count < 6) prefetch(value, LINE);
        }
        for (int i = 0; i < count; i++) {
            vf weight = vall(weights[i][tile->place + j]);
            for (int p = 0; p < parts; p++) sums[i][p] = vfma(weight, values[p], sums[i][p]);
        }
    }
    for (int i = 0; i < count; i++)
        for (int p = 0; p < parts; p++)
            vstore_some(queries[i].range.out + d + 16 * p, sums[i][p], width - d - 16 * p);
}

INLINE void add_values(const struct query *queries, float (*weights)[SCORES], const struct tile *tile, int32_t from,
                       int32_t to, int32_t width, const int count)
{
    int32_t d = 0;
    if (from >= to) return;
    for (; width - d >= 64; d += 64) add_part(queries, weights, tile, from, to, d, d + 64, count, 4);
    for (; width - d >= 32; d += 32) add_part(queries, weights, tile, from, to, d, d + 32, count, 2);
    for (; d < width; d += 16) add_part(queries, weights, tile, from, to, d, width, count, 1);
}

/* Places that all of the queries see are added together, those before and after for each query alone. */
INLINE void some_values(const struct query *queries, float (*weights)[SCORES], const struct tile *tile, int32_t width,
                        const int count)
{
    int32_t from = 0, to = TILE_KEYS, first[QUERIES_OF_VALUES], end[QUERIES_OF_VALUES];
    for (int i = 0; i < count; i++) {
        first[i] = queries[i].from > tile->place ? queries[i].from - tile->place : 0;
        end[i] = queries[i].to - tile->place < TILE_KEYS ? queries[i].to - tile->place : TILE_KEYS;
        from = first[i] > from ? first[i] : from;
        to = end[i] < to ? end[i] : to;
    }
    if (from > to) from = to = TILE_KEYS; /* nothing in common */
    for (int i = 0; count > 1 && i < count; i++)
        add_values(queries + i, weights + i, tile, first[i], end[i] < from ? end[i] : from, width, 1);
    add_values(queries, weights, tile, from, to, width, count);
    for (int i = 0; count > 1 && i < count; i++) add_values(queries + i, weights + i, tile, to, end[i], width, 1);
}

TARGET static void ISA(values)(const struct query *queries, float (*weights)[SCORES], int32_t count,
                               const struct tile *values, int32_t width)
{
#define SOME_VALUES(n) some_values(queries + i, weights + i, values, width, n)
    for (int32_t i = 0; i < count; i += QUERIES_OF_VALUES) FOR_COUNT(count - i, QUERIES_OF_VALUES, SOME_VALUES)
}

/* Of int8 codes, 16 numbers have one scale. */
INLINE void read_all(const int32_t type, float *out, const uint8_t *row, int32_t count, const int32_t n)
{
    const int32_t size = type == STORED_INT8 ? 1 : 2;
    for (; count > 0; count--, row += stored_bytes(type, n), out += n)
        for (int32_t i = 0; i < n; i += 16) {
            uint16_t last[16] = {0}, scale;
            const uint8_t *at = row + i * size;
            if (n - i < 16) at = memcpy(last, at, (size_t)((n - i) * size));
            vf x = type == STORED_F16 ? vhalves(at) : type == STORED_INT8 ? vint8(at) : vbf16_some((const void *)at, 16);
            if (type == STORED_INT8) {
                memcpy(&scale, row + n + i / GROUP * 2, sizeof scale);
                x = vmul(x, vall(float_of_bf16(scale)));
            }
            vstore_some(out + i, x, n - i);
        }
}

TARGET static void ISA(read)(int32_t type, float *out, const void *rows, int32_t count, int32_t n)
{
    switch (type) {
    case STORED_BF16: read_all(STORED_BF16, out, rows, count, n); break;
    case STORED_F16: read_all(STORED_F16, out, rows, count, n); break;
    case STORED_INT8: read_all(STORED_INT8, out, rows, count, n); break;
    default: memcpy(out, rows, (size_t)count * (size_t)n * sizeof *out); break;
    }
}

const struct kernels ISA(kernels) = {
    LEVEL, MANY_REGISTERS, ISA(round), {ISA(f32), ISA(bf16), ISA(u4), ISA(u5), ISA(s8), ISA(s8x16)}, ISA(sum_of),
    ISA(norm), ISA(rotate), ISA(map), ISA(largest_of), ISA(keep), ISA(read), ISA(scores), ISA(softmax), ISA(values),
    ISA(merge), ISA(finish), ISA(statistics), ISA(sample)};

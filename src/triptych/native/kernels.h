/* The table of the functions that are compiled for each level of instructions, and what these functions share.

   They are written once, in matmul_loops.h, attend_loops.h, step_loops.h, statistics.h and sample.h, over
   a few operations on vectors of 16 numbers.  kernels_portable.c, kernels_avx2.c and kernels_avx512.c define these operations
   and include the loops: kernels_portable.c in plain C, which says what each operation computes.  All other C is compiled
   for any processor, but the products in bf16 (matmul_bf16.h) of LEVEL_AMX.  */

#ifndef TRIPTYCH_KERNELS_H
#define TRIPTYCH_KERNELS_H

#include <math.h>

#include "matmul.h"
#include "sample.h"
#include "statistics.h"

#define STREAMS 4 /* bands that a kernel for one vector reads at once, where it reads several */
#define LAYOUTS 6
#define LINE 64   /* bytes */
#define AHEAD 5120 /* bytes; from 2560 to 16384 the speed is the same, without it a fifth less */

/* Bytes of a group of one band, or of a supergroup; their parts lie in the order of the terms. */
#define U4_BYTES (4 * LINE + 2 * BAND + 2 * BAND)
#define U5_BYTES (4 * LINE + LINE + 2 * BAND + 2 * BAND)
#define S8_BYTES (8 * LINE + 2 * BAND)
#define S8X16_BYTES (64 * LINE + 16 * BAND + 2 * BAND)

/* `multiply` for one layout. */
typedef void multiply_kernel(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride,
                             const float *bias, int32_t first_band, int32_t last_band);

#define RANGE 256 /* positions of a range of attention, which begins at a multiple of it */
/* Numbers from the scores of one query to those of the next.  With RANGE the first scores of all queries would share
   few lines of the cache. */
#define SCORES (RANGE + 16)

struct query; struct sums; struct tile; struct instruction; /* of attend.h and step.h */

struct kernels {
    int level; /* that they are compiled for: enum level, up to LEVEL_AVX512 */
    int reads_streams; /* of packed layouts, for one vector */
    void (*round)(struct input *in, int32_t vector, int32_t first, int32_t last);
    multiply_kernel *multiply[LAYOUTS]; /* by layout */
    /* The sum of x - mean, or of its squares; norms; rotations; f(x), times or plus y (step_loops.h). */
    float (*sum_of)(const float *x, int32_t n, float mean, int squares);
    void (*norm)(float *out, const float *x, int32_t n, float mean, float factor, const float *weight, float offset,
                 const float *bias);
    void (*rotate)(float *out, const float *x, const float *cosines, const float *sines, int32_t half, int32_t pairing);
    void (*map)(float *out, const float *x, const float *y, int32_t n, int32_t function, float factor, int adds);
    void (*largest_of)(const float *x, int32_t count, int32_t n, int32_t *places, float *tops);
    /* Write a vector of n numbers to a store; read `count` vectors that follow one another. */
    void (*keep)(int32_t type, void *row, const float *x, int32_t n);
    void (*read)(int32_t type, float *out, const void *rows, int32_t count, int32_t n);
    /* Attention of `count` queries, whose scores, or weights, are [count][SCORES].  The bits of a query's sums do not
       depend on the other queries.  Scores are computed at least where a query sees something, values are added exactly
       there: a number that a query does not see never reaches its sums.  */
    void (*scores)(float (*scores)[SCORES], const struct query *queries, int32_t count, const struct tile *keys,
                   int32_t width);
    void (*softmax)(float *scores, struct query *query, const struct instruction *it);
    void (*values)(const struct query *queries, float (*weights)[SCORES], int32_t count, const struct tile *values,
                   int32_t width);
    /* Add the sums of a range to those of all before it; divide these by their weight and that of a sink. */
    void (*merge)(struct sums *all, const struct sums *range, int32_t width);
    void (*finish)(const struct sums *all, int32_t width, const float *sink);
    /* The statistics of up to STATISTICS_QUERIES queries of one head, and the weight that each key receives from them,
       added to received [row]. */
    void (*statistics)(const struct score_tile *t, int32_t head, int32_t query, float *scores, float *received);
    int32_t (*sample)(const float *x, int32_t n, const struct draw *how, float *weights, void *items);
};

extern const struct kernels portable_kernels;
#if defined(__x86_64__)
#define X86_KERNELS 1
extern const struct kernels avx2_kernels, avx512_kernels;
#endif

/* What select_level chose. */
extern const struct kernels *kernels_in_use;

#define ALWAYS static inline __attribute__((always_inline))

/* Ask for the `bytes` that are AHEAD of `block`, as the processor does itself only within a page.  Nothing is read, so
   an address beyond the last byte is harmless.  */
ALWAYS void prefetch(const void *block, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += LINE)
        __builtin_prefetch((const void *)((uintptr_t)block + AHEAD + i));
}

/* Columns and bytes of a block of one band in a packed layout: a group, or a supergroup. */
ALWAYS int32_t block_columns(const int32_t layout) { return layout == LAYOUT_S8X16 ? SUPERGROUP : GROUP; }

ALWAYS size_t block_bytes(const int32_t layout)
{
    if (layout <= LAYOUT_U5) return layout == LAYOUT_U4 ? U4_BYTES : U5_BYTES;
    return layout == LAYOUT_S8 ? S8_BYTES : S8X16_BYTES;
}

/* The first block of a band; the scales of a block, behind which its minimums stand. */
ALWAYS const uint8_t *band_of(const struct matrix *w, int32_t band, const int32_t layout)
{
    return (const uint8_t *)w->data + (size_t)band * (size_t)(w->columns / block_columns(layout)) * block_bytes(layout);
}

ALWAYS const uint8_t *scales_of(const uint8_t *block, const int32_t layout)
{
    return block + block_bytes(layout) - (layout >= LAYOUT_S8 ? 2 : 4) * BAND;
}

#endif

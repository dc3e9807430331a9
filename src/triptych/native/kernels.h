/* What matmul.c and the files of kernels share; not for others. */

#ifndef TRIPTYCH_KERNELS_H
#define TRIPTYCH_KERNELS_H

#include <math.h>

#include "matmul.h"

#define TILE 8   /* vectors that one call of a kernel serves at most */
#define MANY 12  /* vectors from which on a pair_kernel is faster */
#define STREAMS 4 /* bands that a stream_kernel reads at once */
#define LAYOUTS 6
#define LINE 64  /* bytes */
#ifndef AHEAD
#define AHEAD 5120 /* bytes; from 2560 to 16384 the speed is the same, without it a fifth less */
#endif

/* Bytes of a group of one band, or of a supergroup; their parts lie in the order of the terms. */
#define U4_BYTES (4 * LINE + 2 * BAND + 2 * BAND)
#define U5_BYTES (4 * LINE + LINE + 2 * BAND + 2 * BAND)
#define S8_BYTES (8 * LINE + 2 * BAND)
#define S8X16_BYTES (64 * LINE + 16 * BAND + 2 * BAND)

/* out[m][r] for the vectors first + m, m < count <= TILE, and the rows r of a band; rows beyond w->rows get any
   numbers. */
typedef void band_kernel(const struct matrix *w, int32_t band, const struct input *in, int32_t first, int32_t count,
                         float (*out)[BAND]);

/* out[z][r] for vector 0 and the rows r of the bands band + z * apart, z < STREAMS.  One core reads several places far
   from one another up to a half faster than one place. */
typedef void stream_kernel(const struct matrix *w, int32_t band, int32_t apart, const struct input *in,
                           float (*out)[BAND]);

/* All of `multiply` for the bands `band` and `band + 1`, which have 32 rows of the matrix. */
typedef void pair_kernel(const struct matrix *w, int32_t band, const struct input *in, float *y, ptrdiff_t y_stride,
                         const float *bias);

struct kernels {
    void (*round)(struct input *in, int32_t vector, int32_t first, int32_t last);
    band_kernel *multiply[LAYOUTS];  /* by layout */
    stream_kernel *streams[LAYOUTS]; /* by layout, for one vector; NULL where there is none */
    pair_kernel *const *pairs;       /* by layout, for MANY vectors and more; NULL where there is none */
};

extern pair_kernel *const no_pairs[LAYOUTS];
extern const struct kernels portable_kernels;
#if defined(__x86_64__)
#define X86_KERNELS 1
extern const struct kernels avx2_kernels, avx512_kernels;
extern pair_kernel *const avx512_pairs[LAYOUTS];
#endif

/* The number of the kernels in use, as select_kernels gave it. */
int kernels_in_use(void);

/* Ask for the `bytes` that are AHEAD of `block`, as the processor does itself only within a page.  Nothing is read, so
   an address beyond the last byte is harmless.  */
static inline __attribute__((always_inline)) void prefetch(const uint8_t *block, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += LINE)
        __builtin_prefetch((const void *)((uintptr_t)block + AHEAD + i));
}

/* Where a band begins whose blocks of `columns` columns have `bytes` bytes each. */
static inline const uint8_t *band_of(const struct matrix *w, int32_t band, int32_t columns, size_t bytes)
{
    return (const uint8_t *)w->data + (size_t)band * (size_t)(w->columns / columns) * bytes;
}

#endif

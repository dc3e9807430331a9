/* Products of a few vectors with a large matrix, the work of a decoding step.

   A matrix W [rows, columns] is stored in one of the layouts below; y[m][n] = sum over k of x[m][k] * W[n][k].  All
   layouts go by bands of 16 rows, so a product can be cut anywhere between two bands and given to several threads.
   A row of y has the same bits for any number of vectors, any cut and any number of threads: every kernel adds the
   products of one output in the same order.

   The packed layouts multiply integers: each vector is rounded to 8 bits in groups of 32 columns, with a scale per
   group (never per vector), the integer sums are exact, and the scales are applied in fp32, group after group.  */

#ifndef TRIPTYCH_MATMUL_H
#define TRIPTYCH_MATMUL_H

#include <stddef.h>
#include <stdint.h>

#define BAND 16  /* rows of a matrix that are stored together */
#define GROUP 32 /* columns that share a scale */

enum layout {
    LAYOUT_F32 = 0,  /* fp32 rows, as torch stores them: bands are only a way to count */
    LAYOUT_BF16 = 1, /* bf16 rows, as torch stores them */
    LAYOUT_U4 = 2,   /* w = scale * u + minimum, u in 0..15; per band and group 256 bytes of nibbles, 16 fp16 scales, 16
                        fp16 minimums */
    LAYOUT_U5 = 3,   /* the same with u in 0..31: 64 bytes of fifth bits more */
    LAYOUT_S8 = 4,   /* w = scale * s, s in -127..127: per band and group 512 bytes and 16 fp16 scales */
    LAYOUT_S8X16 = 5 /* the same with scales for groups of 16: per band and 256 columns 16 fp16 scales, 16 x 16 int8
                        sub-scales and 4096 bytes; w = scale * sub-scale * s */
};

/* rows is the true number; packed layouts are padded with zeros to whole bands.  columns is a multiple of GROUP (of 256
   for LAYOUT_S8X16) in packed layouts and any number in dense ones.  data is aligned to 64 bytes in packed layouts.  */
struct matrix {
    int32_t layout;
    int32_t rows;
    int32_t columns;
    int32_t reserved;
    const void *data;
};

/* Vectors [count, columns] as the kernels read them.  The memory belongs to the caller: input_bytes says how much. */
struct input {
    int32_t count;
    int32_t columns;
    const float *dense; /* [count][stride] fp32 */
    ptrdiff_t stride;   /* in floats */
    int8_t *rounded;    /* [count][columns], for packed layouts; NULL where none reads them */
    float *scales;      /* [count][columns / GROUP] */
    float *sums;        /* [count][columns / GROUP]: scale times the sum of the rounded numbers of a group */
};

/* Bytes of `rounded`, `scales` and `sums` together, each part aligned to 64. */
size_t input_bytes(int32_t count, int32_t columns);

/* Round the groups [first, last) of one vector of `in`; different groups may be rounded by different threads. */
void round_groups(struct input *in, int32_t vector, int32_t first, int32_t last);

/* y[m][n] for every vector m and the rows n of the bands [first_band, last_band); y has `y_stride` floats per vector.
   Adds bias[n] where bias is not NULL.  Called by one thread; the caller shares the bands out. */
void multiply(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride, const float *bias,
              int32_t first_band, int32_t last_band);

/* The kernels that `multiply` and `round_groups` use: 0 portable C, 1 AVX2, 2 AVX-512 with VNNI (and BF16 where the
   processor has it).  select_kernels takes the best one up to `at_most` that this processor has, and returns it. */
int select_kernels(int at_most);

#endif

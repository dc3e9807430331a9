/* The layouts of matrices, their products with vectors, and the choice of the instructions that compute them.

   A matrix W [rows, columns] is stored in one of the layouts below; y[m][n] = sum over k of x[m][k] * W[n][k].  All
   layouts go by bands of 16 rows, so a product can be cut anywhere between two bands and given to several threads.
   A row of y has the same bits for any number of vectors, any cut, any number of threads and at any level: all kernels are
   one set of loops, in matmul_loops.h, and add the products of one output in the same order.  unpack_row, in
   kernels_portable.c, is the readable definition of the packed layouts.

   The packed layouts multiply integers: each vector is rounded to 8 bits in groups of 32 columns, with a scale per
   group (never per vector), the integer sums are exact, and the scales are applied in fp32, group after group.  */

#ifndef TRIPTYCH_MATMUL_H
#define TRIPTYCH_MATMUL_H

#include <stddef.h>
#include <stdint.h>

#define BAND 16        /* rows of a matrix that are stored together */
#define GROUP 32       /* columns that share a scale */
#define SUPERGROUP 256 /* columns that share a scale of LAYOUT_S8X16 */

/* A packed layout goes band after band, and in a band group after group (supergroup after supergroup).  The numbers of
   a group lie in lines of 64 bytes, four bytes for each of the 16 rows: byte 4 * r + i of a line belongs to row r.  All
   scales and minimums are finite.  */
enum layout {
    LAYOUT_F32 = 0,  /* fp32 rows, as torch stores them: bands are only a way to count */
    LAYOUT_BF16 = 1, /* bf16 rows, as torch stores them */
    LAYOUT_U4 = 2,   /* w = scale * u + minimum, u in 0..15.  Per group 4 lines, 16 fp16 scales, 16 fp16 minimums; byte
                        4 * r + i of line j holds column 8 * j + i in its low half and 8 * j + 4 + i in its high half */
    LAYOUT_U5 = 3,   /* the same with u in 0..31.  Per group 4 lines as above, a line of fifth bits, scales, minimums;
                        bit j of byte 4 * r + i of the line of fifth bits belongs to column 4 * j + i */
    LAYOUT_S8 = 4,   /* w = scale * s, s in -128..127.  Per group 8 lines and 16 fp16 scales; byte 4 * r + i of line j
                        holds column 4 * j + i */
    LAYOUT_S8X16 = 5 /* w = scale * factor * s, factor in -128..127.  Per supergroup 64 lines as above, 16 rows of int8
                        factors for every 16 columns [16][BAND], and 16 fp16 scales */
};

/* rows is the true number; packed layouts are padded with zeros to whole bands.  columns is a multiple of GROUP (of
   SUPERGROUP for LAYOUT_S8X16) in packed layouts and any number in dense ones.  data is best aligned to 64 bytes.  */
struct matrix {
    int32_t layout;
    int32_t rows;
    int32_t columns;
    int32_t reserved;
    const void *data;
};

/* Bytes of `data`. */
size_t matrix_bytes(int32_t layout, int32_t rows, int32_t columns);

/* Fill the data of w from the blocks of GGUF's type `type_number` (its number in ggml.h: 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1,
   8 Q8_0), row after row, on `threads` threads of OpenMP -> 1; 0 where a scale or a minimum is not finite in fp16, -1
   for another type or the layout of another. */
int repack_blocks(int type_number, const uint8_t *blocks, const struct matrix *w, int32_t threads);

/* out[k] = W[row][k], for every column of a packed layout, whose `data` is that of a whole matrix. */
void unpack_row(const struct matrix *w, int64_t row, float *out);

/* Vectors [count, columns] as the kernels read them.  The memory of the last three belongs to the caller: place_input
   says how much and sets the pointers.  Only packed layouts read them.  */
struct input {
    int32_t count;
    int32_t columns;
    const float *dense; /* [count][stride] fp32 */
    ptrdiff_t stride;   /* in floats */
    int8_t *rounded;    /* [count][columns], in -127..127; the vector is about scale * rounded */
    float *scales;      /* [count][columns / GROUP] */
    float *sums;        /* [count][columns / GROUP][2]: sums of the rounded numbers of a group, of its first half */
};

/* Sets `rounded`, `scales` and `sums` to their parts of `memory`, each aligned to 64 bytes; -> how many bytes they take,
   which `memory` NULL only asks for. */
size_t place_input(struct input *in, void *memory);

/* Round the groups [first, last) of one vector of `in`; different groups may be rounded by different threads.  A group
   with a number that is not finite gets the scale NaN, so that every product with it is NaN.  */
void round_groups(struct input *in, int32_t vector, int32_t first, int32_t last);

/* y[m][n] for every vector m and the rows n of the bands [first_band, last_band); y has `y_stride` floats per vector.
   Adds bias[n] where bias is not NULL.  Called by one thread; the caller shares the bands out.  Nothing is written for an
   unknown layout. */
void multiply(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride, const float *bias,
              int32_t first_band, int32_t last_band);

/* Rounds `in` where the layout of w is packed, and multiplies all bands, on `threads` threads of OpenMP. */
void multiply_parallel(const struct matrix *w, struct input *in, float *y, ptrdiff_t y_stride, const float *bias,
                       int32_t threads);

/* The instructions that functions are compiled for: portable C; AVX2 with FMA and F16C; AVX-512 with VNNI; and products
   in bf16 (matmul_bf16.h) with AMX and AVX-512 beside these. */
enum level { LEVEL_PORTABLE = 0, LEVEL_AVX2 = 1, LEVEL_AVX512 = 2, LEVEL_AMX = 3 };

/* Take the functions of the best level up to `at_most` that this processor and the system have -> that level.  Portable
   ones are in use before the first call.  Not to be called while another thread computes.  */
int select_level(int at_most);

#endif

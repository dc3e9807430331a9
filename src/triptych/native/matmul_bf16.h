/* Products in bf16: the vectors are rounded to bf16, the weights are stored so, the sums are fp32.

   The weights go by pairs of bands (32 rows), and in a pair by tiles of 32 columns, band after band: line j of a tile
   holds columns 2 j and 2 j + 1 of each of 16 rows, [16 lines][BAND][2].  Both numbers of rows and of columns are padded
   with zeros to a multiple of PAIR.

   Packed weights (matmul.h) are unpacked to such tiles while they are multiplied, a range of columns at a time.

   A row of the result has the same bits for any number of vectors and any cut.  */

#ifndef TRIPTYCH_MATMUL_BF16_H
#define TRIPTYCH_MATMUL_BF16_H

#include <stddef.h>
#include <stdint.h>

#include "matmul.h"

#define PAIR 32 /* rows of weights that are multiplied together, and columns of a tile */

static inline int32_t pairs_in(int32_t n)
{
    return n / PAIR + (n % PAIR != 0);
}

/* y = f(x weight^T + bias) + more, or with a gate f(x gate^T) (x weight^T + bias) + more, for `count` vectors. */
struct bf16_product {
    const struct matrix *weight, *gate; /* packed, or with a layout < 0 tiles; of one shape.  The gate may be NULL */
    int32_t count;
    int32_t function;  /* f: enum function of step.h, with its factor */
    float factor;
    int32_t rounded;   /* whether y is rounded as x is */
    const uint16_t *x; /* [count][columns, padded] as round_bf16 gives them */
    const float *bias; /* [rows] or NULL */
    const float *more; /* [count][rows] or NULL; may be y */
    void *y;           /* [count][rows] fp32, or [count][rows, padded] bf16 */
};

/* The pairs [first, last) of the rows of y. */
void multiply_bf16(const struct bf16_product *it, int32_t first, int32_t last);

/* The tiles of columns [from, to) of a pair of bands of a packed matrix, [to - from][2][16 lines][BAND][2]: the numbers of
   unpack_row, rounded as round_bf16 does. */
void unpack_tiles(const struct matrix *w, int32_t pair, int32_t from, int32_t to, uint16_t *tiles);

/* out [columns, padded] = x [columns], to the nearest number, ties to even; numbers below 2^-126 become 0. */
void round_bf16(uint16_t *out, const float *x, int32_t columns);

/* Whether the functions above can be used: 1 where the processor has AMX, `at_most` is 1 and the system allows it, else
   0.  To be called before them.  */
int select_bf16(int at_most);

#endif

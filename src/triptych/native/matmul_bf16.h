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

static inline int32_t pairs_in(int32_t n) { return n / PAIR + (n % PAIR != 0); }

/* y = f(x weight^T + bias) + more, or with a gate f(x gate^T) (x weight^T + bias) + more, for `count` vectors. */
struct bf16_product {
    const struct matrix *weight, *gate; /* packed, or with a layout < 0 tiles; of one shape.  The gate may be NULL */
    int32_t count;
    int32_t function;  /* f: enum function of vector.h, with its factor */
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

/* Whether the functions above can be used beside those of LEVEL_AVX512: the processor has AMX, and the system allows it. */
int has_bf16(void);

/* What the files of products in bf16 share. */
#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) ? __clang_major__ >= 12 : __GNUC__ >= 11)
#define HAS_TILES 1

#include <immintrin.h>

#define BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma")))
#define INLINE_BF16 static inline BF16 __attribute__((always_inline))
#define TILE_NUMBERS (BAND * PAIR) /* of one tile of weights */

/* Part of a product: `count` vectors, at most 32, with the tiles of columns [from, to) of one pair of bands, added to the
   sums [count][line], which are 0 where `from` is.  */
struct part {
    const uint16_t *x;     /* the first vector */
    ptrdiff_t stride;      /* between vectors, in numbers */
    const uint16_t *tiles; /* of the pair, from column 32 * from on */
    ptrdiff_t line;        /* between the sums of two vectors */
    int32_t count, from, to;
    int32_t ask, until; /* which lines to ask for of each tile of the range that comes next in memory, of 32 */
};

/* Between begin_parts and end_parts the parts of products of `count` vectors are multiplied; of fewer than 16 all parts
   have as many vectors. */
void begin_parts(int32_t count);
void multiply_part(const struct part *it, float *sums);
void end_parts(void);

/* The first n of 16 numbers. */
INLINE_BF16 __mmask16 first_of(int32_t n) { return n >= BAND ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }

/* A line of a tile: the numbers of 16 rows in two columns that follow one another, rounded. */
INLINE_BF16 __m512i line_of(__m512 even, __m512 odd)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

#endif

#endif

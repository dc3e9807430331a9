/* What matmul_bf16.c and step_attend_bf16.c share: parts of products in bf16; not for others. */

#ifndef TRIPTYCH_TILES_H
#define TRIPTYCH_TILES_H

#include "matmul_bf16.h"

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
INLINE_BF16 __mmask16 first_of(int32_t n)
{
    return n >= BAND ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

/* A line of a tile: the numbers of 16 rows in two columns that follow one another, rounded. */
INLINE_BF16 __m512i line_of(__m512 even, __m512 odd)
{
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                           23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

#endif

#endif

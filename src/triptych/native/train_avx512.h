/* What both levels with AVX-512 have in common; ISA, TARGET and PAIRS are defined before. */

#define LANES 16
#define ROWS 6  /* of the left side of a product that are multiplied together, */
#define PARTS 4 /* with so many registers of the right side */
#include "train_vector.h"

INLINE vf multiply_add(vf x, vf y, vf z) { return (vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }
INLINE vf larger_or_last(vf x, vf y) { return (vf)_mm512_max_ps((__m512)x, (__m512)y); }
INLINE vf smaller_or_last(vf x, vf y) { return (vf)_mm512_min_ps((__m512)x, (__m512)y); }

INLINE vf if_not_less(vf x, vf y, vf z)
{
    return (vf)_mm512_maskz_mov_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)y, _CMP_NLT_UQ), (__m512)z);
}

INLINE vf widened(const uint16_t *x)
{
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
}

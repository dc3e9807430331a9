/* The functions of a training step for x86-64 with AVX-512 and its products of bf16 numbers.

   vdpbf16ps adds the products of two pairs of bf16 numbers to each of 16 fp32 numbers; the pair of the left side is taken
   for all 16 from memory.  */

#include "train.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")))

#define ISA(NAME) avx512_pairs_##NAME
#define LANES 16
#define PAIRS 1
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

INLINE vf add_unit(vf sum, const float *unit, vf y)
{
    int32_t bits;
    memcpy(&bits, unit, sizeof bits);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)y);
}

INLINE vf widened(const uint16_t *x)
{
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
}

INLINE vh narrowed(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }

#include "train_loops.h"

#endif

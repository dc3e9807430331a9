/* The functions of a training step for x86-64 with AVX-512. */

#include "train.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))

#define ISA(NAME) avx512_##NAME
#define LANES 16
#define PAIRS 0
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

INLINE vf add_unit(vf sum, const float *unit, vf y) { return multiply_add(all_of(*unit), y, sum); }

INLINE vf widened(const uint16_t *x)
{
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
}

INLINE vh narrowed(vf x) { return (vh)_mm512_cvtepi32_epi16((__m512i)rounded(x)); }

#include "train_loops.h"

#endif

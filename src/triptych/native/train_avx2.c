/* The functions of a training step for x86-64 with AVX2 and FMA. */

#include "train.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma,f16c")))

#define ISA(NAME) avx2_##NAME
#define LANES 8
#define PAIRS 0
#define ROWS 6  /* of the left side of a product that are multiplied together, */
#define PARTS 2 /* with so many registers of the right side */
#include "train_vector.h"

INLINE vf multiply_add(vf x, vf y, vf z) { return (vf)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }
INLINE vf larger_or_last(vf x, vf y) { return (vf)_mm256_max_ps((__m256)x, (__m256)y); }
INLINE vf smaller_or_last(vf x, vf y) { return (vf)_mm256_min_ps((__m256)x, (__m256)y); }
INLINE vf if_not_less(vf x, vf y, vf z) { return (vf)((vi)z & ~(x < y)); }
INLINE vf add_unit(vf sum, const float *unit, vf y) { return multiply_add(all_of(*unit), y, sum); }

INLINE vf widened(const uint16_t *x)
{
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
}

INLINE vh narrowed(vf x)
{
    __m256i y = (__m256i)rounded(x);
    return (vh)_mm_packus_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
}

#include "train_loops.h"

#endif

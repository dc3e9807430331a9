/* The functions of a training step for x86-64 with AVX-512 and its products of bf16 numbers.

   vdpbf16ps adds the products of two pairs of bf16 numbers to each of 16 fp32 numbers; the pair of the left side is taken
   for all 16 from memory.  */

#include "train.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx512bf16,avx2,fma,f16c")))

#define ISA(NAME) avx512_pairs_##NAME
#define PAIRS 1
#include "train_avx512.h"

INLINE vf add_unit(vf sum, const float *unit, vf y)
{
    int32_t bits;
    memcpy(&bits, unit, sizeof bits);
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)y);
}

INLINE vh narrowed(vf x) { return (vh)_mm512_cvtneps_pbh((__m512)x); }

#include "train_loops.h"

#endif

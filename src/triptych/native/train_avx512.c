/* The functions of a training step for x86-64 with AVX-512. */

#include "train.h"

#if defined(__x86_64__)

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))

#define ISA(NAME) avx512_##NAME
#define PAIRS 0
#include "train_avx512.h"

INLINE vf add_unit(vf sum, const float *unit, vf y) { return multiply_add(all_of(*unit), y, sum); }

INLINE vh narrowed(vf x) { return (vh)_mm512_cvtepi32_epi16((__m512i)rounded(x)); }

#include "train_loops.h"

#endif

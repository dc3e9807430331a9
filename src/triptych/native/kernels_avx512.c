/* The kernels for x86-64 with AVX-512 and VNNI: a register holds 16 numbers.

   vpdpbusd multiplies unsigned bytes with signed ones, adds four products to each 32-bit number, and takes four bytes
   of a vector for all rows from memory.  Signed weights are read as unsigned ones, 128 larger, and 128 times the sum of
   the vector's numbers is taken off again: whole numbers below 2^24, exact in fp32.

   bf16 weights are widened to fp32, not multiplied by vdpbf16ps, which would round the vectors to bf16 and give other
   bits than the other kernels.  */

#include "kernels.h"

#if X86_KERNELS

#include <immintrin.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni,avx2,fma,f16c")))
#include "vector.h"

#define ISA(NAME) avx512_##NAME
#define LEVEL LEVEL_AVX512
#define VECTORS 8
#define DENSE 6       /* with four rows 24 sums, which leave 8 registers */
#define DENSE_SUMS 24
#define QUERIES_OF_VALUES 6
#define MANY_REGISTERS 1

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vb;

/* A sum of integers begins at the bits of BASE, 1.5 * 2^23.  As its absolute value stays below 2^22, its bits are then
   those of the fp32 number BASE + sum: scale * (BASE + sum) - scale * BASE, rounded once, is scale * sum rounded, with
   no conversion.  A scale is a finite fp16 number, so scale * BASE is exact.  */
#define BASE 12582912.0f
#define BASE_BITS 0x4b400000

INLINE vf vall(float x) { return _mm512_set1_ps(x); }

INLINE __mmask16 first_lanes(int32_t n) { return n >= 16 ? 0xffff : n > 0 ? (__mmask16)((1u << n) - 1) : 0; }

INLINE vf vload_some(const float *x, int32_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), x); }
INLINE void vstore_some(float *x, vf y, int32_t n) { _mm512_mask_storeu_ps(x, first_lanes(n), y); }
INLINE vf vadd(vf x, vf y) { return _mm512_add_ps(x, y); }
INLINE vf vmul(vf x, vf y) { return _mm512_mul_ps(x, y); }
INLINE vf vfma(vf x, vf y, vf z) { return _mm512_fmadd_ps(x, y, z); }
INLINE vf vmax(vf x, vf y) { return _mm512_max_ps(x, y); }
INLINE vf vhalves(const uint8_t *numbers) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)numbers)); }

INLINE vf vint8(const uint8_t *numbers)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)numbers)));
}

INLINE vf vbf16_some(const uint16_t *numbers, int32_t n)
{
    __m256i words = _mm256_maskz_loadu_epi16(first_lanes(n), numbers);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

INLINE vb unsigned_line(const uint8_t *bytes) { return _mm512_loadu_si512(bytes); }

INLINE vb signed_line(const uint8_t *bytes)
{
    return _mm512_xor_si512(_mm512_loadu_si512(bytes), _mm512_set1_epi8(-128));
}

INLINE vb half_bytes(vb line, const int high)
{
    return _mm512_and_si512(high ? _mm512_srli_epi16(line, 4) : line, _mm512_set1_epi8(15));
}

INLINE vb with_fifth_bits(vb line, vb bits, const int place)
{
    bits = place < 4 ? _mm512_slli_epi16(bits, 4 - place) : _mm512_srli_epi16(bits, place - 4);
    return _mm512_ternarylogic_epi64(line, bits, _mm512_set1_epi8(16), 0xf8); /* a | (b & c) */
}

INLINE vi no_products(void) { return _mm512_set1_epi32(BASE_BITS); }

INLINE void add_products(vi *dot, const vb *lines, const int8_t *a, size_t stride, const int count, const int bands,
                         const int is_signed)
{
    const int8_t *far = a + 3 * stride; /* an address has no more than twice the stride: so few registers are needed */
    (void)is_signed;
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        for (int m = 0; m < count; m++) {
            int32_t bytes;
            memcpy(&bytes, (m < 3 ? a + (size_t)m * stride : far + (size_t)(m - 3) * stride) + 4 * j, sizeof bytes);
            vi four = _mm512_set1_epi32(bytes);
            for (int b = 0; b < bands; b++)
                dot[m * bands + b] = _mm512_dpbusd_epi32(dot[m * bands + b], lines[j * bands + b], four);
        }
}

INLINE vf whole(vi dot, float sum, const int is_signed)
{
    vf base = is_signed ? vfma(vall(128), vall(sum), vall(BASE)) : vall(BASE);
    return _mm512_sub_ps(_mm512_castsi512_ps(dot), base);
}

INLINE vf offset_of(vf scale) { return vmul(scale, vall(-BASE)); }
INLINE vf scaled(vi dot, vf scale, vf offset) { return vfma(scale, _mm512_castsi512_ps(dot), offset); }

INLINE vf quarters(const vf *lanes)
{
    vf a = vadd(_mm512_shuffle_f32x4(lanes[0], lanes[1], 0x44), _mm512_shuffle_f32x4(lanes[0], lanes[1], 0xee));
    vf b = vadd(_mm512_shuffle_f32x4(lanes[2], lanes[3], 0x44), _mm512_shuffle_f32x4(lanes[2], lanes[3], 0xee));
    return vadd(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

INLINE vf sums_of_quarters(const vf *fours)
{
    vf a = vadd(_mm512_shuffle_ps(fours[0], fours[1], 0x44), _mm512_shuffle_ps(fours[0], fours[1], 0xee));
    vf b = vadd(_mm512_shuffle_ps(fours[2], fours[3], 0x44), _mm512_shuffle_ps(fours[2], fours[3], 0xee));
    return vadd(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

#include "attend_loops.h"

#endif

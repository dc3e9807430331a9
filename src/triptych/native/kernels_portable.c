/* The kernels in portable C, which define what every operation of the loops computes.

   fmaf rounds once, as the FMA instructions of the other kernels do, so all kernels give the same bits.  A processor
   without such an instruction computes fmaf in software, slowly; the packed layouts need it twice for 32 numbers, the
   dense ones for every number.  fp16 and bf16 numbers are read as little-endian hosts store them.  */

#include "kernels.h"
#include "vector.h"

#define ISA(NAME) portable_##NAME
#define LEVEL LEVEL_PORTABLE
#define VECTORS 1  /* that one pass over the weights serves */
#define DENSE 1    /* the same for dense weights and for keys */
#define DENSE_SUMS 1 /* rows times vectors whose sums are computed together */
#define QUERIES_OF_VALUES 1 /* that one pass over values serves */

typedef struct { float of[16]; } vf;     /* 16 fp32 numbers */
typedef struct { int32_t of[16]; } vi;   /* 16 sums of integers */
typedef struct { uint8_t of[LINE]; } vb; /* a line: four bytes of each of 16 rows */

#define EACH for (int r = 0; r < 16; r++)

INLINE vf vall(float x) { vf y; EACH y.of[r] = x; return y; }

/* The first n numbers, or 16; the others are 0. */
INLINE vf vload_some(const float *x, int32_t n)
{
    vf y = {{0}};
    memcpy(&y, x, (size_t)(n < 16 ? n < 0 ? 0 : n : 16) * sizeof *x);
    return y;
}

INLINE void vstore_some(float *x, vf y, int32_t n) { memcpy(x, &y, (size_t)(n < 16 ? n < 0 ? 0 : n : 16) * sizeof *x); }
INLINE vf vadd(vf x, vf y) { EACH x.of[r] += y.of[r]; return x; }
INLINE vf vmul(vf x, vf y) { EACH x.of[r] *= y.of[r]; return x; }

/* x y + z, rounded once */
INLINE vf vfma(vf x, vf y, vf z) { EACH z.of[r] = fmaf(x.of[r], y.of[r], z.of[r]); return z; }

/* The larger one; y where one is a NaN. */
INLINE vf vmax(vf x, vf y) { EACH y.of[r] = x.of[r] > y.of[r] ? x.of[r] : y.of[r]; return y; }

/* The fp16 number `i` of an array at any address. */
INLINE float half_at(const uint8_t *array, int i)
{
    uint16_t h;
    memcpy(&h, array + 2 * i, sizeof h);
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (exponent == 0) /* zero or subnormal */
        return sign ? -(float)fraction * 0x1p-24f : (float)fraction * 0x1p-24f;
    return float_of_bits(sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | fraction << 13);
}

/* 16 fp16 numbers, int8 numbers, and up to 16 bf16 numbers, the others 0, as fp32. */
INLINE vf vhalves(const uint8_t *numbers) { vf y; EACH y.of[r] = half_at(numbers, r); return y; }
INLINE vf vint8(const uint8_t *numbers) { vf y; EACH y.of[r] = (int8_t)numbers[r]; return y; }

INLINE vf vbf16_some(const uint16_t *numbers, int32_t n)
{
    vf y = {{0}};
    for (int r = 0; r < n && r < 16; r++) y.of[r] = float_of_bf16(numbers[r]);
    return y;
}

/* A line of unsigned bytes, or of signed ones, as `add_products` takes them. */
INLINE vb unsigned_line(const uint8_t *bytes) { vb line; memcpy(&line, bytes, sizeof line); return line; }
INLINE vb signed_line(const uint8_t *bytes) { return unsigned_line(bytes); }

/* The low or the high half of each byte. */
INLINE vb half_bytes(vb line, const int high)
{
    for (int i = 0; i < LINE; i++) line.of[i] = high ? line.of[i] >> 4 : line.of[i] & 15;
    return line;
}

/* Bit `place` of each byte of `bits` becomes bit 4 of the line. */
INLINE vb with_fifth_bits(vb line, vb bits, const int place)
{
    for (int i = 0; i < LINE; i++) line.of[i] |= (uint8_t)((bits.of[i] >> place & 1) << 4);
    return line;
}

INLINE vi no_products(void) { return (vi){{0}}; }

/* dot[m * bands + b] += the products of 16 columns of band b with vector m, whose numbers begin at a + m * stride:
   lines[i * bands + b] has columns 4 i to 4 i + 3.  Unsigned numbers are below 32. */
INLINE void add_products(vi *dot, const vb *lines, const int8_t *a, size_t stride, const int count, const int bands,
                         const int is_signed)
{
    for (int m = 0; m < count; m++)
        for (int j = 0; j < 4 * bands; j++)
            EACH
                for (int i = 0; i < 4; i++) {
                    int byte = lines[j].of[4 * r + i], number = is_signed ? (int8_t)byte : byte;
                    dot[m * bands + j % bands].of[r] += number * a[(size_t)m * stride + (size_t)(4 * (j / bands) + i)];
                }
}

/* The sums as fp32 numbers; `sum` is that of the vector's numbers. */
INLINE vf whole(vi dot, float sum, const int is_signed)
{
    vf y;
    (void)sum, (void)is_signed;
    EACH y.of[r] = (float)dot.of[r];
    return y;
}

/* What `scaled` may need of a scale, computed before. */
INLINE vf offset_of(vf scale) { return scale; }

/* scale * dot of unsigned weights, rounded once */
INLINE vf scaled(vi dot, vf scale, vf offset) { (void)offset; return vmul(scale, whole(dot, 0, 0)); }

/* The numbers of lanes[0..3], added so that four of each are left: those of lanes[i] at 4 i to 4 i + 3. */
INLINE vf quarters(const vf *lanes)
{
    vf y;
    EACH {
        const float *x = lanes[r / 4].of + r % 4;
        y.of[r] = (x[0] + x[8]) + (x[4] + x[12]);
    }
    return y;
}

/* The sums of the quarters: that of quarter i of fours[u] at 4 i + u. */
INLINE vf sums_of_quarters(const vf *fours)
{
    vf y;
    EACH {
        const float *x = fours[r % 4].of + r / 4 * 4;
        y.of[r] = (x[0] + x[2]) + (x[1] + x[3]);
    }
    return y;
}

#include "attend_loops.h"

void unpack_row(const struct matrix *w, int64_t row, float *out)
{
    const int is_signed = w->layout >= LAYOUT_S8, block = block_columns(w->layout);
    const uint8_t *in = band_of(w, (int32_t)(row / BAND), w->layout);
    const int32_t r = (int32_t)(row % BAND);
    for (int32_t k = 0; k < w->columns; k += block, in += block_bytes(w->layout), out += block) {
        const uint8_t *scales = scales_of(in, w->layout);
        float scale = half_at(scales, r), minimum = is_signed ? 0 : half_at(scales + 2 * BAND, r);
        for (int c = 0; c < block; c++) {
            const uint8_t *four = in + 4 * r + c % 4;
            if (is_signed) {
                float factor = block == SUPERGROUP ? scale * (float)(int8_t)in[64 * LINE + BAND * (c / 16) + r] : scale;
                out[c] = factor * (float)(int8_t)four[LINE * (c / 4)];
            } else {
                int code = four[LINE * (c / 8)] >> (c % 8 < 4 ? 0 : 4) & 15;
                if (w->layout == LAYOUT_U5) code |= (four[4 * LINE] >> (c / 4) & 1) << 4;
                out[c] = scale * (float)code + minimum;
            }
        }
    }
}

/* The loops of a training step (train.h), over the operations that each of the files train_*.c defines.

   A unit is what a product multiplies at a time: an fp32 number, or with PAIRS two bf16 numbers, in 32 bits either way.
   The right side of a product stands in panels of PANEL columns, `units` rows of which follow one another; the last panel
   may be narrower, by a multiple of 16.  */

INLINE int64_t units_of(int64_t n) { return PAIRS ? (n + 1) / 2 : n; }
INLINE int64_t whole16(int64_t n) { return (n + 15) / 16 * 16; }
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE const void *vector_of(const struct train_vectors *x, int64_t row, int64_t head, int64_t token, int64_t bf16)
{
    return (const char *)x->data + (row * x->row + head * x->head + token * x->token) * (bf16 ? 2 : 4);
}

INLINE void keep_scaled(void *out, const float *x, int64_t n, float factor, int64_t bf16)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) keep(out, i, i + LANES, load(x + i) * factor, bf16);
    if (i < n) keep(out, i, n, load(x + i) * factor, bf16); /* x goes up to a multiple of 16 */
}

/* The n numbers of a vector as units. */
INLINE void vector_units(float *out, const void *x, int64_t n, int64_t bf16)
{
    if (bf16 && !PAIRS) {
        for (int64_t i = 0; i < n; i++) out[i] = float_of_bf16(((const uint16_t *)x)[i]);
        return;
    }
    if (n % 2) out[units_of(n) - 1] = 0;
    memcpy(out, x, (size_t)n * (bf16 ? sizeof(uint16_t) : sizeof(float)));
}

/* The right side of a product whose columns are `count` vectors of n numbers: [n, count]. */
TARGET static void ISA(columns)(float *out, const void *x, int64_t step, int64_t count, int64_t n, int64_t bf16,
                                float *rows)
{
    const int64_t units = units_of(n), columns = whole16(count);
    for (int64_t begin = 0; begin < columns; begin += 16) {
        int64_t panel = begin / PANEL * PANEL, width = least(columns - panel, PANEL);
        float *to = out + panel * units + begin - panel;
        for (int64_t r = 0; r < 16; r++) {
            if (begin + r < count)
                vector_units(rows + r * units, (const char *)x + (begin + r) * step * (bf16 ? 2 : 4), n, bf16);
            else
                memset(rows + r * units, 0, (size_t)units * sizeof *rows);
        }
        for (int64_t u = 0; u < units; u++)
            for (int64_t r = 0; r < 16; r++) to[u * width + r] = rows[r * units + u];
    }
}

/* The right side of a product whose rows are `count` vectors of n numbers: [count, n]. */
TARGET static void ISA(rows)(float *out, const void *x, int64_t step, int64_t count, int64_t n, int64_t bf16)
{
    const int64_t units = units_of(count), columns = whole16(n);
    for (int64_t u = 0; u < units; u++) {
        const char *first = (const char *)x + (PAIRS ? 2 * u : u) * step * (bf16 ? 2 : 4), *second = first + 2 * step;
        for (int64_t i = 0; i < columns; i += LANES) {
            int64_t panel = i / PANEL * PANEL, width = least(columns - panel, PANEL);
            vf y = i < n ? numbers(first, i, n, bf16) : (vf){0};
            if (PAIRS) { /* a bf16 number that is widened has its bits in the upper half */
                vf high = i < n && 2 * u + 1 < count ? numbers(second, i, n, bf16) : (vf){0};
                y = (vf)((vu)y >> 16 | (vu)high);
            }
            store(out + panel * units + u * width + i - panel, y);
        }
    }
}

/* `rows` rows and `parts` registers of columns of c = a b, or with `adds` of c + a b.  Unit u of row i is a[i * row + u * unit]. */
INLINE void product_tile(float *c, int64_t stride, const float *a, int64_t row, int64_t unit, const float *b,
                         int64_t width, int64_t units, int adds, const int rows, const int parts)
{
    vf sums[ROWS][PARTS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) sums[i][p] = adds ? load(c + i * stride + LANES * p) : (vf){0};
    for (int64_t u = 0; u < units; u++, a += unit, b += width) {
        vf y[PARTS];
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) y[p] = load(b + LANES * p);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int p = 0; p < parts; p++) sums[i][p] = add_unit(sums[i][p], a + i * row, y[p]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int p = 0; p < parts; p++) store(c + i * stride + LANES * p, sums[i][p]);
}

/* c [m, n], whose rows are `stride` numbers apart, n a multiple of 16. */
TARGET static void ISA(product)(float *c, int64_t stride, int64_t m, int64_t n, const float *a, int64_t row,
                                int64_t unit, const float *b, int64_t columns, int64_t all_units, int64_t units,
                                int adds)
{
    for (int64_t j = 0; j < n; j += LANES * PARTS) {
        int64_t panel = j / PANEL * PANEL, width = least(columns - panel, PANEL);
        const float *right = b + panel * all_units + j - panel;
        for (int64_t i = 0; i < m; i += ROWS) {
            float *to = c + i * stride + j;
#define TILE_OF(r, p) product_tile(to, stride, a + i * row, row, unit, right, width, units, adds, r, p)
#define ROWS_OF_PARTS(p) FOR_COUNT(m - i, ROWS, TILE_##p)
#define TILE_1(r) TILE_OF(r, 1)
#define TILE_2(r) TILE_OF(r, 2)
#define TILE_3(r) TILE_OF(r, 3)
#define TILE_4(r) TILE_OF(r, 4)
            switch (least(n - j, LANES * PARTS) / LANES) {
            case 1: ROWS_OF_PARTS(1) break;
            case 2: ROWS_OF_PARTS(2) break;
            case 3: if (PARTS > 2) ROWS_OF_PARTS(3) break;
            default: if (PARTS > 2) ROWS_OF_PARTS(4)
            }
        }
    }
}

#include "train_attend.h"

/* f(x) = x s(x): s(x), and f'(x). */
INLINE vf share_and_slope(vf x, const int64_t function, vf *slope)
{
    const vf one = all_of(1.0f), density = all_of(0.39894228040143268f), root = all_of(0.70710678118654752f);
    const float c = 1.5957691216057308f; /* 2 sqrt(2 / pi) */
    if (function == FUNCTION_GELU) { /* 1 - erf by Abramowitz and Stegun 7.1.26, within 1.5e-7 */
        vf e = exponential(x * x * -0.5f), a = (vf)((vi)x & 0x7fffffff) * root;
        vf t = one / multiply_add(all_of(0.3275911f), a, one), p = all_of(1.061405429f);
        p = multiply_add(p, t, all_of(-1.453152027f));
        p = multiply_add(p, t, all_of(1.421413741f));
        p = multiply_add(p, t, all_of(-0.284496736f));
        p = multiply_add(p, t, all_of(0.254829592f));
        vf tail = p * t * e * 0.5f, s = chosen(x > 0.0f, one - tail, tail);
        *slope = multiply_add(x * e, density, s);
        return s;
    }
    /* 1 / (1 + e^-u); (1 + tanh(u / 2)) / 2 is the same */
    vf inner = function == FUNCTION_SILU ? one : multiply_add(x * x, all_of(c * 0.044715f), all_of(c));
    vf s = if_not_less(x * inner, all_of(-88.0f), one / (one + exponential(-x * inner))); /* e^-u ends at u = -88.3 */
    vf of_u = function == FUNCTION_SILU ? one : multiply_add(x * x, all_of(3 * c * 0.044715f), all_of(c));
    *slope = multiply_add(x * s * (one - s), of_u, s);
    return s;
}

/* The LANES numbers from i on, as far as they are before `last`. */
INLINE void activate_some(const struct train_activation *a, int64_t i, int64_t last, const int64_t function,
                          const int64_t bf16)
{
    vf x = numbers(a->x, i, last, bf16), slope, y = x * share_and_slope(x, function, &slope);
    if (a->gate && bf16) y = (vf)(rounded(y) << 16); /* as where f(x) is a tensor of its own */
    if (a->gate) y *= numbers(a->gate, i, last, bf16);
    keep(a->y, i, last, y, bf16);
}

INLINE void activate_some_back(const struct train_activation *a, int64_t i, int64_t last, const int64_t function,
                               const int64_t bf16)
{
    vf x = numbers(a->x, i, last, bf16), d = numbers(a->d_y, i, last, bf16), slope;
    vf share = share_and_slope(x, function, &slope);
    if (a->gate) {
        keep(a->d_gate, i, last, d * x * share, bf16);
        d *= numbers(a->gate, i, last, bf16);
    }
    keep(a->d_x, i, last, d * slope, bf16);
}

#define ALL(SOME, FUNCTION, BF16)                                                             \
    {                                                                                         \
        int64_t i = first;                                                                    \
        for (; i + LANES <= last; i += LANES) SOME(a, i, i + LANES, FUNCTION, BF16);           \
        if (i < last) SOME(a, i, last, FUNCTION, BF16);                                       \
        break;                                                                                \
    }

#define EACH_FUNCTION(SOME)                                                                   \
    switch (a->function * 2 + (a->bf16 != 0)) {                                               \
    case FUNCTION_SILU * 2: ALL(SOME, FUNCTION_SILU, 0)                                       \
    case FUNCTION_SILU * 2 + 1: ALL(SOME, FUNCTION_SILU, 1)                                   \
    case FUNCTION_GELU * 2: ALL(SOME, FUNCTION_GELU, 0)                                       \
    case FUNCTION_GELU * 2 + 1: ALL(SOME, FUNCTION_GELU, 1)                                   \
    case FUNCTION_GELU_TANH * 2: ALL(SOME, FUNCTION_GELU_TANH, 0)                             \
    case FUNCTION_GELU_TANH * 2 + 1: ALL(SOME, FUNCTION_GELU_TANH, 1)                         \
    }

TARGET static void ISA(activate)(const struct train_activation *a, int64_t first, int64_t last)
{
    EACH_FUNCTION(activate_some)
}

TARGET static void ISA(activate_back)(const struct train_activation *a, int64_t first, int64_t last)
{
    EACH_FUNCTION(activate_some_back)
}

INLINE void rotate_some(const struct train_rotation *r, const char *x, char *y, int64_t i, int64_t end,
                        const float *cosines, const float *sines)
{
    const int64_t half = r->half, bf16 = r->bf16, far = half * (bf16 ? 2 : 4);
    vf a = numbers(x, i, end, bf16), b = numbers(x + far, i, end, bf16);
    vf to_a = numbers(r->back ? sines + half : sines, i, end, 0), to_b = numbers(r->back ? sines : sines + half, i, end, 0);
    keep(y, i, end, multiply_add(b, to_a, a * numbers(cosines, i, end, 0)), bf16);
    keep(y + far, i, end, multiply_add(a, to_b, b * numbers(cosines + half, i, end, 0)), bf16);
}

TARGET static void ISA(rotate)(const struct train_rotation *r, int64_t token)
{
    const float *cosines = r->cosines + token * 2 * r->half, *sines = r->sines + token * 2 * r->half;
    const int64_t size = r->bf16 ? 2 : 4, turned = 2 * r->half;
    for (int64_t head = 0; head < r->heads; head++) {
        const char *x = (const char *)r->x + (token * r->heads + head) * r->width * size;
        char *y = (char *)r->y + (token * r->heads + head) * r->width * size;
        int64_t i = 0;
        for (; i + LANES <= r->half; i += LANES) rotate_some(r, x, y, i, i + LANES, cosines, sines);
        if (i < r->half) rotate_some(r, x, y, i, r->half, cosines, sines);
        memcpy(y + turned * size, x + turned * size, (size_t)((r->width - turned) * size));
    }
}

/* BODY for i = 0, LANES, 2 LANES ... below n, where numbers from `end` on are not there. */
#define OF_A_VECTOR(n, ...)                                               \
    {                                                                     \
        int64_t i = 0, end = LANES;                                       \
        for (; i + LANES <= (n); i += LANES, end = i + LANES) __VA_ARGS__ \
        end = (n);                                                        \
        if (i < end) __VA_ARGS__                                          \
    }

TARGET static void ISA(norm)(const struct train_norm *m, int64_t first, int64_t last)
{
    for (int64_t token = first; token < last; token++) {
        const float *x = m->x + token * m->width;
        float *y = m->y + token * m->width;
        vf sum = {0};
        OF_A_VECTOR(m->width, { vf one = numbers(x, i, end, 0); sum = multiply_add(one, one, sum); })
        float inverse = 1.0f / sqrtf(sum_of_lanes(sum) / (float)m->width + (float)m->eps);
        m->inverse[token] = inverse;
        OF_A_VECTOR(m->width, {
            vf weight = numbers(m->weight, i, end, 0) + (float)m->offset;
            keep(y, i, end, numbers(x, i, end, 0) * inverse * weight, 0);
        })
    }
}

TARGET static void ISA(norm_back)(const struct train_norm *m, int64_t first, int64_t last, float *d_weight)
{
    if (d_weight) memset(d_weight, 0, (size_t)m->width * sizeof *d_weight);
    for (int64_t token = first; token < last; token++) {
        const float *x = m->x + token * m->width, *d = m->d_y + token * m->width, inverse = m->inverse[token];
        float *d_x = m->d_x + token * m->width;
        vf dot = {0};
        OF_A_VECTOR(m->width, {
            vf weight = numbers(m->weight, i, end, 0) + (float)m->offset;
            dot = multiply_add(numbers(d, i, end, 0) * weight, numbers(x, i, end, 0), dot);
        })
        float along = sum_of_lanes(dot) * inverse * inverse / (float)m->width;
        OF_A_VECTOR(m->width, {
            vf weight = numbers(m->weight, i, end, 0) + (float)m->offset, one = numbers(x, i, end, 0);
            vf gradient = numbers(d, i, end, 0);
            keep(d_x, i, end, (gradient * weight - one * along) * inverse, 0);
            if (d_weight) keep(d_weight, i, end, multiply_add(gradient, one * inverse, numbers(d_weight, i, end, 0)), 0);
        })
    }
}

const struct train_kernels ISA(train) = {ISA(attend),        ISA(attend_back), ISA(activate), ISA(activate_back),
                                         ISA(rotate),        ISA(norm),        ISA(norm_back)};

/* The choice of a level, what is called through the table of kernels.h, and the constants that Python repeats.  */

#include <omp.h>

#include "attend.h"
#include "matmul_bf16.h"
#include "train.h"
#include "vector.h"

const struct kernels *kernels_in_use = &portable_kernels;
const struct train_kernels *train_kernels_in_use = &portable_train, *train_pairs_in_use = NULL;

int select_level(int at_most)
{
    int level = LEVEL_PORTABLE;
    (void)at_most;
#if X86_KERNELS
    static const struct kernels *const kernels[] = {&portable_kernels, &avx2_kernels, &avx512_kernels, &avx512_kernels};
    __builtin_cpu_init();
    if (at_most >= LEVEL_AVX2 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c"))
        level = LEVEL_AVX2;
    if (level && at_most >= LEVEL_AVX512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
        level = at_most >= LEVEL_AMX && has_bf16() ? LEVEL_AMX : LEVEL_AVX512;
    kernels_in_use = kernels[level];
    train_kernels_in_use = level == LEVEL_PORTABLE ? &portable_train : level == LEVEL_AVX2 ? &avx2_train : &avx512_train;
    train_pairs_in_use = level >= LEVEL_AVX512 && __builtin_cpu_supports("avx512bf16") ? &avx512_pairs_train : NULL;
#endif
    return level;
}

static size_t aligned(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

size_t matrix_bytes(int32_t layout, int32_t rows, int32_t columns)
{
    if (layout < LAYOUT_F32 || layout >= LAYOUTS) return 0;
    if (layout < LAYOUT_U4) return (layout == LAYOUT_F32 ? 4 : 2) * (size_t)rows * (size_t)columns;
    return ((size_t)rows + BAND - 1) / BAND * (size_t)(columns / block_columns(layout)) * block_bytes(layout);
}

size_t place_input(struct input *in, void *memory)
{
    size_t numbers = (size_t)in->count * (size_t)in->columns, groups = (size_t)in->count * (size_t)(in->columns / GROUP);
    uintptr_t scales = (uintptr_t)memory + aligned(numbers), sums = scales + aligned(groups * sizeof(float));
    in->rounded = memory;
    in->scales = (float *)scales;
    in->sums = (float *)sums;
    return sums + aligned(2 * groups * sizeof(float)) - (uintptr_t)memory;
}

void round_groups(struct input *in, int32_t vector, int32_t first, int32_t last)
{
    kernels_in_use->round(in, vector, first, last);
}

void multiply(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride, const float *bias,
              int32_t first_band, int32_t last_band)
{
    if (w->layout < 0 || w->layout >= LAYOUTS) return;
    kernels_in_use->multiply[w->layout](w, in, y, y_stride, bias, first_band, last_band);
}

void multiply_parallel(const struct matrix *w, struct input *in, float *y, ptrdiff_t y_stride, const float *bias,
                       int32_t threads)
{
    int64_t bands = w->rows / BAND + (w->rows % BAND != 0);
    int32_t groups = w->layout >= LAYOUT_U4 ? in->columns / GROUP : 0;
    /* A few vectors are rounded in less time than other threads need to start. */
#pragma omp parallel for num_threads(threads) if ((int64_t)in->count * groups > 1024)
    for (int32_t m = 0; m < in->count; m++)
        round_groups(in, m, 0, groups);
#pragma omp parallel num_threads(threads)
    {
        int32_t i = omp_get_thread_num(), parts = omp_get_num_threads();
        multiply(w, in, y, y_stride, bias, (int32_t)(bands * i / parts), (int32_t)(bands * (i + 1) / parts));
    }
}

void largest_of(const float *x, int32_t count, int32_t n, int32_t *places, float *tops)
{
    kernels_in_use->largest_of(x, count, n, places, tops);
}

/* The scores x [n] in `y`, those at -inf whose bit is 0. */
static void mask_row(const float *x, float *y, int32_t n, const uint32_t *mask)
{
    memcpy(y, x, (size_t)n * sizeof *y);
    for (int32_t begin = 0; begin < n; begin += 32) {
        int32_t size = n - begin < 32 ? n - begin : 32;
        uint32_t barred = ~*mask++;
        if (size < 32) barred &= ((uint32_t)1 << size) - 1;
        for (; barred; barred &= barred - 1) y[begin + __builtin_ctz(barred)] = -INFINITY;
    }
}

void mask_scores(const float *x, float *y, int32_t count, int32_t n, const uint32_t *masks, int32_t words,
                 const int32_t *which)
{
    for (int32_t row = 0; row < count; row++, x += n, y += n) {
        if (which[row] < 0)
            memcpy(y, x, (size_t)n * sizeof *y);
        else
            mask_row(x, y, n, masks + (int64_t)which[row] * words);
    }
}

/* The token of one row of those whose bit is 1: of few the numbers are taken out, of many the others are at -inf.
   `scratch` are 5 n numbers. */
static int32_t draw_masked(const float *x, int32_t n, const struct draw *how, const uint32_t *mask, float *scratch)
{
    float *numbers = scratch, *weights = scratch + 2 * (int64_t)n;
    int32_t *ids = (int32_t *)(scratch + n), kept = 0, token;
    int64_t allowed = 0;
    for (int32_t word = 0; word < (n + 31) / 32; word++) allowed += __builtin_popcount(mask[word]);
    if (allowed > n / 8) {
        mask_row(x, numbers, n, mask);
        if (how->top_k != 1) return kernels_in_use->sample(numbers, n, how, weights, weights + n);
        largest_of(numbers, 1, n, &token, weights);
        return token;
    }
    for (int32_t begin = 0; begin < n; begin += 32)
        for (uint32_t bits = *mask++; bits; bits &= bits - 1) {
            int32_t i = begin + __builtin_ctz(bits);
            if (i >= n) break;
            numbers[kept] = x[i];
            ids[kept++] = i;
        }
    if (kept == 0) return -1;
    token = kernels_in_use->sample(numbers, kept, how, weights, weights + n);
    return token < 0 ? -1 : ids[token];
}

/* The tokens drawn from `count` rows x [count][n], each in its own way; -1 for a row that has numbers which are not finite.
   With `masks`, those of `mask_scores`, only tokens that they allow.  `scratch` are 5 n numbers for each thread. */
void draw_tokens(const float *x, int32_t count, int32_t n, const struct draw *how, int32_t *tokens, float *scratch,
                 int32_t threads, const uint32_t *masks, int32_t words, const int32_t *which)
{
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (count > 1)
    for (int32_t row = 0; row < count; row++) {
        float *own = scratch + (int64_t)omp_get_thread_num() * 5 * n;
        const float *numbers = x + (int64_t)row * n;
        if (masks != NULL && which[row] >= 0)
            tokens[row] = draw_masked(numbers, n, how + row, masks + (int64_t)which[row] * words, own);
        else
            tokens[row] = kernels_in_use->sample(numbers, n, how + row, own, own + n);
    }
}

/* Numbers of memory that each thread needs: scores, and the weight that each key receives. */
int64_t scratch_floats(const struct score_tile *t) { return (STATISTICS_QUERIES + 1) * t->panels * STATISTICS_PANEL; }

/* Fill the results of a tile; nothing, where more than STATISTICS_TOP weights are asked for. */
void score_statistics(const struct score_tile *t, int32_t threads)
{
    int64_t row = t->panels * STATISTICS_PANEL, each = scratch_floats(t);
    if (t->top > STATISTICS_TOP) return;
#pragma omp parallel num_threads(threads)
    for (int32_t h = 0; h < t->heads; h++) {
#pragma omp for schedule(static, 1)
        for (int32_t part = 0; part < threads; part++) { /* a key receives the same sum, whichever thread is late */
            float *scores = t->scratch + part * each, *received = scores + STATISTICS_QUERIES * row;
            memset(received, 0, (size_t)row * sizeof *received);
            for (int32_t i = part * STATISTICS_QUERIES; i < t->queries; i += threads * STATISTICS_QUERIES)
                kernels_in_use->statistics(t, h, i, scores, received);
        }
#pragma omp single
        for (int32_t part = 0; part < threads; part++)
            for (int32_t j = 0; j < t->keys; j++)
                t->received[h * t->row + j] += t->scratch[part * each + STATISTICS_QUERIES * row + j];
    }
}

#define C(name) {#name, name},
#define AS_TEXT(name, ...) #name ": " #__VA_ARGS__ "\n"
#define SIZE(of) {"sizeof " #of, sizeof(struct of)},
static const struct {
    const char *name;
    int64_t value;
} constants[] = {
    C(BAND) C(GROUP) C(SUPERGROUP) C(PAIR) C(RANGE) C(TILE_KEYS) C(QUERIES) C(QUERIES_BF16) C(SCORES) C(WIDEST_BF16)
    C(FEW_TOKENS) C(COUNTERS) C(PAGES_OF_CHUNK) C(STATISTICS_TOP) C(STATISTICS_PANEL) C(OUTPUT)
    C(LEVEL_PORTABLE) C(LEVEL_AVX2) C(LEVEL_AVX512) C(LEVEL_AMX)
    C(LAYOUT_F32) C(LAYOUT_BF16) C(LAYOUT_U4) C(LAYOUT_U5) C(LAYOUT_S8) C(LAYOUT_S8X16)
    C(OP_NONE) C(OP_EMBED) C(OP_ROUND) C(OP_LINEAR) C(OP_LAYER_NORM) C(OP_RMS_NORM) C(OP_ROTATE) C(OP_MAP)
    C(OP_MAP_MULTIPLY) C(OP_ADD) C(OP_ATTEND) C(OP_EXTEND) C(OP_CHOOSE) C(OP_ROUTE) C(OP_TAKE) C(OP_GIVE)
    C(OP_ROUND_BF16) C(OP_LINEAR_BF16) C(OP_STORED)
    C(INDEX_IDS) C(INDEX_POSITIONS) C(INDEX_TOKENS) C(INDEX_NONE) C(PAIRING_HALF) C(PAIRING_INTERLEAVED)
    C(ROWS_TOKENS) C(ROWS_CHOSEN) C(ROWS_EXPERT) C(BARRIER_NONE) C(BARRIER_BEFORE) C(BARRIER_IF_ANY)
    C(ATTEND_SELF) C(ATTEND_CROSS) C(ATTEND_ROW) C(STORED_F32) C(STORED_BF16) C(STORED_F16) C(STORED_INT8)
    C(FUNCTION_NONE) C(FUNCTION_SILU) C(FUNCTION_GELU) C(FUNCTION_GELU_TANH) C(FUNCTION_RELU) C(FUNCTION_TANH)
    C(FUNCTION_SCALE) C(FUNCTION_SHIFT) C(FUNCTION_SOFTCAP) C(FUNCTION_SIGMOID) C(FUNCTION_ABS) C(FUNCTION_RECIPROCAL)
    C(FUNCTION_EXP)
    SIZE(instruction) SIZE(chunk) SIZE(store) SIZE(plan) SIZE(batch) SIZE(matrix) SIZE(input) SIZE(score_tile) SIZE(draw)
    SIZE(train_vectors) SIZE(train_attention) SIZE(train_activation) SIZE(train_rotation) SIZE(train_norm) C(NORM_TOKENS) C(LONGEST_ROW)
    {OPERANDS(AS_TEXT), 0}};

const char *constant(int i, int64_t *value)
{
    if (i < 0 || (size_t)i >= sizeof constants / sizeof *constants) return NULL;
    *value = constants[i].value;
    return constants[i].name;
}

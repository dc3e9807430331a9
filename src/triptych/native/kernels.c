/* The choice of a level, the constants that Python repeats, and what is called through the table of kernels.h.  */

#include "attend.h"
#include "matmul_bf16.h"
#include "vector.h"

const struct kernels *kernels_in_use = &portable_kernels;
int level_in_use = LEVEL_PORTABLE;

int select_level(int at_most)
{
    level_in_use = LEVEL_PORTABLE;
    kernels_in_use = &portable_kernels;
#if X86_KERNELS
    __builtin_cpu_init();
    if (at_most < LEVEL_AVX2 || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("f16c"))
        return level_in_use;
    kernels_in_use = &avx2_kernels;
    level_in_use = LEVEL_AVX2;
    if (at_most < LEVEL_AVX512 || !__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512vnni"))
        return level_in_use;
    kernels_in_use = &avx512_kernels;
    level_in_use = at_most >= LEVEL_AMX && has_bf16() ? LEVEL_AMX : LEVEL_AVX512;
#endif
    return level_in_use;
}

void largest_of(const float *x, int32_t count, int32_t n, int32_t *places, float *tops)
{
    kernels_in_use->largest_of(x, count, n, places, tops);
}

#define C(name) {#name, name},
#define SIZE(of) {"sizeof " #of, sizeof(struct of)},
static const struct {
    const char *name;
    int64_t value;
} constants[] = {
    C(BAND) C(GROUP) C(SUPERGROUP) C(PAIR) C(RANGE) C(TILE_KEYS) C(QUERIES) C(QUERIES_BF16) C(SCORES) C(WIDEST_BF16)
    C(FEW_TOKENS) C(COUNTERS) C(STATISTICS_TOP) C(STATISTICS_PANEL) C(OUTPUT)
    C(LEVEL_PORTABLE) C(LEVEL_AVX2) C(LEVEL_AVX512) C(LEVEL_AMX)
    C(LAYOUT_F32) C(LAYOUT_BF16) C(LAYOUT_U4) C(LAYOUT_U5) C(LAYOUT_S8) C(LAYOUT_S8X16)
    C(OP_NONE) C(OP_EMBED) C(OP_ROUND) C(OP_LINEAR) C(OP_LAYER_NORM) C(OP_RMS_NORM) C(OP_ROTATE) C(OP_MAP)
    C(OP_MAP_MULTIPLY) C(OP_ADD) C(OP_ATTEND) C(OP_EXTEND) C(OP_CHOOSE) C(OP_ROUTE) C(OP_TAKE) C(OP_GIVE)
    C(OP_ROUND_BF16) C(OP_LINEAR_BF16) C(OP_STORED)
    C(INDEX_IDS) C(INDEX_POSITIONS) C(INDEX_TOKENS) C(INDEX_NONE) C(PAIRING_HALF) C(PAIRING_INTERLEAVED)
    C(ROWS_TOKENS) C(ROWS_CHOSEN) C(ROWS_EXPERT) C(BARRIER_NONE) C(BARRIER_BEFORE) C(BARRIER_IF_ANY)
    C(ATTEND_SELF) C(ATTEND_CROSS) C(ATTEND_ROW) C(STORED_F32) C(STORED_BF16) C(STORED_F16) C(STORED_INT8)
    C(FUNCTION_NONE) C(FUNCTION_SILU) C(FUNCTION_GELU) C(FUNCTION_GELU_TANH) C(FUNCTION_RELU) C(FUNCTION_TANH)
    C(FUNCTION_SCALE) C(FUNCTION_SHIFT) C(FUNCTION_SOFTCAP)
    SIZE(instruction) SIZE(store) SIZE(plan) SIZE(batch) SIZE(matrix) SIZE(input) SIZE(score_tile)};

const char *constant(int i, int64_t *value)
{
    if (i < 0 || (size_t)i >= sizeof constants / sizeof *constants) return NULL;
    *value = constants[i].value;
    return constants[i].name;
}

#define AS_TEXT(name, ...) #name ": " #__VA_ARGS__ "\n"

const char *operands(void) { return OPERANDS(AS_TEXT); }

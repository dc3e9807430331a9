/* A token drawn from a row of logits (`triptych.generate.sampling`): the structure of a call, and for the files
   kernels_*.c the loops.  A filter keeps the numbers that are not below a bound, so that equal ones stay or go together.
   Of what is kept, in the order of the vocabulary, the token is drawn in whose share of the whole weight `uniform` falls.  */

#ifndef TRIPTYCH_SAMPLE_H
#define TRIPTYCH_SAMPLE_H

#include <stdint.h>

struct draw {
    double uniform;   /* in [0, 1) */
    double top_p;     /* 1: off */
    float temperature, lowest; /* above 0; the logarithm of min-p, -inf: off */
    int32_t top_k;    /* 0: off */
    int32_t reserved;
};

#endif

#ifdef ISA

#define WEIGHTS_BLOCK 256 /* tokens whose weights are added in fp32 */
#define BUCKETS 1024      /* into which numbers are sorted to find the bound of top-p */

/* One number with its weight, while the bound of a filter is looked for. */
struct weighed { float x, weight; };

/* The smallest number that stays, where one stays if those above it weigh less than `target` together.  By quickselect;
   `items` change places. */
INLINE float bound_of(struct weighed *items, int64_t count, double target)
{
    double above = 0.0; /* the weight of what is larger than all that is left */
    uint64_t state = 88172645463325252u;
    float bound = -INFINITY;
    while (count > 0) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        float pivot = items[state % (uint64_t)count].x;
        int64_t larger = 0, smaller = count, i = 0;
        double of_larger = 0.0, of_equal = 0.0;
        while (i < smaller) { /* larger ones to the front, smaller ones to the end */
            struct weighed one = items[i];
            if (one.x > pivot) {
                of_larger += one.weight;
                items[i++] = items[larger];
                items[larger++] = one;
            } else if (one.x < pivot) {
                items[i] = items[--smaller];
                items[smaller] = one;
            } else {
                of_equal += one.weight;
                i++;
            }
        }
        if (above + of_larger >= target) {
            count = larger;
            continue;
        }
        bound = pivot;
        above += of_larger + of_equal;
        if (above >= target) break;
        items += smaller;
        count -= smaller;
    }
    return bound;
}

/* The weights that a bound leaves of 16 numbers. */
INLINE v16 weights_above(const float *x, const float *weights, float bound)
{
    return pick(load16(x) >= bound, load16(weights), (v16){0});
}

/* The sum of what a bound leaves of a block. */
INLINE float block_above(const float *x, const float *weights, float bound, int32_t n)
{
    v16 sum = {0};
    int32_t i = 0;
    for (; i + 16 <= n; i += 16) sum += weights_above(x + i, weights + i, bound);
    float rest = sum16(sum);
    for (; i < n; i++) rest += x[i] >= bound ? weights[i] : 0.0f;
    return rest;
}

/* Whether one of 16 comparisons holds. */
INLINE int any16(v16i x)
{
    int64_t bits[8], any = 0;
    memcpy(bits, &x, sizeof bits);
    for (int b = 0; b < 8; b++) any |= bits[b];
    return any != 0;
}

/* The k-th largest number.  That of the largest ones of groups is not above it, and leaves few to look at. */
INLINE float largest_bound(struct weighed *items, const float *x, int32_t n, int32_t k)
{
    float bound = -INFINITY;
    int64_t count = 0;
    if (n / GROUP >= k) {
        for (int32_t g = 0; g < n / GROUP; g++)
            items[g] = (struct weighed){max16(larger(load16(x + g * GROUP), load16(x + g * GROUP + 16))), 1.0f};
        bound = bound_of(items, n / GROUP, k);
    }
    for (int32_t begin = 0; begin < n; begin += 16) {
        int32_t end = n - begin < 16 ? n : begin + 16;
        if (end - begin == 16 && !any16(load16(x + begin) >= bound)) continue;
        for (int32_t i = begin; i < end; i++)
            if (x[i] >= bound) items[count++] = (struct weighed){x[i], 1.0f};
    }
    return bound_of(items, count, k);
}

/* The buckets of 16 numbers by how far they are below the largest one, equal numbers in the same. */
INLINE v16i buckets16(v16 x, float top, float scale)
{
    v16 away = (top - x) * scale;
    away = pick(away < BUCKETS - 1, away, (v16){0} + (BUCKETS - 1));
    return __builtin_convertvector(away, v16i);
}

/* The smallest number that stays of those not below `bound`, where one stays if the larger ones weigh less than
   `target` together.  Numbers of less weight than `light` weigh no more than what is to go, all together; they are in
   the last bucket, so that the others are found in the blocks of 16 that have one of more weight. */
INLINE float heavy_bound(struct weighed *items, const float *x, const float *weights, int32_t n, float top, float bound,
                         float light, float scale, double target)
{
    const v16i nowhere = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; /* of each lane, so that none waits */
    double masses[BUCKETS + 16] = {0}, above = 0.0;
    int32_t places[16], bucket = 0, blocks = 0;
    int64_t count = 0;
    int32_t *with_heavy = (int32_t *)(items + n) - (n + 15) / 16; /* read before items reach it: 16 for each, at most */
    for (int32_t begin = 0; begin < n; begin += 16) {
        int32_t end = n - begin < 16 ? n - begin : 16;
        v16 numbers = end < 16 ? load_part(x + begin, end, -INFINITY) : load16(x + begin);
        v16 heavy = end < 16 ? load_part(weights + begin, end, 0.0f) : load16(weights + begin);
        v16i stays = (numbers >= bound) & (heavy >= light);
        if (!any16(stays)) continue;
        with_heavy[blocks++] = begin;
        v16i into = (stays & buckets16(numbers, top, scale)) | (~stays & (nowhere + BUCKETS));
        float added[16];
        store16(added, heavy);
        memcpy(places, &into, sizeof places);
        for (int32_t i = 0; i < end; i++) masses[places[i]] += added[i];
    }
    while (bucket < BUCKETS - 1 && above + masses[bucket] < target) above += masses[bucket++];
    int all = bucket == BUCKETS - 1;
    for (int32_t block = 0; block < (all ? (n + 15) / 16 : blocks); block++) {
        int32_t begin = all ? 16 * block : with_heavy[block], end = n - begin < 16 ? n - begin : 16;
        v16 numbers = end < 16 ? load_part(x + begin, end, -INFINITY) : load16(x + begin);
        v16i into = buckets16(numbers, top, scale);
        if (!any16(into == bucket)) continue;
        memcpy(places, &into, sizeof places);
        for (int32_t i = 0; i < end; i++)
            if (places[i] == bucket && x[begin + i] >= bound)
                items[count++] = (struct weighed){x[begin + i], weights[begin + i]};
    }
    return bound_of(items, count, target - above);
}

/* The token of one row x [n]; -1 where its numbers have no largest one, or one is a NaN.  `weights` [n] and `items` [n]
   are memory for the call. */
TARGET static int32_t ISA(sample)(const float *x, int32_t n, const struct draw *how, float *weights, void *items)
{
    v16 tops = (v16){0} - INFINITY;
    int32_t whole = n / 16 * 16;
    for (int32_t i = 0; i < whole; i += 16) tops = larger(load16(x + i), tops);
    if (whole < n) tops = larger(load_part(x + whole, n - whole, -INFINITY), tops);
    float top = max16(tops);
    if (!(top < INFINITY && top > -INFINITY)) return -1;

    double total = 0.0;
    for (int32_t begin = 0; begin < n; begin += WEIGHTS_BLOCK) {
        int32_t end = n - begin < WEIGHTS_BLOCK ? n : begin + WEIGHTS_BLOCK;
        v16 sum = {0};
        for (int32_t i = begin; i < end; i += 16) {
            v16 logits = end - i < 16 ? load_part(x + i, end - i, -INFINITY) : load16(x + i);
            v16 weight = exp16((logits - top) / how->temperature);
            sum += weight;
            memcpy(weights + i, &weight, (size_t)(end - i < 16 ? end - i : 16) * sizeof *weights);
        }
        total += sum16(sum);
    }
    if (!(total >= 1.0)) return -1; /* a NaN */

    float bound = -INFINITY;
    struct weighed *kept = items;
    if (how->top_k > 0 && how->top_k < n) bound = largest_bound(kept, x, n, how->top_k);
    if (how->top_p < 1.0) {
        if (bound > -INFINITY) {
            total = 0.0;
            for (int32_t i = 0; i < n; i += WEIGHTS_BLOCK)
                total += block_above(x + i, weights + i, bound, n - i < WEIGHTS_BLOCK ? n - i : WEIGHTS_BLOCK);
        }
        double light = (1.0 - how->top_p) * total / n * 0.999;
        float range = light > 1e-38 ? (float)-log(light) * how->temperature : 88.0f * how->temperature;
        float own = heavy_bound(kept, x, weights, n, top, bound, (float)light, BUCKETS / range, how->top_p * total);
        bound = own > bound ? own : bound;
    }
    for (int32_t i = 0; how->lowest > -INFINITY && i < n; i += 16) {
        size_t bytes = (size_t)(n - i < 16 ? n - i : 16) * sizeof *weights;
        v16 logits = n - i < 16 ? load_part(x + i, n - i, -INFINITY) : load16(x + i), weight = {0};
        memcpy(&weight, weights + i, bytes);
        weight = pick((logits - top) / how->temperature < how->lowest, (v16){0}, weight);
        memcpy(weights + i, &weight, bytes);
    }

    double sums = 0.0, before = 0.0;
    float *of_blocks = items; /* which are done with */
    for (int32_t i = 0; i < n; i += WEIGHTS_BLOCK) {
        int32_t own = n - i < WEIGHTS_BLOCK ? n - i : WEIGHTS_BLOCK;
        sums += of_blocks[i / WEIGHTS_BLOCK] = block_above(x + i, weights + i, bound, own);
    }
    if (bound == -INFINITY && how->lowest == -INFINITY) sums = total;
    double target = how->uniform * sums;
    int32_t token = -1;
    for (int32_t begin = 0; begin < n; begin += WEIGHTS_BLOCK) {
        double of_block = of_blocks[begin / WEIGHTS_BLOCK];
        if (of_block > 0.0 && before + of_block > target) {
            int32_t end = n - begin < WEIGHTS_BLOCK ? n : begin + WEIGHTS_BLOCK;
            double inside = before;
            for (int32_t i = begin; i < end; i++) {
                if (x[i] < bound || weights[i] == 0.0f) continue;
                token = i; /* the last one of a block whose sum is rounded up */
                inside += weights[i];
                if (inside > target) return token;
            }
            return token;
        }
        before += of_block;
    }
    /* Rounding of the sums left nothing above the target: the last token that is kept. */
    for (int32_t i = n - 1; i >= 0; i--)
        if (x[i] >= bound && weights[i] > 0.0f) return i;
    return -1;
}

#endif

/* The operations of a step whose products are in bf16, and several steps at once.  */

#include "matmul_bf16.h"
#include "step.h"

#ifdef _OPENMP
#include <omp.h>
#endif

void step_round_bf16(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input);
    uint16_t *out = (uint16_t *)buffer(me, it->output);
    int64_t padded = (int64_t)pairs_in(it->width) * PAIR, first, last;
    share(me, row_count(me, it), &first, &last);
    for (int64_t n = first; n < last; n++) round_bf16(out + n * padded, x + n * it->width, it->width);
}

void step_linear_bf16(struct worker *me, const struct instruction *it)
{
    const struct matrix *weights = me->plan->weights, *w = weights + it->weight;
    struct bf16_product product = {
        .weight = w, .gate = it->gate == -1 ? NULL : weights + it->gate, .count = row_count(me, it),
        .function = it->kind, .factor = it->first, .rounded = it->number, .x = (const uint16_t *)buffer(me, it->input),
        .bias = it->bias == -1 ? NULL : weights[it->bias].data,
        .more = it->third == -1 ? NULL : buffer(me, it->third), .y = buffer(me, it->output)};
    int64_t first, last;
    share(me, pairs_in(w->rows), &first, &last);
    if (first < last) multiply_bf16(&product, (int32_t)first, (int32_t)last);
}

void run_steps(const struct plan *plans, const struct batch *batches, int32_t count, int32_t threads,
               int64_t arena_floats)
{
#ifdef _OPENMP
    if (threads > 1 && count >= threads) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
        for (int32_t i = 0; i < count; i++) {
            struct batch own = batches[i];
            own.threads = 1;
            own.arena += omp_get_thread_num() * arena_floats;
            own.scratch += (int64_t)omp_get_thread_num() * own.scratch_floats;
            run_step(plans + i, &own);
        }
        return;
    }
#endif
    for (int32_t i = 0; i < count; i++) run_step(plans + i, batches + i);
}

/* A mixture of experts: which tokens go through which expert, and their results put together.

   The experts run one after another, each on its own tokens; one thread finds these before the others begin.  */

#include "step.h"

#include <math.h>
#include <string.h>

/* The weights of one token's experts: the softmax of its scores, kept for the `top` largest; of equal scores the first
   comes first.  kind: whether the kept ones are divided by their sum. */
static void route(float *out, const float *scores, const struct instruction *it)
{
    int32_t n = it->heads;
    float most = scores[0], sum = 0.0f, kept = 0.0f;
    for (int32_t e = 1; e < n; e++)
        if (scores[e] > most) most = scores[e];
    for (int32_t e = 0; e < n; e++) sum += expf(scores[e] - most);
    for (int32_t e = 0; e < n; e++) {
        int32_t better = 0;
        for (int32_t other = 0; other < n; other++)
            better += scores[other] > scores[e] || (scores[other] == scores[e] && other < e);
        out[e] = better < it->top ? expf(scores[e] - most) / sum : 0.0f;
        kept += out[e];
    }
    if (it->kind)
        for (int32_t e = 0; e < n; e++) out[e] /= kept;
}

void step_route(struct worker *me, const struct instruction *it)
{
    const float *scores = buffer(me, it->input);
    float *out = buffer(me, it->output), *sum = buffer(me, it->third);
    int64_t first, last;
    share(me, row_count(me, it), &first, &last);
    for (int64_t n = first; n < last; n++) {
        route(out + n * it->heads, scores + n * it->heads, it);
        memset(sum + n * it->width, 0, (size_t)it->width * sizeof *sum);
    }
}

void step_members(struct worker *me, const struct instruction *it)
{
    const float *weights = buffer(me, it->second);
    me->taken = 0;
    for (int32_t n = 0; n < me->batch->tokens; n++)
        if (weights[(int64_t)n * it->heads + it->number] != 0.0f) me->members[me->taken++] = n;
}

void step_take(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input);
    float *out = buffer(me, it->output);
    int64_t first, last;
    share(me, me->taken, &first, &last);
    for (int64_t i = first; i < last; i++)
        memcpy(out + i * it->width, x + (int64_t)me->members[i] * it->width, (size_t)it->width * sizeof *out);
}

void step_give(struct worker *me, const struct instruction *it)
{
    const float *x = buffer(me, it->input), *weights = buffer(me, it->second);
    float *out = buffer(me, it->output);
    int64_t first, last;
    share(me, me->taken, &first, &last);
    for (int64_t i = first; i < last; i++) {
        int64_t token = me->members[i];
        float weight = weights[token * it->heads + it->number];
        for (int32_t d = 0; d < it->width; d++) out[token * it->width + d] += x[i * it->width + d] * weight;
    }
}

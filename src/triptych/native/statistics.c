/* Shares the queries of a tile of attention statistics out to threads.  See statistics.h.  */

#include <string.h>

#include "kernels.h"

/* Numbers of memory that each thread needs: scores, and the weight that each key receives. */
int64_t scratch_floats(const struct score_tile *t)
{
    return (STATISTICS_QUERIES + 1) * t->panels * STATISTICS_PANEL;
}

/* Fill the results of a tile.  0: done; 1: more than STATISTICS_TOP weights were asked for, and nothing was done. */
int score_statistics(const struct score_tile *t, int32_t threads)
{
    int64_t row = t->panels * STATISTICS_PANEL, each = scratch_floats(t);
    if (t->top > STATISTICS_TOP) return 1;
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
    return 0;
}

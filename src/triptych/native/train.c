/* The division of a training step's functions (train.h) among threads. */

#include "train.h"

#include <omp.h>

#define PIECE 16384 /* numbers of an activation that are a thread's at a time */

static const struct train_kernels *kernels_for(int64_t bf16)
{
    return bf16 && train_pairs_in_use ? train_pairs_in_use : train_kernels_in_use;
}

/* At least what `places_of` (train_attend.h) takes, a multiple of 16. */
int64_t attention_scratch(const struct train_attention *a)
{
    const int64_t keys = (a->keys + 15) / 16 * 16, k = (a->width + 15) / 16 * 16, v = (a->value_width + 15) / 16 * 16;
    return keys * (3 * k + 2 * v) + 3 * QUERY_BLOCK * (k + v) + 7 * QUERY_BLOCK * (keys + 16) / 2 + 16 * (k + v);
}

void attention_forward(const struct train_attention *a, int32_t threads)
{
    const struct train_kernels *kernels = kernels_for(a->bf16);
    const int64_t each = attention_scratch(a);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < a->rows * a->heads; i++)
        kernels->attend(a, i / a->heads, i % a->heads, a->scratch + omp_get_thread_num() * each);
}

/* A gradient of a bias that all rows share is the sum over the rows in their order: a thread has all of a group. */
void attention_backward(const struct train_attention *a, int32_t threads)
{
    const struct train_kernels *kernels = kernels_for(a->bf16);
    const int64_t each = attention_scratch(a), together = a->d_bias.data && a->d_bias.row == 0 ? a->rows : 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
    for (int64_t i = 0; i < a->rows * a->groups / together; i++)
        for (int64_t row = 0; row < together; row++)
            kernels->attend_back(a, together > 1 ? row : i / a->groups, together > 1 ? i : i % a->groups,
                                 a->scratch + omp_get_thread_num() * each);
}

void activation_forward(const struct train_activation *a, int32_t threads)
{
    const struct train_kernels *kernels = kernels_for(a->bf16);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < a->count; first += PIECE)
        kernels->activate(a, first, first + PIECE < a->count ? first + PIECE : a->count);
}

void activation_backward(const struct train_activation *a, int32_t threads)
{
    const struct train_kernels *kernels = kernels_for(a->bf16);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < a->count; first += PIECE)
        kernels->activate_back(a, first, first + PIECE < a->count ? first + PIECE : a->count);
}

void rotation(const struct train_rotation *r, int32_t threads)
{
    const struct train_kernels *kernels = kernels_for(r->bf16);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t token = 0; token < r->tokens; token++) kernels->rotate(r, token);
}

static int64_t end_of_piece(const struct train_norm *m, int64_t first)
{
    return first + NORM_TOKENS < m->tokens ? first + NORM_TOKENS : m->tokens;
}

void norm_forward(const struct train_norm *m, int32_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < m->tokens; first += NORM_TOKENS)
        train_kernels_in_use->norm(m, first, end_of_piece(m, first));
}

void norm_backward(const struct train_norm *m, int32_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t first = 0; first < m->tokens; first += NORM_TOKENS)
        train_kernels_in_use->norm_back(m, first, end_of_piece(m, first),
                                        m->d_weight ? m->d_weight + first / NORM_TOKENS * m->width : NULL);
    for (int64_t i = m->width; m->d_weight && i < (m->tokens + NORM_TOKENS - 1) / NORM_TOKENS * m->width; i++)
        m->d_weight[i % m->width] += m->d_weight[i];
}

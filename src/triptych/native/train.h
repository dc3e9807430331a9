/* Functions of a training step: attention up to some hundred keys and activations, forward and backward.

   Numbers of a tensor are fp32, or bf16 where `bf16` is not 0; sums, softmax and functions are in fp32.  The functions
   are compiled for each level from train_loops.h; unlike those of kernels.h, they give other bits at another level.
   Their bits do not depend on the number of threads.  */

#ifndef TRIPTYCH_TRAIN_H
#define TRIPTYCH_TRAIN_H

#include <stddef.h>
#include <stdint.h>

#define QUERY_BLOCK 64  /* queries whose scores are in memory at a time */
#define PANEL 64        /* columns of the right side of a product that stand together */
#define LONGEST_ROW 512 /* keys of a row at most */

/* Vectors [rows][heads][tokens], each of numbers that follow one another.  The steps are in numbers; 0 where all rows or
   all heads have the same. */
struct train_vectors {
    void *data;
    int64_t row, head, token;
};

/* softmax(scale q k + bias) v for each row and head; head h reads the keys of group h / (heads / groups).

   lse       [rows][heads][queries], the logarithm of the sum of e^score; infinity for a query that sees nothing, whose
             output is 0.  Backward reads it.
   bias      fp32 [keys] of each query, added to the scores; `data` is NULL without one.
   visible   bytes [keys] of each query, 0 where hidden; likewise.
   causal    a query at place i sees keys up to place keys - queries + i.
   d_bias    the sum of the gradients of the scores over those that share a bias; zeros at first.  Its heads are apart.
   scratch   attention_scratch numbers for each thread.  */
struct train_attention {
    struct train_vectors q, k, v, out, bias, visible, d_out, d_q, d_k, d_v, d_bias;
    float *lse, *scratch;
    int64_t rows, heads, groups, queries, keys, width, value_width, bf16, causal;
    double scale;
};

/* Numbers [count]; y = f(x) times `gate` where there is one.  Backward: d_x and d_gate from d_y, x and gate.  `function`
   is one of enum function (vector.h): SILU, GELU, GELU_TANH. */
struct train_activation {
    const void *x, *gate, *d_y;
    void *y, *d_x, *d_gate;
    int64_t count, bf16, function;
};

/* Rotary positions of vectors x [tokens][heads][width], which follow one another: number i of the first 2 `half` of each,
   with its partner half numbers away, becomes x cos + partner sin, cos and sin [tokens][2 half] in fp32; the others stay.
   With `back` y is the gradient of x from that of the result.  */
struct train_rotation {
    const void *x;
    void *y;
    const float *cosines, *sines;
    int64_t tokens, heads, width, half, bf16, back;
};

/* y = x / sqrt(mean(x^2) + eps) (weight + offset) of vectors x [tokens][width] in fp32, which follow one another; `inverse`
   [tokens] is what x is multiplied with.  Backward: d_x; and d_weight where it is not NULL, [pieces][width] for pieces of
   NORM_TOKENS tokens, whose sum then is in the first.  */
#define NORM_TOKENS 128
struct train_norm {
    const float *x, *weight, *d_y;
    float *y, *inverse, *d_x, *d_weight;
    int64_t tokens, width;
    double eps, offset;
};

struct train_kernels {
    void (*attend)(const struct train_attention *a, int64_t row, int64_t head, float *scratch);
    void (*attend_back)(const struct train_attention *a, int64_t row, int64_t group, float *scratch);
    void (*activate)(const struct train_activation *a, int64_t first, int64_t last);
    void (*activate_back)(const struct train_activation *a, int64_t first, int64_t last);
    void (*rotate)(const struct train_rotation *r, int64_t token);
    void (*norm)(const struct train_norm *m, int64_t first, int64_t last);
    void (*norm_back)(const struct train_norm *m, int64_t first, int64_t last, float *d_weight);
};

extern const struct train_kernels portable_train;
#if defined(__x86_64__)
extern const struct train_kernels avx2_train, avx512_train, avx512_pairs_train;
#endif

/* What select_level chose; for numbers of bf16 in pairs, NULL where the processor does not multiply such. */
extern const struct train_kernels *train_kernels_in_use, *train_pairs_in_use;

int64_t attention_scratch(const struct train_attention *a);
void attention_forward(const struct train_attention *a, int32_t threads);
void attention_backward(const struct train_attention *a, int32_t threads);
void activation_forward(const struct train_activation *a, int32_t threads);
void activation_backward(const struct train_activation *a, int32_t threads);
void rotation(const struct train_rotation *r, int32_t threads);
void norm_forward(const struct train_norm *m, int32_t threads);
void norm_backward(const struct train_norm *m, int32_t threads);

#endif

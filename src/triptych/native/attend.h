/* Structures and constants of the attention files, and the functions of attention in the table of kernels.h.

   A score is a sum over the numbers of a key in 16 lanes: number d is added to lane d % 16 with fma, then the upper
   half of the lanes is added to the lower half until one is left.  The softmax is over one range of positions at a
   time; its exponentials are those of `exponentials` in attend_loops.h.  A value, times its weight, is added
   with fma to the sums of its query in the order of positions.  All levels give the same bits.  */

#ifndef TRIPTYCH_ATTEND_H
#define TRIPTYCH_ATTEND_H

#include "kernels.h"
#include "step.h"

#define TILE_KEYS 64 /* positions whose keys or values a thread looks up, and widens, at a time */
#define QUERIES 64   /* of one unit of work at most */
#define QUERIES_BF16 192 /* the same where products are in bf16 */
#define FEW_TOKENS 16    /* of a step, up to which the ranges of a query may be units of their own */
#define COUNTERS 2048    /* of finished ranges: the first numbers of `partial` */

/* Sums over positions: of the values, times their weights, which are e^(score - most); and of the weights. */
struct sums {
    float *out;
    float most, total;
};

/* A query.  Places count from the beginning of the range. */
struct query {
    const float *q;
    const float *distances; /* biases of its head by distance, or NULL */
    const float *bias;      /* that of place 0 of the range; those of the next places stand before it.  NULL: none */
    struct sums all, range; /* over the ranges before, over this one */
    int32_t lowest, end, position; /* positions [lowest, end) are visible */
    int32_t from, to;              /* of them, places [from, to) are in the range */
};

/* Keys or values, fp32, at places [place, place + TILE_KEYS) of a range.  Where there is none, another stands in its
   place. */
struct tile {
    int32_t place;
    const void *rows[TILE_KEYS];
};

/* Point at the keys or the values of the row of `token` at those places of the range from position `begin` on that are in
   [lowest, highest); what the store does not keep in fp32 is read into `wide` first. */
void fill_tile(struct tile *tile, struct worker *me, const struct instruction *it, int32_t token, int32_t group,
               int values, int32_t begin, int32_t lowest, int32_t highest, float *wide);

/* Parts of the scratch memory of a thread, whose size the plan knows. */
struct scratch {
    float *scores; /* [QUERIES or QUERIES_BF16][SCORES] */
    float *wide;   /* [TILE_KEYS][width or value_width], whichever is more */
    float *sums;   /* [QUERIES or QUERIES_BF16][value_width] */
};

/* The sums of `count` queries over the range that begins at position `begin`, with products in bf16
   (step_attend_bf16.c, where HAS_TILES), for keys and values of at most WIDEST_BF16 numbers.  The queries are of
   the row of `token` and of one group. */
#define WIDEST_BF16 256
void attend_range_bf16(struct worker *me, const struct instruction *it, struct query *queries, int32_t count,
                       int32_t token, int32_t group, int32_t begin, const struct scratch *scratch);

#endif

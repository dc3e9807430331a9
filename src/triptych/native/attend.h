/* What the files of attention share, and the functions of attention in the table of kernels.h.

   A score is a sum over the numbers of a key in 16 lanes: number d is added to lane d % 16 with fma, then the upper
   half of the lanes is added to the lower half until one is left.  The softmax is over one range of positions at a
   time; its exponentials are those of `exponentials` in attend_loops.h.  A value, times its weight, is added
   with fma to the sums of its query in the order of positions.  All levels give the same bits.  */

#ifndef TRIPTYCH_ATTEND_H
#define TRIPTYCH_ATTEND_H

#include "kernels.h"
#include "step.h"

#define RANGE 256    /* positions of a range, which begins at a multiple of it */
#define TILE_KEYS 64 /* positions whose keys or values a thread looks up, and widens, at a time */
#define QUERIES 64   /* of one unit of work at most */
#define QUERIES_BF16 192 /* the same where products are in bf16 */
#define FEW_TOKENS 16    /* of a step, up to which the ranges of a query may be units of their own */
#define COUNTERS 2048    /* of finished ranges: the first numbers of `partial` */
/* Numbers from the scores of one query to those of the next.  With RANGE the first scores of all queries would share
   few lines of the cache. */
#define SCORES (RANGE + 16)

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

/* `read` and `keep` are read_rows and keep_row of step.h, `merge` adds the sums of a range to those of all before it, and
   `finish` divides them by their weight and that of a sink.  The others are for `count` queries, whose scores, or
   weights, are [count][SCORES].  The bits of a query's sums do not depend on the other queries.  Scores are computed at
   least where a query sees something, values are added exactly there: a number that a query does not see never reaches
   its sums.  */
struct attend_kernels {
    void (*read)(int32_t type, float *out, const void *rows, int32_t count, int32_t n);
    void (*keep)(int32_t type, void *row, const float *x, int32_t n);
    void (*merge)(struct sums *all, const struct sums *range, int32_t width);
    void (*finish)(const struct sums *all, int32_t width, const float *sink);
    void (*scores)(float (*scores)[SCORES], const struct query *queries, int32_t count, const struct tile *keys,
                   int32_t width);
    void (*softmax)(float *scores, struct query *query, const struct instruction *it);
    void (*values)(const struct query *queries, float (*weights)[SCORES], int32_t count, const struct tile *values,
                   int32_t width);
};

/* The sums of `count` queries over the range that begins at position `begin`, with products in bf16
   (step_attend_bf16.c, where HAS_TILES), for keys and values of at most WIDEST_BF16 numbers.  The queries are of
   the row of `token` and of one group. */
#define WIDEST_BF16 256
void attend_range_bf16(struct worker *me, const struct instruction *it, struct query *queries, int32_t count,
                       int32_t token, int32_t group, int32_t begin, const struct scratch *scratch);

#endif

/* What step_attend.c and its kernels share; not for others. */

#ifndef TRIPTYCH_ATTEND_H
#define TRIPTYCH_ATTEND_H

#include "kernels.h"
#include "step.h"

#define TILE_KEYS 64 /* positions of a tile, which begins at a multiple of it */

/* The keys and values of one tile: of position `begin` + j at place j, for positions [from, to).  Places without a
   position have the key of another.  `across` is room for [width][TILE_KEYS] numbers, aligned to 64 bytes.  */
struct tile {
    int32_t begin, from, to;
    float *across;
    const float *keys[TILE_KEYS];
    const float *values[TILE_KEYS];
};

/* A query and its sums so far. */
struct query {
    const float *q;
    float *out;
    const float *bias; /* of its head by distance, or NULL */
    float most, total;
    int32_t lowest, end, position; /* positions [lowest, end) are visible */
};

/* Add a tile to the sums of `count` queries, each over the positions of the tile that it sees.  The bits of a query's
   sums do not depend on the other queries.  */
typedef void tile_kernel(struct query *queries, int32_t count, const struct tile *tile, const struct instruction *it);

#if X86_KERNELS
tile_kernel avx512_tile;
#endif

#endif

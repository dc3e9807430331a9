/* Attention of a step: each query over what the store holds of its row and over the new tokens of the row.

   Positions are read in ranges of RANGE that begin at multiples of it.  A range has a softmax of its own, and its sums
   are merged with those of the ranges before, in the order of positions (Milakov and Gimelshein 2018).  So the sums of
   a query do not depend on the other queries of the batch, nor on how many of its keys are new, nor on which threads
   compute which of its ranges.  */

#include "attend.h"
#include "matmul_bf16.h"

#include <stdatomic.h>
#include <string.h>

#define HEADS 4        /* of a group that are one unit of work at most, where a unit has several tokens */
#define NUMBERS(width) (((width) + 17) / 16 * 16) /* of the sums of one range */

/* How the work of an instruction is cut: into segments, runs of tokens of one row, with some heads of one group. */
struct cut {
    int32_t tokens; /* of a segment at most */
    int32_t heads;  /* of a unit at most */
    int32_t parts;  /* units of a group */
    int apart;      /* whether ranges are units of their own */
};

/* Tokens [first, last) with the heads [head, head + heads), over the ranges [range, end). */
struct unit {
    int32_t first, last, head, heads, range, end;
    int apart; /* one of several units of these tokens and heads, of a range each */
};

static int32_t most_queries(const struct instruction *it) { return it->attend.bf16 ? QUERIES_BF16 : QUERIES; }

static struct scratch scratch_of(const struct worker *me, const struct instruction *it)
{
    float *scores = (float *)(((uintptr_t)me->scratch + 63) / 64 * 64), *wide = scores + most_queries(it) * SCORES;
    int32_t widest = it->width > it->attend.value_width ? it->width : it->attend.value_width;
    return (struct scratch){scores, wide, wide + TILE_KEYS * widest};
}

/* Positions [*lowest, *end) are visible to token n. */
static void visible(const struct batch *batch, const struct instruction *it, int32_t n, int32_t *lowest, int32_t *end)
{
    *end = it->attend.kind == ATTEND_CROSS ? batch->source[n]
           : it->attend.kind == ATTEND_ROW ? batch->end[n]
                                    : batch->position[n] + 1;
    *lowest = it->attend.kind == ATTEND_SELF && it->attend.window && *end > it->attend.window ? *end - it->attend.window : 0;
}

void fill_tile(struct tile *tile, struct worker *me, const struct instruction *it, int32_t token, int32_t group,
               int values, int32_t begin, int32_t lowest, int32_t highest, float *wide)
{
    const struct batch *batch = me->batch;
    const struct store *store = me->plan->stores + it->attend.store;
    int32_t width = values ? it->attend.value_width : it->width, start = batch->start[token];
    int32_t held = it->attend.kind == ATTEND_CROSS ? INT32_MAX : batch->position[start];
    const float *new = it->attend.kind == ATTEND_CROSS ? NULL : buffer(me, values ? it->attend.values : it->attend.keys);
    int32_t from = begin + (tile->place > lowest ? tile->place : lowest), p = from;
    int32_t to = begin + (tile->place + TILE_KEYS < highest ? tile->place + TILE_KEYS : highest);
    int64_t slot = it->attend.kind == ATTEND_CROSS ? batch->source_slot[token] : batch->slot[token];
    int64_t bytes = held ? stored_bytes(store->type, width) : 0;
    begin += tile->place;
    while (p < to && p < held) { /* a run of places that follow one another */
        struct spot spot = spot_of(batch, store, slot, it->attend.window, p);
        int32_t end = to < held ? to : held;
        if (end - p > spot.run) end = p + spot.run;
        const char *run = values ? spot.chunk->values : spot.chunk->keys;
        run += bytes_before(&spot, it->attend.groups, group, bytes);
        if (store->type != STORED_F32) {
            kernels_in_use->read(store->type, wide, run, end - p, width);
            run = (const char *)wide;
            wide += (int64_t)(end - p) * width;
        }
        for (const float *row = (const float *)run; p < end; p++, row += width) tile->rows[p - begin] = row;
    }
    for (; p < to; p++) tile->rows[p - begin] = new + ((int64_t)(start + p - held) * it->attend.groups + group) * width;
    for (int32_t j = 0; j < TILE_KEYS; j++)
        if (j < from - begin || j >= to - begin) tile->rows[j] = tile->rows[from - begin];
}

/* The sums of `count` queries of a unit over the range that begins at position `begin`.  Each sees something of it. */
static void attend_range(struct worker *me, const struct instruction *it, const struct unit *unit,
                         struct query *queries, int32_t count, int32_t begin)
{
    const struct kernels *use = kernels_in_use;
    const struct scratch scratch = scratch_of(me, it);
    float(*scores)[SCORES] = (float(*)[SCORES])scratch.scores;
    struct tile tile;
    int32_t group = unit->head / (it->heads / it->attend.groups);
    int32_t lowest = queries[0].from, highest = queries[count - 1].to; /* later tokens see no earlier places */
#if HAS_TILES
    if (it->attend.bf16) {
        attend_range_bf16(me, it, queries, count, unit->first, group, begin, &scratch);
        return;
    }
#endif
    for (int values = 0; values < 2; values++) {
        for (tile.place = lowest / TILE_KEYS * TILE_KEYS; tile.place < highest; tile.place += TILE_KEYS) {
            fill_tile(&tile, me, it, unit->first, group, values, begin, lowest, highest, scratch.wide);
            if (values)
                use->values(queries, scores, count, &tile, it->attend.value_width);
            else
                use->scores(scores, queries, count, &tile, it->width);
        }
        for (int32_t i = 0; i < count && !values; i++) use->softmax(scores[i], queries + i, it);
    }
}

static void finish_unit(struct worker *me, const struct instruction *it, const struct unit *unit,
                        const struct query *queries)
{
    const float *sinks = it->attend.sinks == -1 ? NULL : me->plan->weights[it->attend.sinks].data;
    for (int32_t i = 0; i < (unit->last - unit->first) * unit->heads; i++)
        kernels_in_use->finish(&queries[i].all, it->attend.value_width,
                                       sinks ? sinks + unit->head + i % unit->heads : NULL);
}

/* The queries of a unit, one after another by token and head, with the sums of no range. */
static int32_t queries_of(struct worker *me, const struct instruction *it, const struct unit *unit,
                          struct query *queries)
{
    const struct matrix *bias = it->attend.bias == -1 ? NULL : me->plan->weights + it->attend.bias;
    int32_t count = 0;
    for (int32_t n = unit->first; n < unit->last; n++)
        for (int32_t head = unit->head; head < unit->head + unit->heads; head++) {
            struct query *query = queries + count++;
            int64_t vector = (int64_t)n * it->heads + head;
            query->q = buffer(me, it->input) + vector * it->width;
            query->distances = bias ? (const float *)bias->data + (int64_t)head * bias->columns : NULL;
            query->all = (struct sums){buffer(me, it->output) + vector * it->attend.value_width, -INFINITY, 0.0f};
            query->position = me->batch->position[n];
            visible(me->batch, it, n, &query->lowest, &query->end);
        }
    return count;
}

/* Where the sums of a range stand, [heads of a token][NUMBERS], if ranges are units of their own: the numbers of the
   values, then the largest score and the sum of the weights.  */
static float *partial(struct worker *me, const struct instruction *it, const struct unit *unit, int32_t i,
                      int32_t range)
{
    int64_t n = unit->first + i / unit->heads, head = unit->head + i % unit->heads;
    int64_t at = ((int64_t)range * me->batch->tokens + n) * it->heads + head;
    return me->batch->partial + COUNTERS + at * NUMBERS(it->attend.value_width);
}

/* Add one range to the sums of all queries that see something of it. */
static void add_range(struct worker *me, const struct instruction *it, const struct unit *unit, struct query *queries,
                      int32_t count, int32_t range)
{
    int32_t begin = range * RANGE, first = count, last = 0, width = it->attend.value_width;
    float *sums = scratch_of(me, it).sums;
    for (int32_t i = 0; i < count; i++) {
        struct query *query = queries + i;
        query->from = query->lowest > begin ? query->lowest - begin : 0;
        query->to = query->end - begin < RANGE ? query->end - begin : RANGE;
        if (query->from >= query->to) continue;
        first = first < i ? first : i;
        last = i + 1;
        query->bias = query->distances ? query->distances + query->position - begin : NULL;
        if (unit->apart) query->all.out = partial(me, it, unit, i, range);
        query->range.out = unit->apart || range == query->lowest / RANGE ? query->all.out : sums + i * width;
        memset(query->range.out, 0, (size_t)width * sizeof(float));
    }
    if (first == count) return;
    attend_range(me, it, unit, queries + first, last - first, begin);
    for (int32_t i = first; i < last; i++) kernels_in_use->merge(&queries[i].all, &queries[i].range, width);
}

/* Put the ranges of a unit together, which are all computed. */
static void merge_ranges(struct worker *me, const struct instruction *it, const struct unit *unit)
{
    struct query queries[QUERIES_BF16];
    int32_t count = queries_of(me, it, unit, queries), width = it->attend.value_width;
    for (int32_t i = 0; i < count; i++) {
        struct query *query = queries + i;
        for (int32_t range = query->lowest / RANGE; range * RANGE < query->end; range++) {
            float *numbers = partial(me, it, unit, i, range);
            struct sums sums = {numbers, numbers[width], numbers[width + 1]};
            if (range == query->lowest / RANGE) {
                memcpy(query->all.out, numbers, (size_t)width * sizeof *numbers);
                sums.out = query->all.out;
            }
            kernels_in_use->merge(&query->all, &sums, width);
        }
    }
    finish_unit(me, it, unit, queries);
}

/* Compute a unit; of several of the same tokens and heads, the one that is done last puts them together. */
static void attend_unit(struct worker *me, const struct instruction *it, const struct unit *unit, int32_t ranges,
                        atomic_int *done)
{
    struct query queries[QUERIES_BF16];
    int32_t count = queries_of(me, it, unit, queries), width = it->attend.value_width;
    for (int32_t i = 0; i < count; i++)
        if (queries[i].lowest >= queries[i].end) memset(queries[i].all.out, 0, (size_t)width * sizeof(float));
    for (int32_t range = unit->range; range < unit->end; range++) add_range(me, it, unit, queries, count, range);
    if (!unit->apart) {
        finish_unit(me, it, unit, queries);
        return;
    }
    for (int32_t i = 0; i < count; i++) {
        if (queries[i].from >= queries[i].to) continue;
        float *numbers = partial(me, it, unit, i, unit->range);
        numbers[width] = queries[i].all.most;
        numbers[width + 1] = queries[i].all.total;
    }
    if (atomic_fetch_add(done, 1) + 1 < ranges) return;
    atomic_store(done, 0);
    merge_ranges(me, it, unit);
}

/* Heads of a group share what is loaded of keys and values, so they are separate units only where there are too few
   units for all threads, or too many queries for one. */
static struct cut cut_of(struct worker *me, const struct instruction *it)
{
    const struct batch *batch = me->batch;
    int32_t per_group = it->heads / it->attend.groups, together = per_group < HEADS ? per_group : HEADS, longest = 1;
    int32_t segments = 0, ranges = 1, lowest, end;
    for (int32_t n = 0; n < batch->tokens; n++) {
        int32_t length = batch->end[n] - batch->position[batch->start[n]];
        longest = length > longest ? length : longest;
        segments += n == batch->start[n];
        visible(batch, it, n, &lowest, &end);
        ranges = end - lowest > (ranges - 1) * RANGE ? (end - lowest + RANGE - 1) / RANGE : ranges;
    }
    int32_t queries = most_queries(it), tokens = queries / together;
    struct cut cut = {tokens < longest ? tokens : longest, 0, 1, 0};
    cut.heads = queries / cut.tokens < per_group ? queries / cut.tokens : per_group;
    int64_t units = (int64_t)segments * it->attend.groups;
    cut.apart = batch->tokens <= FEW_TOKENS && ranges > 1 && me->threads > 1 && units < 4 * me->threads;
    units *= cut.apart ? ranges : (longest + cut.tokens - 1) / cut.tokens;
    while (cut.heads > 1 && units * ((per_group + cut.heads - 1) / cut.heads) < 2 * me->threads)
        cut.heads = (cut.heads + 1) / 2;
    cut.parts = (per_group + cut.heads - 1) / cut.heads;
    if (units * cut.parts > COUNTERS) cut.apart = 0;
    return cut;
}

/* Go through the units of an instruction; -> the work of all, in products of a query with a key.  Where `all` is that
   number, compute those whose work begins in this thread's share. */
static int64_t units_of(struct worker *me, const struct instruction *it, const struct cut *cut, int64_t all)
{
    const struct batch *batch = me->batch;
    int32_t per_group = it->heads / it->attend.groups, number = 0;
    int64_t before = 0;
    for (int32_t n = 0, next; n < batch->tokens; n = next) {
        int32_t lowest, highest, end;
        for (next = n + 1; next < batch->tokens && next - n < cut->tokens && batch->start[next] == batch->start[n];)
            next++;
        visible(batch, it, n, &lowest, &end);
        visible(batch, it, next - 1, &end, &highest);
        int32_t first = lowest / RANGE, last = (highest + RANGE - 1) / RANGE, ranges = last - first;
        for (int32_t part = 0; part < it->attend.groups * cut->parts; part++, number++) {
            int32_t in_group = part % cut->parts * cut->heads, left = per_group - in_group;
            int32_t head = part / cut->parts * per_group + in_group, heads = left < cut->heads ? left : cut->heads;
            struct unit unit = {n, next, head, heads, first, last, cut->apart && ranges > 1};
            for (int32_t i = 0; i < (unit.apart ? ranges : 1); i++) {
                if (unit.apart) unit.end = (unit.range = first + i) + 1;
                if (all && before * me->threads / all == me->thread)
                    attend_unit(me, it, &unit, ranges, (atomic_int *)batch->partial + number);
                int32_t from = unit.range * RANGE > lowest ? unit.range * RANGE : lowest;
                int32_t to = unit.end * RANGE < highest ? unit.end * RANGE : highest;
                before += (int64_t)(next - n) * unit.heads * (to - from + 16);
            }
        }
    }
    return before;
}

void step_attend(struct worker *me, const struct instruction *it)
{
    struct cut cut = cut_of(me, it);
    units_of(me, it, &cut, units_of(me, it, &cut, 0));
}

/* A decoding step: the instructions of a plan, run on the vectors of any mix of rows by one team of threads.

   A plan is made in Python (triptych.program.native_plan) from the operations of a program; nothing here knows a model
   family.  Every value is a buffer [tokens][width] of fp32 numbers in one arena; an instruction names a buffer by its
   offset in numbers per token.  The work of an instruction is cut into units that do not depend on the number of
   threads, and no sum crosses two units, so a row has the same bits in any batch and with any number of threads.

   The caller checks every size before the call: ids against tables, positions against tables and stores, slots against
   stores, and the arena against the plan.  */

#ifndef TRIPTYCH_STEP_H
#define TRIPTYCH_STEP_H

#include <stdint.h>

#include "matmul.h"

/* Each with its member of struct instruction, where it has one. */
enum operation {
    OP_NONE = -1,
    OP_EMBED = 0,        /* embed: output = a row of a table */
    OP_ROUND = 1,        /* output = input rounded for packed products, as `struct input` has it */
    OP_LINEAR = 2,       /* linear: output = input weight^T + bias */
    OP_LAYER_NORM = 3,   /* norm */
    OP_RMS_NORM = 4,     /* norm */
    OP_ROTATE = 5,       /* rotate: output = input rotated by the angles of its position */
    OP_MAP = 6,          /* map: output = f(input) */
    OP_MAP_MULTIPLY = 7, /* map: output = f(input) other */
    OP_ADD = 8,          /* map: output = input + other */
    OP_ATTEND = 9,       /* attend: input are queries */
    OP_EXTEND = 10,      /* attend: its keys and values into the store */
    OP_CHOOSE = 11,      /* row m of output = row `chosen[m]` of input */
    OP_ROUTE = 12,       /* route: output = weight of each expert from the scores `input`, 0 for those not chosen */
    OP_TAKE = 13,        /* expert: the rows of input that it is chosen for, one after another */
    OP_GIVE = 14,        /* expert: row i of input, times its weight, added to its token's row of output */
    OP_ROUND_BF16 = 15,  /* output = input rounded for products in bf16 (matmul_bf16.h) */
    OP_LINEAR_BF16 = 16, /* linear_bf16: output = f(input weight^T + bias) + more, or where there is a gate
                            f(input gate^T) (input weight^T + bias) + more; input is rounded */
    OP_STORED = 17       /* stored: output = input as a store gives it back */
};

enum index { INDEX_IDS = 0, INDEX_POSITIONS = 1, INDEX_TOKENS = 2, INDEX_NONE = 3 };
enum pairing { PAIRING_HALF = 0, PAIRING_INTERLEAVED = 1 };
/* Which vectors an instruction runs on: those of every token, of the chosen ones, of the current expert's. */
enum rows { ROWS_TOKENS = 0, ROWS_CHOSEN = 1, ROWS_EXPERT = 2 };
/* BARRIER_BEFORE: other threads must have finished what came before.  BARRIER_IF_ANY: only if an expert has tokens. */
enum barrier { BARRIER_NONE = 0, BARRIER_BEFORE = 1, BARRIER_IF_ANY = 2 };
/* To the keys of the row so far, of its source, of all its new tokens (no store). */
enum attention { ATTEND_SELF = 0, ATTEND_CROSS = 1, ATTEND_ROW = 2 };
/* What a store keeps of a vector: its numbers, or codes and after them a scale for each group of 32 (step_ops.c). */
enum stored_type { STORED_F32 = 0, STORED_BF16 = 1, STORED_F16 = 2, STORED_INT8 = 3 };

/* The buffer that the step's result is written to.  Those at OUTPUT - 1 - n are n numbers per token into `reads`. */
#define OUTPUT -2

/* What an operation has beside the fields of all.  Buffers are offsets, tables places in `weights` of the plan; both are -1
   where there is none. */
#define OPERANDS(MEMBER)                                                                                          \
    MEMBER(embed, int32_t table, row, shift;)         /* row: enum index, moved by `shift` */                     \
    MEMBER(linear, int32_t weight, bias, rounded;)    /* buffer `rounded`: that of OP_ROUND, for packed weights */ \
    MEMBER(linear_bf16,                               /* buffer `more`; rounds: whether output is as in OP_ROUND_BF16 */ \
           int32_t weight, bias, gate, more, function, rounds; float factor;)                                     \
    MEMBER(norm, int32_t weight, bias, rounds; float eps, offset;) /* offset: what is added to the weight */      \
    MEMBER(rotate, int32_t table, far_table, near_length, pairing;) /* far_table: of rows longer than near_length */ \
    MEMBER(map, int32_t other, function; float factor;) /* buffer `other` */                                      \
    MEMBER(attend,                                    /* buffers of new keys and values; bf16: what products are in */ \
           int32_t keys, values, store, groups, value_width, window, kind, bf16, sinks, bias; float scale, softcap;) \
    MEMBER(route, int32_t experts, top, normalized, sum;) /* buffer `sum`: becomes 0 */                           \
    MEMBER(expert, int32_t routes, experts, number, skip;) /* skip: instructions of one without tokens */         \
    MEMBER(stored, int32_t type;)                     /* enum stored_type */
#define AS_STRUCT(name, ...) struct { __VA_ARGS__ } name;

struct instruction {
    int32_t op, rows, barrier;
    int32_t input, output; /* buffers */
    int32_t width, heads;  /* numbers of a vector, vectors per token */
    union { OPERANDS(AS_STRUCT) };
};

/* Memory for keys and values of a layer, [strips][groups][places][bytes of a vector]. */
struct chunk {
    char *keys, *values;
    int64_t places;
};

/* Keys and values of a layer.  Where it has no pages (`page` is 0), its chunk has a strip for each slot; in a ring,
   position p stands at place p % window.  Otherwise a chunk has one strip of pages of `page` places each, and the
   table of pages says where the positions of a slot stand. */
struct store {
    const struct chunk *chunks;
    int32_t page, type; /* enum stored_type */
};

/* A page in a table: which chunk it is in, and which of its pages it is. */
#define PAGES_OF_CHUNK 65536

struct plan {
    int32_t count;
    int32_t alone; /* nanoseconds of work that one thread does without waiting for the others */
    const struct instruction *instructions;
    const struct matrix *weights; /* matrices, vectors (fp32, one row) and tables by position */
    const struct store *stores;
};

/* The rows of one call.  Tokens of a row follow one another; `start` is where its first one stands, and the store holds
   the positions before that one's. */
struct batch {
    int32_t tokens, chosen_count, threads, scratch_floats;
    const int32_t *ids, *position, *slot, *start; /* of each token */
    const int32_t *end, *reach, *source;          /* lengths of its row: after this call, after the step, of its source */
    const int32_t *source_slot;                   /* where its source lies in the stores of sources */
    const int32_t *pages;                         /* the table of pages, [slots][most_pages] */
    int64_t most_pages;
    const int32_t *chosen;                        /* tokens, for ROWS_CHOSEN */
    float *arena;
    float *output;
    float *scratch; /* [threads][scratch_floats] */
    float *partial; /* zeros before the first call: what step_attend.c keeps of ranges of positions */
    float *reads;   /* the values that the caller keeps; NULL where the plan has none */
};

/* What a thread of the team knows. */
struct worker {
    const struct plan *plan;
    const struct batch *batch;
    int32_t thread, threads; /* which part of the work it does, of how many: not always one per thread */
    int32_t team;            /* threads that share the work */
    int32_t taken;           /* tokens of the current expert */
    int64_t products;        /* of numbers, in all linear instructions of the level */
    int64_t passed;          /* in those that come before this one */
    int32_t *members;        /* which they are; the same memory for all threads */
    float *scratch;          /* its own */
};

/* A buffer of the arena or of `reads`, or the output. */
static inline float *buffer(const struct worker *me, int32_t offset)
{
    if (offset == OUTPUT) return me->batch->output;
    if (offset < OUTPUT) return me->batch->reads + (int64_t)(OUTPUT - 1 - offset) * me->batch->tokens;
    return me->batch->arena + (int64_t)offset * me->batch->tokens;
}

static inline int32_t row_count(const struct worker *me, const struct instruction *it)
{
    return it->rows == ROWS_TOKENS ? me->batch->tokens : it->rows == ROWS_CHOSEN ? me->batch->chosen_count : me->taken;
}

/* Where part `i` of so many units begins.  Of more parts than threads, the first ones, one for each thread, are
   (FIRST_SHARE - 1) / FIRST_SHARE of the work and the others share the rest. */
#define FIRST_SHARE 5
static inline int64_t cut(const struct worker *me, int64_t units, int64_t i)
{
    int64_t team = me->team, late = me->threads - team;
    if (late <= 0) return units * i / me->threads;
    int64_t place = i < team ? (FIRST_SHARE - 1) * late * i : (FIRST_SHARE - 1) * late * team + (i - team) * team;
    return units * place / (FIRST_SHARE * late * team);
}

/* The units [*first, *last) of `units` that are in this part. */
static inline void share(const struct worker *me, int64_t units, int64_t *first, int64_t *last)
{
    *first = cut(me, units, me->thread);
    *last = cut(me, units, me->thread + 1);
}

/* For every one of `units` that is in this part. */
#define FOR_SHARE(unit, units) \
    for (int64_t unit = cut(me, units, me->thread), end = cut(me, units, me->thread + 1); unit < end; unit++)

/* Where a position of a slot stands in a store, and how many of the positions from it on stand in the next places. */
struct spot {
    const struct chunk *chunk;
    int64_t strip, place;
    int32_t run;
};

static inline struct spot spot_of(const struct batch *batch, const struct store *store, int64_t slot, int32_t window,
                                  int32_t position)
{
    if (store->page) {
        int32_t in_page = position % store->page;
        uint32_t page = (uint32_t)batch->pages[slot * batch->most_pages + position / store->page];
        int64_t place = (int64_t)(page % PAGES_OF_CHUNK) * store->page + in_page;
        return (struct spot){store->chunks + page / PAGES_OF_CHUNK, 0, place, store->page - in_page};
    }
    int32_t place = window ? position % window : position;
    return (struct spot){store->chunks, slot, place, window ? window - place : INT32_MAX};
}

/* The bytes before the vector of a group there, of vectors of so many bytes. */
static inline int64_t bytes_before(const struct spot *spot, int32_t groups, int32_t group, int64_t bytes)
{
    return ((spot->strip * groups + group) * spot->chunk->places + spot->place) * bytes;
}

/* Bytes that a vector of `width` numbers takes in a store of this type. */
int64_t stored_bytes(int32_t type, int32_t width);

/* One instruction, this thread's part of it (step_ops.c, step_attend.c). */
typedef void operation(struct worker *me, const struct instruction *it);
operation step_embed, step_round, step_linear, step_norm, step_rotate, step_map, step_attend, step_extend, step_choose,
    step_route, step_give, step_round_bf16, step_linear_bf16, step_stored;
/* Find the tokens of the expert of OP_TAKE, before its parts begin. */
operation step_members;
/* The bands of a product that are in this part.  The products of a level are cut as one piece, so that a part reads
   memory from as few places as possible: to be called for them in their order.  */
void step_bands(struct worker *me, const struct instruction *it, int32_t *first_band, int32_t *last_band);

/* Run a plan.  The caller's thread is one of `threads`. */
void run_step(const struct plan *plan, const struct batch *batch);

/* Run several plans of tokens that do not read each other.  Where there are as many as threads, each runs on one thread,
   with its own part of the arena, [threads][arena_floats]; else one after another on all.  */
void run_steps(const struct plan *plans, const struct batch *batches, int32_t count, int32_t threads,
               int64_t arena_floats);

/* Where the largest number of each row of x [count][n] stands first, or its first NaN, and that number. */
void largest_of(const float *x, int32_t count, int32_t n, int32_t *places, float *tops);

/* Draw a token from each row (sample.h), of those that its mask allows where it has one. */
void draw_tokens(const float *x, int32_t count, int32_t n, const struct draw *how, int32_t *tokens, float *scratch,
                 int32_t threads, const uint32_t *masks, int32_t words, const int32_t *which);

/* The scores x [count][n] in `y`, those at -inf whose bit in a mask is 0.  Row i has the mask `which[i]` of so many words,
   the lowest bit first; a row with -1 is copied. */
void mask_scores(const float *x, float *y, int32_t count, int32_t n, const uint32_t *masks, int32_t words,
                 const int32_t *which);

/* The name and the value of constant `i` that triptych.native.step repeats: numbers of enumerations, sizes of structures,
   and as a name OPERANDS.  NULL beyond the last one. */
const char *constant(int i, int64_t *value);

#endif

/* The team of threads of a step, and the order of its instructions.

   A level is a run of instructions without a barrier between them.  Its work is cut into parts, which the threads claim
   one after another; whoever finishes the last one opens the next level.  So a level waits for the parts that were begun,
   not for every thread: one that has no processor, because other programs have it, holds up at most one part.

   A level with so little work that meeting would take longer is not opened: the thread that would open it does all of
   it.  Of a step of one token, products and attention remain to be shared.  */

#include "kernels.h"
#include "step.h"

#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define SPINS 2000              /* looks at a level before a thread sleeps */
#define PART ((int64_t)1 << 15) /* products of numbers that are worth a part of their own */
#define LOOKAHEAD 16            /* instructions among which a waiting thread looks for products */
#define FETCH ((size_t)1 << 14) /* bytes of each place that it asks for */
#define EXTRA_PARTS 4           /* per thread at most, which threads take that end early: they balance the load */
#define MOST_THREADS 1024       /* so that claims fit into 16 bits */

/* The ticket holds the level's number, how many parts it has, how many of them are done, and how many were claimed (by
   threads that found none left, too), in 16 bits each: one number, so that no thread takes a part of one level for
   another's.  A level of no parts is the end of the step.  What else describes a level changes only when all its parts
   are done.  */
typedef unsigned long long ticket_bits;

#define CLAIM ((ticket_bits)1)
#define DONE ((ticket_bits)1 << 16)

static int32_t claimed_of(ticket_bits ticket) { return (int32_t)(ticket & 0xffff); }
static int32_t done_of(ticket_bits ticket) { return (int32_t)(ticket >> 16 & 0xffff); }
static int32_t parts_in(ticket_bits ticket) { return (int32_t)(ticket >> 32 & 0xffff); }
static uint32_t level_of(ticket_bits ticket) { return (uint32_t)(ticket >> 48); }

struct team {
    const struct plan *plan;
    const struct batch *batch;
    int32_t threads;
    int32_t first, last; /* instructions of the level */
    int32_t taken;       /* tokens of the current expert, as in struct worker */
    int64_t products;    /* of the level, as in struct worker */
    atomic_int asleep;
    _Atomic uint32_t level; /* that of the ticket, written after it: what sleeping threads wait on */
    _Alignas(64) _Atomic ticket_bits ticket;
};

static int is_open(struct team *team, uint32_t level) { return level_of(atomic_load(&team->ticket)) == level; }

/* Wait until the team has come to another level than this: to its ticket, so that a thread claims once per level. */
static void wait_beyond(struct team *team, uint32_t level)
{
    for (int spins = 0; spins < SPINS; spins++) {
        if (!is_open(team, level)) return;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    atomic_fetch_add(&team->asleep, 1);
    while (is_open(team, level)) {
#ifdef __linux__
        syscall(SYS_futex, &team->level, FUTEX_WAIT_PRIVATE, level, NULL, NULL, 0);
#else
        sched_yield();
#endif
    }
    atomic_fetch_sub(&team->asleep, 1);
}

/* Open a level of so many parts, the first `claimed` of them taken. */
static void open_level(struct team *team, int32_t parts, int32_t claimed)
{
    uint32_t level = (atomic_load_explicit(&team->level, memory_order_relaxed) + 1) & 0xffff;
    ticket_bits ticket = (ticket_bits)level << 48 | (ticket_bits)parts << 32 | (ticket_bits)claimed;
    atomic_store(&team->ticket, ticket);
    atomic_store(&team->level, level);
#ifdef __linux__
    if (atomic_load(&team->asleep)) syscall(SYS_futex, &team->level, FUTEX_WAKE_PRIVATE, team->threads, NULL, NULL, 0);
#endif
}

static operation *const operations[] = {
    [OP_EMBED] = step_embed,     [OP_ROUND] = step_round,       [OP_LINEAR] = step_linear,
    [OP_LAYER_NORM] = step_norm, [OP_RMS_NORM] = step_norm,     [OP_ROTATE] = step_rotate,
    [OP_MAP] = step_map,         [OP_MAP_MULTIPLY] = step_map,  [OP_ADD] = step_map,
    [OP_ATTEND] = step_attend,   [OP_EXTEND] = step_extend,     [OP_CHOOSE] = step_choose,
    [OP_ROUTE] = step_route,     [OP_TAKE] = step_choose,       [OP_GIVE] = step_give,
    [OP_STORED] = step_stored,   [OP_ROUND_BF16] = step_round_bf16, [OP_LINEAR_BF16] = step_linear_bf16};

static int64_t products_of(const struct worker *me, const struct instruction *it)
{
    const struct matrix *w = me->plan->weights + it->linear.weight;
    return (int64_t)w->rows * w->columns * row_count(me, it);
}

/* About how many nanoseconds one thread needs for an instruction.  To unpack weights for products in bf16 takes the time of
   16 vectors. */
static int64_t cost_of(const struct worker *me, const struct instruction *it)
{
    int32_t each = it->op == OP_ROUTE ? it->route.experts
                   : it->op == OP_TAKE || it->op == OP_GIVE ? it->expert.experts : it->heads;
    int64_t vectors = (int64_t)row_count(me, it) * (each > 1 ? each : 1);
    const struct matrix *w = me->plan->weights + (it->op == OP_LINEAR_BF16 ? it->linear_bf16.weight : 0);
    switch (it->op) {
    case OP_LINEAR: return products_of(me, it) / 16;
    case OP_LINEAR_BF16:
        return (int64_t)w->rows * w->columns * (16 + row_count(me, it)) / (it->linear_bf16.gate == -1 ? 256 : 128);
    case OP_ATTEND: return vectors * 1500;
    case OP_MAP:
    case OP_MAP_MULTIPLY:
    case OP_STORED: return vectors * it->width;
    default: return vectors * it->width / 8;
    }
}

static void run_level(struct worker *me, int32_t first, int32_t last)
{
    me->passed = 0;
    for (const struct instruction *it = me->plan->instructions + first; it < me->plan->instructions + last; it++)
        if (row_count(me, it) && (size_t)it->op < sizeof operations / sizeof *operations) operations[it->op](me, it);
}

static int32_t parts_for(const struct team *team, int64_t products)
{
    int64_t extra = products / FIRST_SHARE / PART, most = (int64_t)team->threads * EXTRA_PARTS;
    return team->threads + (int32_t)(extra > most ? most : extra);
}

/* Ask for what the first part that is not the opener's will read of the next products, from instruction `at` on, until
   the team has come to another level than this.  Memory is idle while a thread waits. */
static void fetch_ahead(struct team *team, struct worker me, int32_t at, uint32_t level)
{
    const struct instruction *instructions = team->plan->instructions;
    int32_t end = at + LOOKAHEAD < team->plan->count ? at + LOOKAHEAD : team->plan->count, from = at;
    while (from < end && instructions[from].op != OP_LINEAR && instructions[from].op != OP_TAKE) from++;
    me.products = me.passed = 0;
    for (at = from; at < end && instructions[at].op == OP_LINEAR; at++) {
        if (at > from && instructions[at].barrier != BARRIER_NONE) break;
        me.products += products_of(&me, instructions + at);
    }
    me.thread = 1;
    me.threads = parts_for(team, me.products);
    for (end = at, at = from; at < end; at++) {
        int32_t first, last;
        if (!row_count(&me, instructions + at)) continue;
        step_bands(&me, instructions + at, &first, &last);
        if (first >= last) continue;
        const struct matrix *w = team->plan->weights + instructions[at].linear.weight;
        size_t bytes = matrix_bytes(w->layout, BAND, w->columns), apart = (size_t)((last - first) / STREAMS) * bytes;
        const char *place = (const char *)w->data + (size_t)first * bytes; /* and STREAMS - 1 more, where `multiply` begins */
        if (!kernels_in_use->reads_streams || w->layout < LAYOUT_U4) return;
        for (size_t i = 0; i < apart && i < FETCH && is_open(team, level); i += LINE)
            for (size_t z = 0; z < STREAMS; z++) __builtin_prefetch(place + z * apart + i);
        return;
    }
}

/* How many parts the level of instructions [first, last) is cut into: one for each thread, and smaller ones of its
   products for those that come to their end first.  1: it is not worth opening. */
static int32_t parts_of(struct team *team, const struct worker *me)
{
    int64_t cost = 0, products = 0;
    for (int32_t i = team->first; i < team->last; i++) {
        const struct instruction *it = me->plan->instructions + i;
        cost += cost_of(me, it);
        if (it->op == OP_LINEAR) products += products_of(me, it);
    }
    team->products = products;
    if (team->threads == 1 || cost <= team->plan->alone) return 1;
    return parts_for(team, products);
}

/* Do the levels from instruction `at` on that are not worth opening, and open the one after them with the first
   `claimed` parts taken; -> how many parts it has, 0 at the end of the step.  All before `at` is done.  Experts that have
   no tokens are passed over. */
static int32_t advance(struct team *team, struct worker *me, int32_t at, int32_t claimed)
{
    const struct instruction *instructions = team->plan->instructions;
    int32_t count = team->plan->count, parts = 0;
    while (at < count) {
        if (instructions[at].op == OP_TAKE) {
            step_members(me, instructions + at);
            team->taken = me->taken;
            if (!me->taken) {
                at += 1 + instructions[at].expert.skip;
                continue;
            }
        }
        team->first = at++;
        while (at < count && instructions[at].barrier == BARRIER_NONE && instructions[at].op != OP_TAKE) at++;
        team->last = at;
        parts = parts_of(team, me);
        me->products = team->products;
        if (parts > 1) break;
        me->thread = 0;
        me->threads = 1;
        run_level(me, team->first, team->last);
        parts = 0;
    }
    open_level(team, parts, claimed);
    return parts;
}

static struct worker worker_of(const struct team *team, int32_t thread)
{
    const struct batch *batch = team->batch;
    float *scratch = batch->scratch + (int64_t)thread * batch->scratch_floats + batch->tokens;
    return (struct worker){
        .plan = team->plan, .batch = batch, .team = team->threads, .members = (int32_t *)batch->scratch,
        .scratch = scratch};
}

/* Claim parts and do them, until the step is done. */
static void work(struct team *team, int32_t thread)
{
    struct worker me = worker_of(team, thread);
    ticket_bits ticket = atomic_fetch_add(&team->ticket, CLAIM);
    int32_t next = 0; /* where the level ends of which this thread last did a part; 0 once it fetched what follows */
    me.thread = claimed_of(ticket);
    me.threads = parts_in(ticket);
    while (me.threads) {
        if (me.thread >= me.threads) {
            if (next) fetch_ahead(team, me, next, level_of(ticket));
            next = 0;
            wait_beyond(team, level_of(ticket));
            ticket = atomic_fetch_add(&team->ticket, CLAIM);
        } else {
            me.taken = team->taken;
            me.products = team->products;
            next = team->last;
            run_level(&me, team->first, next);
            ticket = atomic_fetch_add(&team->ticket, DONE | CLAIM);
            if (done_of(ticket) + 1 == me.threads) { /* the last one: it opens the next level, and takes a part */
                me.threads = advance(team, &me, next, 1);
                me.thread = 0;
                continue;
            }
        }
        me.thread = claimed_of(ticket);
        me.threads = parts_in(ticket);
    }
}

void run_step(const struct plan *plan, const struct batch *batch)
{
    struct team team = {
        .plan = plan, .batch = batch, .threads = batch->threads < MOST_THREADS ? batch->threads : MOST_THREADS};
    struct worker me = worker_of(&team, 0);
    advance(&team, &me, 0, 0);
    if (team.threads == 1) {
        work(&team, 0);
        return;
    }
#pragma omp parallel num_threads(team.threads)
    work(&team, omp_get_thread_num());
}

void run_steps(const struct plan *plans, const struct batch *batches, int32_t count, int32_t threads,
               int64_t arena_floats)
{
    if (threads == 1 || count < threads) {
        for (int32_t i = 0; i < count; i++) run_step(plans + i, batches + i);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int32_t i = 0; i < count; i++) {
        struct batch own = batches[i];
        own.threads = 1;
        own.arena += omp_get_thread_num() * arena_floats;
        own.scratch += (int64_t)omp_get_thread_num() * own.scratch_floats;
        run_step(plans + i, &own);
    }
}

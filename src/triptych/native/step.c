/* The team of threads of a step, and the order of its instructions.  */

#include "step.h"

#include <sched.h>
#include <stdatomic.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define SPINS 4000 /* looks at a barrier before a thread offers its processor to others */

struct team {
    atomic_int arrived;
    atomic_int phase;
};

static inline void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

/* Wait until all threads of the team have come here. */
static void meet(struct team *team, int32_t threads)
{
    if (threads == 1) return;
    int phase = atomic_load_explicit(&team->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == threads - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->phase, phase + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPINS)
            pause_briefly();
        else
            sched_yield();
    }
}

static void run_one(struct worker *me, const struct instruction *it)
{
    switch (it->op) {
    case OP_EMBED: step_embed(me, it); break;
    case OP_ROUND: step_round(me, it); break;
    case OP_LINEAR: step_linear(me, it); break;
    case OP_LAYER_NORM:
    case OP_RMS_NORM: step_norm(me, it); break;
    case OP_ROTATE: step_rotate(me, it); break;
    case OP_MAP:
    case OP_MAP_MULTIPLY: step_map(me, it); break;
    case OP_ADD: step_add(me, it); break;
    case OP_ATTEND: step_attend(me, it); break;
    case OP_EXTEND: step_extend(me, it); break;
    case OP_CHOOSE: step_choose(me, it); break;
    case OP_ROUTE: step_route(me, it); break;
    case OP_TAKE: step_take(me, it); break;
    case OP_GIVE: step_give(me, it); break;
    default: break;
    }
}

static void run(const struct plan *plan, const struct batch *batch, struct team *team, int32_t thread, int32_t threads)
{
    float *scratch = batch->scratch + (int64_t)thread * batch->scratch_floats;
    struct worker me = {plan, batch, thread, threads, 0, (int32_t *)scratch, scratch + batch->tokens};
    for (int32_t i = 0; i < plan->count; i++) {
        const struct instruction *it = plan->instructions + i;
        if (it->barrier == BARRIER_BEFORE) meet(team, threads);
        if (row_count(&me, it) == 0 && it->op != OP_TAKE) continue;
        if (it->op == OP_TAKE) {
            step_members(&me, it);
            if (me.taken == 0) {
                i += it->skip;
                continue;
            }
            if (it->barrier == BARRIER_IF_ANY) meet(team, threads);
        }
        run_one(&me, it);
    }
}

void run_step(const struct plan *plan, const struct batch *batch)
{
    struct team team;
    atomic_init(&team.arrived, 0);
    atomic_init(&team.phase, 0);
#ifdef _OPENMP
    if (batch->threads > 1) {
#pragma omp parallel num_threads(batch->threads)
        run(plan, batch, &team, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    run(plan, batch, &team, 0, 1);
}

int step_sizeof(int which)
{
    switch (which) {
    case 0: return (int)sizeof(struct instruction);
    case 1: return (int)sizeof(struct store);
    case 2: return (int)sizeof(struct plan);
    case 3: return (int)sizeof(struct batch);
    case 4: return (int)sizeof(struct matrix);
    default: return 0;
    }
}

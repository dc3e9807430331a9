/* The functions of a training step in portable C. */

#include "train.h"

#define ISA(NAME) portable_##NAME
#define LANES 4
#define PAIRS 0
#define ROWS 2  /* of the left side of a product that are multiplied together, */
#define PARTS 4 /* with so many registers of the right side */
#include "train_vector.h"

INLINE vf multiply_add(vf x, vf y, vf z) { return x * y + z; }
INLINE vf larger_or_last(vf x, vf y) { return chosen(x > y, x, y); }
INLINE vf smaller_or_last(vf x, vf y) { return chosen(x < y, x, y); }
INLINE vf if_not_less(vf x, vf y, vf z) { return (vf)((vi)z & ~(x < y)); }
INLINE vf add_unit(vf sum, const float *unit, vf y) { return sum + *unit * y; }

INLINE vf widened(const uint16_t *x)
{
    vh halves;
    memcpy(&halves, x, sizeof halves);
    return (vf)(__builtin_convertvector(halves, vu) << 16);
}

INLINE vh narrowed(vf x) { return __builtin_convertvector(rounded(x), vh); }

#include "train_loops.h"

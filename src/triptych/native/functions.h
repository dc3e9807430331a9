/* The functions of one number that a step applies (enum function), for 16 at a time. */

#ifndef TRIPTYCH_FUNCTIONS_H
#define TRIPTYCH_FUNCTIONS_H

#include "step.h"
#include "vector.h"

INLINE v16 function16(v16 x, int32_t kind, float factor)
{
    switch (kind) {
    case FUNCTION_SILU: return x / (1.0f + exp16(-x));
    case FUNCTION_GELU: return 0.5f * x * (1.0f + erf16(x * 0.70710678118654752f));
    case FUNCTION_GELU_TANH:
        return 0.5f * x * (1.0f + tanh16(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case FUNCTION_RELU: return pick(x < 0.0f, (v16){0}, x);
    case FUNCTION_TANH: return tanh16(x);
    case FUNCTION_SCALE: return x * factor;
    case FUNCTION_SHIFT: return x + factor;
    case FUNCTION_SOFTCAP: return factor * tanh16(x / factor);
    default: return x;
    }
}

#endif

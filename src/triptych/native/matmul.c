/* Sizes, and the sharing of a product between threads.  See matmul.h. */

#include <omp.h>

#include "kernels.h"

static size_t aligned(size_t bytes) { return (bytes + LINE - 1) / LINE * LINE; }

size_t matrix_bytes(int32_t layout, int32_t rows, int32_t columns)
{
    if (layout < LAYOUT_F32 || layout >= LAYOUTS) return 0;
    if (layout < LAYOUT_U4) return (layout == LAYOUT_F32 ? 4 : 2) * (size_t)rows * (size_t)columns;
    return ((size_t)rows + BAND - 1) / BAND * (size_t)(columns / block_columns(layout)) * block_bytes(layout);
}

size_t place_input(struct input *in, void *memory)
{
    size_t numbers = (size_t)in->count * (size_t)in->columns, groups = (size_t)in->count * (size_t)(in->columns / GROUP);
    uintptr_t scales = (uintptr_t)memory + aligned(numbers), sums = scales + aligned(groups * sizeof(float));
    in->rounded = memory;
    in->scales = (float *)scales;
    in->sums = (float *)sums;
    return sums + aligned(2 * groups * sizeof(float)) - (uintptr_t)memory;
}

void round_groups(struct input *in, int32_t vector, int32_t first, int32_t last)
{
    kernels_in_use->round(in, vector, first, last);
}

void multiply(const struct matrix *w, const struct input *in, float *y, ptrdiff_t y_stride, const float *bias,
              int32_t first_band, int32_t last_band)
{
    if (w->layout < 0 || w->layout >= LAYOUTS) return;
    kernels_in_use->multiply[w->layout](w, in, y, y_stride, bias, first_band, last_band);
}

void multiply_parallel(const struct matrix *w, struct input *in, float *y, ptrdiff_t y_stride, const float *bias,
                       int32_t threads)
{
    int64_t bands = w->rows / BAND + (w->rows % BAND != 0);
    int32_t groups = w->layout >= LAYOUT_U4 ? in->columns / GROUP : 0;
    /* A few vectors are rounded in less time than other threads need to start. */
#pragma omp parallel for num_threads(threads) if ((int64_t)in->count * groups > 1024)
    for (int32_t m = 0; m < in->count; m++)
        round_groups(in, m, 0, groups);
#pragma omp parallel num_threads(threads)
    {
        int32_t i = omp_get_thread_num(), parts = omp_get_num_threads();
        multiply(w, in, y, y_stride, bias, (int32_t)(bands * i / parts), (int32_t)(bands * (i + 1) / parts));
    }
}

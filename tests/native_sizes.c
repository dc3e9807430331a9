/* Runs every layout and kernel at ragged sizes in buffers of exactly the size that matmul.h names, for a compiler with
   -fsanitize=address,undefined; with -DGUARDED=1 in buffers that end where memory that cannot be read begins, for the
   masked instructions that a sanitizer does not see.  With -DSHORTER=1 the weights lack their last byte (GUARDED: their
   last four, so that dense numbers stay aligned), with -DSHORTER=2 a cache does, which must be noticed.  */

#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "kernels.h"
#include "matmul_bf16.h"
#include "step.h"

#ifndef SHORTER
#define SHORTER 0
#endif

#ifndef GUARDED
#define GUARDED 0
#endif

#define SHORT_BY (GUARDED ? 4 : 1)
#define LACKING (SHORTER == 1 ? SHORT_BY : 0)
#define PAGE 65536 /* a multiple of every usual size of a page */

static size_t mapped(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE + PAGE;
}

static void *reserve(size_t bytes)
{
    if (!GUARDED)
        return malloc(bytes);
    char *start = mmap(NULL, mapped(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *end = start + mapped(bytes) - PAGE;
    if (start == MAP_FAILED || mprotect(end, PAGE, PROT_NONE))
        exit(2);
    return end - bytes;
}

static void release(void *buffer, size_t bytes)
{
    if (GUARDED)
        munmap((char *)buffer + bytes + PAGE - mapped(bytes), mapped(bytes));
    else
        free(buffer);
}

static void product(int layout, int rows, int columns, int count, int threads)
{
    size_t bytes = matrix_bytes(layout, rows, columns) - LACKING, memory_bytes;
    size_t x_bytes = sizeof(float) * (size_t)(count * columns), y_bytes = sizeof(float) * (size_t)(count * rows);
    size_t bias_bytes = sizeof(float) * (size_t)rows;
    struct input sizes = {.count = count, .columns = columns};
    memory_bytes = place_input(&sizes, NULL);
    char *data = reserve(bytes), *memory = reserve(memory_bytes);
    float *x = reserve(x_bytes), *y = reserve(y_bytes), *bias = reserve(bias_bytes);
    for (size_t i = 0; i < bytes; i++)
        data[i] = (char)(i * 37 % 61); /* no exponent of all ones, so no NaN */
    for (int i = 0; i < count * columns; i++)
        x[i] = (float)(i % 23 - 11);
    for (int i = 0; i < rows; i++)
        bias[i] = (float)i;
    struct matrix w = {layout, rows, columns, 0, data};
    struct input in = {count, columns, x, columns, NULL, NULL, NULL};
    place_input(&in, memory);
    multiply_parallel(&w, &in, y, rows, threads % 2 ? bias : NULL, threads);
    if (layout >= LAYOUT_U4) unpack_row(&w, rows - 1, x);
    release(data, bytes);
    release(memory, memory_bytes);
    release(x, x_bytes);
    release(y, y_bytes);
    release(bias, bias_bytes);
}

/* x' [count][columns] rounded, y fp32 or rounded, with a bias, something more and a gate or without. */
static void product_bf16(int rows, int columns, int count, int rounded)
{
    int pairs = pairs_in(rows), padded = pairs_in(columns) * PAIR;
    size_t bytes = (size_t)(pairs * PAIR * padded) * sizeof(uint16_t) - LACKING, x_bytes = sizeof(float) * (size_t)columns;
    size_t in_bytes = (size_t)(count * padded) * sizeof(uint16_t), bias_bytes = sizeof(float) * (size_t)rows;
    size_t more_bytes = sizeof(float) * (size_t)(count * rows);
    size_t y_bytes = rounded ? (size_t)(count * pairs * PAIR) * sizeof(uint16_t) : more_bytes;
    char *weights = reserve(bytes), *y = reserve(y_bytes);
    float *x = reserve(x_bytes), *bias = reserve(bias_bytes), *more = reserve(more_bytes);
    uint16_t *in = reserve(in_bytes);
    for (size_t i = 0; i < bytes; i++) weights[i] = (char)(i * 37 % 61);
    for (int i = 0; i < columns; i++) x[i] = (float)(i % 23 - 11);
    for (int i = 0; i < rows; i++) bias[i] = (float)i;
    for (int i = 0; i < count * rows; i++) more[i] = (float)i;
    for (int m = 0; m < count; m++) round_bf16(in + m * padded, x, columns);
    struct matrix w = {-1, rows, columns, 0, weights}; /* tiles */
    struct bf16_product it = {.weight = &w, .gate = count % 3 ? NULL : &w, .count = count, .function = rounded,
                              .rounded = rounded, .x = in, .bias = count % 2 ? bias : NULL,
                              .more = count % 2 ? NULL : more, .y = y};
    multiply_bf16(&it, 0, pairs);
    release(weights, bytes);
    release(y, y_bytes);
    release(x, x_bytes);
    release(bias, bias_bytes);
    release(more, more_bytes);
    release(in, in_bytes);
}

/* The same with packed weights, unpacked while they are multiplied. */
static void product_unpacked(int layout, int rows, int columns, int count)
{
    size_t bytes = matrix_bytes(layout, rows, columns) - LACKING, y_bytes = sizeof(float) * (size_t)(count * rows);
    size_t in_bytes = (size_t)(count * columns) * sizeof(uint16_t);
    char *data = reserve(bytes), *y = reserve(y_bytes);
    uint16_t *in = reserve(in_bytes);
    for (size_t i = 0; i < bytes; i++) data[i] = (char)(i * 37 % 61);
    for (int i = 0; i < count * columns; i++) in[i] = (uint16_t)(0x3f80 + i % 64);
    struct matrix w = {layout, rows, columns, 0, data};
    struct bf16_product it = {.weight = &w, .gate = count % 3 ? NULL : &w, .count = count, .x = in, .y = y};
    multiply_bf16(&it, 0, pairs_in(rows));
    release(data, bytes);
    release(y, y_bytes);
    release(in, in_bytes);
}

static void repacked(int type, int layout, int block_bytes, int rows, int groups)
{
    size_t bytes = matrix_bytes(layout, rows, 32 * groups), file_bytes = (size_t)(rows * groups * block_bytes) - LACKING;
    char *data = reserve(bytes), *file = reserve(file_bytes);
    for (size_t i = 0; i < file_bytes; i++)
        file[i] = (char)(i * 37 % 61);
    struct matrix w = {layout, rows, 32 * groups, 0, data};
    if (repack_blocks(type, (const uint8_t *)file, &w, 2) != 1)
        exit(3);
    release(data, bytes);
    release(file, file_bytes);
}

/* Vectors of `width` numbers, written to a cache and read back. */
static void stored(int type, int width, int count)
{
    size_t bytes = (size_t)stored_bytes(type, width), room = bytes * (size_t)count - (SHORTER == 2 ? SHORT_BY : 0);
    size_t x_bytes = sizeof(float) * (size_t)(count * width);
    char *kept = reserve(room);
    float *x = reserve(x_bytes), *y = reserve(x_bytes);
    for (int i = 0; i < count * width; i++) x[i] = (float)(i % 23 - 11);
    for (int i = 0; i < count; i++) kernels_in_use->keep(type, kept + (size_t)i * bytes, x + i * width, width);
    kernels_in_use->read(type, y, kept, count, width);
    release(kept, room);
    release(x, x_bytes);
    release(y, x_bytes);
}

int main(void)
{
    int widths[] = {7, 1, 31, 32, 33, 64, 80};
    for (int type = STORED_F32; type <= STORED_INT8; type++)
        for (int w = 0; w < 7; w++)
            for (int c = 1; c < 4; c++) stored(type, widths[w], c);
    int types[][3] = {{2, LAYOUT_U4, 18}, {3, LAYOUT_U4, 20}, {6, LAYOUT_U5, 22}, {7, LAYOUT_U5, 24}, {8, LAYOUT_S8, 34}};
    for (int i = 0; i < 5; i++)
        for (int rows = SHORTER ? 16 : 1; rows <= 33; rows += 16)
            repacked(types[i][0], types[i][1], types[i][2], rows, i + 1);
    int rows[] = {1, 15, 16, 17, 37}, counts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17}, products = 0;
    for (int level = LEVEL_PORTABLE; level < LEVEL_AMX; level++)
        for (int layout = LAYOUT_F32; select_level(level) == level && layout <= LAYOUT_S8X16; layout++)
            for (int r = 0; r < 5; r++)
                for (int c = 0; c < 10; c++)
                    for (int i = 0; i < 4; i++, products++) {
                        int size = i < 3 ? i + 1 : 21;
                        int block = layout == LAYOUT_S8X16 ? 256 : layout <= LAYOUT_BF16 ? 13 : 32;
                        product(layout, rows[r], size * block, counts[c], 1 + products % 2);
                    }
    int many[] = {1, 5, 15, 16, 17, 31, 33, 47, 259};
    for (int i = 0; i < 1 && select_level(LEVEL_AMX) == LEVEL_AMX; i++)
        for (int r = 0; r < 5; r++)
            for (int c = 0; c < 9; c++, products++) product_bf16(rows[r], c * 60 + 7, many[c], c % 2);
    for (int i = 0; i < 1 && select_level(LEVEL_AMX) == LEVEL_AMX; i++)
        for (int layout = LAYOUT_U4; layout <= LAYOUT_S8X16; layout++)
            for (int c = 0; c < 9; c++, products++)
                product_unpacked(layout, rows[c % 5], (layout == LAYOUT_S8X16 ? 256 : 32) * (c % 5 * 7 + 1), many[c]);
    printf("%d\n", products);
    return 0;
}

/* Repacks blocks of GGUF's types Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 into the layouts of matmul.h, a band at a time.

   A block of 32 numbers begins with an fp16 scale and, in Q4_1 and Q5_1, an fp16 minimum.  Four bytes of fifth bits
   follow in Q5_0 and Q5_1, bit i for number i, and then 16 bytes, of which byte i holds number i in its low half and
   number 16 + i in its high half; or, in Q8_0, 32 bytes.  Q4_0 and Q5_0 count from -8 and -16 on, so their minimum is
   that many times the scale.  */

#include <string.h>

#include "kernels.h"

static uint32_t word_at(const uint8_t *bytes) { uint32_t word; memcpy(&word, bytes, sizeof word); return word; }
static uint16_t half_at(const uint8_t *bytes) { return (uint16_t)(bytes[0] | bytes[1] << 8); }
static int finite_half(uint16_t half) { return (half & 0x7c00) != 0x7c00; }

/* -x * 2^power for a finite fp16 number x; where it is too large, a number that is not finite. */
static uint16_t negative_multiple(uint16_t half, int power)
{
    uint32_t sign = (half & 0x8000) ^ 0x8000, size = half & 0x7fff;
    for (int i = 0; i < power && size < 0x7c00; i++) size += size < 0x400 ? size : 0x400; /* subnormal or exponent */
    return (uint16_t)(sign | (size < 0x7c00 ? size : 0x7c00));
}

/* The numbers of a row's block into its four bytes of each line; whole lines are LINE apart. */
static void place_nibbles(uint8_t *out, const uint8_t *in)
{
    const uint32_t low = 0x0f0f0f0f, high = 0xf0f0f0f0;
    uint32_t a = word_at(in), b = word_at(in + 4), c = word_at(in + 8), d = word_at(in + 12);
    uint32_t lines[4] = {(a & low) | (b & low) << 4, (c & low) | (d & low) << 4, (a >> 4 & low) | (b & high),
                         (c >> 4 & low) | (d & high)};
    for (int j = 0; j < 4; j++) memcpy(out + LINE * j, lines + j, 4);
}

static void place_fifths(uint8_t *out, uint32_t bits)
{
    for (int i = 0; i < 4; i++) {
        uint32_t byte = 0;
        for (int j = 0; j < 8; j++) byte |= (bits >> (4 * j + i) & 1) << j;
        out[i] = (uint8_t)byte;
    }
}

/* How a type stores a block; power: its lowest code is -2^power, 0 where a minimum is stored or codes are signed. */
struct type {
    int layout, bytes, minimum, fifths, power;
};

/* By the number of the type in GGUF; where `bytes` is 0 there is none. */
static const struct type types[] = {[2] = {LAYOUT_U4, 18, 0, 0, 3}, [3] = {LAYOUT_U4, 20, 1, 0, 0},
                                    [6] = {LAYOUT_U5, 22, 0, 1, 4}, [7] = {LAYOUT_U5, 24, 1, 1, 0},
                                    [8] = {LAYOUT_S8, 34, 0, 0, 0}};

/* The block `in` of row r into its group; -> whether its numbers are finite in fp16. */
static int place_block(uint8_t *out, const uint8_t *in, int32_t r, const struct type *type)
{
    uint8_t *halves = out + (type->layout == LAYOUT_U4 ? 4 : type->layout == LAYOUT_U5 ? 5 : 8) * LINE + 2 * r;
    uint16_t scale = half_at(in), minimum = 0;
    in += 2;
    memcpy(halves, &scale, 2);
    if (type->layout == LAYOUT_S8) {
        for (int j = 0; j < 8; j++) memcpy(out + LINE * j + 4 * r, in + 4 * j, 4);
        return finite_half(scale);
    }
    if (type->minimum) {
        minimum = half_at(in);
        in += 2;
    } else {
        minimum = negative_multiple(scale, type->power);
    }
    memcpy(halves + 2 * BAND, &minimum, 2);
    if (type->fifths) {
        place_fifths(out + 4 * LINE + 4 * r, word_at(in));
        in += 4;
    }
    place_nibbles(out + 4 * r, in);
    return finite_half(scale) && finite_half(minimum);
}

int repack_blocks(int type_number, const uint8_t *blocks, const struct matrix *w, int32_t threads)
{
    if (type_number < 0 || type_number > 8 || !types[type_number].bytes) return -1;
    const struct type *type = types + type_number;
    if (type->layout != w->layout) return -1;
    int32_t groups = w->columns / GROUP, bands = w->rows / BAND + (w->rows % BAND != 0);
    size_t group_bytes = block_bytes(w->layout);
    int finite = 1;
#pragma omp parallel for num_threads(threads) reduction(&& : finite)
    for (int32_t band = 0; band < bands; band++) {
        uint8_t *out = (uint8_t *)(uintptr_t)w->data + (size_t)band * (size_t)groups * group_bytes;
        int32_t rows = w->rows - band * BAND < BAND ? w->rows - band * BAND : BAND;
        if (rows < BAND) memset(out, 0, (size_t)groups * group_bytes);
        for (int32_t g = 0; g < groups; g++)
            for (int32_t r = 0; r < rows; r++) {
                size_t block = ((size_t)band * BAND + (size_t)r) * (size_t)groups + (size_t)g;
                finite &= place_block(out + (size_t)g * group_bytes, blocks + block * (size_t)type->bytes, r, type);
            }
    }
    return finite;
}

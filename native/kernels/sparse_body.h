/* The sparse codecs' numbers: which elements of a block are kept, and what is kept of them. docs/numbers.md, "Codecs". */

#include "sparse.h"

enum { SPARSE_NAN = 0x7fc00000, SPARSE_ROW = 16 /* elements that are looked at together */ };

/* By what elements are kept: the bits of the magnitude; a NaN is above infinity, and all are alike. */
INLINE i32 sparse_rank(float x) { return magnitude(x) > F32_INF ? SPARSE_NAN : magnitude(x); }

/* The number that is the *rest-th from the top of `count`, and how many of those that equal it are among the first *rest:
   a radix selection, byte by byte, of which only those stay that have the bytes so far. Changes a. */
static __attribute__((noinline)) i32 sparse_nth(i32 *restrict a, u32 count, u32 *rest)
{
    i32 found = 0;
    for (int shift = 24;; shift -= 8) {
        u16 counts[256] = {0};
        u32 left = 0, byte = 255;
        for (u32 i = 0; i < count; i++)
            counts[a[i] >> shift & 255]++;
        for (; counts[byte] < *rest; byte--)
            *rest -= counts[byte];
        found |= (i32)(byte << shift);
        if (shift == 0)
            return found;
        for (u32 i = 0; i < count; i++) {
            a[left] = a[i];
            left += (u32)(a[i] >> shift & 255) == byte;
        }
        count = left;
    }
}

/* The places of the `kept` elements of greatest rank, in order; of those that are alike the first. Of the greatest ones
   of at least twice as many columns the kept-th is a lower bound, which few reach. */
static __attribute__((noinline)) void sparse_choose(u16 *restrict places, const float *x, u32 kept)
{
    i32 rank[WC_SPARSE_BLOCK], most[WC_SPARSE_BLOCK / 2], above[WC_SPARSE_BLOCK], bound = 0;
    u16 near[WC_SPARSE_BLOCK];
    u32 among = 0, rest = kept;
    for (int i = 0; i < WC_SPARSE_BLOCK; i++)
        rank[i] = sparse_rank(x[i]);
    if (kept <= WC_SPARSE_BLOCK / 4) {
        u32 columns = 64;
        while (columns < 2 * kept)
            columns *= 2;
        memcpy(most, rank, columns * sizeof *most);
        for (u32 at = columns; at < WC_SPARSE_BLOCK; at += columns)
            for (u32 i = 0; i < columns; i++)
                most[i] = GREATER(most[i], rank[at + i]);
        bound = sparse_nth(most, columns, &rest);
    }
    for (u32 at = 0; at < WC_SPARSE_BLOCK; at += SPARSE_ROW) {
        u32 any = 0;
        for (u32 i = at; i < at + SPARSE_ROW; i++)
            any |= rank[i] >= bound;
        for (u32 i = at; any && i < at + SPARSE_ROW; i++) {
            near[among] = (u16)i;
            among += rank[i] >= bound;
        }
    }
    for (u32 k = 0; k < among; k++)
        above[k] = rank[near[k]];
    rest = kept;
    const i32 least = sparse_nth(above, among, &rest);
    for (u32 k = 0, n = 0; n < kept; k++) { /* rest: how many of those that have the least rank */
        const i32 here = rank[near[k]];
        const u32 taken = here > least || (here == least && rest > 0);
        places[n] = near[k];
        n += taken;
        rest -= taken && here == least;
    }
}

/* A mean as bfloat16; of nothing it is 0, and none becomes infinite by rounding. */
INLINE u16 sparse_level(double sum, u32 count)
{
    const u32 level = bf16_rounded((float)(count ? sum / count : 0)) >> 16;
    return (u16)LESSER(level, BF16_INF - 1);
}

/* Two bits: the sign, and which of two levels. Those above the mean magnitude are worth their mean, the others theirs.
   Infinities and NaNs, where there are any, are the upper ones alone. */
INLINE void sparse_levels(u8u *coded, u8 *restrict codes, const float *x, u32 kept)
{
    double sums[2] = {0}, all = 0;
    u32 counts[2] = {0}, finite = 0;
    i32 most = 0;
    for (u32 i = 0; i < kept; i++) {
        const i32 rank = sparse_rank(x[i]);
        most = GREATER(most, rank);
        if (rank < F32_INF) {
            all += f32_from((u32)rank);
            finite++;
        }
    }
    const double mean = finite ? all / finite : 0;
    for (u32 i = 0; i < kept; i++) {
        const i32 rank = sparse_rank(x[i]);
        const u32 upper = most >= F32_INF ? rank >= F32_INF : f32_from((u32)rank) > mean;
        codes[i] = (u8)(upper | f32_bits(x[i]) >> 31 << 1);
        if (rank < F32_INF)
            sums[upper] += f32_from((u32)rank);
        counts[upper]++;
    }
    u16 levels[2] = {sparse_level(sums[0], counts[0]), sparse_level(sums[1], counts[1])};
    if (most >= F32_INF)
        levels[1] = (u16)(most >> 16);
    memcpy(coded, levels, sizeof levels);
}

static void sparse_encode_block(const wc_sparse *form, u8u *coded, const float *x)
{
    u16 places[WC_SPARSE_BLOCK];
    u8 codes[WC_SPARSE_BLOCK];
    float chosen[WC_SPARSE_BLOCK];
    sparse_choose(places, x, form->kept);
    for (u32 i = 0; i < form->kept; i++)
        chosen[i] = x[places[i]];
    if (form->bits == 2)
        sparse_levels(coded, codes, chosen, form->kept);
    else
        put_scale(coded, block_codes((i8 *)codes, chosen, NULL, (int)form->kept, INT8_CODES));
    wc_sparse_write(form, coded, places, codes);
}

/* The first n elements of a block, 1 at least. */
static void sparse_decode_block(const wc_sparse *form, float *x, const u8u *coded, size_t n)
{
    u16 places[WC_SPARSE_BLOCK];
    u8 codes[WC_SPARSE_BLOCK];
    float values[WC_SPARSE_BLOCK];
    memset(x, 0, WC_SPARSE_BLOCK * sizeof *x);
    if (!wc_sparse_read(form, coded, n, places, codes))
        return;
    if (form->bits == 2) {
        u16 levels[2];
        memcpy(levels, coded, sizeof levels);
        for (u32 i = 0; i < form->kept; i++)
            values[i] = f32_from(f32_result(f32_from((u32)levels[codes[i] & 1] << 16 | (u32)codes[i] >> 1 << 31)));
    } else {
        decode_block(values, NULL, (const i8u *)codes, (int)form->kept, INT8_CODES, get_scale(coded));
    }
    for (u32 i = 0; i < form->kept; i++)
        x[places[i]] = values[i];
}

static void sparse_encode(u32 codec, int dtype, void *dst, const void *src, size_t n)
{
    const wc_sparse form = wc_sparse_of(codec);
    const uint8_t *from = src;
    float x[WC_SPARSE_BLOCK];
    for (u8u *to = dst; n > 0; to += form.bytes) {
        const size_t count = LESSER(n, WC_SPARSE_BLOCK);
        load_floats(dtype, x, from, count);
        memset(x + count, 0, (WC_SPARSE_BLOCK - count) * sizeof *x);
        sparse_encode_block(&form, to, x);
        n -= count, from += count * element_size(dtype);
    }
}

static void sparse_decode(u32 codec, int dtype, void *dst, const void *coded, size_t n)
{
    const wc_sparse form = wc_sparse_of(codec);
    uint8_t *to = dst;
    float x[WC_SPARSE_BLOCK];
    for (const u8u *from = coded; n > 0; from += form.bytes) {
        const size_t count = LESSER(n, WC_SPARSE_BLOCK);
        sparse_decode_block(&form, x, from, count);
        store_floats(dtype, to, x, count);
        n -= count, to += count * element_size(dtype);
    }
}

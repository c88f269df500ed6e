/* Codecs of whole tensors: cuts them into groups and converts dtypes. body.h includes this once for each instruction
   set. */

#include "codec_groups.h"

typedef void encode_group_fn(u8u *coded, const f32u *x, const u32 *random);
typedef void decode_group_fn(f32u *out, const u8u *coded);
typedef void add_group_fn(f32u *out, const f32u *a, const u8u *coded);

/* n elements of src as floats, and zeros up to a group. */
INLINE void load_floats(int dtype, float *restrict x, const void *src, size_t n)
{
    size_t i = 0;
    if (dtype == WC_F32) {
        memcpy(x, src, n * sizeof *x);
        i = n;
    } else if (dtype == WC_F64) {
        for (; i < n; i++)
            x[i] = (float)((const f64u *)src)[i];
    } else if (dtype == WC_BF16) {
        for (; i < n; i++)
            x[i] = f32_from((u32)((const u16u *)src)[i] << 16);
    } else {
#if defined(HALF_LANES)
        for (; i + HALF_LANES <= n; i += HALF_LANES) {
            const lanes v = half_load((const u16u *)src + i);
            memcpy(x + i, &v, sizeof v);
        }
#endif
        for (; i < n; i++)
            x[i] = f16_widened(((const u16u *)src)[i]);
    }
    for (; i < GROUP; i++)
        x[i] = 0;
}

/* n floats, their NaNs canonical, as elements of dst. */
INLINE void store_floats(int dtype, void *dst, const float *restrict x, size_t n)
{
    size_t i = 0;
    if (dtype == WC_F32) {
        memcpy(dst, x, n * sizeof *x);
    } else if (dtype == WC_F64) {
        for (; i < n; i++)
            ((f64u *)dst)[i] = x[i];
    } else if (dtype == WC_BF16) {
        for (; i < n; i++)
            ((u16u *)dst)[i] = (u16)(bf16_rounded(x[i]) >> 16);
    } else {
#if defined(HALF_LANES)
        for (; i + HALF_LANES <= n; i += HALF_LANES) {
            lanes v;
            memcpy(&v, x + i, sizeof v);
            half_store((u16u *)dst + i, v);
        }
#endif
        for (; i < n; i++)
            ((u16u *)dst)[i] = f16_rounded(x[i]);
    }
}

INLINE size_t element_size(int dtype) { return dtype == WC_F64 ? 8 : dtype == WC_F32 ? 4 : 2; }
INLINE size_t coded_size(wc_codec_block block, size_t n) { return (n + block.elements - 1) / block.elements * block.bytes; }

enum { GROUP_BYTES = GROUP / BLOCK * FP16_BYTES }; /* the most that a coded group takes */

INLINE void encode_all(int dtype, wc_codec_block block, encode_group_fn *group, void *dst, const void *src, size_t n, const wc_noise *noise)
{
    const size_t size = element_size(dtype), step = coded_size(block, GROUP);
    const uint8_t *from = src;
    u8u *to = dst;
    float x[GROUP];
    u32 room[GROUP + RANDOM_LINE];
    for (size_t i = 0; i < n; i += GROUP, from += GROUP * size, to += step) {
        const u32 *random = noise == NULL ? NULL : random_group(room, noise->key, noise->first + i);
        if (n - i >= GROUP) {
            if (dtype != WC_F32)
                load_floats(dtype, x, from, GROUP);
            group(to, dtype == WC_F32 ? (const f32u *)from : x, random);
        } else {
            uint8_t coded[GROUP_BYTES];
            load_floats(dtype, x, from, n - i);
            group(coded, x, random);
            memcpy(to, coded, coded_size(block, n - i));
        }
    }
}

INLINE void decode_last(wc_codec_block block, decode_group_fn *group, float *x, const u8u *coded, size_t n)
{
    uint8_t padded[GROUP_BYTES] = {0};
    memcpy(padded, coded, coded_size(block, n));
    group(x, padded);
}

INLINE void decode_all(int dtype, wc_codec_block block, decode_group_fn *group, void *dst, const void *coded, size_t n)
{
    const size_t size = element_size(dtype), step = coded_size(block, GROUP);
    const u8u *from = coded;
    uint8_t *to = dst;
    float x[GROUP];
    for (; n >= GROUP; n -= GROUP, from += step, to += GROUP * size) {
        group(dtype == WC_F32 ? (f32u *)to : x, from);
        if (dtype != WC_F32)
            store_floats(dtype, to, x, GROUP);
    }
    if (n == 0)
        return;
    decode_last(block, group, x, from, n);
    store_floats(dtype, to, x, n);
}

enum { PIECE = 2 * GROUP }; /* elements decoded before they are added: they stay in the first cache */

INLINE void accumulate_all(int dtype, wc_codec_block block, decode_group_fn *group, add_group_fn *add, wc_reduce_fn sum, void *dst, const void *a,
                           const void *coded, size_t n)
{
    const size_t size = element_size(dtype);
    const uint8_t *other = a;
    const u8u *from = coded;
    uint8_t *to = dst, decoded[PIECE * sizeof(double)];
    if (dtype == WC_F32) {
        for (const size_t step = coded_size(block, GROUP); n >= GROUP; n -= GROUP, from += step, other += GROUP * size, to += GROUP * size)
            add((f32u *)to, (const f32u *)other, from);
    }
    while (n > 0) {
        const size_t count = LESSER(n, PIECE);
        decode_all(dtype, block, group, decoded, from, count);
        sum(to, other, decoded, count);
        n -= count, from += coded_size(block, count), other += count * size, to += count * size;
    }
}

enum { SUMS = 16 }; /* side by side, so that vectors of any width add in the same order */

INLINE void error_all(int dtype, const void *src, const void *decoded, size_t n, double *error, double *norm)
{
    const size_t size = element_size(dtype);
    double errors[SUMS] = {0}, norms[SUMS] = {0};
    for (size_t at = 0; at < n; at += GROUP) {
        const size_t count = LESSER(n - at, GROUP);
        const uint8_t *from = (const uint8_t *)src + at * size;
        float x[GROUP], y[GROUP];
        double wide[GROUP] = {0};
        load_floats(dtype, y, (const uint8_t *)decoded + at * size, count);
        load_floats(dtype, x, from, count);
        if (dtype == WC_F64)
            memcpy(wide, from, count * size);
        INDEPENDENT for (int i = 0; i < GROUP; i += SUMS) {
            for (int k = 0; k < SUMS; k++) {
                const double value = dtype == WC_F64 ? wide[i + k] : (double)x[i + k];
                const double finite = value - value == 0 ? value : 0, off = value - value == 0 ? value - (double)y[i + k] : 0;
                errors[k] += off * off;
                norms[k] += finite * finite;
            }
        }
    }
    for (int k = 0; k < SUMS; k++) {
        *error += errors[k];
        *norm += norms[k];
    }
}
#define ERROR(dtype, type)                                                                                                      \
    static void error_##type(const void *src, const void *decoded, size_t n, double *error, double *norm) {                     \
        error_all(dtype, src, decoded, n, error, norm);                                                                         \
    }
ERROR(WC_F32, f32)
ERROR(WC_F64, f64)
ERROR(WC_F16, f16)
ERROR(WC_BF16, bf16)

#include "sparse_body.h"

/* The three functions of a codec for a dtype. */
#define CODEC(codec, elements, bytes, dtype, type)                                                                              \
    static void encode_##codec##_##type(void *dst, const void *src, size_t n, const wc_noise *noise) {                          \
        encode_all(dtype, (wc_codec_block){elements, bytes}, codec##_encode_group, dst, src, n, noise);                         \
    }                                                                                                                           \
    static void decode_##codec##_##type(void *dst, const void *coded, size_t n) {                                               \
        decode_all(dtype, (wc_codec_block){elements, bytes}, codec##_decode_group, dst, coded, n);                              \
    }                                                                                                                           \
    static void accumulate_##codec##_##type(void *dst, const void *a, const void *coded, size_t n) {                            \
        accumulate_all(dtype, (wc_codec_block){elements, bytes}, codec##_decode_group, codec##_add_group, type##_sum_all, dst, a, coded, n);       \
    }
#define CODEC_WIDE(codec, elements, bytes)                                                                                      \
    CODEC(codec, elements, bytes, WC_F32, f32)                                                                                  \
    CODEC(codec, elements, bytes, WC_F64, f64)
#define CODEC_HALF(codec, elements, bytes)                                                                                      \
    CODEC(codec, elements, bytes, WC_F16, f16)                                                                                  \
    CODEC(codec, elements, bytes, WC_BF16, bf16)
CODEC_WIDE(bf16, 1, 2)
CODEC_WIDE(fp16, 128, 260)
CODEC_WIDE(int8, 128, 132)
CODEC_HALF(int8, 128, 132)
CODEC_WIDE(int4, 32, 20)
CODEC_HALF(int4, 32, 20)
CODEC_WIDE(fp8, 128, 132)
CODEC_HALF(fp8, 128, 132)

#define WIDE(verb, codec) [WC_F32] = verb##_##codec##_f32, [WC_F64] = verb##_##codec##_f64
#define HALF(verb, codec) [WC_F16] = verb##_##codec##_f16, [WC_BF16] = verb##_##codec##_bf16
#define CODEC_TABLE(verb)                                                                                                       \
    {                                                                                                                           \
        [WC_CODEC_BF16] = {WIDE(verb, bf16)},                                                                                   \
        [WC_CODEC_FP16] = {WIDE(verb, fp16)},                                                                                   \
        [WC_CODEC_INT8] = {WIDE(verb, int8), HALF(verb, int8)},                                                                 \
        [WC_CODEC_INT4] = {WIDE(verb, int4), HALF(verb, int4)},                                                                 \
        [WC_CODEC_FP8] = {WIDE(verb, fp8), HALF(verb, fp8)},                                                                    \
    }

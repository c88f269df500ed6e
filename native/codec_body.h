/* Codecs, in plain C; kernels_body.h includes this once for each instruction set. The formats are in ARCHITECTURE.md, "Codecs, bit for bit".
   All formats are coded GROUP elements at a time, as float32; the functions at the end cut tensors into groups and convert dtypes. */

#define INLINE static inline __attribute__((always_inline))

enum {
    GROUP = 128,   /* elements: a block of fp16 and int8, four of int4 */
    INT4_BLOCK = 32,
    RANDOM_LINE = 64, /* elements whose random bits are made together */
    F32_INF = 0x7f800000,
    F32_LEAST_NORMAL = 0x00800000
};

INLINE i32 magnitude(float x) { return (i32)(f32_bits(x) & 0x7fffffffu); }

INLINE void put_scale(u8u *coded, float scale) { memcpy(coded, &scale, sizeof scale); }
INLINE float get_scale(const u8u *coded) {
    float scale;
    memcpy(&scale, coded, sizeof scale);
    return scale;
}

/* ---- random bits: Philox4x32-7 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011) --------------------------- */

#define PHILOX_ROUND                                                                            \
    {                                                                                           \
        const u64 p = (u64)c0 * 0xd2511f53u, q = (u64)c2 * 0xcd9e8d57u;                         \
        c0 = (u32)(q >> 32) ^ c1 ^ k0;                                                          \
        c1 = (u32)q;                                                                            \
        c2 = (u32)(p >> 32) ^ c3 ^ k1;                                                          \
        c3 = (u32)p;                                                                            \
        k0 += 0x9e3779b9u;                                                                      \
        k1 += 0xbb67ae85u;                                                                      \
    }

/* The random words of the elements of one line: word w of counter 16 * line + lane belongs to element 64 * line + 16 * w + lane. */
static void random_line(u32 *restrict out, u64 key, u64 line) {
    const u32 low = (u32)(line << 4), high = (u32)(line >> 28);
    INDEPENDENT for (u32 lane = 0; lane < RANDOM_LINE / 4; lane++) {
        u32 c0 = low | lane, c1 = high, c2 = 0, c3 = 0, k0 = (u32)key, k1 = (u32)(key >> 32);
        PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND
        out[lane] = c0;
        out[lane + 16] = c1;
        out[lane + 32] = c2;
        out[lane + 48] = c3;
    }
}

/* One word for each of the GROUP elements from `first`. room holds GROUP + RANDOM_LINE words; the result lies in it. */
INLINE const u32 *random_group(u32 *room, u64 key, u64 first) {
    const u32 skip = (u32)(first % RANDOM_LINE);
    for (u32 k = 0; k < GROUP + (skip ? RANDOM_LINE : 0); k += RANDOM_LINE)
        random_line(room + k, key, first / RANDOM_LINE + k / RANDOM_LINE);
    return room + skip;
}

/* ---- bf16 ------------------------------------------------------------------------------------------------------------------------------------- */

static void bf16_encode_group(u8u *coded, const f32u *x, const u32 *random) {
    u16u *out = (u16u *)coded;
    if (random == NULL) {
        INDEPENDENT for (int i = 0; i < GROUP; i++) out[i] = (u16)(bf16_rounded(x[i]) >> 16);
    } else { /* a carry out of the mantissa reaches infinity at most; infinity itself stays, since its lower half is zero */
        INDEPENDENT for (int i = 0; i < GROUP; i++) out[i] = (u16)((f32_result(x[i]) + (random[i] >> 16)) >> 16);
    }
}

static void bf16_decode_group(f32u *out, const u8u *coded) {
    const u16u *in = (const u16u *)coded;
    INDEPENDENT for (int i = 0; i < GROUP; i++) ((u32u *)out)[i] = f32_result(f32_from((u32)in[i] << 16));
}

/* ---- fp16: scale, halves ---------------------------------------------------------------------------------------------------------------------- */

/* The greatest magnitude among finite elements, as bits. */
INLINE i32 most_finite(const f32u *x, const int count) {
    i32 most = 0;
    for (int i = 0; i < count; i++) {
        const i32 size = magnitude(x[i]), finite = size < F32_INF ? size : 0;
        most = GREATER(most, finite);
    }
    return most;
}

/* Toward zero or away from it, with a chance that is the distance. v is at most 2^15, infinite or NaN. */
INLINE u16 f16_rounded_at_random(float v, u32 random) {
    const u32 bits = f32_bits(v), size = bits & 0x7fffffffu;
    const float scaled = f32_from(choose(less(size, 113u << 23), size, 0)) * 16777216.0f; /* denormals: a place is 2^-24 */
    const i32 whole = (i32)scaled;
    const u32 up = (float)(random >> 8) * 0x1p-24f < scaled - (float)whole;
    const u32 normal = (size - ((127u - 15) << 23) + (random >> 19)) >> 13;
    const u32 finite = choose(less(size, 113u << 23), (u32)whole + up, normal);
    const u32 half = choose(less(size, F32_INF), finite, F16_INF) | (bits >> 31) << 15;
    return (u16)choose(less(F32_INF, size), F16_NAN, half);
}

/* A power of two, so that dividing by it is exact, and the greatest finite magnitude comes to lie below 2^15. */
static void fp16_encode_group(u8u *coded, const f32u *x, const u32 *random) {
    const i32 exponent = (most_finite(x, GROUP) >> 23) - 14;
    const u32 field = (u32)GREATER(exponent, 1);
    const float inverse = f32_from((254 - field) << 23);
    u16u *out = (u16u *)(coded + 4);
    put_scale(coded, f32_from(field << 23));
    if (random != NULL) {
        INDEPENDENT for (int i = 0; i < GROUP; i++) out[i] = f16_rounded_at_random(x[i] * inverse, random[i]);
        return;
    }
#if defined(HALF_LANES)
    for (int i = 0; i < GROUP; i += HALF_LANES) {
        lanes v;
        memcpy(&v, x + i, sizeof v);
        half_store(out + i, lanes_result(v * inverse));
    }
#else
    INDEPENDENT for (int i = 0; i < GROUP; i++) out[i] = f16_rounded(x[i] * inverse);
#endif
}

static void fp16_decode_group(f32u *out, const u8u *coded) {
    const u16u *in = (const u16u *)(coded + 4);
    const float scale = get_scale(coded);
#if defined(HALF_LANES)
    for (int i = 0; i < GROUP; i += HALF_LANES) {
        const lanes v = lanes_result(half_load(in + i) * scale);
        memcpy(out + i, &v, sizeof v);
    }
#else
    INDEPENDENT for (int i = 0; i < GROUP; i++) ((u32u *)out)[i] = f32_result(f16_widened(in[i]) * scale);
#endif
}

/* ---- int8 and int4: scale, codes -------------------------------------------------------------------------------------------------------------- */

/* What one step of a code is worth, for a block whose greatest magnitude has the bits `most`. A scale that is denormal is rounded up, so that no code
   exceeds the limit by more than rounding; one that would make the greatest code infinite is rounded down. */
INLINE float block_scale(i32 most, int limit) {
    const float greatest = f32_from((u32)most), scale = greatest / (float)limit, reached = scale * (float)limit;
    u32 bits = f32_bits(scale);
    if (magnitude(reached) >= F32_INF) bits--;
    if (bits < F32_LEAST_NORMAL && reached < greatest) bits++;
    return f32_from(bits);
}

INLINE i8 clamped(i32 code, int limit) { return (i8)(code > limit ? limit : code < -limit ? -limit : code); }

/* Codes of finite elements. */
INLINE void make_codes(i8 *restrict codes, const f32u *x, const u32 *random, const int count, const int limit, float scale) {
    if (random != NULL) {
        const float divisor = scale > 0 ? scale : 1;
        INDEPENDENT for (int i = 0; i < count; i++) {
            const float q = x[i] / divisor;
            const i32 toward_zero = (i32)q, below = toward_zero - ((float)toward_zero > q);
            codes[i] = clamped(below + ((float)(random[i] >> 8) * 0x1p-24f < q - (float)below), limit);
        }
        return;
    }
    /* The reciprocal of a tiny scale would be infinite: both are moved up by an exact power of two. */
    const float lift = scale < 0x1p-100f ? 0x1p64f : 1, inverse = scale > 0 ? 1 / (scale * lift) : 0;
    const float shift = 0x1.8p23f; /* adding it leaves the rounded integer in the mantissa's low bits */
    INDEPENDENT for (int i = 0; i < count; i++) {
        const float moved = x[i] * lift * inverse + shift;
        codes[i] = clamped((i32)(f32_bits(moved) - f32_bits(shift)), limit);
    }
}

/* A block with infinities or NaNs: the sign of the scale says so, and the codes at the ends mean them. */
static __attribute__((noinline)) float flagged_codes(i8 *codes, const f32u *x, const u32 *random, int count, int limit) {
    float finite[GROUP];
    for (int i = 0; i < count; i++) finite[i] = magnitude(x[i]) < F32_INF ? x[i] : 0;
    const float scale = block_scale(most_finite(finite, count), limit - 1);
    make_codes(codes, finite, random, count, limit - 1, scale);
    for (int i = 0; i < count; i++) {
        if (magnitude(x[i]) == F32_INF) codes[i] = (i8)(x[i] > 0 ? limit : -limit);
        if (magnitude(x[i]) > F32_INF) codes[i] = (i8)(-limit - 1);
    }
    return -scale;
}

/* Fills codes and returns the scale. */
INLINE float encode_block(i8 *restrict codes, const f32u *x, const u32 *random, const int count, const int limit) {
    i32 most = 0;
    for (int i = 0; i < count; i++) most = GREATER(most, magnitude(x[i]));
    if (__builtin_expect(most >= F32_INF, 0)) return flagged_codes(codes, x, random, count, limit);
    const float scale = block_scale(most, limit);
    make_codes(codes, x, random, count, limit, scale);
    return scale;
}

static __attribute__((noinline)) void decode_flagged(f32u *out, const i8u *codes, int count, int limit, float scale) {
    for (int i = 0; i < count; i++) {
        u32 bits = f32_result((float)codes[i] * -scale);
        if (codes[i] == limit) bits = F32_INF;
        if (codes[i] == -limit) bits = F32_INF | 0x80000000u;
        if (codes[i] == -limit - 1) bits = F32_NAN;
        ((u32u *)out)[i] = bits;
    }
}

INLINE void decode_block(f32u *out, const i8u *codes, const int count, const int limit, float scale) {
    if (__builtin_expect(f32_bits(scale) >> 31, 0)) {
        decode_flagged(out, codes, count, limit, scale);
    } else {
        INDEPENDENT for (int i = 0; i < count; i++) ((u32u *)out)[i] = f32_result((float)codes[i] * scale);
    }
}

static void int8_encode_group(u8u *coded, const f32u *x, const u32 *random) {
    i8 codes[GROUP];
    put_scale(coded, encode_block(codes, x, random, GROUP, 127));
    memcpy(coded + 4, codes, GROUP);
}

static void int8_decode_group(f32u *out, const u8u *coded) { decode_block(out, (const i8u *)coded + 4, GROUP, 127, get_scale(coded)); }

static void int4_encode_group(u8u *coded, const f32u *x, const u32 *random) {
    i8 codes[INT4_BLOCK];
    for (int at = 0; at < GROUP; at += INT4_BLOCK, coded += 4 + INT4_BLOCK / 2) {
        put_scale(coded, encode_block(codes, x + at, random == NULL ? NULL : random + at, INT4_BLOCK, 7));
        INDEPENDENT for (int i = 0; i < INT4_BLOCK / 2; i++) coded[4 + i] = (u8)((codes[2 * i] & 15) | (u8)codes[2 * i + 1] << 4);
    }
}

static void int4_decode_group(f32u *out, const u8u *coded) {
    i8 codes[INT4_BLOCK];
    for (int at = 0; at < GROUP; at += INT4_BLOCK, coded += 4 + INT4_BLOCK / 2) {
        INDEPENDENT for (int i = 0; i < INT4_BLOCK / 2; i++) {
            codes[2 * i] = (i8)((coded[4 + i] & 15) - (coded[4 + i] & 8) * 2);
            codes[2 * i + 1] = (i8)((coded[4 + i] >> 4) - (coded[4 + i] >> 7) * 16);
        }
        decode_block(out + at, codes, INT4_BLOCK, 7, get_scale(coded));
    }
}

/* ---- tensors ---------------------------------------------------------------------------------------------------------------------------------- */

typedef void encode_group_fn(u8u *coded, const f32u *x, const u32 *random);
typedef void decode_group_fn(f32u *out, const u8u *coded);

/* n elements of src as floats, and zeros up to a group. */
INLINE void load_floats(int dtype, float *restrict x, const void *src, size_t n) {
    size_t i = 0;
    if (dtype == WC_F32) {
        memcpy(x, src, n * sizeof *x);
        i = n;
    } else if (dtype == WC_F64) {
        for (; i < n; i++) x[i] = (float)((const f64u *)src)[i];
    } else if (dtype == WC_BF16) {
        for (; i < n; i++) x[i] = f32_from((u32)((const u16u *)src)[i] << 16);
    } else {
#if defined(HALF_LANES)
        for (; i + HALF_LANES <= n; i += HALF_LANES) {
            const lanes v = half_load((const u16u *)src + i);
            memcpy(x + i, &v, sizeof v);
        }
#endif
        for (; i < n; i++) x[i] = f16_widened(((const u16u *)src)[i]);
    }
    for (; i < GROUP; i++) x[i] = 0;
}

/* n floats, their NaNs canonical, as elements of dst. */
INLINE void store_floats(int dtype, void *dst, const float *restrict x, size_t n) {
    size_t i = 0;
    if (dtype == WC_F32) {
        memcpy(dst, x, n * sizeof *x);
    } else if (dtype == WC_F64) {
        for (; i < n; i++) ((f64u *)dst)[i] = x[i];
    } else if (dtype == WC_BF16) {
        for (; i < n; i++) ((u16u *)dst)[i] = (u16)(bf16_rounded(x[i]) >> 16);
    } else {
#if defined(HALF_LANES)
        for (; i + HALF_LANES <= n; i += HALF_LANES) {
            lanes v;
            memcpy(&v, x + i, sizeof v);
            half_store((u16u *)dst + i, v);
        }
#endif
        for (; i < n; i++) ((u16u *)dst)[i] = f16_rounded(x[i]);
    }
}

INLINE size_t element_size(int dtype) { return dtype == WC_F64 ? 8 : dtype == WC_F32 ? 4 : 2; }
INLINE size_t coded_size(wc_codec_block block, size_t n) { return (n + block.elements - 1) / block.elements * block.bytes; }

enum { GROUP_BYTES = 260 }; /* the most that a coded group takes */

INLINE void encode_all(int dtype, wc_codec_block block, encode_group_fn *group, void *dst, const void *src, size_t n, const wc_noise *noise) {
    const size_t size = element_size(dtype), step = coded_size(block, GROUP);
    const uint8_t *from = src;
    u8u *to = dst;
    float x[GROUP];
    u32 room[GROUP + RANDOM_LINE];
    for (size_t i = 0; i < n; i += GROUP, from += GROUP * size, to += step) {
        const u32 *random = noise == NULL ? NULL : random_group(room, noise->key, noise->first + i);
        if (n - i >= GROUP) {
            if (dtype != WC_F32) load_floats(dtype, x, from, GROUP);
            group(to, dtype == WC_F32 ? (const f32u *)from : x, random);
        } else {
            uint8_t coded[GROUP_BYTES];
            load_floats(dtype, x, from, n - i);
            group(coded, x, random);
            memcpy(to, coded, coded_size(block, n - i));
        }
    }
}

INLINE void decode_last(wc_codec_block block, decode_group_fn *group, float *x, const u8u *coded, size_t n) {
    uint8_t padded[GROUP_BYTES] = {0};
    memcpy(padded, coded, coded_size(block, n));
    group(x, padded);
}

INLINE void decode_all(int dtype, wc_codec_block block, decode_group_fn *group, void *dst, const void *coded, size_t n) {
    const size_t size = element_size(dtype), step = coded_size(block, GROUP);
    const u8u *from = coded;
    uint8_t *to = dst;
    float x[GROUP];
    for (; n >= GROUP; n -= GROUP, from += step, to += GROUP * size) {
        group(dtype == WC_F32 ? (f32u *)to : x, from);
        if (dtype != WC_F32) store_floats(dtype, to, x, GROUP);
    }
    if (n == 0) return;
    decode_last(block, group, x, from, n);
    store_floats(dtype, to, x, n);
}

enum { PIECE = 8 * GROUP }; /* elements decoded before they are added: they stay in the first cache */

INLINE void accumulate_all(int dtype, wc_codec_block block, decode_group_fn *group, wc_reduce_fn sum, void *dst, const void *a, const void *coded,
                           size_t n) {
    const size_t size = element_size(dtype), step = coded_size(block, PIECE);
    uint8_t decoded[PIECE * sizeof(double)];
    for (size_t i = 0, at = 0; i < n; i += PIECE, at += step) {
        const size_t count = LESSER(n - i, PIECE);
        decode_all(dtype, block, group, decoded, (const u8u *)coded + at, count);
        sum((uint8_t *)dst + i * size, (const uint8_t *)a + i * size, decoded, count);
    }
}

enum { SUMS = 16 }; /* side by side, so that vectors of any width add in the same order */

INLINE void error_all(int dtype, wc_codec_block block, decode_group_fn *group, const void *src, const void *coded, size_t n, double *error, double *norm) {
    const size_t size = element_size(dtype), step = coded_size(block, GROUP);
    double errors[SUMS] = {0}, norms[SUMS] = {0};
    for (size_t at = 0; at < n; at += GROUP) {
        const size_t count = LESSER(n - at, GROUP);
        const uint8_t *from = (const uint8_t *)src + at * size;
        uint8_t decoded[GROUP * sizeof(double)];
        float x[GROUP], y[GROUP];
        double wide[GROUP] = {0};
        decode_all(dtype, block, group, decoded, (const u8u *)coded + at / GROUP * step, count);
        load_floats(dtype, y, decoded, count);
        load_floats(dtype, x, from, count);
        if (dtype == WC_F64) memcpy(wide, from, count * size);
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

/* The four functions of a codec for a dtype. */
#define CODEC(codec, elements, bytes, dtype, type)                                                                              \
    static void encode_##codec##_##type(void *dst, const void *src, size_t n, const wc_noise *noise) {                          \
        encode_all(dtype, (wc_codec_block){elements, bytes}, codec##_encode_group, dst, src, n, noise);                         \
    }                                                                                                                           \
    static void decode_##codec##_##type(void *dst, const void *coded, size_t n) {                                               \
        decode_all(dtype, (wc_codec_block){elements, bytes}, codec##_decode_group, dst, coded, n);                              \
    }                                                                                                                           \
    static void accumulate_##codec##_##type(void *dst, const void *a, const void *coded, size_t n) {                            \
        accumulate_all(dtype, (wc_codec_block){elements, bytes}, codec##_decode_group, type##_sum_all, dst, a, coded, n);       \
    }                                                                                                                           \
    static void error_##codec##_##type(const void *src, const void *coded, size_t n, double *error, double *norm) {             \
        error_all(dtype, (wc_codec_block){elements, bytes}, codec##_decode_group, src, coded, n, error, norm);                  \
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

#define WIDE(verb, codec) [WC_F32] = verb##_##codec##_f32, [WC_F64] = verb##_##codec##_f64
#define HALF(verb, codec) [WC_F16] = verb##_##codec##_f16, [WC_BF16] = verb##_##codec##_bf16
#define CODEC_TABLE(verb)                                                                                                       \
    {                                                                                                                           \
        [WC_CODEC_BF16] = {WIDE(verb, bf16)},                                                                                   \
        [WC_CODEC_FP16] = {WIDE(verb, fp16)},                                                                                   \
        [WC_CODEC_INT8] = {WIDE(verb, int8), HALF(verb, int8)},                                                                 \
        [WC_CODEC_INT4] = {WIDE(verb, int4), HALF(verb, int4)},                                                                 \
    }

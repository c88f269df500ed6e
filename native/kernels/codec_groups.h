/* The codecs' formats, in plain C, GROUP float32 elements at a time. They are described in docs/numbers.md, "Codecs".
   codec_body.h includes this and makes whole tensors of it. */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "scales and codes are written as they lie in memory");

#define INLINE static inline __attribute__((always_inline))

enum {
    GROUP = 512, /* elements: several blocks, whose chains of dependent operations then run side by side */
    BLOCK = 128, /* elements of a block of fp16 and int8 */
    FP16_BYTES = 260,
    INT8_BYTES = 132,
    INT4_BLOCK = 32,
    INT4_BYTES = 20,
    RANDOM_LINE = 64, /* elements whose random bits are made together */
    F32_INF = 0x7f800000,
    F32_LEAST_NORMAL = 0x00800000
};

INLINE i32 magnitude(float x) { return (i32)(f32_bits(x) & 0x7fffffffu); }

/* A decoded value as bits, added to element i of a if there is an a. */
INLINE u32 joined(const f32u *a, int i, float decoded) { return f32_result(a == NULL ? decoded : a[i] + decoded); }

/* The greatest magnitude, as bits; that of a NaN is above that of infinity. */
INLINE i32 greatest_of(const f32u *x, const int count)
{
    i32 most = 0;
    for (int i = 0; i < count; i++)
        most = GREATER(most, magnitude(x[i]));
    return most;
}

/* A copy in which zeros stand for infinities and NaNs. */
INLINE void finite_of(float *restrict finite, const f32u *x, int count)
{
    for (int i = 0; i < count; i++)
        finite[i] = magnitude(x[i]) < F32_INF ? x[i] : 0;
}

#if defined(HALF_LANES)
INLINE lanes lanes_load(const f32u *x)
{
    lanes v;
    memcpy(&v, x, sizeof v);
    return v;
}
INLINE void lanes_store(f32u *x, lanes v) { memcpy(x, &v, sizeof v); }
#endif

INLINE void put_scale(u8u *coded, float scale) { memcpy(coded, &scale, sizeof scale); }
INLINE float get_scale(const u8u *coded)
{
    float scale;
    memcpy(&scale, coded, sizeof scale);
    return scale;
}

/* ---- random bits: Philox4x32-7 ----------------------------------------------------------------------------------- */

/* Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. */

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

/* The random words of the elements of one line: word w of counter 16 * line + lane belongs to element 64 * line + 16 *
   w + lane. */
static __attribute__((noinline)) void random_line(u32 *restrict out, u64 key, u64 line)
{
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
INLINE const u32 *random_group(u32 *room, u64 key, u64 first)
{
    const u32 skip = (u32)(first % RANDOM_LINE);
    for (u32 k = 0; k < GROUP + (skip ? RANDOM_LINE : 0); k += RANDOM_LINE)
        random_line(room + k, key, first / RANDOM_LINE + k / RANDOM_LINE);
    return room + skip;
}

/* ---- bf16 ------------------------------------------------------------------------------------------------------- */

static void bf16_encode_group(u8u *coded, const f32u *x, const u32 *random)
{
    u16u *out = (u16u *)coded;
    if (random == NULL) {
        INDEPENDENT for (int i = 0; i < GROUP; i++) out[i] = (u16)(bf16_rounded(x[i]) >> 16);
    /* a carry out of the mantissa reaches infinity at most; infinity itself stays, since its lower half is zero */
    } else {
        INDEPENDENT for (int i = 0; i < GROUP; i++) out[i] = (u16)((f32_result(x[i]) + (random[i] >> 16)) >> 16);
    }
}

INLINE void bf16_group(f32u *out, const f32u *a, const u8u *coded)
{
    const u16u *in = (const u16u *)coded;
    INDEPENDENT for (int i = 0; i < GROUP; i++) ((u32u *)out)[i] = joined(a, i, f32_from((u32)in[i] << 16));
}

/* ---- fp16: scale, halves ---------------------------------------------------------------------------------------- */

/* Toward zero or away from it, with a chance that is the distance. v is at most 2^15, infinite or NaN. */
INLINE u16 f16_rounded_at_random(float v, u32 random)
{
    const u32 bits = f32_bits(v), size = bits & 0x7fffffffu;
    /* denormals: a place is 2^-24 */
    const float scaled = f32_from(choose(less(size, 113u << 23), size, 0)) * 16777216.0f;
    const i32 whole = (i32)scaled;
    const u32 up = (float)(random >> 8) * 0x1p-24f < scaled - (float)whole;
    const u32 normal = (size - ((127u - 15) << 23) + (random >> 19)) >> 13;
    const u32 finite = choose(less(size, 113u << 23), (u32)whole + up, normal);
    const u32 half = choose(less(size, F32_INF), finite, F16_INF) | (bits >> 31) << 15;
    return (u16)choose(less(F32_INF, size), F16_NAN, half);
}

/* A power of two, so that dividing by it is exact, and the greatest finite magnitude comes to lie below 2^15. */
INLINE u32 power_below(const f32u *x)
{
    i32 most = greatest_of(x, BLOCK);
    if (__builtin_expect(most >= F32_INF, 0)) {
        float finite[BLOCK];
        finite_of(finite, x, BLOCK);
        most = greatest_of(finite, BLOCK);
    }
    const i32 exponent = (most >> 23) - 14;
    return (u32)GREATER(exponent, 1);
}

static void fp16_encode_group(u8u *coded, const f32u *x, const u32 *random)
{
    for (int at = 0; at < GROUP; at += BLOCK, coded += FP16_BYTES, x += BLOCK) {
        const u32 power = power_below(x);
        const float inverse = f32_from((254 - power) << 23);
        u16u *out = (u16u *)(coded + 4);
        put_scale(coded, f32_from(power << 23));
        if (random != NULL) {
            INDEPENDENT for (int i = 0; i < BLOCK; i++) out[i] = f16_rounded_at_random(x[i] * inverse, random[at + i]);
            continue;
        }
#if defined(HALF_LANES)
        for (int i = 0; i < BLOCK; i += HALF_LANES)
            half_store(out + i, lanes_result(lanes_load(x + i) * inverse));
#else
        INDEPENDENT for (int i = 0; i < BLOCK; i++) out[i] = f16_rounded(x[i] * inverse);
#endif
    }
}

INLINE void fp16_group(f32u *out, const f32u *a, const u8u *coded)
{
    for (int at = 0; at < GROUP; at += BLOCK, coded += FP16_BYTES) {
        const u16u *in = (const u16u *)(coded + 4);
        const float scale = get_scale(coded);
#if defined(HALF_LANES)
        for (int i = 0; i < BLOCK; i += HALF_LANES) {
            const lanes v = half_load(in + i) * scale;
            lanes_store(out + at + i, lanes_result(a == NULL ? v : lanes_load(a + at + i) + v));
        }
#else
        INDEPENDENT for (int i = 0; i < BLOCK; i++) ((u32u *)out)[at + i] = joined(a, at + i, f16_widened(in[i]) * scale);
#endif
    }
}

/* ---- int8 and int4: scale, codes -------------------------------------------------------------------------------- */

/* Blocks whose greatest magnitude has bits from LEAST_PLAIN on, and is not the greatest float, need no care for the
   ends of the exponents. */
#define LEAST_PLAIN_SCALE 0x1p-100f
enum { LEAST_PLAIN = (127 - 90) << 23 };

/* To nearest even. Adding 1.5 x 2^23 leaves the rounded integer in the low bits of the mantissa. */
INLINE i8 nearest(float q) { return (i8)f32_bits(q + 0x1.8p23f); }

/* What one step of a code is worth, for a block whose greatest magnitude has the bits `most`. A scale that is denormal
   is rounded up, so that no element exceeds the limit by more than rounding; one that would make the greatest code
   infinite is rounded down. */
INLINE float block_scale(i32 most, int limit)
{
    const float greatest = f32_from((u32)most), scale = greatest / (float)limit;
    const i32 bits = (i32)f32_bits(scale);
    if (__builtin_expect(bits < F32_LEAST_NORMAL || most == F32_INF - 1, 0)) {
        const float reached = scale * (float)limit;
        return f32_from((u32)(bits + (reached < greatest) - (magnitude(reached) == F32_INF)));
    }
    return scale;
}

/* Codes of x / scale, to nearest even. An element can exceed the limit by rounding errors only, so no code does. */
INLINE void nearest_codes(i8 *restrict codes, const f32u *x, int count, float scale)
{
    /* The reciprocal of a tiny scale would be infinite: both are moved up by an exact power of two. */
    const float lift = scale < LEAST_PLAIN_SCALE ? 0x1p64f : 1, inverse = scale > 0 ? 1 / (scale * lift) : 0;
    INDEPENDENT for (int i = 0; i < count; i++) codes[i] = nearest(x[i] * lift * inverse);
}

INLINE i8 clamped(i32 code, int limit) { return (i8)(code > limit ? limit : code < -limit ? -limit : code); }

/* Down or up, with a chance that is the distance. */
INLINE void random_codes(i8 *restrict codes, const f32u *x, const u32 *random, int count, int limit, float scale)
{
    const float divisor = scale > 0 ? scale : 1;
    INDEPENDENT for (int i = 0; i < count; i++) {
        const float q = x[i] / divisor;
        const i32 toward_zero = (i32)q, below = toward_zero - ((float)toward_zero > q);
        codes[i] = clamped(below + ((float)(random[i] >> 8) * 0x1p-24f < q - (float)below), limit);
    }
}

INLINE float finite_codes(i8 *restrict codes, const f32u *x, const u32 *random, int count, int limit)
{
    const float scale = block_scale(greatest_of(x, count), limit);
    if (random == NULL)
        nearest_codes(codes, x, count, scale);
    else
        random_codes(codes, x, random, count, limit, scale);
    return scale;
}

/* The codes of any block, and its scale. Infinities and NaNs are flagged by the sign of the scale, and the codes at the
   ends mean them. */
static __attribute__((noinline)) float any_codes(i8 *codes, const f32u *x, const u32 *random, int count, int limit)
{
    if (greatest_of(x, count) < F32_INF)
        return finite_codes(codes, x, random, count, limit);
    float finite[BLOCK];
    finite_of(finite, x, count);
    const float scale = finite_codes(codes, finite, random, count, limit - 1);
    for (int i = 0; i < count; i++) {
        if (magnitude(x[i]) == F32_INF)
            codes[i] = (i8)(x[i] > 0 ? limit : -limit);
        if (magnitude(x[i]) > F32_INF)
            codes[i] = (i8)(-limit - 1);
    }
    return -scale;
}

/* Codes and scales of a group of blocks of `count` elements; the codes of the blocks lie `stride` apart. Blocks with
   the ends of the exponents, and stochastic rounding, are rarer: there blocks are done one by one. */
INLINE void group_codes(i8 *codes, const int stride, float *scales, const f32u *x, const u32 *random, const int count, const int limit)
{
    const int blocks = GROUP / count;
    i32 most[GROUP / INT4_BLOCK], rare = random != NULL;
    float inverse[GROUP / INT4_BLOCK];
    for (int b = 0; b < blocks; b++)
        most[b] = greatest_of(x + b * count, count);
    for (int b = 0; b < blocks; b++) {
        scales[b] = f32_from((u32)most[b]) / (float)limit;
        inverse[b] = 1 / (scales[b] > 0 ? scales[b] : 1);
        rare |= ((most[b] < LEAST_PLAIN) & (most[b] != 0)) | (most[b] >= F32_INF - 1);
    }
    if (__builtin_expect(rare, 0)) {
        for (int b = 0; b < blocks; b++)
            scales[b] = any_codes(codes + b * stride, x + b * count, random == NULL ? NULL : random + b * count, count, limit);
        return;
    }
#if defined(HALF_LANES)
#define SCALED(k) lanes_load(x + i + (k)*HALF_LANES) * inverse[(i + (k)*HALF_LANES) / count]
    for (int i = 0; i < GROUP; i += 4 * HALF_LANES)
        codes_store(codes + i / count * stride + i % count, SCALED(0), SCALED(1), SCALED(2), SCALED(3));
#else
    for (int b = 0; b < blocks; b++) {
        INDEPENDENT for (int i = 0; i < count; i++) codes[b * stride + i] = nearest(x[b * count + i] * inverse[b]);
    }
#endif
}

static __attribute__((noinline)) void decode_flagged(f32u *out, const f32u *a, const i8u *codes, int count, int limit, float scale)
{
    for (int i = 0; i < count; i++) {
        float decoded = (float)codes[i] * -scale;
        if (codes[i] == limit)
            decoded = f32_from(F32_INF);
        if (codes[i] == -limit)
            decoded = -f32_from(F32_INF);
        if (codes[i] == -limit - 1)
            decoded = f32_from(F32_NAN);
        ((u32u *)out)[i] = joined(a, i, decoded);
    }
}

INLINE void decode_block(f32u *out, const f32u *a, const i8u *codes, const int count, const int limit, float scale)
{
    if (__builtin_expect(f32_bits(scale) >> 31, 0)) {
        decode_flagged(out, a, codes, count, limit, scale);
    } else {
        INDEPENDENT for (int i = 0; i < count; i++) ((u32u *)out)[i] = joined(a, i, (float)codes[i] * scale);
    }
}

static void int8_encode_group(u8u *coded, const f32u *x, const u32 *random)
{
    float scales[GROUP / BLOCK];
    group_codes((i8 *)coded + 4, INT8_BYTES, scales, x, random, BLOCK, 127);
    for (int b = 0; b < GROUP / BLOCK; b++)
        put_scale(coded + b * INT8_BYTES, scales[b]);
}

INLINE void int8_group(f32u *out, const f32u *a, const u8u *coded)
{
    for (int at = 0; at < GROUP; at += BLOCK, coded += INT8_BYTES)
        decode_block(out + at, a == NULL ? NULL : a + at, (const i8u *)coded + 4, BLOCK, 127, get_scale(coded));
}

/* Two codes lie in a byte, the first one in the lower half: as 16-bit words, two bytes become one. */
static void int4_encode_group(u8u *coded, const f32u *x, const u32 *random)
{
    float scales[GROUP / INT4_BLOCK];
    i8 codes[GROUP];
    u16 pairs[GROUP / 2];
    u8 bytes[GROUP / 2];
    group_codes(codes, INT4_BLOCK, scales, x, random, INT4_BLOCK, 7);
    memcpy(pairs, codes, sizeof pairs);
    for (int i = 0; i < GROUP / 2; i++)
        bytes[i] = (u8)((pairs[i] & 0x0f) | (pairs[i] >> 4 & 0xf0));
    for (int b = 0; b < GROUP / INT4_BLOCK; b++) {
        put_scale(coded + b * INT4_BYTES, scales[b]);
        memcpy(coded + b * INT4_BYTES + 4, bytes + b * INT4_BLOCK / 2, INT4_BLOCK / 2);
    }
}

INLINE void int4_group(f32u *out, const f32u *a, const u8u *coded)
{
    for (int at = 0; at < GROUP; at += INT4_BLOCK, coded += INT4_BYTES) {
        u16 pairs[INT4_BLOCK / 2];
        i8 codes[INT4_BLOCK];
        INDEPENDENT for (int i = 0; i < INT4_BLOCK / 2; i++) pairs[i] = (u16)((coded[4 + i] | coded[4 + i] << 4) & 0x0f0f);
        memcpy(codes, pairs, sizeof codes);
        for (int i = 0; i < INT4_BLOCK; i++)
            codes[i] = (i8)((codes[i] ^ 8) - 8); /* the sign of four bits */
        decode_block(out + at, a == NULL ? NULL : a + at, codes, INT4_BLOCK, 7, get_scale(coded));
    }
}

#define GROUP_FUNCTIONS(codec)                                                                                                  \
    static void codec##_decode_group(f32u *out, const u8u *coded) { codec##_group(out, NULL, coded); }                          \
    static void codec##_add_group(f32u *out, const f32u *a, const u8u *coded) { codec##_group(out, a, coded); }
GROUP_FUNCTIONS(bf16)
GROUP_FUNCTIONS(fp16)
GROUP_FUNCTIONS(int8)
GROUP_FUNCTIONS(int4)

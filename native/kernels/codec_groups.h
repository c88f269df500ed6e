/* The codecs' formats, in plain C, GROUP float32 elements at a time. They are described in docs/numbers.md, "Codecs".
   codec_body.h includes this and makes whole tensors of it. */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "scales and codes are written as they lie in memory");

enum {
    GROUP = 512, /* elements: several blocks, whose chains of dependent operations then run side by side */
    BLOCK = 128, /* elements of a block of fp16, int8 and fp8 */
    FP16_BYTES = 260,
    BYTE_CODES = 132, /* bytes of a block of int8 and fp8 */
    INT4_BLOCK = 32,
    INT4_BYTES = 20,
    RANDOM_LINE = 64 /* elements whose random bits are made together */
};

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

/* The random words of the elements of one line: word w of counter 16 * line + lane belongs to element 64 * line + 16 *
   w + lane. */
static __attribute__((noinline)) void random_line(u32 *restrict out, u64 key, u64 line)
{
    const u32 low = (u32)(line << 4), high = (u32)(line >> 28);
    INDEPENDENT for (u32 lane = 0; lane < RANDOM_LINE / 4; lane++) {
        u32 c0 = low | lane, c1 = high, c2 = 0, c3 = 0, k0 = (u32)key, k1 = (u32)(key >> 32);
        PHILOX_ROUNDS
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
    } else {
        INDEPENDENT for (int i = 0; i < GROUP; i++) out[i] = (u16)(bf16_rounded_at_random(x[i], random[i]) >> 16);
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
    const u32 up = uniform(random) < scaled - (float)whole;
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

/* ---- int8, int4 and fp8: scale, codes ---------------------------------------------------------------------------- */

/* Blocks whose greatest magnitude has bits from LEAST_PLAIN on, and is not the greatest float, need no care for the
   ends of the exponents: their scales are at least LEAST_PLAIN_SCALE. */
enum { LEAST_PLAIN = (127 - 90) << 23 };

INLINE float numbers_codes(i8 *restrict out, const f32u *x, const u32 *random, int count, const int codes, const int flagged)
{
    const float scale = block_scale(greatest_of(x, count), greatest_number(codes, flagged));
    if (random == NULL) {
        const float lift = scale_lift(scale), inverse = scale_inverse(scale);
        INDEPENDENT for (int i = 0; i < count; i++) out[i] = nearest_code(codes, flagged, x[i] * lift * inverse);
    } else {
        const float divisor = scale > 0 ? scale : 1;
        INDEPENDENT for (int i = 0; i < count; i++) out[i] = random_code(codes, flagged, x[i] / divisor, random[i]);
    }
    return scale;
}

/* The codes of any block, and its scale. Infinities and NaNs are flagged by the sign of the scale. */
INLINE float block_codes(i8 *out, const f32u *x, const u32 *random, int count, const int codes)
{
    if (greatest_of(x, count) < F32_INF)
        return numbers_codes(out, x, random, count, codes, 0);
    float finite[WC_SPARSE_BLOCK];
    finite_of(finite, x, count);
    const float scale = numbers_codes(out, finite, random, count, codes, 1);
    for (int i = 0; i < count; i++)
        if (magnitude(x[i]) >= F32_INF)
            out[i] = special_code(codes, x[i]);
    return -scale;
}

/* Codes and scales of a group of blocks of `count` elements; the codes of the blocks lie `stride` apart. Blocks with
   the ends of the exponents, and stochastic rounding, are rarer: there `any` does blocks one by one. */
typedef float block_codes_fn(i8 *out, const f32u *x, const u32 *random);
INLINE void group_codes(i8 *out, const int stride, float *scales, const f32u *x, const u32 *random, const int count, const int codes,
                        block_codes_fn *any)
{
    const int blocks = GROUP / count;
    i32 most[GROUP / INT4_BLOCK], rare = random != NULL;
    float inverse[GROUP / INT4_BLOCK];
    for (int b = 0; b < blocks; b++)
        most[b] = greatest_of(x + b * count, count);
    for (int b = 0; b < blocks; b++) {
        scales[b] = f32_from((u32)most[b]) / greatest_number(codes, 0);
        inverse[b] = 1 / (scales[b] > 0 ? scales[b] : 1);
        rare |= ((most[b] < LEAST_PLAIN) & (most[b] != 0)) | (most[b] >= F32_INF - 1);
    }
    if (__builtin_expect(rare, 0)) {
        for (int b = 0; b < blocks; b++)
            scales[b] = any(out + b * stride, x + b * count, random == NULL ? NULL : random + b * count);
        return;
    }
#if defined(HALF_LANES)
#define SCALED(k) lanes_load(x + i + (k)*HALF_LANES) * inverse[(i + (k)*HALF_LANES) / count]
    if (codes != E4M3_CODES) {
        for (int i = 0; i < GROUP; i += 4 * HALF_LANES)
            codes_store(out + i / count * stride + i % count, SCALED(0), SCALED(1), SCALED(2), SCALED(3));
        return;
    }
#endif
    for (int b = 0; b < blocks; b++) {
        INDEPENDENT for (int i = 0; i < count; i++) out[b * stride + i] = nearest_code(codes, 0, x[b * count + i] * inverse[b]);
    }
}

INLINE void decode_block(f32u *out, const f32u *a, const i8u *in, const int count, const int codes, float scale)
{
    if (__builtin_expect(f32_bits(scale) >> 31, 0)) {
        for (int i = 0; i < count; i++)
            ((u32u *)out)[i] = joined(a, i, flagged_value(codes, in[i], scale));
    } else {
        INDEPENDENT for (int i = 0; i < count; i++) ((u32u *)out)[i] = joined(a, i, code_value(codes, in[i]) * scale);
    }
}

#define BYTE_CODES_FUNCTIONS(codec, codes)                                                                                      \
    static __attribute__((noinline)) float codec##_block_codes(i8 *out, const f32u *x, const u32 *random) {                     \
        return block_codes(out, x, random, BLOCK, codes);                                                                       \
    }                                                                                                                           \
    static void codec##_encode_group(u8u *coded, const f32u *x, const u32 *random) {                                            \
        float scales[GROUP / BLOCK];                                                                                            \
        group_codes((i8 *)coded + 4, BYTE_CODES, scales, x, random, BLOCK, codes, codec##_block_codes);                         \
        for (int b = 0; b < GROUP / BLOCK; b++)                                                                                 \
            put_scale(coded + b * BYTE_CODES, scales[b]);                                                                       \
    }                                                                                                                           \
    INLINE void codec##_group(f32u *out, const f32u *a, const u8u *coded) {                                                     \
        for (int at = 0; at < GROUP; at += BLOCK, coded += BYTE_CODES)                                                          \
            decode_block(out + at, a == NULL ? NULL : a + at, (const i8u *)coded + 4, BLOCK, codes, get_scale(coded));          \
    }
BYTE_CODES_FUNCTIONS(int8, INT8_CODES)
BYTE_CODES_FUNCTIONS(fp8, E4M3_CODES)

static __attribute__((noinline)) float int4_block_codes(i8 *out, const f32u *x, const u32 *random)
{
    return block_codes(out, x, random, INT4_BLOCK, INT4_CODES);
}

/* Two codes lie in a byte, the first one in the lower half: as 16-bit words, two bytes become one. */
static void int4_encode_group(u8u *coded, const f32u *x, const u32 *random)
{
    float scales[GROUP / INT4_BLOCK];
    i8 codes[GROUP];
    u16 pairs[GROUP / 2];
    u8 bytes[GROUP / 2];
    group_codes(codes, INT4_BLOCK, scales, x, random, INT4_BLOCK, INT4_CODES, int4_block_codes);
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
        decode_block(out + at, a == NULL ? NULL : a + at, codes, INT4_BLOCK, INT4_CODES, get_scale(coded));
    }
}

#define GROUP_FUNCTIONS(codec)                                                                                                  \
    static void codec##_decode_group(f32u *out, const u8u *coded) { codec##_group(out, NULL, coded); }                          \
    static void codec##_add_group(f32u *out, const f32u *a, const u8u *coded) { codec##_group(out, a, coded); }
GROUP_FUNCTIONS(bf16)
GROUP_FUNCTIONS(fp16)
GROUP_FUNCTIONS(int8)
GROUP_FUNCTIONS(int4)
GROUP_FUNCTIONS(fp8)

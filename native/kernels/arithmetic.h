/* The arithmetic of numbers and codes, one element at a time: the text that gcc, clang and, for CUDA devices, NVRTC
   compile. So a device's codec is the CPU's. Only what means the same everywhere: single IEEE operations that round
   once, and integers. Neither reciprocals nor roots that are guessed; no float becomes an integer that could be out
   of its bounds. The formats are in docs/numbers.md, "Codecs". */
#ifndef WC_ARITHMETIC_H
#define WC_ARITHMETIC_H

#if defined(__CUDACC_RTC__)
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define INLINE static __device__ __forceinline__
INLINE u32 f32_bits(float x) { return __float_as_uint(x); }
INLINE float f32_from(u32 bits) { return __uint_as_float(bits); }
#else
#include <stdint.h>
#include <string.h>
typedef int8_t i8;
typedef int16_t i16;
typedef int32_t i32;
typedef int64_t i64;
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
#define INLINE static inline __attribute__((always_inline))
INLINE u32 f32_bits(float x)
{
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
INLINE float f32_from(u32 bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
#endif

#define F32_NAN 0x7fc00000u
#define F16_NAN 0x7e00u
#define F16_INF 0x7c00u
enum { F32_INF = 0x7f800000, F32_LEAST_NORMAL = 0x00800000 };

/* A result as bits, any NaN made canonical. */
INLINE u32 f32_result(float x) { return x != x ? F32_NAN : f32_bits(x); }
INLINE i32 magnitude(float x) { return (i32)(f32_bits(x) & 0x7fffffffu); }

/* In what follows all cases are computed and masks choose: a compiler may not move float operations over a branch, so
   it would not vectorise one. */
INLINE u32 less(u32 a, u32 b) { return (u32)((i32)(a - b) >> 31); } /* all bits if a < b, else none; both below 2^31 */
INLINE u32 choose(u32 mask, u32 yes, u32 no) { return no ^ ((yes ^ no) & mask); }

/* ---- half types ------------------------------------------------------------------------------------------------- */

/* bfloat16 in the upper half; the lower half is rubbish. Integers do it: VCVTNEPS2BF16 would flush denormals. */
INLINE u32 bf16_rounded(float x)
{
    const u32 bits = f32_result(x);
    return bits + 0x7fff + (bits >> 16 & 1);
}
/* A carry out of the mantissa reaches infinity at most; infinity itself stays, since its lower half is zero. */
INLINE u32 bf16_rounded_at_random(float x, u32 random) { return f32_result(x) + (random >> 16); }

/* float16 without instructions for it (after F. Giesen, "float->half variants", 2012, public domain). */
INLINE float f16_widened(u16 h)
{
    const u32 size = (u32)(h & 0x7fff) << 13;
    const u32 normal = size + ((127 - 15) << 23);
    const u32 special = normal + ((128 - 16) << 23);
    const u32 denormal = f32_bits(f32_from(normal + (1 << 23)) - f32_from(113u << 23));
    const u32 bits = choose(less(size, 1 << 23), denormal, choose(less(size, 31 << 23), normal, special));
    return f32_from(bits | (u32)(h & 0x8000) << 16);
}
INLINE u16 f16_rounded(float x)
{
    const u32 bits = f32_bits(x), sign = bits & 0x80000000u, size = bits ^ sign;
    const u32 nan = less(0x7f800000u, size);
    /* Adding 0.5 makes the float addition round at the denormals' last place. */
    const u32 denormal = f32_bits(f32_from(size) + 0.5f) - (126u << 23);
    const u32 normal = (size - ((127u - 15) << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    const u32 finite = choose(less(size, 113u << 23), denormal, normal);
    const u32 half = choose(less(size, (127u + 16) << 23), finite, F16_INF) | (sign >> 16);
    return (u16)choose(nan, F16_NAN, half);
}

/* ---- random bits ------------------------------------------------------------------------------------------------ */

/* Philox4x32 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), a round of it. Word
   w of counter 16 * line + lane belongs to element 64 * line + 16 * w + lane. */
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
#define PHILOX_ROUNDS PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND PHILOX_ROUND

/* In [0, 1), 24 bits. */
INLINE float uniform(u32 random) { return (float)(random >> 8) * 0x1p-24f; }

/* ---- e4m3: four bits of exponent, three of mantissa, no infinity, one NaN --------------------------------------- */

/* E4M3 by the OCP's "8-bit floating point specification" (2023): 448 is the greatest, 2^-9 the least. */
enum { E4M3_GREATEST = 0x7e, E4M3_NAN = 0x7f, E4M3_LEAST_NORMAL = 121 << 23 };

/* To nearest even, and no code above `most`. x is no NaN, and below 480. */
INLINE u32 e4m3_rounded(float x, u32 most)
{
    const u32 bits = f32_bits(x), size = bits & 0x7fffffffu;
    /* At 2^14 a float's last place is 2^-9, that of the denormals. */
    const u32 denormal = f32_bits(f32_from(size) + 16384.0f) - f32_bits(16384.0f);
    const u32 normal = (size - (120u << 23) + 0x7ffff + (size >> 20 & 1)) >> 20;
    const u32 code = choose(less(size, E4M3_LEAST_NORMAL), denormal, normal);
    return (code < most ? code : most) | (bits >> 24 & 0x80);
}

/* Toward zero or away from it, with a chance that is the distance. */
INLINE u32 e4m3_rounded_at_random(float x, u32 random, u32 most)
{
    const u32 bits = f32_bits(x), size = bits & 0x7fffffffu, small = less(size, E4M3_LEAST_NORMAL);
    const float places = f32_from(choose(small, size, 0)) * 512.0f;
    const i32 whole = (i32)places;
    const u32 up = uniform(random) < places - (float)whole;
    const u32 code = choose(small, (u32)whole + up, (size - (120u << 23) + (random >> 12)) >> 20);
    return (code < most ? code : most) | (bits >> 24 & 0x80);
}

INLINE float e4m3_widened(u32 code)
{
    const u32 size = code & 0x7f;
    const u32 denormal = f32_bits(f32_from(f32_bits(16384.0f) + size) - 16384.0f);
    const u32 finite = choose(less(size, 8), denormal, (size << 20) + (120u << 23));
    return f32_from(choose(less(E4M3_GREATEST, size), F32_NAN, finite) | (code & 0x80) << 24);
}

/* ---- blocks of codes with a scale: int8, int4, fp8 -------------------------------------------------------------- */

enum { INT8_CODES, INT4_CODES, E4M3_CODES };

/* A block with infinities or NaNs is flagged: its greatest code means infinity, the next one is the greatest number. */
INLINE float greatest_number(int codes, int flagged)
{
    if (codes == E4M3_CODES)
        return flagged ? 416.0f : 448.0f;
    return (codes == INT8_CODES ? 127.0f : 7.0f) - (flagged ? 1.0f : 0.0f);
}

/* What one step of a code is worth, for a block whose greatest finite magnitude has the bits `most`. A scale that is
   denormal is rounded up, so that no element exceeds the greatest number by more than rounding; one that would make
   the greatest number infinite is rounded down. */
INLINE float block_scale(i32 most, float number)
{
    const float greatest = f32_from((u32)most), scale = greatest / number;
    const i32 bits = (i32)f32_bits(scale);
    if (__builtin_expect(bits < F32_LEAST_NORMAL || most == F32_INF - 1, 0)) {
        const float reached = scale * number;
        return f32_from((u32)(bits + (reached < greatest) - (magnitude(reached) == F32_INF)));
    }
    return scale;
}

/* x / scale is x * lift * inverse: the reciprocal of a tiny scale would be infinite, so both are moved up by an exact
   power of two. */
#define LEAST_PLAIN_SCALE 0x1p-100f
INLINE float scale_lift(float scale) { return scale < LEAST_PLAIN_SCALE ? 0x1p64f : 1.0f; }
INLINE float scale_inverse(float scale) { return scale > 0 ? 1.0f / (scale * scale_lift(scale)) : 0.0f; }

/* The code of q = x / scale, to nearest even. Adding 1.5 x 2^23 leaves the rounded integer in the low bits of the
   mantissa. An element can exceed the greatest number by rounding errors only, so no integer does. */
INLINE i8 nearest_code(int codes, int flagged, float q)
{
    if (codes == E4M3_CODES)
        return (i8)e4m3_rounded(q, flagged ? E4M3_GREATEST - 1 : E4M3_GREATEST);
    return (i8)f32_bits(q + 0x1.8p23f);
}

/* Down or up, with a chance that is the distance. */
INLINE i8 random_code(int codes, int flagged, float q, u32 random)
{
    if (codes == E4M3_CODES)
        return (i8)e4m3_rounded_at_random(q, random, flagged ? E4M3_GREATEST - 1 : E4M3_GREATEST);
    const i32 limit = (i32)greatest_number(codes, flagged);
    const i32 toward_zero = (i32)q, below = toward_zero - ((float)toward_zero > q);
    const i32 code = below + (uniform(random) < q - (float)below);
    return (i8)(code > limit ? limit : code < -limit ? -limit : code);
}

/* The code of an infinity or a NaN. */
INLINE i8 special_code(int codes, float x)
{
    const i32 limit = codes == INT8_CODES ? 127 : 7;
    if (magnitude(x) > F32_INF)
        return (i8)(codes == E4M3_CODES ? E4M3_NAN : -limit - 1);
    if (codes == E4M3_CODES)
        return (i8)(E4M3_GREATEST | (x < 0 ? 0x80 : 0));
    return (i8)(x > 0 ? limit : -limit);
}

/* What a code means, in steps. */
INLINE float code_value(int codes, i8 code) { return codes == E4M3_CODES ? e4m3_widened((u8)code) : (float)code; }

/* What a code of a flagged block means; the scale as it is on the wire. */
INLINE float flagged_value(int codes, i8 code, float scale)
{
    const i32 limit = codes == INT8_CODES ? 127 : 7;
    const i32 plus = codes == E4M3_CODES ? E4M3_GREATEST : limit;
    const i32 minus = codes == E4M3_CODES ? (i8)(E4M3_GREATEST | 0x80) : -limit;
    if (code == plus || code == minus)
        return f32_from((u32)F32_INF | (code == minus ? 0x80000000u : 0));
    if (codes != E4M3_CODES && code == -limit - 1)
        return f32_from(F32_NAN);
    return code_value(codes, code) * -scale;
}

#endif

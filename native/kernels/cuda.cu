/* Codecs for CUDA devices: what arithmetic.h says, one warp for each block. wancoll/client/cuda/encode.py has NVRTC
   compile this at run time, without contraction; the tests compile it for the host, too (tests/cuda/warps.c), so it
   is both C and C++. The bits are those of the other tables. Pointers are aligned to what they hold; codes and
   scales to nothing. */
#include "arithmetic.h"

#if defined(__cplusplus)
#define KERNEL extern "C" __global__ void
#else
#define KERNEL __global__ void
#endif

enum { WARP = 32, BLOCK = 128, BLOCK_BYTES = 132, LINE = 64, LINE_LANES = 16, WORDS = 4 };

/* ---- elements ----------------------------------------------------------------------------------------------------- */

#define LOAD_f32(src, i) (((const float *)(src))[i])
#define LOAD_f64(src, i) ((float)((const double *)(src))[i])
#define LOAD_f16(src, i) f16_widened(((const u16 *)(src))[i])
#define LOAD_bf16(src, i) f32_from((u32)((const u16 *)(src))[i] << 16)

#define STORE_f32(dst, i, x) (((u32 *)(dst))[i] = f32_result(x))
#define STORE_f64(dst, i, x) ((x) != (x) ? (void)(((u64 *)(dst))[i] = 0x7ff8000000000000u) : (void)(((double *)(dst))[i] = (x)))
#define STORE_f16(dst, i, x) (((u16 *)(dst))[i] = f16_rounded(x))
#define STORE_bf16(dst, i, x) (((u16 *)(dst))[i] = (u16)(bf16_rounded(x) >> 16))

/* ---- blocks of codes with a scale ---------------------------------------------------------------------------------- */

INLINE i32 greatest_of_warp(i32 most)
{
    for (int apart = WARP / 2; apart > 0; apart /= 2) {
        const i32 other = __shfl_xor_sync(0xffffffffu, most, apart);
        most = other > most ? other : most;
    }
    return most;
}

/* The block of a thread's warp, of x[0 .. 3], its elements. */
INLINE void encode_block(u8 *out, const float *x, int codes, u32 lane)
{
    i32 most = 0;
    for (int w = 0; w < WORDS; w++)
        most = magnitude(x[w]) > most ? magnitude(x[w]) : most;
    most = greatest_of_warp(most);
    const int flagged = most >= F32_INF;
    if (flagged) {
        most = 0;
        for (int w = 0; w < WORDS; w++)
            most = magnitude(x[w]) < F32_INF && magnitude(x[w]) > most ? magnitude(x[w]) : most;
        most = greatest_of_warp(most);
    }
    const float scale = block_scale(most, greatest_number(codes, flagged));
    const float lift = scale_lift(scale), inverse = scale_inverse(scale);
    const u32 place = 4 + lane / LINE_LANES * LINE + lane % LINE_LANES;
    for (int w = 0; w < WORDS; w++) {
        const int special = magnitude(x[w]) >= F32_INF;
        const i8 code = special ? special_code(codes, x[w]) : nearest_code(codes, flagged, x[w] * lift * inverse);
        out[place + LINE_LANES * w] = (u8)code;
    }
    if (lane < 4)
        out[lane] = (u8)((f32_bits(scale) | (flagged ? 0x80000000u : 0)) >> 8 * lane);
}

/* One warp for each block; n elements from a block's begin on. */
#define ENCODE_BLOCKS(codec, codes, type)                                                                                       \
    KERNEL encode_##codec##_##type(u8 *coded, const void *src, u64 n) {                                                         \
        const u64 block = (u64)blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;                                           \
        const u32 lane = threadIdx.x % WARP;                                                                                    \
        const u64 begin = block * BLOCK + lane / LINE_LANES * LINE;                                                             \
        float x[WORDS];                                                                                                         \
        if (block * BLOCK >= n)                                                                                                 \
            return;                                                                                                             \
        for (int w = 0; w < WORDS; w++) {                                                                                       \
            const u64 i = begin + (u32)w * LINE_LANES + lane % LINE_LANES;                                                      \
            x[w] = i < n ? LOAD_##type(src, i) : 0;                                                                             \
        }                                                                                                                       \
        encode_block(coded + block * BLOCK_BYTES, x, codes, lane);                                                              \
    }

/* Element i of what was encoded. */
INLINE float block_value(const u8 *coded, u64 i, int codes)
{
    const u8 *in = coded + i / BLOCK * BLOCK_BYTES;
    const u32 bits = in[0] | (u32)in[1] << 8 | (u32)in[2] << 16 | (u32)in[3] << 24;
    const float scale = f32_from(bits);
    const i8 code = (i8)in[4 + i % BLOCK];
    return bits >> 31 ? flagged_value(codes, code, scale) : code_value(codes, code) * scale;
}
#define VALUE_int8(coded, i) block_value(coded, i, INT8_CODES)
#define VALUE_fp8(coded, i) block_value(coded, i, E4M3_CODES)
#define VALUE_bf16(coded, i) f32_from((u32)((const u16 *)(coded))[i] << 16)

/* One thread for each element, here and below. */
#define DECODE(codec, type)                                                                                                     \
    KERNEL decode_##codec##_##type(void *dst, const u8 *coded, u64 n) {                                                         \
        const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;                                                               \
        if (i >= n)                                                                                                             \
            return;                                                                                                             \
        const float x = VALUE_##codec(coded, i);                                                                                \
        STORE_##type(dst, i, x);                                                                                                \
    }

/* ---- error feedback ------------------------------------------------------------------------------------------------ */

typedef float kept_f32, kept_f16, kept_bf16; /* what residuals of a dtype are */
typedef double kept_f64;

#define WHOLE_f32(src, i) LOAD_f32(src, i)
#define WHOLE_f64(src, i) (((const double *)(src))[i])
#define WHOLE_f16(src, i) LOAD_f16(src, i)
#define WHOLE_bf16(src, i) LOAD_bf16(src, i)

/* What elements of the dtype keep of x. */
#define KEEPS_f32(x) (x)
#define KEEPS_f64(x) (x)
#define KEEPS_f16(x) f16_widened(f16_rounded(x))
#define KEEPS_bf16(x) f32_from(bf16_rounded(x) >> 16 << 16)

/* src + residual, if there is one. */
#define FEED(type)                                                                                                              \
    KERNEL feed_##type(kept_##type *out, const void *src, u64 n, const kept_##type *residual) {                                 \
        const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;                                                               \
        if (i >= n)                                                                                                             \
            return;                                                                                                             \
        const kept_##type x = WHOLE_##type(src, i);                                                                             \
        out[i] = residual ? x + residual[i] : x;                                                                                \
    }
FEED(f32)
FEED(f64)
FEED(f16)
FEED(bf16)

/* What the codec loses of src: all of it, if nothing is `coded`. What is not finite is not lost. */
#define LOST(codec, type)                                                                                                       \
    KERNEL lost_##codec##_##type(kept_##type *out, const kept_##type *src, u64 n, const u8 *coded) {                            \
        const u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;                                                               \
        if (i >= n)                                                                                                             \
            return;                                                                                                             \
        const kept_##type lost = src[i] - (coded ? (kept_##type)KEEPS_##type(VALUE_##codec(coded, i)) : 0);                     \
        out[i] = lost - lost == 0 ? lost : 0;                                                                                   \
    }

#define BLOCKS(codec, codes, type)                                                                                              \
    ENCODE_BLOCKS(codec, codes, type)                                                                                           \
    DECODE(codec, type)                                                                                                         \
    LOST(codec, type)

BLOCKS(int8, INT8_CODES, f32)
BLOCKS(int8, INT8_CODES, f64)
BLOCKS(int8, INT8_CODES, f16)
BLOCKS(int8, INT8_CODES, bf16)
BLOCKS(fp8, E4M3_CODES, f32)
BLOCKS(fp8, E4M3_CODES, f64)
BLOCKS(fp8, E4M3_CODES, f16)
BLOCKS(fp8, E4M3_CODES, bf16)

/* ---- bf16 ---------------------------------------------------------------------------------------------------------- */

/* 16 threads for each line of 64 elements. */
#define BF16(type)                                                                                                              \
    KERNEL encode_bf16_##type(u16 *coded, const void *src, u64 n) {                                                             \
        const u64 thread = (u64)blockIdx.x * blockDim.x + threadIdx.x;                                                          \
        for (int w = 0; w < WORDS; w++) {                                                                                       \
            const u64 i = thread / LINE_LANES * LINE + (u32)w * LINE_LANES + thread % LINE_LANES;                               \
            if (i < n)                                                                                                          \
                coded[i] = (u16)(bf16_rounded(LOAD_##type(src, i)) >> 16);                                                      \
        }                                                                                                                       \
    }                                                                                                                           \
    DECODE(bf16, type)                                                                                                          \
    LOST(bf16, type)
BF16(f32)
BF16(f64)

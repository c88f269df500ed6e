/* The kernels themselves, in plain C. Each instruction-set file includes this once, after it has told the compiler its target, so that the
   same loops are vectorised for it. That file defines:
     TABLE, NAME                the table's symbol, its name
     XXH_VECTOR                 the vector width of the hash
     HALF_LANES, half_load(p), half_store(p, v), codes_store(p, a, b, c, d)
                                optional: float16 by instructions, HALF_LANES at a time, in a vector of floats called `lanes`;
                                four such vectors, rounded to nearest even and below 128, as bytes
   The rules of arithmetic are in docs/numbers.md, "Numbers". */

#include <float.h>
#include <string.h>

#include "arithmetic.h"
#include "tables.h"

#define XXH_INLINE_ALL
#include "vendor/xxhash.h"

_Static_assert(FLT_EVAL_METHOD == 0, "float operations must round to float");

/* Elements of any alignment. */
typedef float f32u __attribute__((aligned(1), may_alias));
typedef double f64u __attribute__((aligned(1), may_alias));
typedef int8_t i8u __attribute__((aligned(1), may_alias));
typedef int16_t i16u __attribute__((aligned(1), may_alias));
typedef int32_t i32u __attribute__((aligned(1), may_alias));
typedef int64_t i64u __attribute__((aligned(1), may_alias));
typedef uint8_t u8u __attribute__((aligned(1), may_alias));
typedef uint16_t u16u __attribute__((aligned(1), may_alias));
typedef uint32_t u32u __attribute__((aligned(1), may_alias));
typedef uint64_t u64u __attribute__((aligned(1), may_alias));

/* dst may be a or b: no iteration touches what another one reads, but the compiler cannot know. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* it is a hint: builds without optimisation need not vectorise */
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

#define F64_NAN 0x7ff8000000000000u
#define BF16_NAN 0x7fc0u
#define BF16_INF 0x7f80u

static inline uint64_t f64_bits(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline uint64_t f64_result(double x) { return x != x ? F64_NAN : f64_bits(x); }

/* Each of the two selections gives its second operand when they are equal: their bits differ only for zeros of unlike
   sign. */
static inline uint32_t f32_min(float x, float y)
{
    uint32_t bits = f32_bits(x < y ? x : y) | f32_bits(y < x ? y : x);
    return __builtin_isunordered(x, y) ? F32_NAN : bits;
}
static inline uint32_t f32_max(float x, float y)
{
    uint32_t bits = f32_bits(x > y ? x : y) & f32_bits(y > x ? y : x);
    return __builtin_isunordered(x, y) ? F32_NAN : bits;
}
static inline uint64_t f64_min(double x, double y)
{
    uint64_t bits = f64_bits(x < y ? x : y) | f64_bits(y < x ? y : x);
    return __builtin_isunordered(x, y) ? F64_NAN : bits;
}
static inline uint64_t f64_max(double x, double y)
{
    uint64_t bits = f64_bits(x > y ? x : y) & f64_bits(y > x ? y : x);
    return __builtin_isunordered(x, y) ? F64_NAN : bits;
}

/* Function `name`: dst[i] = result for every element, x and y being the operands. */
#define REDUCE(name, element, stored, result)                                   \
    static void name(void *dst, const void *va, const void *vb, size_t n) {     \
        const element##u *a = va, *b = vb;                                      \
        stored##u *d = dst;                                                     \
        INDEPENDENT for (size_t i = 0; i < n; i++) {                            \
            const element x = a[i], y = b[i];                                   \
            d[i] = result;                                                      \
        }                                                                       \
    }
/* The same for the last step of avg; `by` is the divisor as a `divisor_type`. */
#define AVERAGE(name, element, stored, divisor_type, given, result)                             \
    static void name(void *dst, const void *va, const void *vb, size_t n, uint32_t divisor) {   \
        const element##u *a = va, *b = vb;                                                      \
        stored##u *d = dst;                                                                     \
        const divisor_type by = (divisor_type)(given);                                          \
        INDEPENDENT for (size_t i = 0; i < n; i++) {                                            \
            const element x = a[i], y = b[i];                                                   \
            d[i] = result;                                                                      \
        }                                                                                       \
    }

typedef float f32;
typedef double f64;

REDUCE(f32_sum_all, f32, u32, f32_result(x + y))
REDUCE(f32_prod_all, f32, u32, f32_result(x *y))
REDUCE(f32_min_all, f32, u32, f32_min(x, y))
REDUCE(f32_max_all, f32, u32, f32_max(x, y))
AVERAGE(f32_average_all, f32, u32, float, divisor, f32_result((x + y) / by))

REDUCE(f64_sum_all, f64, u64, f64_result(x + y))
REDUCE(f64_prod_all, f64, u64, f64_result(x *y))
REDUCE(f64_min_all, f64, u64, f64_min(x, y))
REDUCE(f64_max_all, f64, u64, f64_max(x, y))
AVERAGE(f64_average_all, f64, u64, double, divisor, f64_result((x + y) / by))

/* Integers: sums and products in unsigned types, where wrapping is defined (16-bit ones in 32 bits, since C would
   promote them to int). */
REDUCE(i8_sum_all, u8, u8, (u8)(x + y))
REDUCE(i8_prod_all, u8, u8, (u8)(x * y))
REDUCE(i16_sum_all, u16, u16, (u16)(x + y))
REDUCE(i16_prod_all, u16, u16, (u16)((u32)x * (u32)y))
REDUCE(i32_sum_all, u32, u32, x + y)
REDUCE(i32_prod_all, u32, u32, x *y)
REDUCE(i64_sum_all, u64, u64, x + y)
REDUCE(i64_prod_all, u64, u64, x *y)
REDUCE(u8_min_all, u8, u8, x < y ? x : y)
REDUCE(u8_max_all, u8, u8, x > y ? x : y)
REDUCE(i8_min_all, i8, i8, x < y ? x : y)
REDUCE(i8_max_all, i8, i8, x > y ? x : y)
REDUCE(i16_min_all, i16, i16, x < y ? x : y)
REDUCE(i16_max_all, i16, i16, x > y ? x : y)
REDUCE(i32_min_all, i32, i32, x < y ? x : y)
REDUCE(i32_max_all, i32, i32, x > y ? x : y)
REDUCE(i64_min_all, i64, i64, x < y ? x : y)
REDUCE(i64_max_all, i64, i64, x > y ? x : y)

/* Floating-point division, then truncation, is exact here: a quotient that is no integer is at least 1/divisor away
   from one, and its rounding error is smaller. 65536 gives zero for every 16-bit sum, as every larger divisor does, and
   is a float. */
#define AT_MOST_65536 (divisor < 65536 ? divisor : 65536)
AVERAGE(i8_average_all, u8, i8, float, AT_MOST_65536, (i8)(i32)((float)(i8)(u8)(x + y) / by))
AVERAGE(u8_average_all, u8, u8, float, AT_MOST_65536, (u8)(i32)((float)(u8)(x + y) / by))
AVERAGE(i16_average_all, u16, i16, float, AT_MOST_65536, (i16)(i32)((float)(i16)(u16)(x + y) / by))
AVERAGE(i32_average_all, u32, i32, double, divisor, (i32)((double)(i32)(x + y) / by))
AVERAGE(i64_average_all, u64, i64, i64, divisor, (i64)(x + y) / by)

/* Half types, min and max: widening and rounding back changes no value, so the bits are compared as they are. The key
   of a half, a signed integer, has the order of the floats, -0 before +0 and the NaNs at both ends; the key of a key is
   the half again. */
static inline i16 half_key(i16 h) { return (i16)(h ^ ((i16)(h >> 15) & 0x7fff)); }
#define KEY(h) half_key((i16)(h))
#define LESSER(x, y) ((x) < (y) ? (x) : (y))
#define GREATER(x, y) ((x) > (y) ? (x) : (y))
static inline u16 half_select(i16 key, i16 least, i16 greatest, i16 infinity, u16 nan)
{
    return ((greatest > infinity) | (least < ~infinity)) ? nan : (u16)half_key(key);
}
static inline u16 half_min(i16 x, i16 y, i16 infinity, u16 nan)
{
    return half_select(LESSER(x, y), LESSER(x, y), GREATER(x, y), infinity, nan);
}
static inline u16 half_max(i16 x, i16 y, i16 infinity, u16 nan)
{
    return half_select(GREATER(x, y), LESSER(x, y), GREATER(x, y), infinity, nan);
}
REDUCE(f16_min_all, u16, u16, half_min(KEY(x), KEY(y), F16_INF, F16_NAN))
REDUCE(f16_max_all, u16, u16, half_max(KEY(x), KEY(y), F16_INF, F16_NAN))
REDUCE(bf16_min_all, u16, u16, half_min(KEY(x), KEY(y), BF16_INF, BF16_NAN))
REDUCE(bf16_max_all, u16, u16, half_max(KEY(x), KEY(y), BF16_INF, BF16_NAN))

/* bfloat16, two elements in one 32-bit word: no lane ever changes its width, which vectorises best. */
#define BF16_LOW(word) f32_from((word) << 16)
#define BF16_HIGH(word) f32_from((word)&0xffff0000u)
#define BF16_LOOP(result)                                                                       \
    const u32u *a = va, *b = vb;                                                                \
    u32u *d = dst;                                                                              \
    INDEPENDENT for (size_t i = 0; i < n / 2; i++) {                                            \
        const u32 aw = a[i], bw = b[i];                                                         \
        float x = BF16_LOW(aw), y = BF16_LOW(bw);                                               \
        const u32 low = bf16_rounded(result) >> 16;                                             \
        x = BF16_HIGH(aw), y = BF16_HIGH(bw);                                                   \
        d[i] = low | (bf16_rounded(result) & 0xffff0000u);                                      \
    }                                                                                           \
    if (n & 1) {                                                                                \
        const float x = f32_from((u32)((const u16u *)va)[n - 1] << 16);                         \
        const float y = f32_from((u32)((const u16u *)vb)[n - 1] << 16);                         \
        ((u16u *)dst)[n - 1] = (u16)(bf16_rounded(result) >> 16);                               \
    }
static void bf16_sum_all(void *dst, const void *va, const void *vb, size_t n) { BF16_LOOP(x + y) }
static void bf16_prod_all(void *dst, const void *va, const void *vb, size_t n) { BF16_LOOP(x *y) }
static void bf16_average_all(void *dst, const void *va, const void *vb, size_t n, uint32_t divisor)
{
    const float by = (float)divisor;
    BF16_LOOP((x + y) / by)
}

/* float16 */
#if defined(HALF_LANES)
static inline lanes lanes_result(lanes x)
{
    typedef i32 masks __attribute__((vector_size(sizeof(lanes))));
    const masks nan = (masks)(x != x);
    return (lanes)(((masks)x & ~nan) | (nan & (i32)F32_NAN));
}
#define F16_LANES(result)                                                                               \
    for (; i + HALF_LANES <= n; i += HALF_LANES) {                                                      \
        const lanes x = half_load(a + i), y = half_load(b + i);                                         \
        half_store(d + i, lanes_result(result));                                                        \
    }
#else
#define F16_LANES(result)
#endif
#define F16_LOOP(result)                                                                                \
    const u16u *a = va, *b = vb;                                                                        \
    u16u *d = dst;                                                                                      \
    size_t i = 0;                                                                                       \
    F16_LANES(result)                                                                                   \
    INDEPENDENT for (; i < n; i++) {                                                                    \
        const float x = f16_widened(a[i]), y = f16_widened(b[i]);                                       \
        d[i] = f16_rounded(result);                                                                     \
    }
static void f16_sum_all(void *dst, const void *va, const void *vb, size_t n) { F16_LOOP(x + y) }
static void f16_prod_all(void *dst, const void *va, const void *vb, size_t n) { F16_LOOP(x *y) }
static void f16_average_all(void *dst, const void *va, const void *vb, size_t n, uint32_t divisor)
{
    const float by = (float)divisor;
    F16_LOOP((x + y) / by)
}

#include "codec_body.h"

static uint64_t hash64(const void *data, size_t n) { return XXH3_64bits(data, n); }

/* Callers' states are of any alignment, XXH3's are not. */
_Static_assert(sizeof(XXH3_state_t) <= WC_HASH_STATE, "a state has room for XXH3's");
static void hash_begin(wc_hash_state *state)
{
    XXH3_state_t aligned;
    XXH3_64bits_reset(&aligned);
    memcpy(state->bytes, &aligned, sizeof aligned);
}
static void hash_add(wc_hash_state *state, const void *data, size_t n)
{
    XXH3_state_t aligned;
    memcpy(&aligned, state->bytes, sizeof aligned);
    XXH3_64bits_update(&aligned, data, n);
    memcpy(state->bytes, &aligned, sizeof aligned);
}
static uint64_t hash_end(const wc_hash_state *state)
{
    XXH3_state_t aligned;
    memcpy(&aligned, state->bytes, sizeof aligned);
    return XXH3_64bits_digest(&aligned);
}

#define OPS(sum, min, max, prod) {[WC_SUM] = sum, [WC_AVG] = sum, [WC_MIN] = min, [WC_MAX] = max, [WC_PROD] = prod}
const wc_kernels TABLE = {
    .name = NAME,
    .reduce =
        {
            [WC_F32] = OPS(f32_sum_all, f32_min_all, f32_max_all, f32_prod_all),
            [WC_F64] = OPS(f64_sum_all, f64_min_all, f64_max_all, f64_prod_all),
            [WC_F16] = OPS(f16_sum_all, f16_min_all, f16_max_all, f16_prod_all),
            [WC_BF16] = OPS(bf16_sum_all, bf16_min_all, bf16_max_all, bf16_prod_all),
            [WC_I8] = OPS(i8_sum_all, i8_min_all, i8_max_all, i8_prod_all),
            [WC_I16] = OPS(i16_sum_all, i16_min_all, i16_max_all, i16_prod_all),
            [WC_I32] = OPS(i32_sum_all, i32_min_all, i32_max_all, i32_prod_all),
            [WC_I64] = OPS(i64_sum_all, i64_min_all, i64_max_all, i64_prod_all),
            [WC_U8] = OPS(i8_sum_all, u8_min_all, u8_max_all, i8_prod_all),
        },
    .average =
        {
            [WC_F32] = f32_average_all,
            [WC_F64] = f64_average_all,
            [WC_F16] = f16_average_all,
            [WC_BF16] = bf16_average_all,
            [WC_I8] = i8_average_all,
            [WC_I16] = i16_average_all,
            [WC_I32] = i32_average_all,
            [WC_I64] = i64_average_all,
            [WC_U8] = u8_average_all,
        },
    .encode = CODEC_TABLE(encode),
    .decode = CODEC_TABLE(decode),
    .accumulate = CODEC_TABLE(accumulate),
    .error = {[WC_F32] = error_f32, [WC_F64] = error_f64, [WC_F16] = error_f16, [WC_BF16] = error_bf16},
    .sparse_encode = sparse_encode,
    .sparse_decode = sparse_decode,
    .hash64 = hash64,
    .hash_begin = hash_begin,
    .hash_add = hash_add,
    .hash_end = hash_end,
};

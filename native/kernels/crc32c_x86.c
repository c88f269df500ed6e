/* CRC-32C on x86-64: the SSE4.2 instruction, and carry-less multiplication 512 bits wide. */
#include "crc32c.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("sse4.2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("sse4.2")
#endif

#define CRC8(crc, byte) _mm_crc32_u8(crc, byte)
#define CRC64(crc, word) (uint32_t) _mm_crc32_u64(crc, word)
#include "crc32c_body.h"

uint32_t wc_crc32c_sse42(uint32_t crc, const void *data, size_t n) { return three_way(crc, data, n); }

#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("sse4.2,pclmul,avx512f,vpclmulqdq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("sse4.2,pclmul,avx512f,vpclmulqdq")
#endif

enum { FOLDED = 256 }; /* bytes in the four accumulators */

/* Moves a 128-bit lane over `bits` of message: its first 64 bits times x^(bits + 64), the others times x^bits. Each
   power is one lower, since the product of two reflected numbers comes out shifted by one bit. */
typedef struct {
    uint64_t first, second;
} fold_factors;
static fold_factors over_256, over_64, over_16;

static fold_factors factors(uint64_t bits)
{
    fold_factors f = {(uint64_t)wc_crc32c_power(bits + 63) << 32, (uint64_t)wc_crc32c_power(bits - 1) << 32};
    return f;
}

void wc_crc32c_vpclmul_init(void)
{
    over_256 = factors(8 * 256);
    over_64 = factors(8 * 64);
    over_16 = factors(8 * 16);
}

static inline __m512i fold512(__m512i lanes, __m512i k, __m512i next)
{
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(lanes, k, 0x00), _mm512_clmulepi64_epi128(lanes, k, 0x11), next, 0x96);
}

static inline __m128i fold128(__m128i lane, __m128i k, __m128i next)
{
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(lane, k, 0x00), _mm_clmulepi64_si128(lane, k, 0x11)), next);
}

static inline __m128i constants(fold_factors f) { return _mm_set_epi64x((long long)f.second, (long long)f.first); }

/* Four 512-bit accumulators (after Gopal et al., Intel, 2009, "Fast CRC computation for generic polynomials using
   PCLMULQDQ"); the last 128 bits go through the crc instruction. */
uint32_t wc_crc32c_vpclmul(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *p = data;
    if (n < FOLDED)
        return three_way(crc, p, n);
    __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64);
    __m512i c = _mm512_loadu_si512(p + 128), d = _mm512_loadu_si512(p + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
    __m512i k = _mm512_broadcast_i32x4(constants(over_256));
    for (n -= FOLDED, p += FOLDED; n >= FOLDED; n -= FOLDED, p += FOLDED) {
        a = fold512(a, k, _mm512_loadu_si512(p));
        b = fold512(b, k, _mm512_loadu_si512(p + 64));
        c = fold512(c, k, _mm512_loadu_si512(p + 128));
        d = fold512(d, k, _mm512_loadu_si512(p + 192));
    }
    k = _mm512_broadcast_i32x4(constants(over_64));
    a = fold512(fold512(fold512(a, k, b), k, c), k, d);
    for (; n >= 64; n -= 64, p += 64)
        a = fold512(a, k, _mm512_loadu_si512(p));
    __m128i k16 = constants(over_16), lane = _mm512_castsi512_si128(a);
    lane = fold128(lane, k16, _mm512_extracti32x4_epi32(a, 1));
    lane = fold128(lane, k16, _mm512_extracti32x4_epi32(a, 2));
    lane = fold128(lane, k16, _mm512_extracti32x4_epi32(a, 3));
    crc = CRC64(CRC64(0, (uint64_t)_mm_cvtsi128_si64(lane)), (uint64_t)_mm_extract_epi64(lane, 1));
    return three_way(~crc, p, n);
}

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

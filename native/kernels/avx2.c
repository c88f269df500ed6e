/* Kernels for x86-64 with AVX2 and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* After the system's headers, so that only our code is compiled for it. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,bmi,bmi2")
#endif

#define HALF_LANES 8
typedef float lanes __attribute__((vector_size(32)));
static inline lanes half_load(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
static inline void half_store(void *p, lanes v) { _mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
/* the packs leave the halves of a, b, c, d one after the other */
static inline void codes_store(void *p, lanes a, lanes b, lanes c, lanes d)
{
    const __m256i ab = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));
    const __m256i cd = _mm256_packs_epi32(_mm256_cvtps_epi32(c), _mm256_cvtps_epi32(d));
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(p, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order));
}

#define TABLE wc_kernels_avx2
#define NAME "avx2"
#define XXH_VECTOR XXH_AVX2
#include "body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

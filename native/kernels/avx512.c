/* Kernels for x86-64 with AVX-512 F, BW, DQ and VL. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* After the system's headers, so that only our code is compiled for it. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi,bmi2"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,f16c,bmi,bmi2,prefer-vector-width=512")
#endif

#define HALF_LANES 16
typedef float lanes __attribute__((vector_size(64)));
static inline lanes half_load(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
static inline void half_store(void *p, lanes v) { _mm256_storeu_si256(p, _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }
/* the packs leave the quarters of a, b, c, d one after the other */
static inline void codes_store(void *p, lanes a, lanes b, lanes c, lanes d)
{
    const __m512i ab = _mm512_packs_epi32(_mm512_cvtps_epi32(a), _mm512_cvtps_epi32(b));
    const __m512i cd = _mm512_packs_epi32(_mm512_cvtps_epi32(c), _mm512_cvtps_epi32(d));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, _mm512_packs_epi16(ab, cd)));
}

#define TABLE wc_kernels_avx512
#define NAME "avx512"
#define XXH_VECTOR XXH_AVX512
#include "body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

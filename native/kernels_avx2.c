/* Kernels for x86-64 with AVX2 and F16C. */
#if defined(__x86_64__)
#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* After the system's headers, so that only our code is compiled for it. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,bmi,bmi2,sse4.2"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,bmi,bmi2,sse4.2")
#endif

#define HALF_LANES 8
typedef float lanes __attribute__((vector_size(32)));
static inline lanes half_load(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128(p)); }
static inline void half_store(void *p, lanes v) { _mm_storeu_si128(p, _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }

#define TABLE wc_kernels_avx2
#define NAME "avx2"
#define CRC32C wc_crc32c_sse42
#define XXH_VECTOR XXH_AVX2
#include "kernels_body.h"

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif

/* Kernels for AArch64, whose baseline has NEON with float16 conversions. */
#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

#define HALF_LANES 4
typedef float32x4_t lanes;
static inline lanes half_load(const void *p)
{
    float16x4_t halves;
    memcpy(&halves, p, sizeof halves);
    return vcvt_f32_f16(halves);
}
static inline void half_store(void *p, lanes v)
{
    float16x4_t halves = vcvt_f16_f32(v);
    memcpy(p, &halves, sizeof halves);
}
static inline void codes_store(void *p, lanes a, lanes b, lanes c, lanes d)
{
    const int16x8_t ab = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a)), vqmovn_s32(vcvtnq_s32_f32(b)));
    const int16x8_t cd = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(c)), vqmovn_s32(vcvtnq_s32_f32(d)));
    vst1q_s8(p, vcombine_s8(vqmovn_s16(ab), vqmovn_s16(cd)));
}

#define TABLE wc_kernels_neon
#define NAME "neon"
#define XXH_VECTOR XXH_NEON
#include "body.h"
#endif

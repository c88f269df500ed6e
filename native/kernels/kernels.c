/* The dispatcher: which tables this CPU can run, and which one is used. Chosen once, from any thread. */
#include "kernels.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "sparse.h"
#include "tables.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif !defined(__aarch64__)
#include <fenv.h>
#endif

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const wc_kernels *tables[3]; /* those that this CPU can run, the best first, "generic" last */
static int tables_count;
static const wc_kernels *chosen;

static const wc_kernels *find(const char *name)
{
    for (int i = 0; i < tables_count; i++)
        if (strcmp(tables[i]->name, name) == 0)
            return tables[i];
    return NULL;
}

static void choose(void)
{
#if defined(__x86_64__)
    /* The compiler's check includes the operating system's support of the wide registers. */
    __builtin_cpu_init();
    unsigned a, b, c = 0, d;
    const int f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
    const int avx2 = f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (avx512)
        tables[tables_count++] = &wc_kernels_avx512;
    if (avx2)
        tables[tables_count++] = &wc_kernels_avx2;
#elif defined(__aarch64__)
    tables[tables_count++] = &wc_kernels_neon;
#endif
    tables[tables_count++] = &wc_kernels_generic;
    const char *wanted = getenv("WANCOLL_CPU");
    chosen = wanted != NULL && *wanted != '\0' ? find(wanted) : tables[0];
}

const wc_kernels *wc_kernels_default(void)
{
    pthread_once(&once, choose);
    return chosen;
}

const wc_kernels *wc_kernels_named(const char *name)
{
    pthread_once(&once, choose);
    return find(name);
}

size_t wc_dtype_size(int dtype)
{
    static const size_t sizes[WC_DTYPES] = {
        [WC_F32] = 4, [WC_F64] = 8, [WC_F16] = 2, [WC_BF16] = 2, [WC_I8] = 1, [WC_I16] = 2, [WC_I32] = 4, [WC_I64] = 8, [WC_U8] = 1};
    return dtype >= 0 && dtype < WC_DTYPES ? sizes[dtype] : 0;
}

wc_codec_block wc_codec_shape(int codec)
{
    static const wc_codec_block shapes[WC_CODECS] = {
        [WC_CODEC_BF16] = {1, 2}, [WC_CODEC_FP16] = {128, 260}, [WC_CODEC_INT8] = {128, 132}, [WC_CODEC_INT4] = {32, 20}, [WC_CODEC_FP8] = {128, 132}};
    if (codec >= 0 && codec < WC_CODECS)
        return shapes[codec];
    const uint32_t bytes = wc_sparse_of((uint32_t)codec).bytes;
    return (wc_codec_block){bytes ? WC_SPARSE_BLOCK : 0, bytes};
}

void wc_encode(const wc_kernels *kernels, uint32_t codec, uint32_t dtype, void *dst, const void *src, size_t n, const wc_noise *noise)
{
    if (codec < WC_CODECS)
        kernels->encode[codec][dtype](dst, src, n, noise);
    else
        kernels->sparse_encode(codec, (int)dtype, dst, src, n);
}

void wc_decode(const wc_kernels *kernels, uint32_t codec, uint32_t dtype, void *dst, const void *coded, size_t n)
{
    if (codec < WC_CODECS)
        kernels->decode[codec][dtype](dst, coded, n);
    else
        kernels->sparse_decode(codec, (int)dtype, dst, coded, n);
}

#if defined(__x86_64__)
uint64_t wc_fpenv_enter(void)
{
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, round to nearest, denormals kept */
    return saved;
}
void wc_fpenv_leave(uint64_t saved) { _mm_setcsr((unsigned)saved); }
#elif defined(__aarch64__)
uint64_t wc_fpenv_enter(void)
{
    uint64_t saved;
    const uint64_t plain = 0; /* no traps, round to nearest, denormals and IEEE half precision kept */
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"(plain) : "memory");
    return saved;
}
void wc_fpenv_leave(uint64_t saved) { __asm__ volatile("msr fpcr, %0" : : "r"(saved) : "memory"); }
#else
uint64_t wc_fpenv_enter(void)
{
    const int saved = fegetround();
    fesetround(FE_TONEAREST);
    return (uint64_t)saved;
}
void wc_fpenv_leave(uint64_t saved) { fesetround((int)saved); }
#endif

/* Speed of the codec kernels beside memcpy over the same buffers, for `python -m tests.bench codec`. One line for each
   case: TABLE CODEC VERB BYTES SECONDS MEMCPY_SECONDS RATIO. Bytes are those of float32; seconds are medians over the
   rounds for that many bytes; the ratio (speed in memcpy's) is the median of the rounds' ratios. Arguments: rounds,
   then table names. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels.h"

enum { SMALL = 64 << 10, LARGE = 64 << 20, REPEAT = 64, MAX_ROUNDS = 1000, VERBS = 4 };
static const char *const codec_names[WC_CODECS] = {"none", "bf16", "fp16", "int8", "int4", "fp8"};
static const char *const verb_names[VERBS] = {"encode", "encode stochastic", "decode", "decode-accumulate"};

static float *from, *to;
static uint8_t *coded;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void once(const wc_kernels *table, int codec, int verb, size_t n)
{
    const wc_noise noise = {42, 0};
    if (verb == 0)
        table->encode[codec][WC_F32](coded, from, n, NULL);
    if (verb == 1)
        table->encode[codec][WC_F32](coded, from, n, &noise);
    if (verb == 2)
        table->decode[codec][WC_F32](to, coded, n);
    if (verb == 3)
        table->accumulate[codec][WC_F32](to, from, coded, n);
}

/* verb -1: memcpy. Seconds for one pass. */
static double timed(const wc_kernels *table, int codec, int verb, size_t bytes)
{
    const int times = bytes == SMALL ? REPEAT : 1;
    const double begin = now();
    for (int i = 0; i < times; i++) {
        if (verb < 0)
            memcpy(to, from, bytes);
        else
            once(table, codec, verb, bytes / sizeof(float));
        __asm__ volatile("" ::: "memory");
    }
    return (now() - begin) / times;
}

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int n)
{
    qsort(values, (size_t)n, sizeof *values, ascending);
    return values[n / 2];
}

static void measure(const wc_kernels *table, int codec, int verb, size_t bytes, int rounds)
{
    static double mine[MAX_ROUNDS], theirs[MAX_ROUNDS], ratio[MAX_ROUNDS];
    table->encode[codec][WC_F32](coded, from, bytes / sizeof(float), NULL);
    for (int i = -1; i < rounds; i++) { /* the first round only warms up */
        const double copy = timed(table, codec, -1, bytes), seconds = timed(table, codec, verb, bytes);
        if (i >= 0)
            mine[i] = seconds, theirs[i] = copy, ratio[i] = copy / seconds;
    }
    printf("%s\t%s\t%s\t%zu\t%.9f\t%.9f\t%.4f\n", table->name, codec_names[codec], verb_names[verb], bytes, median(mine, rounds),
           median(theirs, rounds), median(ratio, rounds));
    fflush(stdout);
}

int main(int argc, char **argv)
{
    const int rounds = argc > 1 ? atoi(argv[1]) : 0;
    from = malloc(LARGE), to = malloc(LARGE), coded = malloc(LARGE);
    if (rounds < 1 || rounds > MAX_ROUNDS || !from || !to || !coded)
        return 2;
    wc_fpenv_enter();
    uint32_t state = 1;
    /* roughly Gaussian: four terms of a linear congruential generator */
    for (size_t i = 0; i < LARGE / sizeof(float); i++) {
        float sum = 0;
        for (int k = 0; k < 4; k++)
            sum += (float)(int32_t)(state = state * 1664525u + 1013904223u) * 0x1p-31f;
        from[i] = sum;
    }
    memset(to, 0, LARGE);
    for (int k = 2; k < argc; k++) {
        const wc_kernels *table = wc_kernels_named(argv[k]);
        if (table == NULL)
            continue;
        for (int codec = WC_CODEC_NONE + 1; codec < WC_CODECS; codec++)
            for (int verb = 0; verb < VERBS; verb++) {
                measure(table, codec, verb, SMALL, rounds * 3);
                measure(table, codec, verb, LARGE, rounds);
            }
    }
    return 0;
}

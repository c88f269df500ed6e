/* Runs native/kernels/cuda.cu on the host: the same text, compiled by the C compiler. The threads of a warp are contexts that
   take turns at each shuffle, so what only some of them reach is an error. test_encode.py compiles and calls this. */
#define _GNU_SOURCE
#include <stdint.h>
#include <ucontext.h>

#define __global__
typedef struct {
    unsigned x;
} shape;
static shape threadIdx, blockIdx, blockDim;
static int __shfl_xor_sync(unsigned mask, int value, int apart);

#include "cuda.cu"

enum { STACK = 64 << 10 };
static char stacks[WARP][STACK];
static ucontext_t threads[WARP], scheduler;
static int shuffles[WARP], finished[WARP], values[2][WARP], running, violations;
static void (*kernel)(void);

/* A value is read after all have written theirs, and each writes the next one beside it. */
static int __shfl_xor_sync(unsigned mask, int value, int apart)
{
    const int me = running, turn = shuffles[me]++ & 1;
    if (mask != 0xffffffffu)
        violations++;
    values[turn][me] = value;
    swapcontext(&threads[me], &scheduler);
    return values[turn][me ^ apart];
}

static void run_thread(void)
{
    kernel();
    finished[running] = 1;
}

static void run_warp(unsigned first)
{
    for (int lane = 0; lane < WARP; lane++) {
        shuffles[lane] = finished[lane] = 0;
        getcontext(&threads[lane]);
        threads[lane].uc_stack.ss_sp = stacks[lane];
        threads[lane].uc_stack.ss_size = STACK;
        threads[lane].uc_link = &scheduler;
        makecontext(&threads[lane], run_thread, 0);
    }
    while (!finished[0]) {
        for (running = 0; running < WARP; running++) {
            threadIdx.x = first + (unsigned)running;
            swapcontext(&scheduler, &threads[running]);
        }
        for (int lane = 1; lane < WARP; lane++)
            if (finished[lane] != finished[0] || shuffles[lane] != shuffles[0]) {
                violations++;
                return;
            }
    }
}

static void *to;
static const void *from, *also;
static uint64_t count;

#define CALLS(codec, type)                                                                                                      \
    static void call_encode_##codec##_##type(void) { encode_##codec##_##type(to, from, count); }                                \
    static void call_decode_##codec##_##type(void) { decode_##codec##_##type(to, from, count); }                                \
    static void call_lost_##codec##_##type(void) { lost_##codec##_##type(to, from, count, also); }
#define NAMES(codec, type)                                                                                                      \
    {"encode_" #codec "_" #type, call_encode_##codec##_##type}, {"decode_" #codec "_" #type, call_decode_##codec##_##type},     \
    {"lost_" #codec "_" #type, call_lost_##codec##_##type}
#define EACH(one, between)                                                                                                      \
    one(int8, f32) between one(int8, f64) between one(int8, f16) between one(int8, bf16) between one(fp8, f32)                  \
    between one(fp8, f64) between one(fp8, f16) between one(fp8, bf16) between one(bf16, f32) between one(bf16, f64)
#define NOTHING
#define COMMA ,
EACH(CALLS, NOTHING)
#define FEED_CALL(type) static void call_feed_##type(void) { feed_##type(to, from, count, also); }
FEED_CALL(f32) FEED_CALL(f64) FEED_CALL(f16) FEED_CALL(bf16)
static const struct {
    const char *name;
    void (*call)(void);
} kernels[] = {EACH(NAMES, COMMA), {"feed_f32", call_feed_f32}, {"feed_f64", call_feed_f64}, {"feed_f16", call_feed_f16},
               {"feed_bf16", call_feed_bf16}};

/* As the driver launches it; the number of violations, or -1: no such kernel. */
int launch(const char *name, unsigned grid, unsigned block, void *dst, const void *src, uint64_t n, const void *third)
{
    kernel = 0;
    for (unsigned k = 0; k < sizeof kernels / sizeof kernels[0]; k++)
        if (strcmp(kernels[k].name, name) == 0)
            kernel = kernels[k].call;
    if (kernel == 0)
        return -1;
    to = dst, from = src, count = n, also = third;
    violations = 0, blockDim.x = block;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
        for (unsigned at = 0; at < block; at += WARP)
            run_warp(at);
    return violations;
}

/* What all of the engine's files begin with: its bounds, the names of its structs, and two small helpers. */
#ifndef WC_COMMON_H
#define WC_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "calls.h"
#include "engine.h"
#include "kernels.h"

_Static_assert(sizeof(wc_frame) == 64, "the frame header is 64 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers and digests are written as the machine stores them");

enum {
    WC_TX_FRAMES = 8,             /* frames that one sendmsg carries at most */
    WC_TX_BATCH = 128 << 10,      /* no further frame joins a sendmsg that has this many bytes */
    WC_READ_BYTES = 256 << 10,    /* one read; with the source and the result it stays within a core's L2 */
    WC_ROUND_BYTES = 512 << 10,   /* what one lane may read, and send, before the other lanes have their turn */
    WC_LOCAL_BYTES = 256 << 10,   /* what local parts that wait for nothing may do before the lanes have their turn */
    WC_IDLE_SCRATCH = 256 << 20,  /* scratch memory kept warm for the next op */
    WC_TCP_INFO_BYTES = 256,
    WC_LEAST_UNSENT = 32 << 10,   /* bytes that a lane may take beyond its window: half of that, within these bounds */
    WC_MOST_UNSENT = 256 << 10,
    WC_TCP_INFO_MS = 100,         /* a busy lane's tcp_info is looked at no more often */
    WC_MAX_SEGMENT = 16 << 20,
    WC_MIN_STRIPE = 4 << 10,      /* a multiple of every codec's block but the sparse ones' */
    WC_MAX_LANES = 256,
    WC_MAX_WORKERS = 64,
    WC_MAX_STEPS = 1 << 16,
    WC_MAX_PARTS = 1 << 16,       /* of a step */
    WC_PART_FRAMES = 2,           /* shorter parts get shorter frames, so that a ring's steps overlap */
    WC_FINE_PARTS = 32,           /* for each lane: so many parts of a step may be as short as a digest block */
    WC_COARSE_PART = 256 << 10,   /* and if there are more, they need not be longer than this, bytes */
    WC_FRAME_COST = 4 << 10,      /* of a round's bytes, however short the frame */
    WC_BUCKETS = 256,
};

#ifdef WC_TEST_ALLOCATOR
#include <stdlib.h>
#include <sys/mman.h>
/* Tests decide which allocation fails: true, with errno set, if this one does. */
bool wc_test_no_memory(void);
/* Tests make the time between two steps longer, in which another thread's could come. */
void wc_test_gap(void);
#define WC_GAP() wc_test_gap()
#define malloc(size) (wc_test_no_memory() ? NULL : (malloc)(size))
#define calloc(n, size) (wc_test_no_memory() ? NULL : (calloc)(n, size))
#define aligned_alloc(to, size) (wc_test_no_memory() ? NULL : (aligned_alloc)(to, size))
#define mmap(...) (wc_test_no_memory() ? MAP_FAILED : (mmap)(__VA_ARGS__))
#else
#define WC_GAP() ((void)0)
#endif

typedef struct wc_part wc_part;       /* part.h */
typedef struct wc_work wc_work;       /* op.h */
typedef struct wc_op_queue wc_op_queue;     /* pull.h */
typedef struct wc_task wc_task;       /* op.h */
typedef struct wc_lane_group wc_lane_group;     /* lane_group.h */
typedef struct wc_lane wc_lane;       /* lane.h */
typedef struct wc_link wc_link;       /* link.h */
typedef struct wc_command wc_command; /* commands.h */
typedef struct wc_worker wc_worker;   /* worker.h */
typedef struct wc_scratch wc_scratch; /* scratch.h */
typedef struct wc_pipe wc_pipe;       /* pipe.h */

static inline size_t wc_bucket(uint64_t id)
{
    return (size_t)((id * 0x9e3779b97f4a7c15u) >> 56);
}

/* Counters have one writer. */
static inline void wc_count(atomic_ullong *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n, memory_order_relaxed);
}

#endif

/* The uplink: a bucket of tokens that all workers share, kept as one number, the time up to which tokens are spent. */
#include "uplink.h"

#include "events.h"

#include <time.h>

enum {
    PIECES = 200,           /* a second; but: */
    LEAST_PIECE = 8 << 10,  /* some packets, since their last one is a short one */
    SECOND = 1000000000,    /* ns */
    LATE = SECOND / 100,    /* what a worker that wakes late may make up for */
};

static uint64_t nanoseconds(const wc_uplink *uplink, uint64_t bytes)
{
    return bytes * SECOND / uplink->rate;
}

void wc_uplink_init(wc_uplink *uplink, uint64_t rate)
{
    uint64_t piece = rate / PIECES;
    uplink->rate = rate;
    uplink->piece = (uint32_t)(piece < LEAST_PIECE ? LEAST_PIECE : piece > WC_TX_BATCH ? WC_TX_BATCH : piece);
}

uint32_t wc_uplink_take(wc_uplink *uplink)
{
    unsigned long long due = atomic_load_explicit(&uplink->due, memory_order_relaxed), next;
    do {
        uint64_t now = wc_now(CLOCK_MONOTONIC);
        if (due > now)
            return 0;
        next = (due > now - LATE ? due : now - LATE) + nanoseconds(uplink, uplink->piece);
    } while (!atomic_compare_exchange_weak_explicit(&uplink->due, &due, next, memory_order_relaxed, memory_order_relaxed));
    return uplink->piece;
}

void wc_uplink_return(wc_uplink *uplink, uint32_t bytes)
{
    atomic_fetch_sub_explicit(&uplink->due, nanoseconds(uplink, bytes), memory_order_relaxed);
}

uint64_t wc_uplink_wait(const wc_uplink *uplink)
{
    uint64_t now = wc_now(CLOCK_MONOTONIC), due = atomic_load_explicit(&uplink->due, memory_order_relaxed);
    return due > now ? due - now : 0;
}

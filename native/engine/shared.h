/* The engine's own struct: what callers and workers share. */
#ifndef WC_SHARED_H
#define WC_SHARED_H

#include "calls/caller.h"
#include "common.h"
#include "events.h"
#include "lanes/link.h"
#include "operations/readiness.h"
#include "operations/op.h"
#include "operations/scratch.h"
#include "streams/uplink.h"
#include "worker.h"

struct wc_engine {
    wc_config config;
    const wc_kernels *kernels;
    wc_events events;
    wc_uplink uplink;
    int notes; /* an epoll: the sockets of all note lanes */
    /* guards the tables and the order of commands. Taken before a worker's or the events' mutex */
    pthread_mutex_t mutex;
    wc_link *links[WC_BUCKETS];
    wc_work *works[WC_BUCKETS];
    uint64_t cancels, posts;  /* numbers of commands; guarded by mutex */
    pthread_mutex_t scratch_mutex;
    wc_scratch *idle_scratch; /* warm, the newest first; guarded by scratch_mutex */
    atomic_bool stopping, tracing;
    atomic_ullong lease; /* see wc_lease */
    wc_worker workers[];
};

#endif

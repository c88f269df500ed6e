/* Workers: a thread each, which does what commands, sockets and bells let it do. */
#ifndef WC_WORKER_H
#define WC_WORKER_H

#include "commands.h"
#include "common.h"
#include "ready.h"

struct wc_worker {
    wc_engine *engine;
    uint32_t index;
    pthread_t thread;
    bool started;
    int epoll;
    wc_inbox inbox;
    wc_command *todo;        /* taken from the inbox; the first one may wait for other workers' cancels */
    atomic_ullong cancelled; /* number of the last cancel processed */
    uint64_t round;          /* counts its looks at epoll */
    uint64_t patience;       /* ns that it looks on before it parks; 0 where it has no core of its own */
    wc_ready ready;          /* see ready.h */
    wc_list thirsty;         /* lanes that wait for the uplink, first come, first served */
    wc_task *unready;        /* of ops whose input is being filled */
    uint8_t *read_buffer;    /* WC_READ_BYTES, and room for a split element */
    uint8_t *decoded;        /* a digest block, for reductions that have no kernel for encoded operands */
};

int wc_worker_start(wc_worker *worker, wc_engine *engine, uint32_t index);
void wc_worker_destroy(wc_worker *worker); /* after the thread has ended */

#endif

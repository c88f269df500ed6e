/* Workers: a thread each, and the commands that tell it what to do. */
#ifndef WC_WORKER_H
#define WC_WORKER_H

#include "common.h"
#include "operations/part.h"
#include "streams/stream.h"

enum { WC_CMD_ATTACH, WC_CMD_EPOCH, WC_CMD_PACE, WC_CMD_CLOSE, WC_CMD_POST, WC_CMD_CANCEL };

struct wc_command {
    wc_command *next;
    int type;
    wc_stream stream; /* ATTACH */
    uint32_t lane;
    bool checksums;  /* ATTACH */
    /* EPOCH: the epoch; PACE: the rate; CANCEL: its number; POST: cancels that must be through before */
    uint64_t number;
    wc_link *link;
    wc_work *work;   /* holds a reference */
};

struct wc_worker {
    wc_engine *engine;
    uint32_t index;
    pthread_t thread;
    bool started;
    int epoll, wake;
    pthread_mutex_t mutex;   /* guards the incoming queue */
    wc_command *in_head, *in_tail;
    wc_command *todo;        /* taken from the queue; the first one may wait for other workers' cancels */
    atomic_ullong cancelled; /* number of the last cancel processed */
    uint64_t round;          /* counts its looks at epoll */
    wc_turns *last_turn;     /* of the ops with local parts that wait for nothing but their turn: who had the last one */
    wc_gate *gates;          /* of ops whose front is being filled */
    uint64_t bells;          /* how often it has looked at them */
    uint8_t *read_buffer;    /* WC_READ_BYTES, and room for a split element */
    uint8_t *decoded;        /* a digest block, for reductions that have no kernel for encoded operands */
};

/* One command for each worker that `wanted` (NULL: every worker) has a count for, `lane` says which. All or none are
   made: NULL with errno */
wc_command *wc_commands_new(const wc_engine *engine, int type, const uint32_t *wanted);
void wc_commands_free(wc_command *list); /* that were not sent */

int wc_worker_start(wc_worker *worker, wc_engine *engine, uint32_t index);
void wc_worker_push(wc_worker *worker, wc_command *command); /* engine->mutex held; takes the command */
void wc_worker_wake(wc_worker *worker);
void wc_worker_destroy(wc_worker *worker); /* after the thread has ended */

#endif

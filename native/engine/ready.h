/* The ready queue of a worker: what it can go on with.

   Nothing in the engine runs what it has let go. Bytes that arrive, parts that move and sockets that have room mark
   what can go on, and the worker's loop takes the marks until none is left. So calls lead from the worker to a lane
   group, its lanes and their parts, and never back; nothing is entered a second time while it runs.

   - Order: by kind, as listed below; within a kind, what was marked first comes first. So bytes that have arrived are
     reduced and sent while they are in the cache, before any lane reads on. A lane stays the first one until its turn
     is over, so that a frame of two reads is still there when it leaves.
   - Bound: a thing is in the queue once, however often it is marked. The mark is a member of the thing, so marking
     needs no memory and cannot fail.
   - Who marks: the worker's own thread only, so there is no lock.
   - Lifetime: the worker empties the queue, but for turns, before each command and after it. Hence a command may free
     whatever is not waiting for its turn. */
#ifndef WC_READY_H
#define WC_READY_H

#include "list.h"

typedef enum {
    WC_READY_END,   /* wc_task: all of its parts are finished */
    WC_READY_GROUP, /* wc_lane_group: some lane may have something to send */
    WC_READY_PART,  /* wc_part: a local one, more of what it reads is there */
    WC_READY_LANE,  /* wc_lane: it may have something to receive */
    WC_READY_TURN,  /* wc_task: it has local parts that wait for nothing but their turn */
    WC_READY_KINDS,
} wc_ready_kind;

typedef struct {
    wc_list of[WC_READY_KINDS];
} wc_ready;

static inline void wc_ready_mark(wc_ready *ready, wc_ready_kind kind, wc_node *mark)
{
    if (!mark->listed)
        wc_list_append(&ready->of[kind], mark);
}

#endif

/* The ready queue of a worker: what it can go on with.

   Nothing in the engine runs what it has let go. Bytes that arrive, parts that move and sockets that have room mark
   what can go on, and the worker's loop takes the marks until none is left. So calls lead from the worker to a track,
   its lanes and their parts, and never back; nothing is entered a second time while it runs.

   - Order: by kind, as the header lists them; within a kind, what was marked first comes first. So bytes that have
     arrived are reduced and sent while they are in the cache, before any lane reads on.
   - Bound: a thing is in the queue once, however often it is marked. The mark is a member of the thing, so marking
     needs no memory and cannot fail.
   - Who marks: the worker's own thread only, so there is no lock.
   - Lifetime: the worker empties the queue, but for turns, before each command and after it. Hence a command may free
     whatever is not waiting for its turn. */
#include "ready.h"

void wc_ready_mark(wc_ready *ready, wc_ready_kind kind, wc_mark *mark)
{
    if (mark->set)
        return;
    mark->set = true;
    mark->next = NULL;
    *(ready->lists[kind].head ? &ready->lists[kind].tail->next : &ready->lists[kind].head) = mark;
    ready->lists[kind].tail = mark;
}

wc_mark *wc_ready_take(wc_ready *ready, wc_ready_kind kind)
{
    wc_mark *first = ready->lists[kind].head;
    if (first) {
        ready->lists[kind].head = first->next;
        first->set = false;
    }
    return first;
}

void wc_ready_unmark(wc_ready *ready, wc_ready_kind kind, wc_mark *mark)
{
    wc_mark **at = &ready->lists[kind].head, *before = NULL;
    if (!mark->set)
        return;
    for (; *at != mark; at = &before->next)
        before = *at;
    *at = mark->next;
    if (ready->lists[kind].tail == mark)
        ready->lists[kind].tail = before;
    mark->set = false;
}

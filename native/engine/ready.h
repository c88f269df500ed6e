/* The ready queue: see the beginning of ready.c. */
#ifndef WC_READY_H
#define WC_READY_H

#include "common.h"

/* In the order in which they are taken. */
typedef enum {
    WC_READY_END,   /* wc_task: all of its parts are finished */
    WC_READY_TRACK, /* wc_track: some lane may have something to send */
    WC_READY_PART,  /* wc_part: a local one, more of what it reads is there */
    WC_READY_LANE,  /* wc_lane: it may have something to receive */
    WC_READY_TURN,  /* wc_task: it has local parts that wait for nothing but their turn */
    WC_READY_KINDS,
} wc_ready_kind;

/* The first member of what it marks. */
typedef struct wc_mark {
    struct wc_mark *next;
    bool set; /* it is in the queue */
} wc_mark;

typedef struct {
    struct {
        wc_mark *head, *tail;
    } lists[WC_READY_KINDS];
} wc_ready;

void wc_ready_mark(wc_ready *ready, wc_ready_kind kind, wc_mark *mark);   /* again is harmless */
void wc_ready_unmark(wc_ready *ready, wc_ready_kind kind, wc_mark *mark); /* of what is not marked: does nothing */
wc_mark *wc_ready_take(wc_ready *ready, wc_ready_kind kind);              /* NULL: there is none */

#endif

/* Gates: see the beginning of gate.c. Its worker alone touches one. */
#ifndef WC_GATE_H
#define WC_GATE_H

#include "common.h"
#include "part.h"

enum { WC_BELL = 1 }; /* among the pointers that epoll gives back: no struct is there */

/* Of one op at one worker. */
struct wc_gate {
    wc_gate *next;         /* in the worker's list */
    wc_work *work;
    wc_part *head, *tail;  /* parts that read front, by step; those whose bytes are all there have left */
    uint64_t looked;       /* the worker's bells at the last look */
};

uint64_t wc_gate_bound(const wc_part *part, uint64_t to); /* how far, up to `to`, what it reads of front is there */
/* The part reads this place: holds it back if it is in front */
void wc_gate_keep(wc_part *part, const wc_place *place);
void wc_gate_join(wc_gate *gate, wc_part *part);
void wc_gate_enter(wc_worker *worker, wc_work *work); /* bells concern the op from now on */
void wc_gate_leave(wc_worker *worker, wc_work *work); /* and no longer; again is harmless */
void wc_gates_look(wc_worker *worker);                /* a bell has rung */

#endif

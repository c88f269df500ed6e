/* Gates: see the beginning of gate.c. */
#ifndef WC_GATE_H
#define WC_GATE_H

#include "common.h"

enum { WC_BELL = 1 }; /* among the pointers that epoll gives back: no struct is there */

void wc_gate_enter(wc_task *task);      /* bells concern the op from now on */
void wc_gate_leave(wc_task *task);      /* and no longer; again is harmless */
void wc_gates_look(wc_worker *worker);  /* a bell has rung */

#endif

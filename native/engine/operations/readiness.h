/* Input readiness: see the beginning of readiness.c. */
#ifndef WC_READINESS_H
#define WC_READINESS_H

#include "common.h"

enum { WC_BELL = 1 }; /* among the pointers that epoll gives back: no struct is there */

void wc_readiness_enter(wc_task *task); /* bells concern the op from now on */
void wc_readiness_leave(wc_task *task); /* and no longer; again is harmless */
void wc_readiness_look(wc_worker *worker); /* a bell has rung */

#endif

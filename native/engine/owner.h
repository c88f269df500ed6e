/* Owners: what takes ops and notes on itself in place of the daemon (calls/caller.c). Others know it by these functions. */
#ifndef WC_OWNER_H
#define WC_OWNER_H

#include "common.h"

enum { WC_OWNER = 2, WC_NOTES = 4 }; /* low bits of the pointers that epoll gives back: what they point to */

typedef struct wc_owner wc_owner;
struct wc_owner {
    /* An attempt that it has started has finished, as the DONE event would say. True: there shall be none. *speaks: whether
       its vote goes out */
    bool (*finished)(wc_work *work, const wc_event *event, bool *speaks);
    /* Whether it takes the note of this voter; else it is the daemon's */
    bool (*hear)(wc_owner *owner, uint32_t voter, const uint8_t *bytes, uint32_t length);
    void (*serve)(wc_owner *owner); /* its client has rung; by the first worker */
    void (*unref)(wc_owner *owner);
};

#endif

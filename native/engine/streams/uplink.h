/* The uplink of the daemon: how many bytes all of its sockets together may take, so that they keep to a rate. */
#ifndef WC_UPLINK_H
#define WC_UPLINK_H

#include "common.h"

typedef struct {
    uint64_t rate;     /* bytes per second; 0: without limit, and nobody asks */
    uint32_t piece;    /* bytes that are given out at a time */
    atomic_ullong due; /* ns of CLOCK_MONOTONIC: when what was given out has left at that rate */
} wc_uplink;

void wc_uplink_init(wc_uplink *uplink, uint64_t rate);
/* Bytes that one socket may take now, at most; 0: none before wc_uplink_wait. What is not used is returned. */
uint32_t wc_uplink_take(wc_uplink *uplink);
void wc_uplink_return(wc_uplink *uplink, uint32_t bytes);
/* ns until there is something to take; 0: there is. */
uint64_t wc_uplink_wait(const wc_uplink *uplink);

#endif

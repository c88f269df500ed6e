/* Scratch memory of one attempt. */
#ifndef WC_SCRATCH_H
#define WC_SCRATCH_H

#include "common.h"

struct wc_scratch {
    wc_scratch *next;
    size_t bytes;
    uint8_t *memory;
};

wc_scratch *wc_scratch_take(wc_engine *engine, size_t bytes); /* NULL with errno */
void wc_scratch_give(wc_engine *engine, wc_scratch *scratch); /* NULL: does nothing */
void wc_scratch_free_all(wc_engine *engine);

#endif

/* An input that a CUDA device fills: what tells the engine so. */
#ifndef WC_FILL_H
#define WC_FILL_H

#include <stdint.h>

/* Blocks [first, stop) of an input, whose table of what is filled lies at `filled`; the bell rings when they are. */
typedef struct {
    uint64_t filled;
    uint64_t first;
    uint64_t stop;
    int32_t bell;
} wc_fill;

/* A host function for a stream: these blocks, a wc_fill, are there. Any thread of the driver may call it. */
void wc_fill_told(void *fill);

#endif

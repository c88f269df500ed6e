/* See fill.h. It runs in a thread of the CUDA driver: no Python, nothing that blocks, nothing of CUDA. */
#include "fill.h"

#include <unistd.h>

void wc_fill_told(void *fill)
{
    const wc_fill *told = fill;
    uint8_t *filled = (uint8_t *)(uintptr_t)told->filled;
    for (uint64_t block = told->first; block < told->stop; block++)
        __atomic_store_n(&filled[block], 1, __ATOMIC_RELEASE);
    const uint64_t one = 1;
    if (write(told->bell, &one, sizeof one) < 0)
        return; /* it is full, so it has rung */
}

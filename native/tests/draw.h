/* The tests' random numbers: the same in each run. */
#ifndef WC_TEST_DRAW_H
#define WC_TEST_DRAW_H

#include <stdint.h>

static uint64_t state = 0x9e3779b97f4a7c15u;
static uint64_t draw(void) /* xorshift64* (Vigna, 2014) */
{
    state ^= state >> 12;
    state ^= state << 25;
    state ^= state >> 27;
    return state * 0x2545f4914f6cdd1du;
}

#endif

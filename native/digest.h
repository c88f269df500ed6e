/* Digests of memory, as the engine reports them of results. */
#ifndef WC_DIGEST_H
#define WC_DIGEST_H

#include <stdint.h>

/* A stripe: `bytes` bytes at `address`. */
typedef struct {
    uint64_t address;
    uint64_t bytes;
    uint64_t digest;
} wc_stripe;

/* Sets the digest of each stripe to what an op with these bytes as its result would report, in so many threads (0: as many
   as there are cores for). 0, or a negative errno. A call into C lets other Python threads run. */
int wc_digest_stripes(wc_stripe *stripes, uint64_t count, unsigned threads);

#endif

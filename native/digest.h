/* Digests of memory, as the engine reports them of results. */
#ifndef WC_DIGEST_H
#define WC_DIGEST_H

#include <stdint.h>

/* out[i] = the digest that an op with the bytes of stripe i as its result would report. Stripes have `stripe` bytes (a
   multiple of WC_DIGEST_BLOCK), the last one may be shorter. 0, or a negative errno. A call into C lets other Python
   threads run. */
int wc_digest_stripes(uint64_t address, uint64_t bytes, uint64_t stripe, uint64_t *out);

#endif

/* The digest of a result while it is being made: its blocks are hashed when they become final, in any order. */
#ifndef WC_HASHES_H
#define WC_HASHES_H

#include "common.h"

typedef struct {
    const wc_kernels *kernels;
    const uint8_t *memory;
    uint64_t bytes;  /* of the elements */
    uint64_t block_raw, block_wire; /* the codec in whose form they lie there; 0: none */
    uint64_t count;  /* blocks; 0: nothing is hashed */
    uint64_t *block; /* their hashes */
    uint8_t *known;  /* per block: hashed already */
    uint32_t *shown; /* per block: becomes `attempt` when it is hashed; NULL: nobody looks */
    uint32_t attempt;
} wc_hashes;

/* False: no memory */
bool wc_hashes_init(wc_hashes *hashes, const wc_kernels *kernels, const void *memory, uint64_t bytes);
void wc_hashes_free(wc_hashes *hashes);
/* Bytes [from, to) are final, and those from `begin` on were before: hashes the blocks that this completes and that
   begin there. Others, which straddle two stretches, wait for the digest. Stretches that do not overlap may grow on
   several threads. */
void wc_hashes_extend(wc_hashes *hashes, uint64_t begin, uint64_t from, uint64_t to);
/* Hash of the block that these n bytes are; NULL: they are none, or it is not hashed yet. Its user may extend it. */
const uint64_t *wc_hashes_of(const wc_hashes *hashes, const uint8_t *from, uint64_t n);
uint64_t wc_hashes_digest(wc_hashes *hashes);

#endif

/* Checksums of payloads: pieces of at most a digest block are hashed, as digests hash blocks, and their hashes are
   folded into one. Pieces end where the offset is a multiple of a block, so a piece that is a block of the result has
   that block's hash. Both ends know the pieces from the frame's header alone. */
#ifndef WC_CHECKSUM_H
#define WC_CHECKSUM_H

#include "common.h"

typedef struct {
    uint64_t sum; /* of the pieces that are whole; what the frame says once `left` is 0 */
    uint64_t at;  /* offset of the next byte */
    uint32_t left;
    bool half;    /* the current piece has begun: `state` is of its first bytes */
    wc_hash_state state;
} wc_checksum;

void wc_checksum_begin(wc_checksum *sum, uint64_t offset, uint32_t length);
void wc_checksum_add(wc_checksum *sum, const wc_kernels *kernels, const void *data, size_t n); /* the next n bytes */
uint32_t wc_checksum_piece(const wc_checksum *sum); /* bytes that the current piece lacks; 0: all are there */
void wc_checksum_skip(wc_checksum *sum, const wc_kernels *kernels, uint64_t hash); /* a whole piece, of this hash */

#endif

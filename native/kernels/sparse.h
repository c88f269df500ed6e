/* A block of a sparse codec: a scale (4 bytes), a field for each kept element (its code, then the low bits of its
   place), and the high bits of the places, the i-th as bit i + high of a row of bits (P. Elias, "Efficient storage and
   retrieval by content and address of static files", 1974; R. Fano, 1971). All blocks of a codec have one size. */
#ifndef WC_SPARSE_H
#define WC_SPARSE_H

#include <stdbool.h>

#include "kernels.h"

enum {
    WC_SPARSE_MOST = 4 + WC_SPARSE_BLOCK + WC_SPARSE_BLOCK / 4 + 16 /* bytes of the largest block, and of reads beyond it */
};

typedef struct {
    uint32_t kept;   /* elements; 0: the codec is none of these */
    uint32_t bits;   /* of a code */
    uint32_t low;    /* bits of a place that lie in its field */
    uint32_t highs;  /* bits of the row */
    uint32_t fields; /* bytes of the fields */
    uint32_t bytes;  /* of the block */
} wc_sparse;

wc_sparse wc_sparse_of(uint32_t codec);
/* Places ascend, codes are below 1 << bits. All of a block but its scale. */
void wc_sparse_write(const wc_sparse *form, uint8_t *coded, const uint16_t *places, const uint8_t *codes);
/* The other way, for a block of n elements, 1 to WC_SPARSE_BLOCK. False: nobody encodes this; the arrays are rubbish. */
bool wc_sparse_read(const wc_sparse *form, const uint8_t *coded, size_t n, uint16_t *places, uint8_t *codes);

#endif

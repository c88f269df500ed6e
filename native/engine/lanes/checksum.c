/* Checksums of payloads: see checksum.h. */
#include "checksum.h"

void wc_checksum_begin(wc_checksum *sum, uint64_t offset, uint32_t length)
{
    sum->sum = 0;
    sum->at = offset;
    sum->left = length;
    sum->half = false;
}

uint32_t wc_checksum_piece(const wc_checksum *sum)
{
    uint32_t most = WC_DIGEST_BLOCK - (uint32_t)(sum->at % WC_DIGEST_BLOCK);
    return most < sum->left ? most : sum->left;
}

void wc_checksum_skip(wc_checksum *sum, const wc_kernels *kernels, uint64_t hash)
{
    uint32_t n = wc_checksum_piece(sum);
    const uint64_t both[] = {sum->sum, hash};
    sum->sum = kernels->hash64(both, sizeof both);
    sum->at += n;
    sum->left -= n;
    sum->half = false;
}

void wc_checksum_add(wc_checksum *sum, const wc_kernels *kernels, const void *data, size_t n)
{
    for (const uint8_t *p = data; n;) {
        uint32_t piece = wc_checksum_piece(sum), here = n < piece ? (uint32_t)n : piece;
        if (!sum->half && here == piece) {
            wc_checksum_skip(sum, kernels, kernels->hash64(p, here));
        } else {
            if (!sum->half)
                kernels->hash_begin(&sum->state);
            sum->half = true;
            kernels->hash_add(&sum->state, p, here);
            if (here == piece) {
                wc_checksum_skip(sum, kernels, kernels->hash_end(&sum->state));
            } else {
                sum->at += here;
                sum->left -= here;
            }
        }
        p += here;
        n -= here;
    }
}

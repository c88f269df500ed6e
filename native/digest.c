/* Digests of memory, as the engine reports them of results: blocks are hashed, then their hashes. */
#include "digest.h"

#include "engine.h"
#include "kernels.h"

#include <errno.h>
#include <stdlib.h>

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

int wc_digest_stripes(uint64_t address, uint64_t bytes, uint64_t stripe, uint64_t *out)
{
    if (stripe == 0 || stripe % WC_DIGEST_BLOCK)
        return -EINVAL;
    const wc_kernels *kernels = wc_kernels_default();
    if (!kernels)
        return -ENOSYS;
    uint64_t *hashes = malloc((least(stripe, bytes) / WC_DIGEST_BLOCK + 1) * sizeof *hashes);
    if (!hashes)
        return -ENOMEM;
    const uint8_t *memory = (const uint8_t *)(uintptr_t)address;
    for (uint64_t start = 0; start < bytes; start += stripe) {
        uint64_t end = start + least(stripe, bytes - start);
        size_t blocks = 0;
        for (uint64_t at = start; at < end; at += WC_DIGEST_BLOCK)
            hashes[blocks++] = kernels->hash64(memory + at, (size_t)least(WC_DIGEST_BLOCK, end - at));
        *out++ = kernels->hash64(hashes, blocks * sizeof *hashes);
    }
    free(hashes);
    return 0;
}

/* Digests of memory: blocks are hashed, then their hashes. Of whole memory, and of results while they are being
   made. */
#include "digest.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "hashes.h"
#include "shares.h"

static uint64_t least(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static void hash_block(wc_hashes *hashes, uint64_t block)
{
    uint64_t start = block * WC_DIGEST_BLOCK, n = least(WC_DIGEST_BLOCK, hashes->bytes - start), raw = hashes->block_raw;
    if (raw) {
        start = start / raw * hashes->block_wire;
        n = (n + raw - 1) / raw * hashes->block_wire;
    }
    hashes->block[block] = hashes->kernels->hash64(hashes->memory + start, (size_t)n);
    hashes->known[block] = 1;
    if (hashes->shown)
        __atomic_store_n(&hashes->shown[block], hashes->attempt, __ATOMIC_RELEASE);
}

bool wc_hashes_init(wc_hashes *hashes, const wc_kernels *kernels, const void *memory, uint64_t bytes)
{
    *hashes = (wc_hashes){.kernels = kernels, .memory = memory, .bytes = bytes};
    hashes->count = (bytes + WC_DIGEST_BLOCK - 1) / WC_DIGEST_BLOCK;
    hashes->block = calloc(hashes->count + 1, sizeof *hashes->block);
    hashes->known = calloc(hashes->count + 1, 1);
    return hashes->block && hashes->known;
}

void wc_hashes_free(wc_hashes *hashes)
{
    free(hashes->block);
    free(hashes->known);
}

void wc_hashes_extend(wc_hashes *hashes, uint64_t begin, uint64_t from, uint64_t to)
{
    uint64_t block = from / WC_DIGEST_BLOCK;
    if (block * WC_DIGEST_BLOCK < begin)
        block++;
    for (; block < hashes->count && least((block + 1) * WC_DIGEST_BLOCK, hashes->bytes) <= to; block++)
        hash_block(hashes, block);
}

const uint64_t *wc_hashes_of(const wc_hashes *hashes, const uint8_t *from, uint64_t n)
{
    uint64_t start = (uint64_t)(from - hashes->memory), block = start / WC_DIGEST_BLOCK;
    bool whole = !hashes->block_raw && block < hashes->count && start % WC_DIGEST_BLOCK == 0 &&
                 n == least(WC_DIGEST_BLOCK, hashes->bytes - start);
    return whole && hashes->known[block] ? &hashes->block[block] : NULL;
}

uint64_t wc_hashes_digest(wc_hashes *hashes)
{
    for (uint64_t block = 0; block < hashes->count; block++)
        if (!hashes->known[block])
            hash_block(hashes, block);
    return hashes->kernels->hash64(hashes->block, (size_t)hashes->count * sizeof *hashes->block);
}

typedef struct {
    const wc_kernels *kernels;
    const uint8_t *memory;
    uint64_t bytes, stripe, *out;
    atomic_bool lacks_memory;
} wc_striped;

static void digest_share(void *work, uint64_t begin, uint64_t end)
{
    wc_striped *all = work;
    for (uint64_t i = begin; i < end; i++) {
        uint64_t start = i * all->stripe;
        wc_hashes hashes;
        if (wc_hashes_init(&hashes, all->kernels, all->memory + start, least(all->stripe, all->bytes - start)))
            all->out[i] = wc_hashes_digest(&hashes);
        else
            atomic_store(&all->lacks_memory, true);
        wc_hashes_free(&hashes);
    }
}

int wc_digest_stripes(uint64_t address, uint64_t bytes, uint64_t stripe, uint64_t *out)
{
    if (stripe == 0 || stripe % WC_DIGEST_BLOCK)
        return -EINVAL;
    const wc_kernels *kernels = wc_kernels_default();
    if (!kernels)
        return -ENOSYS;
    wc_striped all = {.kernels = kernels, .memory = (const uint8_t *)(uintptr_t)address, .bytes = bytes,
                      .stripe = stripe, .out = out};
    uint64_t count = bytes / stripe + (bytes % stripe > 0);
    wc_in_shares(digest_share, &all, count, 1, 0);
    return atomic_load(&all.lacks_memory) ? -ENOMEM : 0;
}

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
    wc_stripe *stripes;
    uint64_t count;
    atomic_ullong next;
    atomic_bool lacks_memory;
} wc_digesting;

/* Whichever thread is free takes the next stripe: some have a few bytes. */
static void digest_share(void *work, uint64_t begin, uint64_t end)
{
    (void)begin, (void)end;
    wc_digesting *all = work;
    for (uint64_t i; (i = atomic_fetch_add(&all->next, 1)) < all->count;) {
        wc_stripe *stripe = &all->stripes[i];
        wc_hashes hashes;
        if (wc_hashes_init(&hashes, all->kernels, (const void *)(uintptr_t)stripe->address, stripe->bytes))
            stripe->digest = wc_hashes_digest(&hashes);
        else
            atomic_store(&all->lacks_memory, true);
        wc_hashes_free(&hashes);
    }
}

int wc_digest_stripes(wc_stripe *stripes, uint64_t count, unsigned threads)
{
    const wc_kernels *kernels = wc_kernels_default();
    if (!kernels)
        return -ENOSYS;
    wc_digesting all = {.kernels = kernels, .stripes = stripes, .count = count};
    wc_in_shares(digest_share, &all, count, 1, threads);
    return atomic_load(&all.lacks_memory) ? -ENOMEM : 0;
}

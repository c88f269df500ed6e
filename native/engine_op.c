/* One op: checked, cut into parts, hashed block by block, settled when every worker has let go of it. */
#include "engine_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* How many parts a transfer has: a pure function, the same on both ends. */
static uint32_t part_count(uint64_t length, uint32_t lanes, uint32_t stripe)
{
    uint64_t wanted = length / stripe;
    return wanted < 1 ? 1 : wanted > lanes ? lanes : (uint32_t)wanted;
}

static uint32_t op_stripe(const wc_engine *engine, const wc_op *op)
{
    return op->stripe ? op->stripe : engine->config.stripe;
}

/* Where part `index` of `count` begins: inside the chunk at absolute multiples of the digest's block. */
static uint64_t part_cut(uint64_t offset, uint64_t length, uint32_t count, uint32_t index)
{
    if (index == 0)
        return offset;
    if (index == count)
        return offset + length;
    uint64_t at = offset + length / count * index + length % count * index / count;
    at -= at % WC_DIGEST_BLOCK;
    return at < offset ? offset : at;
}

static bool transfer_valid(const wc_op *op, uint32_t index, size_t itemsize)
{
    const wc_transfer *t = &op->transfers[index];
    if (t->offset > op->bytes || t->length > op->bytes - t->offset || t->offset % itemsize || t->length % itemsize)
        return false;
    if (t->direction == WC_RECV)
        return t->action <= WC_FINAL && t->after == -1;
    if (t->direction != WC_SEND || (t->action != WC_FRONT && t->action != WC_BACK) || t->after < -1)
        return false;
    if (t->after == -1)
        return true;
    if ((uint32_t)t->after >= index)
        return false;
    const wc_transfer *a = &op->transfers[t->after];
    return a->direction == WC_RECV && a->offset == t->offset && a->length == t->length;
}

static bool op_valid(const wc_engine *engine, const wc_op *op)
{
    if (op->dtype >= WC_DTYPES || op->op >= WC_OPS || op->transfers_count > WC_MAX_TRANSFERS)
        return false;
    if (op->bytes > INT64_MAX || (op->bytes && (!op->front || !op->back)) || (op->transfers_count && !op->transfers))
        return false;
    if ((op->op == WC_AVG && op->divisor < 1) || (op->transfers_count && op->lanes < 1))
        return false;
    size_t itemsize = wc_dtype_size((int)op->dtype);
    if (op->bytes % itemsize)
        return false;
    for (uint32_t i = 0; i < op->transfers_count; i++) {
        if (!transfer_valid(op, i, itemsize))
            return false;
        const wc_link *link = wc_link_find(engine, op->transfers[i].link);
        if (!link || link->lanes_count != op->lanes || link->epoch != op->epoch)
            return false;
    }
    return true;
}

/* The sender's choice: long frames cost less, several per part let the next rank begin while the rest is on its way. */
static uint32_t part_segment(const wc_engine *engine, const wc_part *part)
{
    uint64_t wanted = (part->end - part->begin) / WC_PART_FRAMES;
    wanted += WC_DIGEST_BLOCK - 1 - (wanted + WC_DIGEST_BLOCK - 1) % WC_DIGEST_BLOCK;
    if (wanted < WC_DIGEST_BLOCK)
        wanted = WC_DIGEST_BLOCK;
    return wanted < engine->config.segment ? (uint32_t)wanted : engine->config.segment;
}

/* Fills in the parts of all transfers. `first` gets, per transfer, the index of its first part. */
static void make_parts(wc_engine *engine, wc_work *work, size_t *first)
{
    const wc_op *op = &work->op;
    size_t next = 0;
    /* Part 0 of any call with this seq is on this lane: members whose calls differ in size meet there and find out. */
    uint64_t turn = op->no_turns ? 0 : op->seq % op->lanes;
    for (uint32_t i = 0; i < op->transfers_count; i++) {
        const wc_transfer *t = &op->transfers[i];
        wc_link *link = wc_link_find(engine, t->link);
        uint32_t count = part_count(t->length, op->lanes, op_stripe(engine, op));
        first[i] = next;
        for (uint32_t p = 0; p < count; p++) {
            wc_part *part = &work->parts[next++];
            uint32_t lane = (uint32_t)((turn + p) % op->lanes);
            part->work = work;
            part->lane = &link->lanes[lane];
            part->worker = lane % engine->config.workers;
            part->begin = part->cursor = part_cut(t->offset, t->length, count, p);
            part->end = part_cut(t->offset, t->length, count, p + 1);
            part->segment = part_segment(engine, part);
            part->step = t->step;
            part->direction = t->direction;
            part->action = t->action;
            if (t->after >= 0) {
                part->after = &work->parts[first[t->after] + p];
                part->next_dependent = part->after->dependents;
                part->after->dependents = part;
            }
            work->remaining[part->worker]++;
        }
    }
}

void wc_work_free(wc_work *work)
{
    free(work->hashes);
    free(work->hashed);
    free(work->remaining);
    free(work->parts);
    free(work);
}

wc_work *wc_work_new(wc_engine *engine, const wc_op *op)
{
    if (!op_valid(engine, op)) {
        errno = EINVAL;
        return NULL;
    }
    uint32_t workers = engine->config.workers;
    size_t parts = 0;
    for (uint32_t i = 0; i < op->transfers_count; i++)
        parts += part_count(op->transfers[i].length, op->lanes, op_stripe(engine, op));
    uint64_t blocks = op->digest ? (op->bytes + WC_DIGEST_BLOCK - 1) / WC_DIGEST_BLOCK : 0;

    wc_work *work = calloc(1, sizeof *work);
    size_t *first = calloc((size_t)op->transfers_count + 1, sizeof *first);
    if (work) {
        work->remaining = calloc(workers, sizeof *work->remaining);
        work->parts = calloc(parts + 1, sizeof *work->parts);
        work->hashes = calloc(blocks + 1, sizeof *work->hashes);
        work->hashed = calloc(blocks + 1, 1);
    }
    if (!work || !first || !work->remaining || !work->parts || !work->hashes || !work->hashed) {
        free(first);
        if (work)
            wc_work_free(work);
        errno = ENOMEM;
        return NULL;
    }
    work->op = *op;
    work->itemsize = wc_dtype_size((int)op->dtype);
    work->reduce = engine->kernels->reduce[op->dtype][op->op];
    work->average = op->op == WC_AVG ? engine->kernels->average[op->dtype] : NULL;
    work->blocks = blocks;
    work->parts_count = parts;
    make_parts(engine, work, first);
    free(first);
    work->op.transfers = NULL;
    if (op->transfers_count == 0)
        work->remaining[0] = 1; /* the copy from front to back */
    unsigned involved = 0;
    for (uint32_t w = 0; w < workers; w++)
        involved += work->remaining[w] > 0;
    atomic_init(&work->unfinished, involved);
    atomic_init(&work->refs, 1 + involved); /* settle, and the commands */
    return work;
}

void wc_work_unref(wc_work *work)
{
    if (atomic_fetch_sub(&work->refs, 1) == 1)
        wc_work_free(work);
}

static void hash_block(wc_engine *engine, wc_work *work, uint64_t block)
{
    uint64_t start = block * WC_DIGEST_BLOCK, left = work->op.bytes - start;
    size_t n = left < WC_DIGEST_BLOCK ? (size_t)left : WC_DIGEST_BLOCK;
    work->hashes[block] = engine->kernels->hash64((const uint8_t *)work->op.back + start, n);
    work->hashed[block] = 1;
}

/* Bytes [from, to) of part have become final: hashes the blocks that this completes and that lie within the part. */
void wc_work_hash(wc_engine *engine, wc_work *work, const wc_part *part, uint64_t from, uint64_t to)
{
    if (!work->blocks)
        return;
    uint64_t block = from / WC_DIGEST_BLOCK;
    if (block * WC_DIGEST_BLOCK < part->begin)
        block++;
    for (; block < work->blocks; block++) {
        uint64_t end = (block + 1) * WC_DIGEST_BLOCK;
        if ((end < work->op.bytes ? end : work->op.bytes) > to)
            return;
        hash_block(engine, work, block);
    }
}

static uint64_t digest(wc_engine *engine, wc_work *work)
{
    if (!work->op.digest)
        return 0;
    for (uint64_t block = 0; block < work->blocks; block++)
        if (!work->hashed[block])
            hash_block(engine, work, block);
    return engine->kernels->hash64(work->hashes, (size_t)work->blocks * sizeof *work->hashes);
}

static void table_remove(wc_engine *engine, wc_work *work)
{
    wc_work **at = &engine->works[wc_bucket(work->op.id)];
    while (*at != work)
        at = &(*at)->next;
    *at = work->next;
}

/* The last worker has let go: DONE unless it was given up, and an answer to each cancel. */
static void settle(wc_engine *engine, wc_work *work)
{
    bool aborted = atomic_load(&work->aborted);
    wc_event event = {.type = WC_EV_DONE, .op = work->op.id};
    if (!aborted) {
        event.value = digest(engine, work);
        event.extra = atomic_load(&work->bytes_sent);
    }
    pthread_mutex_lock(&engine->mutex);
    table_remove(engine, work);
    if (aborted)
        wc_events_release(&engine->events, 1);
    else
        wc_events_push(&engine->events, &event);
    if (!atomic_load(&work->mismatched))
        wc_events_release(&engine->events, 1);
    event = (wc_event){.type = WC_EV_CANCELLED, .op = work->op.id};
    for (uint32_t i = 0; i < work->cancels; i++)
        wc_events_push(&engine->events, &event);
    pthread_mutex_unlock(&engine->mutex);
    wc_work_unref(work);
}

void wc_work_let_go(wc_engine *engine, wc_work *work, bool aborted)
{
    if (aborted)
        atomic_store(&work->aborted, true);
    if (atomic_fetch_sub(&work->unfinished, 1) == 1)
        settle(engine, work);
}

void wc_part_finish(wc_engine *engine, wc_part *part)
{
    part->finished = true;
    part->lane = NULL;
    if (--part->work->remaining[part->worker] == 0)
        wc_work_let_go(engine, part->work, false);
}

bool wc_work_copy(wc_engine *engine, wc_work *work)
{
    uint64_t left = work->op.bytes - work->copied;
    uint64_t stop = work->copied + (left < WC_COPY_SLICE ? left : WC_COPY_SLICE);
    while (work->copied < stop) {
        uint64_t block = work->copied / WC_DIGEST_BLOCK;
        uint64_t n = stop - work->copied < WC_DIGEST_BLOCK ? stop - work->copied : WC_DIGEST_BLOCK;
        memcpy((uint8_t *)work->op.back + work->copied, (const uint8_t *)work->op.front + work->copied, (size_t)n);
        work->copied += n;
        if (work->blocks)
            hash_block(engine, work, block);
    }
    return work->copied == work->op.bytes;
}

/* One op: checked, cut into parts, hashed block by block, settled when every worker has let go of it. */
#include "engine_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* How many parts a transfer has: a pure function, the same on both ends. One for each lane; more, so that lanes that are faster can take more, if
   they are not shorter than a digest block, and than WC_COARSE_PART if there are many. */
static uint32_t part_count(uint64_t length, uint32_t lanes, uint32_t stripe)
{
    uint64_t wanted = length / stripe, blocks = length / WC_DIGEST_BLOCK, coarse = length / WC_COARSE_PART;
    uint64_t most = blocks < (uint64_t)lanes * WC_FINE_PARTS ? blocks : (uint64_t)lanes * WC_FINE_PARTS;
    if (most < coarse)
        most = coarse;
    if (most < lanes)
        most = lanes;
    if (wanted > most)
        wanted = most;
    return wanted < 1 ? 1 : wanted > WC_MAX_PARTS ? WC_MAX_PARTS : (uint32_t)wanted;
}

static uint32_t op_stripe(const wc_engine *engine, const wc_op *op)
{
    uint32_t stripe = op->stripe ? op->stripe : engine->config.stripe;
    return stripe < WC_MIN_STRIPE ? WC_MIN_STRIPE : stripe;
}

/* Cuts are at multiples of it: the digest's block, or less where parts are shorter, so that none is empty. */
static uint64_t cut_align(uint64_t length, uint32_t count)
{
    uint64_t align = WC_DIGEST_BLOCK;
    while (align > length / count)
        align /= 2;
    return align;
}

/* Where part `index` of `count` begins: inside the transfer at absolute multiples of align. */
static uint64_t part_cut(uint64_t offset, uint64_t length, uint32_t count, uint32_t index, uint64_t align)
{
    if (index == 0)
        return offset;
    if (index == count)
        return offset + length;
    uint64_t at = offset + length / count * index + length % count * index / count;
    return at - at % align;
}

/* Raw bytes of the codec's block; 1 without codec. */
static uint64_t block_raw(const wc_op *op)
{
    uint64_t elements = wc_codec_shape((int)op->codec).elements;
    return elements ? elements * wc_dtype_size((int)op->dtype) : 1;
}

static bool place_valid(const wc_op *op, const wc_transfer *t, const wc_place *place, size_t itemsize)
{
    if (place->buffer >= WC_BUFFERS || place->offset > op->bytes[place->buffer])
        return false;
    uint64_t room = op->bytes[place->buffer] - place->offset, need = t->length, raw = block_raw(op);
    if (place->encoded) {
        if (op->codec == WC_CODEC_NONE || place->buffer != WC_SCRATCH || t->start % raw)
            return false;
        need = (t->length + raw - 1) / raw * wc_codec_shape((int)op->codec).bytes;
    } else if (place->offset % itemsize) {
        return false;
    }
    return need <= room;
}

static bool writable(const wc_op *op, const wc_transfer *t, size_t itemsize)
{
    return t->to.buffer != WC_FRONT && place_valid(op, t, &t->to, itemsize);
}

static bool bounds_valid(const wc_op *op, uint32_t index)
{
    const wc_transfer *t = &op->transfers[index];
    for (int i = 0; i < WC_AFTER; i++) {
        int64_t at = t->after[i];
        if (at < -1 || at >= (int64_t)index || (at >= 0 && (t->length == 0 || t->direction == WC_RECV)))
            return false;
        if (at < 0)
            continue;
        const wc_transfer *a = &op->transfers[at];
        if (a->direction == WC_SEND || a->start != t->start || a->length != t->length || (i && at == t->after[0]))
            return false;
    }
    return true;
}

static bool local_valid(const wc_op *op, const wc_transfer *t, size_t itemsize)
{
    if (!writable(op, t, itemsize) || !place_valid(op, t, &t->left, itemsize) || t->length == 0)
        return false;
    switch (t->action) {
    case WC_COPY:
        return !t->to.encoded && !t->left.encoded;
    case WC_REDUCE:
    case WC_FINAL:
        return !t->to.encoded && !t->left.encoded && place_valid(op, t, &t->right, itemsize);
    case WC_ENCODE:
        return t->to.encoded && !t->left.encoded;
    case WC_DECODE:
        return !t->to.encoded && t->left.encoded;
    default:
        return false;
    }
}

static bool transfer_valid(const wc_op *op, uint32_t index, size_t itemsize)
{
    const wc_transfer *t = &op->transfers[index];
    if (t->length > INT64_MAX || t->start > INT64_MAX || t->start % itemsize || t->length % itemsize || !bounds_valid(op, index))
        return false;
    if (t->result && (t->direction == WC_SEND || t->to.buffer != WC_BACK))
        return false;
    switch (t->direction) {
    case WC_SEND:
        return t->action == WC_COPY && place_valid(op, t, &t->left, itemsize);
    case WC_RECV:
        if (t->action != WC_COPY && (t->action > WC_FINAL || t->to.encoded || t->left.encoded || !place_valid(op, t, &t->left, itemsize)))
            return false;
        return writable(op, t, itemsize);
    case WC_LOCAL:
        return local_valid(op, t, itemsize);
    default:
        return false;
    }
}

static bool op_valid(const wc_engine *engine, const wc_op *op)
{
    if (op->dtype >= WC_DTYPES || op->op >= WC_OPS || op->codec >= WC_CODECS || op->transfers_count > WC_MAX_TRANSFERS)
        return false;
    for (int i = 0; i < WC_BUFFERS; i++)
        if (op->bytes[i] > INT64_MAX)
            return false;
    if ((op->bytes[WC_FRONT] && !op->front) || (op->bytes[WC_BACK] && !op->back) || (op->transfers_count && !op->transfers))
        return false;
    if (op->divisor < 1 || op->lanes < 1 || op->lanes > WC_MAX_LANES || op->tracks < 1 || op->tracks > op->lanes)
        return false;
    if (op->codec != WC_CODEC_NONE && !engine->kernels->encode[op->codec][op->dtype])
        return false;
    size_t itemsize = wc_dtype_size((int)op->dtype);
    for (uint32_t i = 0; i < op->transfers_count; i++) {
        if (!transfer_valid(op, i, itemsize))
            return false;
        if (op->transfers[i].direction == WC_LOCAL)
            continue;
        const wc_link *link = wc_link_find(engine, op->transfers[i].link);
        if (!link || link->lanes_count != op->lanes || link->tracks_count != op->tracks || link->epoch != op->epoch)
            return false;
    }
    return true;
}

/* The sender's choice: long frames cost less, several per part let the next rank begin while the rest is on its way; unless parts are many. */
static uint32_t part_segment(const wc_engine *engine, const wc_part *part, bool many)
{
    const wc_work *work = part->work;
    uint64_t wanted = (part->end - part->begin) / (many ? 1 : WC_PART_FRAMES);
    wanted += WC_DIGEST_BLOCK - 1 - (wanted + WC_DIGEST_BLOCK - 1) % WC_DIGEST_BLOCK;
    uint64_t most = engine->config.segment;
    if (part->encoded)
        most = most / work->block_wire * work->block_raw;
    most -= most % WC_DIGEST_BLOCK;
    if (wanted > most)
        wanted = most;
    return wanted < WC_DIGEST_BLOCK ? WC_DIGEST_BLOCK : (uint32_t)wanted;
}

static wc_spot spot_of(const wc_work *work, wc_place place)
{
    uint8_t *buffers[WC_BUFFERS] = {(uint8_t *)work->op.front, work->op.back, work->scratch ? work->scratch->memory : NULL};
    uint8_t *base = buffers[place.buffer];
    return (wc_spot){.base = base ? base + place.offset : NULL, .encoded = place.encoded};
}

/* Fills in what a part has of its transfer. */
static void describe_part(wc_part *part, const wc_transfer *t)
{
    const wc_work *work = part->work;
    part->start = t->start;
    part->number = t->number;
    part->direction = t->direction;
    part->action = t->action;
    part->result = t->result;
    part->measured = t->measured;
    if (t->direction != WC_SEND) {
        part->to = spot_of(work, t->to);
        part->back = t->to.offset;
    }
    if (t->direction != WC_RECV || t->action != WC_COPY)
        part->left = spot_of(work, t->left);
    if (t->direction == WC_LOCAL && (t->action == WC_REDUCE || t->action == WC_FINAL))
        part->right = spot_of(work, t->right);
    part->encoded = part->to.encoded || part->left.encoded || part->right.encoded;
}

static void depend(wc_part *part, int slot, wc_part *after)
{
    part->after[slot] = after;
    part->next_dependent[slot] = after->dependents;
    after->dependents = part;
}

/* Numbers the shares that an op needs: link->post_share, for each link that it uses. Returns how many; *numbers: how many numbers their transfers have. */
static size_t count_shares(wc_engine *engine, const wc_op *op, size_t *numbers)
{
    size_t shares = 0;
    *numbers = 0;
    engine->posts++;
    for (uint32_t i = 0; i < op->transfers_count; i++) {
        const wc_transfer *t = &op->transfers[i];
        if (t->direction == WC_LOCAL)
            continue;
        wc_link *link = wc_link_find(engine, t->link);
        if (link->post != engine->posts) {
            link->post = engine->posts;
            link->post_share = shares;
            link->post_numbers = 0;
            shares += op->tracks;
        }
        if (t->direction == WC_RECV && t->number >= link->post_numbers) {
            *numbers += t->number + 1u - link->post_numbers;
            link->post_numbers = t->number + 1u;
        }
    }
    return shares;
}

/* Fills in the shares. False: two transfers from one rank have the same number. */
static bool make_shares(wc_engine *engine, wc_work *work)
{
    const wc_op *op = &work->op;
    uint32_t *numbers = work->numbers;
    for (uint32_t i = 0; i < op->transfers_count; i++) {
        const wc_transfer *t = &op->transfers[i];
        if (t->direction == WC_LOCAL)
            continue;
        wc_link *link = wc_link_find(engine, t->link);
        wc_share *shares = &work->shares[link->post_share];
        if (!shares->work) {
            for (uint32_t k = 0; k < op->tracks; k++)
                shares[k] = (wc_share){.work = work, .track = &link->tracks[k], .worker = k % engine->config.workers,
                                       .numbers = numbers, .numbers_count = link->post_numbers};
            numbers += link->post_numbers;
        }
        if (t->direction != WC_RECV)
            continue;
        uint32_t *slot = &work->numbers[shares->numbers - work->numbers] + t->number;
        if (*slot)
            return false;
        *slot = i + 1;
    }
    return true;
}

static void join_share(wc_part *part, wc_share *share, uint32_t count)
{
    uint32_t lanes = part->work->op.lanes;
    part->share = share;
    if (part->direction != WC_SEND)
        return;
    share->unbegun++;
    if (share->homes < count)
        share->homes = count < lanes ? count : lanes;
}

/* Fills in the parts of all transfers. */
static void make_parts(wc_engine *engine, wc_work *work)
{
    const wc_op *op = &work->op;
    size_t next = 0;
    const uint32_t stripe = op_stripe(engine, op);
    /* Part 0 of any call with this seq is of this lane's track: members whose calls differ in size meet there and find out. */
    work->first_lane = op->no_turns ? 0 : (uint32_t)(op->seq % op->lanes);
    for (uint32_t i = 0; i < op->transfers_count; i++) {
        const wc_transfer *t = &op->transfers[i];
        wc_link *link = t->direction == WC_LOCAL ? NULL : wc_link_find(engine, t->link);
        uint32_t count = part_count(t->length, op->lanes, stripe);
        const uint64_t align = cut_align(t->length, count);
        work->steps[i] = (wc_step){.first = next, .count = count, .start = t->start, .length = t->length};
        for (uint32_t p = 0; p < count; p++) {
            wc_part *part = &work->parts[next++];
            part->work = work;
            part->home = (work->first_lane + p) % op->lanes;
            part->worker = part->home % op->tracks % engine->config.workers;
            part->begin = part->cursor = part_cut(t->start, t->length, count, p, align);
            part->end = part_cut(t->start, t->length, count, p + 1, align);
            describe_part(part, t);
            part->segment = part_segment(engine, part, count > op->lanes);
            for (int a = 0; a < WC_AFTER; a++)
                if (t->after[a] >= 0)
                    depend(part, a, &work->parts[work->steps[t->after[a]].first + p]);
            if (link)
                join_share(part, &work->shares[link->post_share + part->home % op->tracks], count);
            work->remaining[part->worker]++;
        }
    }
}

wc_part *wc_share_part(wc_share *share, uint16_t number, uint64_t offset)
{
    const wc_work *work = share->work;
    uint32_t index = number < share->numbers_count ? share->numbers[number] : 0;
    if (!index)
        return NULL;
    const wc_step *step = &work->steps[index - 1];
    if (offset < step->start || offset - step->start > step->length)
        return NULL;
    uint64_t guess = (offset - step->start) / (step->length / step->count + 1);
    wc_part *part = &work->parts[step->first + guess], *last = &work->parts[step->first + step->count - 1];
    while (part < last && offset >= part->end)
        part++;
    return part->share == share ? part : NULL;
}

void wc_work_free(wc_engine *engine, wc_work *work)
{
    wc_scratch_give(engine, work->scratch);
    free(work->squares);
    free(work->hashes);
    free(work->hashed);
    free(work->remaining);
    free(work->parts);
    free(work->steps);
    free(work->shares);
    free(work->numbers);
    free(work);
}

wc_work *wc_work_new(wc_engine *engine, const wc_op *op)
{
    if (!op_valid(engine, op)) {
        errno = EINVAL;
        return NULL;
    }
    uint32_t workers = engine->config.workers;
    size_t parts = 0, numbers;
    for (uint32_t i = 0; i < op->transfers_count; i++)
        parts += part_count(op->transfers[i].length, op->lanes, op_stripe(engine, op));
    size_t shares = count_shares(engine, op, &numbers);
    uint64_t blocks = op->digest ? (op->bytes[WC_BACK] + WC_DIGEST_BLOCK - 1) / WC_DIGEST_BLOCK : 0;

    wc_work *work = calloc(1, sizeof *work);
    if (work) {
        work->remaining = calloc(workers, sizeof *work->remaining);
        work->parts = calloc(parts + 1, sizeof *work->parts);
        work->steps = calloc((size_t)op->transfers_count + 1, sizeof *work->steps);
        work->shares = calloc(shares + 1, sizeof *work->shares);
        work->numbers = calloc(numbers + 1, sizeof *work->numbers);
        work->hashes = calloc(blocks + 1, sizeof *work->hashes);
        work->hashed = calloc(blocks + 1, 1);
        work->squares = calloc(2 * workers, sizeof *work->squares);
        work->scratch = op->bytes[WC_SCRATCH] ? wc_scratch_take(engine, op->bytes[WC_SCRATCH]) : NULL;
    }
    if (!work || !work->remaining || !work->parts || !work->steps || !work->shares || !work->numbers || !work->hashes || !work->hashed ||
        !work->squares || (op->bytes[WC_SCRATCH] && !work->scratch)) {
        if (work)
            wc_work_free(engine, work);
        errno = ENOMEM;
        return NULL;
    }
    work->op = *op;
    work->engine = engine;
    work->block_raw = block_raw(op);
    work->block_wire = wc_codec_shape((int)op->codec).bytes;
    work->itemsize = wc_dtype_size((int)op->dtype);
    work->reduce = engine->kernels->reduce[op->dtype][op->op];
    work->average = op->op == WC_AVG ? engine->kernels->average[op->dtype] : NULL;
    work->blocks = blocks;
    work->parts_count = parts;
    work->shares_count = shares;
    if (!make_shares(engine, work)) {
        wc_work_free(engine, work);
        errno = EINVAL;
        return NULL;
    }
    make_parts(engine, work);
    work->op.transfers = NULL;
    if (op->transfers_count == 0)
        work->remaining[0] = 1; /* a worker has to say that there is nothing to do */
    unsigned involved = 0;
    for (uint32_t w = 0; w < workers; w++)
        involved += work->remaining[w] > 0;
    atomic_init(&work->unfinished, involved);
    atomic_init(&work->refs, 1 + involved); /* settle, and the commands */
    return work;
}

void wc_work_unref(wc_engine *engine, wc_work *work)
{
    if (atomic_fetch_sub(&work->refs, 1) == 1)
        wc_work_free(engine, work);
}

static void hash_block(wc_engine *engine, wc_work *work, uint64_t block)
{
    uint64_t start = block * WC_DIGEST_BLOCK, left = work->op.bytes[WC_BACK] - start;
    size_t n = left < WC_DIGEST_BLOCK ? (size_t)left : WC_DIGEST_BLOCK;
    work->hashes[block] = engine->kernels->hash64((const uint8_t *)work->op.back + start, n);
    work->hashed[block] = 1;
}

/* Bytes [from, to) of part have become final: hashes the blocks of back that this completes and that lie within the part. */
void wc_work_hash(wc_engine *engine, wc_work *work, const wc_part *part, uint64_t from, uint64_t to)
{
    if (!work->blocks)
        return;
    uint64_t shift = part->back - part->start; /* may wrap around: so do the sums */
    uint64_t bytes = work->op.bytes[WC_BACK];
    uint64_t block = (from + shift) / WC_DIGEST_BLOCK;
    if (block * WC_DIGEST_BLOCK < part->begin + shift)
        block++;
    for (; block < work->blocks; block++) {
        uint64_t end = (block + 1) * WC_DIGEST_BLOCK;
        if ((end < bytes ? end : bytes) > to + shift)
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
        event.saved = atomic_load(&work->saved);
        for (uint32_t w = 0; w < engine->config.workers; w++) {
            event.error_squares += work->squares[2 * w];
            event.norm_squares += work->squares[2 * w + 1];
        }
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
    wc_work_unref(engine, work);
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
    wc_work *work = part->work;
    uint32_t worker = part->worker;
    if (--work->remaining[worker])
        return;
    for (size_t i = 0; i < work->shares_count; i++)
        if (work->shares[i].worker == worker)
            wc_track_leave(&work->shares[i]);
    wc_work_let_go(engine, work, false);
}

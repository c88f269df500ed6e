/* How an op is cut: steps into parts, and a queue of them for each lane group. Both ends of a link come to the same
   cuts, which depend on the op alone. */
#include "shared.h"

#include <string.h>

enum { MOST_STRIPE = 1 << 30 }; /* bytes of elements; a multiple of the digest's block */

/* How many parts a step has. One for each lane; more, so that lanes that are faster can take more, if they are not
   shorter than a digest block, and than WC_COARSE_PART if there are many. */
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

/* A sparse codec's stripe is as long on the wire as others: it has many times their elements. */
static uint32_t op_stripe(const wc_engine *engine, const wc_op *op)
{
    uint64_t stripe = op->stripe ? op->stripe : engine->config.stripe;
    if (op->codec >= WC_CODECS)
        stripe *= 1 + wc_block_raw(op) / wc_codec_shape((int)op->codec).bytes;
    const uint64_t least = wc_block_raw(op) > WC_MIN_STRIPE ? wc_block_raw(op) : WC_MIN_STRIPE;
    return stripe < least ? (uint32_t)least : stripe < MOST_STRIPE ? (uint32_t)stripe : MOST_STRIPE;
}

/* Cuts are at multiples of it: the digest's block, or less where parts are shorter, so that none is empty. */
static uint64_t cut_align(uint64_t length, uint32_t count)
{
    uint64_t align = WC_DIGEST_BLOCK;
    while (align > length / count)
        align /= 2;
    return align;
}

/* Where part `index` of `count` begins: inside the step at absolute multiples of align. */
static uint64_t part_cut(uint64_t offset, uint64_t length, uint32_t count, uint32_t index, uint64_t align)
{
    if (index == 0)
        return offset;
    if (index == count)
        return offset + length;
    uint64_t at = offset + length / count * index + length % count * index / count;
    return at - at % align;
}

/* The sender's choice: long frames cost less, several per part let the next rank begin while the rest is on its way;
   unless parts are many. */
static uint32_t part_segment(const wc_engine *engine, const wc_part *part, bool many)
{
    const wc_work *work = part->work;
    uint64_t wanted = (part->end - part->begin) / (many ? 1 : WC_PART_FRAMES);
    wanted += WC_DIGEST_BLOCK - 1 - (wanted + WC_DIGEST_BLOCK - 1) % WC_DIGEST_BLOCK;
    uint64_t most = engine->config.segment;
    if (part->encoded)
        most = most / work->block_wire * work->block_raw;
    most = most < MOST_STRIPE ? most - most % WC_DIGEST_BLOCK : MOST_STRIPE;
    if (wanted > most)
        wanted = most;
    return wanted < WC_DIGEST_BLOCK ? WC_DIGEST_BLOCK : (uint32_t)wanted;
}

static wc_spot spot_of(const wc_work *work, wc_place place)
{
    uint8_t *scratch = work->scratch ? work->scratch->memory : NULL;
    uint8_t *buffers[WC_BUFFERS] = {(uint8_t *)work->op.input, work->op.result, scratch};
    uint8_t *base = buffers[place.buffer];
    return (wc_spot){.base = base ? base + place.offset : NULL, .encoded = place.encoded};
}

/* The part of this step reads this place: it waits while that is in the input buffer and not filled. */
static void read_front(wc_part *part, const wc_step *step, const wc_place *place)
{
    if (part->work->op.filled && place->buffer == WC_INPUT)
        part->input_at[part->awaited++] = place->encoded ? step->start : place->offset;
}

static void join_unready(wc_part *part)
{
    wc_task *task = part->task;
    *(task->unready ? &task->last_unready->next_unready : &task->unready) = part;
    task->last_unready = part;
    atomic_fetch_add(&part->work->unready, 1);
}

/* Fills in what a part has of its step. */
static void describe_part(wc_part *part, const wc_step *step)
{
    const wc_work *work = part->work;
    part->start = step->start;
    part->number = step->number;
    part->direction = step->direction;
    part->action = step->action;
    part->result = step->result;
    part->measured = step->measured;
    part->noise = step->measured ? 0 : step->left.buffer == WC_INPUT ? 1 : 2;
    if (step->direction != WC_SEND) {
        part->to = spot_of(work, step->to);
        part->result_at = step->to.encoded ? step->start : step->to.offset;
    }
    if (step->direction != WC_RECV || step->action != WC_COPY) {
        part->left = spot_of(work, step->left);
        read_front(part, step, &step->left);
    }
    if (step->direction == WC_LOCAL && (step->action == WC_REDUCE || step->action == WC_FINAL)) {
        part->right = spot_of(work, step->right);
        read_front(part, step, &step->right);
    }
    part->encoded = part->to.encoded || part->left.encoded || part->right.encoded;
}

static void depend(wc_part *part, int slot, wc_part *after)
{
    part->after[slot] = after;
    if (part->direction == WC_RECV)
        return; /* it waits for its bytes, not for what bounds it: see match.c */
    part->next_dependent[slot] = after->dependents;
    after->dependents = part;
}

void wc_cut_count(wc_work *work)
{
    const wc_op *op = &work->op;
    const uint32_t stripe = op_stripe(work->engine, op);
    work->queues_count = (size_t)work->links_count * op->lane_groups;
    for (uint32_t i = 0; i < work->links_count; i++)
        work->links[i].queue = (size_t)i * op->lane_groups;
    for (uint32_t i = 0; i < op->steps_count; i++) {
        const wc_step *step = &op->steps[i];
        work->parts_count += part_count(step->length, op->lanes, stripe);
        wc_op_link *at = step->direction == WC_RECV ? &work->links[work->link_of[i]] : NULL;
        if (at && step->number >= at->numbers) {
            work->numbers_count += step->number + 1u - at->numbers;
            at->numbers = step->number + 1u;
        }
    }
}

/* Fills in the queues. False: two steps from one rank have the same number. */
static bool make_queues(wc_work *work)
{
    const wc_op *op = &work->op;
    uint32_t *numbers = work->numbers;
    for (uint32_t i = 0; i < work->links_count; i++) {
        const wc_op_link *at = &work->links[i];
        for (uint32_t k = 0; k < op->lane_groups; k++)
            work->queues[at->queue + k] = (wc_op_queue){
                .work = work,
                .group = &at->link->groups[k],
                .task = &work->tasks[k % work->engine->config.workers],
                .numbers = numbers,
                .numbers_count = at->numbers,
            };
        numbers += at->numbers;
    }
    for (uint32_t i = 0; i < op->steps_count; i++) {
        const wc_step *step = &op->steps[i];
        if (step->direction != WC_RECV)
            continue;
        const wc_op_queue *queue = &work->queues[work->links[work->link_of[i]].queue];
        uint32_t *slot = &work->numbers[queue->numbers - work->numbers] + step->number;
        if (*slot)
            return false;
        *slot = i + 1;
    }
    return true;
}

static void join_queue(wc_part *part, wc_op_queue *queue, uint32_t count)
{
    uint32_t lanes = part->work->op.lanes;
    part->queue = queue;
    if (part->direction != WC_SEND)
        return;
    queue->unbegun++;
    if (queue->homes < count)
        queue->homes = count < lanes ? count : lanes;
}

/* Fills in the parts of all steps. */
static void make_parts(wc_work *work)
{
    const wc_op *op = &work->op;
    const wc_engine *engine = work->engine;
    size_t next = 0;
    const uint32_t stripe = op_stripe(engine, op);
    /* Part 0 of any call with this seq is of this lane's group: members whose calls differ in size meet there and find
       out. */
    work->first_lane = op->no_turns ? 0 : (uint32_t)(op->seq % op->lanes);
    for (uint32_t i = 0; i < op->steps_count; i++) {
        const wc_step *step = &op->steps[i];
        const wc_op_link *link = step->direction == WC_LOCAL ? NULL : &work->links[work->link_of[i]];
        uint32_t count = part_count(step->length, op->lanes, stripe);
        const uint64_t align = cut_align(step->length, count);
        work->cuts[i] = (wc_cuts){.first = next, .count = count, .start = step->start, .length = step->length};
        for (uint32_t p = 0; p < count; p++) {
            wc_part *part = &work->parts[next++];
            part->work = work;
            part->home = (work->first_lane + p) % op->lanes;
            part->task = &work->tasks[part->home % op->lane_groups % engine->config.workers];
            part->begin = part->cursor = part->framed = part_cut(step->start, step->length, count, p, align);
            part->end = part_cut(step->start, step->length, count, p + 1, align);
            describe_part(part, step);
            part->segment = part_segment(engine, part, count > op->lanes);
            if (part->awaited)
                join_unready(part);
            for (int a = 0; a < WC_AFTER; a++)
                if (step->after[a] >= 0)
                    depend(part, a, &work->parts[work->cuts[step->after[a]].first + p]);
            if (link)
                join_queue(part, &work->queues[link->queue + part->home % op->lane_groups], count);
            part->task->remaining++;
        }
    }
}

bool wc_cut(wc_work *work)
{
    if (!make_queues(work))
        return false;
    make_parts(work);
    return true;
}

/* Parts: their places in memory, how far they may go, and which ones go on when one has moved. */
#include "shared.h"

size_t wc_grain(const wc_part *part)
{
    return part->encoded ? (size_t)part->work->block_wire : part->work->itemsize;
}

uint64_t wc_wire_bytes(const wc_part *part, uint64_t from, uint64_t to)
{
    if (!part->encoded)
        return to - from;
    const wc_work *work = part->work;
    return (to - from + work->block_raw - 1) / work->block_raw * work->block_wire;
}

uint8_t *wc_spot_at(const wc_part *part, wc_spot spot, uint64_t cursor)
{
    uint64_t into = cursor - part->start;
    if (spot.encoded)
        into = into / part->work->block_raw * part->work->block_wire;
    return spot.base + into;
}

/* Parts of encoded steps end at blocks of the codec. */
static uint64_t whole_blocks(const wc_part *part, uint64_t bound)
{
    if (part->encoded && bound < part->end)
        bound -= (bound - part->start) % part->work->block_raw;
    return bound;
}

/* How far it has ever been. */
static uint64_t passed(const wc_part *part)
{
    return part->direction == WC_SEND ? part->framed : part->cursor;
}

uint64_t wc_part_bound(const wc_part *part)
{
    uint64_t bound = part->end;
    for (int i = 0; i < WC_AFTER; i++)
        if (part->after[i] && passed(part->after[i]) < bound)
            bound = passed(part->after[i]);
    return whole_blocks(part, bound);
}

/* How far [from, to) of the input buffer is there. */
static uint64_t filled_until(const wc_op *op, uint64_t from, uint64_t to)
{
    for (uint64_t at = from; at < to; at += WC_DIGEST_BLOCK - at % WC_DIGEST_BLOCK)
        if (!__atomic_load_n(&op->filled[at / WC_DIGEST_BLOCK], __ATOMIC_ACQUIRE))
            return at;
    return to;
}

uint64_t wc_part_filled(const wc_part *part, uint64_t to)
{
    for (uint32_t i = 0; i < part->awaited; i++) {
        uint64_t shift = part->input_at[i] - part->start; /* may wrap around: so do the sums */
        to = filled_until(&part->work->op, part->cursor + shift, to + shift) - shift;
    }
    return to;
}

uint64_t wc_part_ready(const wc_part *part)
{
    uint64_t bound = wc_part_bound(part);
    return part->awaited ? whole_blocks(part, wc_part_filled(part, bound)) : bound;
}

bool wc_part_frame(const wc_part *part, uint64_t *end)
{
    uint64_t boundary = (part->cursor / part->segment + 1) * part->segment;
    *end = boundary < part->end ? boundary : part->end;
    return wc_part_ready(part) >= *end;
}

bool wc_part_waits(const wc_part *part)
{
    for (int i = 0; i < WC_AFTER; i++)
        if (part->after[i])
            return true;
    return false;
}

bool wc_part_sends_result(const wc_part *part)
{
    const wc_part *made = part->after[0];
    return part->direction == WC_SEND && made && made->result && made->to.base == part->left.base;
}

static void send_on(wc_part *part)
{
    uint64_t end;
    bool begun = part->lane;
    if (part->node.listed != begun) /* it is offered already, or was begun and all of its frames have been made */
        return;
    if (!part->queue->group || !wc_part_frame(part, &end))
        return;
    if (!begun) {
        wc_list_append(&part->queue->offered, &part->node);
        part->queue->offered_count++;
    }
    wc_ready_mark(&part->task->worker->ready, WC_READY_GROUP, &part->queue->group->mark);
}

void wc_part_go(wc_part *part)
{
    wc_ready *ready = &part->task->worker->ready;
    if (part->direction == WC_SEND) {
        send_on(part);
    } else if (part->direction == WC_LOCAL && !part->node.listed && part->cursor < wc_part_ready(part)) {
        if (wc_part_waits(part)) {
            wc_ready_mark(ready, WC_READY_PART, &part->node);
        } else {
            wc_list_append(&part->task->turns, &part->node);
            wc_ready_mark(ready, WC_READY_TURN, &part->task->mark);
        }
    }
}

void wc_part_moved(wc_part *part)
{
    for (wc_part *next, *waiting = part->dependents; waiting; waiting = next) {
        next = waiting->next_dependent[waiting->after[0] == part ? 0 : 1];
        wc_part_go(waiting);
    }
}

void wc_part_finish(wc_part *part)
{
    wc_task *task = part->task;
    if (--task->remaining == 0)
        wc_ready_mark(&task->worker->ready, WC_READY_END, &task->mark);
}

void wc_part_final(wc_part *part, uint64_t from)
{
    uint64_t shift = part->result_at - part->start; /* may wrap around: so do the sums */
    wc_hashes_extend(&part->work->hashes, part->begin + shift, from + shift, part->cursor + shift);
}

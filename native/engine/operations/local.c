/* Local steps: parts that combine bytes which are here, slice by slice, as far as the parts that they come after have
   come. */
#include "shared.h"

#include <string.h>

static void measure(wc_part *part, const uint8_t *source, const uint8_t *coded, size_t n)
{
    wc_work *work = part->work;
    uint8_t *decoded = part->task->worker->decoded;
    wc_decode(work->engine->kernels, work->op.codec, work->op.dtype, decoded, coded, n);
    work->engine->kernels->error[work->op.dtype](source, decoded, n, &part->task->squares[0], &part->task->squares[1]);
}

static void encode(wc_part *part, uint8_t *to, const uint8_t *left, size_t n)
{
    wc_work *work = part->work;
    const wc_noise noise = {.key = work->op.noise[part->noise], .first = part->cursor / work->itemsize};
    wc_encode(work->engine->kernels, work->op.codec, work->op.dtype, to, left, n, work->op.stochastic ? &noise : NULL);
    if (part->measured)
        measure(part, left, to, n);
}

static void reduce(wc_part *part, uint8_t *to, const uint8_t *left, const uint8_t *right, size_t n)
{
    const wc_work *work = part->work;
    const wc_kernels *kernels = work->engine->kernels;
    bool divides = part->action == WC_FINAL && work->average;
    if (part->right.encoded) {
        bool sums = work->op.op == WC_SUM || work->op.op == WC_AVG;
        if (sums && !divides && work->op.codec < WC_CODECS) {
            kernels->accumulate[work->op.codec][work->op.dtype](to, left, right, n);
            return;
        }
        uint8_t *decoded = part->task->worker->decoded;
        wc_decode(kernels, work->op.codec, work->op.dtype, decoded, right, n);
        right = decoded;
    }
    if (divides)
        work->average(to, left, right, n, work->op.divisor);
    else
        work->reduce(to, left, right, n);
}

static void run_slice(wc_part *part, uint64_t bytes)
{
    wc_work *work = part->work;
    size_t n = (size_t)(bytes / work->itemsize);
    uint8_t *to = wc_spot_at(part, part->to, part->cursor);
    const uint8_t *left = wc_spot_at(part, part->left, part->cursor);
    switch (part->action) {
    case WC_COPY:
        memcpy(to, left, (size_t)wc_wire_bytes(part, part->cursor, part->cursor + bytes));
        break;
    case WC_ENCODE:
        encode(part, to, left, n);
        break;
    case WC_DECODE:
        wc_decode(work->engine->kernels, work->op.codec, work->op.dtype, to, left, n);
        break;
    default:
        reduce(part, to, left, wc_spot_at(part, part->right, part->cursor), n);
    }
}

void wc_local_go(wc_part *part)
{
    uint64_t bound = wc_part_ready(part), slice = WC_DIGEST_BLOCK - part->cursor % WC_DIGEST_BLOCK;
    if (slice > bound - part->cursor)
        slice = bound - part->cursor;
    if (slice) { /* else whoever fills the input buffer has taken back what it said */
        run_slice(part, slice);
        part->cursor += slice;
        if (part->result)
            wc_part_final(part, part->cursor - slice);
        wc_part_moved(part); /* while the slice is hot */
    }
    if (part->node.listed && part->cursor == bound)
        wc_list_remove(&part->task->turns, &part->node); /* at its end, or readiness.c says when there is more */
    if (part->cursor == part->end)
        wc_part_finish(part);
    else
        wc_part_go(part);
}

void wc_local_turn(wc_task *task)
{
    wc_local_go((wc_part *)task->turns.head);
    if (task->turns.head) /* the next turn is after those of all other ops */
        wc_ready_mark(&task->worker->ready, WC_READY_TURN, &task->mark);
}

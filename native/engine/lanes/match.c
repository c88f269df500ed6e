/* Matching: which part a frame that arrives is of, or why it waits, is dropped or breaks the protocol.

   A part to receive may have bounds, too: those who use what is where its bytes will go. It does not wait for them. The
   bytes of a correct sender are made of those that the bounds have passed on, so a frame that goes beyond is no correct
   sender's. It would be written over, and a digest would vouch for what is not in memory. A frame that is reduced into
   the input's bytes waits for them in the socket while the input is being filled. */
#include "shared.h"

#include <errno.h>

#define REFUSE(lane, ...) (wc_lane_down(lane, EPROTO, "protocol: " __VA_ARGS__), WC_DOWN)

/* The part of the queue's op that this offset of a step is in, or NULL. */
static wc_part *part_at(const wc_op_queue *queue, uint16_t number, uint64_t offset)
{
    const wc_work *work = queue->work;
    uint32_t index = number < queue->numbers_count ? queue->numbers[number] : 0;
    if (!index)
        return NULL;
    const wc_cuts *step = &work->cuts[index - 1];
    if (offset < step->start || offset - step->start > step->length)
        return NULL;
    uint64_t guess = (offset - step->start) / (step->length / step->count + 1);
    wc_part *part = &work->parts[step->first + guess], *last = &work->parts[step->first + step->count - 1];
    while (part < last && offset >= part->end)
        part++;
    return part->queue == queue ? part : NULL;
}

/* The frame is the one of which the beginning came over a connection that is lost. */
static bool resumes(const wc_partial *partial, const wc_frame *frame)
{
    return partial && frame->taken == partial->have && frame->offset == partial->header.offset &&
           frame->length == partial->header.length && frame->checksum == partial->header.checksum;
}

/* The frame belongs to the queue's op; is it the next one of a part? */
static wc_verdict match_part(wc_lane *lane, wc_op_queue *queue, const wc_frame *frame)
{
    const unsigned long long seq = frame->seq, offset = frame->offset;
    wc_part *part = part_at(queue, frame->number, frame->offset);
    if (!part || part->arrived)
        return REFUSE(lane, "step %u of seq %llu at offset %llu, %s", frame->number, seq, offset,
                      part ? "which is here" : "expected none");
    if (part->lane && part->lane != lane)
        return REFUSE(lane, "offset %llu in seq %llu, which lane %u has begun", offset, seq, part->lane->index);
    if (part->partial || frame->taken) {
        if (!resumes(part->partial, frame))
            return REFUSE(lane, "offset %llu in seq %llu, %llu bytes of it taken, expected %u", offset, seq,
                          (unsigned long long)frame->taken, part->partial ? part->partial->have : 0);
        lane->rx_part = part;
        part->lane = lane;
        return WC_ACCEPT;
    }
    if (offset != part->cursor)
        return REFUSE(lane, "offset %llu in seq %llu, expected %llu", offset, seq, (unsigned long long)part->cursor);
    const unsigned long long most = wc_wire_bytes(part, part->cursor, part->end);
    if (frame->length > most || frame->length % wc_grain(part) || (frame->length == 0 && part->begin != part->end))
        return REFUSE(lane, "frame of %u bytes in seq %llu, expected 1 to %llu", frame->length, seq, most);
    if (frame->length > wc_wire_bytes(part, part->cursor, wc_part_bound(part)))
        return REFUSE(lane, "step %u of seq %llu at offset %llu, before what it comes after", frame->number, seq,
                      offset);
    if (part->awaited && wc_part_filled(part, part->cursor + frame->length) < part->cursor + frame->length)
        return WC_PARK;
    lane->rx_part = part;
    part->lane = lane;
    return WC_ACCEPT;
}

static void report_mismatch(wc_lane *lane, wc_work *work, const wc_frame *frame)
{
    if (atomic_exchange(&work->mismatched, true))
        return;
    wc_event event = {
        .type = WC_EV_MISMATCH,
        .link = lane->link->id,
        .lane = lane->index,
        .op = work->op.id,
        .value = frame->seq,
        .extra = frame->fingerprint,
    };
    wc_events_push(&lane->worker->engine->events, &event);
}

/* What to do with the frame whose header has arrived. */
wc_verdict wc_match(wc_lane *lane)
{
    const wc_frame *frame = &lane->rx_frame;
    uint32_t limit = lane->worker->engine->config.segment;
    uint64_t check = wc_header_check(lane->worker->engine->kernels, frame);
    if (check != frame->check) {
        wc_count(&lane->counters.checksum_failures, 1);
        wc_lane_down(lane, EBADMSG, "checksum: %016llx over a header that says %016llx",
                     (unsigned long long)check, (unsigned long long)frame->check);
        return WC_DOWN;
    }
    if (frame->version != WC_FRAME_VERSION || frame->reserved)
        return REFUSE(lane, "version %u.%u of frames, expected %u", frame->version, frame->reserved, WC_FRAME_VERSION);
    if (frame->length > limit)
        return REFUSE(lane, "frame of %u bytes, expected at most %u", frame->length, limit);
    if (frame->taken && frame->taken >= frame->length)
        return REFUSE(lane, "frame of %u bytes of which %llu were taken", frame->length, (unsigned long long)frame->taken);
    if (frame->length == 0 && (frame->number || frame->offset))
        return REFUSE(lane, "an empty frame of step %u at offset %llu, expected of step 0 only", frame->number,
                      (unsigned long long)frame->offset);
    const wc_lane_group *group = lane->group;
    if (frame->epoch != group->epoch)
        return frame->epoch < group->epoch ? WC_DRAIN : WC_PARK;
    wc_op_queue *queue = (wc_op_queue *)group->queues.head;
    while (queue && queue->work->op.seq != frame->seq)
        queue = (wc_op_queue *)queue->node.next;
    if (!queue || queue->task->remaining == 0)
        return frame->seq < group->next_seq ? WC_DRAIN : WC_PARK; /* done or cancelled, or not posted yet */
    if (frame->fingerprint != queue->work->op.fingerprint) {
        report_mismatch(lane, queue->work, frame);
        return WC_PARK;
    }
    return match_part(lane, queue, frame);
}

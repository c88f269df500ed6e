/* The receiving half of a lane: payload is checksummed, reduced and hashed as it arrives. */
#include "shared.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The next n bytes enter the payload's checksum, if it has one. */
static void check(wc_lane *lane, const void *src, size_t n)
{
    if (lane->checksums)
        wc_checksum_add(&lane->rx_sum, lane->worker->engine->kernels, src, n);
}

/* Payload that is final where it is read enters the checksum later, in whole pieces: blocks of the result are hashed
   once. Of other payload nothing may wait: steps that come after write over it. */
static bool checked_later(const wc_part *part)
{
    return part->action == WC_COPY && part->result && !part->encoded;
}

/* Bytes that are read and not in the checksum yet. */
static uint32_t unchecked(const wc_lane *lane)
{
    return lane->checksums ? lane->rx_sum.left - lane->rx_left : 0;
}

/* Final bytes up to `end` are here, and hashed as blocks of the result as far as these are whole. */
static void check_final(wc_lane *lane, const wc_part *part, const uint8_t *end)
{
    const wc_kernels *kernels = lane->worker->engine->kernels;
    for (uint32_t n, left; (left = unchecked(lane)) && (n = wc_checksum_piece(&lane->rx_sum)) <= left;) {
        const uint64_t *hash = wc_hashes_of(&part->work->hashes, end - left, n);
        wc_checksum_skip(&lane->rx_sum, kernels, hash ? *hash : kernels->hash64(end - left, n));
    }
}

/* n bytes of whole elements at src follow part's cursor: reduce, hash, slice by slice while they are hot. */
static void consume(wc_part *part, const uint8_t *src, size_t n)
{
    wc_work *work = part->work;
    while (n) {
        size_t slice = WC_DIGEST_BLOCK - part->cursor % WC_DIGEST_BLOCK;
        if (slice > n)
            slice = n;
        if (part->action != WC_COPY) {
            uint8_t *to = wc_spot_at(part, part->to, part->cursor);
            const uint8_t *left = wc_spot_at(part, part->left, part->cursor);
            if (part->action == WC_FINAL && work->average)
                work->average(to, left, src, slice / work->itemsize, work->op.divisor);
            else
                work->reduce(to, left, src, slice / work->itemsize);
        }
        part->cursor += slice;
        if (part->result)
            wc_part_final(part, part->cursor - slice);
        src += slice;
        n -= slice;
    }
}

/* n bytes of whole blocks of the codec follow part's cursor; they stay as they are. What nobody encodes costs the lane
   at the frame's end, where it is known that no bit has flipped. */
static void consume_encoded(wc_part *part, const uint8_t *src, size_t n)
{
    uint64_t raw = n / part->work->block_wire * part->work->block_raw, from = part->cursor;
    part->cursor = raw < part->end - from ? from + raw : part->end;
    part->malformed |= !wc_codec_valid(part->work->op.codec, src, (size_t)(part->cursor - from) / part->work->itemsize);
    if (part->result)
        wc_part_final(part, from);
}

/* While it is traced an op knows when its first and last bytes came. */
static void stamp(wc_work *work)
{
    unsigned long long at = wc_now(CLOCK_MONOTONIC), none = 0;
    atomic_compare_exchange_strong_explicit(&work->first, &none, at, memory_order_relaxed, memory_order_relaxed);
    atomic_store_explicit(&work->last, at, memory_order_relaxed);
}

/* n payload bytes have been read to where payload_target() said. */
static void take_payload(wc_lane *lane, size_t n)
{
    wc_part *part = lane->rx_part;
    uint8_t *buffer = lane->worker->read_buffer;
    lane->rx_left -= (uint32_t)n;
    if (!part) {
        check(lane, buffer, n);
        return;
    }
    if (atomic_load_explicit(&lane->worker->engine->tracing, memory_order_relaxed))
        stamp(part->work);
    bool in_place = part->action == WC_COPY;
    size_t have = lane->rx_tail_bytes + n;
    size_t tail = have % wc_grain(part);
    const uint8_t *src = in_place ? wc_spot_at(part, part->to, part->cursor) : buffer;
    if (!checked_later(part))
        check(lane, src + lane->rx_tail_bytes, n);
    if (!in_place && tail)
        memcpy(lane->rx_tail, src + have - tail, tail);
    lane->rx_tail_bytes = (uint32_t)tail;
    if (have == tail)
        return;
    if (part->encoded)
        consume_encoded(part, src, have - tail);
    else
        consume(part, src, have - tail);
    if (checked_later(part))
        check_final(lane, part, src + have);
    wc_part_moved(part);
}

/* Where the next payload bytes go, and how many at most. */
static uint8_t *payload_target(wc_lane *lane, size_t *room)
{
    wc_part *part = lane->rx_part;
    uint8_t *buffer = lane->worker->read_buffer;
    *room = lane->rx_left < WC_READ_BYTES ? lane->rx_left : WC_READ_BYTES;
    if (!part)
        return buffer;
    if (part->action == WC_COPY)
        return wc_spot_at(part, part->to, part->cursor) + lane->rx_tail_bytes;
    memcpy(buffer, lane->rx_tail, lane->rx_tail_bytes);
    return buffer + lane->rx_tail_bytes;
}

/* The frame's last byte is here. */
static void end_frame(wc_lane *lane)
{
    wc_part *part = lane->rx_part;
    lane->rx_body = false;
    lane->rx_part = NULL;
    lane->rx_begin += wc_frame_bytes(&lane->rx_frame);
    wc_count(part ? &lane->counters.frames_received : &lane->counters.frames_dropped, 1);
    const bool partly = !part && lane->rx_frame.taken; /* drained, and its beginning came over another connection */
    if (lane->checksums && !partly && lane->rx_sum.sum != lane->rx_frame.checksum) {
        wc_count(&lane->counters.checksum_failures, 1);
        wc_lane_down(lane, EBADMSG, "checksum: %016llx over seq %llu offset %llu, the frame says %016llx",
                     (unsigned long long)lane->rx_sum.sum, (unsigned long long)lane->rx_frame.seq,
                     (unsigned long long)lane->rx_frame.offset, (unsigned long long)lane->rx_frame.checksum);
        return;
    }
    if (part && part->malformed) {
        wc_lane_down(lane, EPROTO, "protocol: step %u of seq %llu: a block of the codec that nobody encodes, in the frame at offset %llu",
                     lane->rx_frame.number, (unsigned long long)lane->rx_frame.seq, (unsigned long long)lane->rx_frame.offset);
        return;
    }
    if (!part || part->cursor != part->end)
        return;
    part->arrived = true;
    wc_part_finish(part);
}

/* The frame goes on where it was when the connection before was lost. */
static void resume(wc_lane *lane, wc_part *part)
{
    wc_partial *partial = part->partial;
    part->partial = NULL;
    lane->rx_sum = partial->sum;
    lane->rx_tail_bytes = partial->tail_bytes;
    memcpy(lane->rx_tail, partial->tail, sizeof lane->rx_tail);
    free(partial);
}

/* A whole header is in rx_buffer. False: the lane reads no further for now. */
static bool begin_frame(wc_lane *lane)
{
    memcpy(&lane->rx_frame, lane->rx_buffer, sizeof lane->rx_frame);
    lane->rx_part = NULL;
    wc_verdict found = wc_match(lane);
    if (found == WC_PARK)
        lane->rx_parked = true;
    if (found == WC_PARK || found == WC_DOWN)
        return false;
    lane->rx_have = 0;
    lane->rx_body = true;
    lane->rx_left = wc_frame_rest(&lane->rx_frame);
    lane->rx_tail_bytes = 0;
    wc_checksum_begin(&lane->rx_sum, lane->rx_frame.offset, lane->rx_left);
    if (lane->rx_part && lane->rx_part->partial)
        resume(lane, lane->rx_part);
    if (lane->rx_left == 0)
        end_frame(lane);
    return lane->stream.fd >= 0;
}

/* One read: payload of the current frame, and the header after it. Returns the bytes read, 0 if the lane must wait or
   is down. */
static size_t read_once(wc_lane *lane)
{
    struct iovec iov[2];
    int pieces = 0;
    size_t room = 0;
    if (lane->rx_body) {
        iov[0].iov_base = payload_target(lane, &room);
        iov[0].iov_len = room;
        pieces = 1;
    }
    if (!lane->rx_body || room == lane->rx_left) {
        iov[pieces].iov_base = lane->rx_buffer + lane->rx_have;
        iov[pieces++].iov_len = sizeof lane->rx_buffer - lane->rx_have;
    }
    ssize_t n = wc_stream_receive(&lane->stream, iov, pieces, &lane->rx_more);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
    if (n < 0) {
        int error = errno;
        wc_lane_lost(lane, error, "receive: %s", wc_stream_reason(&lane->stream, error));
        return 0;
    }
    if (n == 0) {
        wc_lane_lost(lane, 0, "closed by the other end%s", lane->rx_body || lane->rx_have ? " within a frame" : "");
        return 0;
    }
    wc_count(&lane->counters.bytes_received, (uint64_t)n);
    size_t payload = (size_t)n < room ? (size_t)n : room;
    if (lane->rx_body) {
        if (payload)
            take_payload(lane, payload);
        if (lane->stream.fd >= 0 && lane->rx_left == 0)
            end_frame(lane);
    }
    if (lane->stream.fd >= 0)
        lane->rx_have += (uint32_t)((size_t)n - payload);
    return (size_t)n;
}

/* False: there is nothing more for now. */
static bool step(wc_lane *lane)
{
    if (!lane->rx_body && lane->rx_have == sizeof lane->rx_buffer)
        return begin_frame(lane);
    bool turn_is_over = lane->rx_budget == 0;
    if (!lane->rx_more || (turn_is_over && !wc_stream_holds(&lane->stream)))
        return false; /* level-triggered: epoll tells again if there is more */
    wc_stream_rest(&lane->stream, turn_is_over); /* of what is held it does not know */
    size_t n = read_once(lane);
    size_t cost = n < WC_FRAME_COST ? WC_FRAME_COST : n; /* so an end that sends only headers holds up no other lane */
    lane->rx_budget -= cost < lane->rx_budget ? cost : lane->rx_budget;
    return n > 0;
}

void wc_lane_receive(wc_lane *lane)
{
    if (lane->stream.fd < 0 || !step(lane))
        wc_list_remove(&lane->worker->ready.of[WC_READY_LANE], &lane->mark);
    wc_lane_interest(lane);
}

/* The frame that is arriving is no longer wanted if it is work's (NULL: any op's): the rest of it is drained. */
void wc_lane_forget_rx(wc_lane *lane, const wc_work *work)
{
    const wc_part *part = lane->rx_part;
    if (!part || (work && part->work != work))
        return;
    if (checked_later(part)) {
        const uint8_t *end = wc_spot_at(part, part->to, part->cursor) + lane->rx_tail_bytes;
        check(lane, end - unchecked(lane), unchecked(lane));
    }
    lane->rx_tail_bytes = 0;
    lane->rx_part = NULL;
}

/* The sending half of a lane: frames of the parts that it has begun and of further ones, as far as the bytes that bound
   them are there. */
#include "shared.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

/* Checksum of the frame [cursor, end) of part. Blocks of the result that a step before has made are hashed already. */
static uint64_t payload_checksum(const wc_part *part, uint64_t end)
{
    const wc_work *work = part->work;
    const wc_kernels *kernels = work->engine->kernels;
    const uint8_t *from = wc_spot_at(part, part->left, part->cursor);
    wc_checksum sum;
    wc_checksum_begin(&sum, part->cursor, (uint32_t)wc_wire_bytes(part, part->cursor, end));
    bool final = wc_part_sends_result(part);
    while (sum.left) {
        uint32_t n = wc_checksum_piece(&sum);
        const uint64_t *hash = final ? wc_hashes_of(&work->hashes, from, n) : NULL;
        wc_checksum_skip(&sum, kernels, hash ? *hash : kernels->hash64(from, n));
        from += n;
    }
    return sum.sum;
}

static void make_frame(wc_lane *lane, wc_part *part, uint64_t end)
{
    const wc_kernels *kernels = lane->worker->engine->kernels;
    const wc_op *op = &part->work->op;
    wc_tx_frame *frame = &lane->tx[lane->tx_first + lane->tx_count++];
    uint64_t payload = wc_wire_bytes(part, part->cursor, end);
    frame->payload = payload ? wc_spot_at(part, part->left, part->cursor) + part->taken : NULL;
    frame->part = part;
    frame->saved = end - part->cursor - payload;
    frame->header = (wc_frame){
        .version = WC_FRAME_VERSION,
        .number = part->number,
        .epoch = op->epoch,
        .seq = op->seq,
        .fingerprint = op->fingerprint,
        .offset = part->cursor,
        .length = (uint32_t)payload,
        .taken = part->taken,
    };
    if (lane->checksums && payload) /* what was taken may have been written over since */
        frame->header.checksum = part->taken ? part->checksum : payload_checksum(part, end);
    part->taken = 0;
    frame->header.check = wc_header_check(kernels, &frame->header);
    part->cursor = end;
    if (part->framed < end)
        part->framed = end;
    frame->last = end == part->end;
    if (frame->last)
        wc_list_remove(&lane->begun, &part->node);
    wc_lost_log(lane, frame);
}

/* A part whose next frame can leave: one that the lane has begun, or a further one. */
static wc_part *next_part(wc_lane *lane, uint32_t *begun, uint32_t *quota)
{
    uint64_t end;
    for (wc_node *at = lane->begun.head; at; at = at->next)
        if (wc_part_frame((wc_part *)at, &end))
            return (wc_part *)at;
    if (*quota && *begun == *quota) {
        wc_ready_mark(&lane->worker->ready, WC_READY_GROUP, &lane->group->mark); /* others, or itself, may go on */
        return NULL;
    }
    wc_part *part = wc_pull(lane, quota);
    *begun += part != NULL;
    return part;
}

static void fill(wc_lane *lane, uint32_t *begun, uint32_t *quota)
{
    size_t bytes = 0, batch = lane->unsent && lane->unsent < WC_TX_BATCH ? lane->unsent : WC_TX_BATCH;
    lane->tx_first = 0;
    while (lane->tx_count < WC_TX_FRAMES && bytes < batch) {
        wc_part *part = next_part(lane, begun, quota);
        uint64_t end;
        if (!part || !wc_part_frame(part, &end))
            return;
        make_frame(lane, part, end);
        bytes += wc_frame_bytes(&lane->tx[lane->tx_count - 1].header);
    }
}

/* The kernel has taken n more bytes. */
static void advance(wc_lane *lane, size_t n)
{
    wc_count(&lane->counters.bytes_sent, n);
    lane->tx_sent += n;
    while (lane->tx_count) {
        wc_tx_frame *frame = &lane->tx[lane->tx_first];
        size_t size = wc_frame_bytes(&frame->header);
        if (lane->tx_sent < size)
            return;
        lane->tx_sent -= size;
        lane->tx_first++;
        lane->tx_count--;
        wc_count(&lane->counters.frames_sent, 1);
        if (!frame->part) {
            free(lane->tx_private);
            lane->tx_private = NULL;
            continue;
        }
        wc_work *work = frame->part->work;
        atomic_fetch_add_explicit(wc_stream_in_memory(&lane->stream) ? &work->in_memory : &work->bytes_sent, size,
                                  memory_order_relaxed);
        if (frame->saved)
            atomic_fetch_add_explicit(&work->saved, frame->saved, memory_order_relaxed);
        if (frame->last && !frame->part->gone) {
            frame->part->gone = true;
            wc_part_finish(frame->part);
        }
    }
}

/* What the socket is to take next: most bytes, or all of the frames if they are fewer. */
static int gather(const wc_lane *lane, struct iovec *iov, size_t most, size_t *total)
{
    int count = 0;
    size_t skip = lane->tx_sent;
    *total = 0;
    for (uint32_t i = 0; i < lane->tx_count && *total < most; i++) {
        const wc_tx_frame *frame = &lane->tx[lane->tx_first + i];
        struct iovec pieces[2] = {
            {(void *)&frame->header, sizeof frame->header},
            {(void *)frame->payload, wc_frame_rest(&frame->header)},
        };
        for (int k = 0; k < 2; k++) {
            size_t cut = skip < pieces[k].iov_len ? skip : pieces[k].iov_len;
            skip -= cut;
            if (pieces[k].iov_len == cut || *total == most)
                continue;
            size_t left = pieces[k].iov_len - cut;
            iov[count].iov_base = (uint8_t *)pieces[k].iov_base + cut;
            iov[count].iov_len = left < most - *total ? left : most - *total;
            *total += iov[count++].iov_len;
        }
    }
    return count;
}

static bool limited(const wc_lane *lane)
{
    return lane->worker->engine->uplink.rate && !wc_stream_in_memory(&lane->stream);
}

/* How many bytes its socket may take now. 0: it waits for the uplink, after the worker's lanes that do. */
static size_t allowance(wc_lane *lane)
{
    if (!limited(lane))
        return SIZE_MAX;
    if (lane->thirst.listed)
        return 0;
    uint32_t bytes = wc_uplink_take(&lane->worker->engine->uplink);
    if (!bytes)
        wc_list_append(&lane->worker->thirsty, &lane->thirst);
    return bytes;
}

void wc_lane_send(wc_lane *lane)
{
    uint32_t begun = 0, quota = 0;
    if (lane->round != lane->worker->round) {
        lane->round = lane->worker->round;
        lane->round_bytes = WC_ROUND_BYTES;
    }
    while (lane->stream.fd >= 0 && !lane->blocked && !lane->owed) {
        bool unsent = wc_stream_unsent(&lane->stream);
        if (lane->tx_count == 0 && !unsent)
            fill(lane, &begun, &quota);
        if (lane->tx_count == 0 && !unsent)
            break;
        size_t total, most = lane->tx_count ? allowance(lane) : 0;
        if (most == 0 && !unsent)
            break;
        struct iovec iov[2 * WC_TX_FRAMES];
        int pieces = gather(lane, iov, most, &total);
        ssize_t n = wc_stream_send(&lane->stream, iov, pieces);
        if (most && limited(lane))
            wc_uplink_return(&lane->worker->engine->uplink, (uint32_t)(n > 0 ? most - (size_t)n : most));
        if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
            int error = errno;
            wc_lane_lost(lane, error, "send: %s", wc_stream_reason(&lane->stream, error));
            return;
        }
        if (n > 0) {
            advance(lane, (size_t)n);
            wc_window_look(lane);
        }
        if (n < (ssize_t)total || (size_t)n >= lane->round_bytes || wc_stream_unsent(&lane->stream))
            lane->blocked = true; /* epoll says when there is room, or when it is this lane's turn again */
        else
            lane->round_bytes -= (size_t)n;
    }
    wc_lane_interest(lane);
}

/* Parts and frames of work (NULL: of every op) leave the lane. A half-sent frame is completed later from a private
   copy. */
void wc_lane_forget_tx(wc_lane *lane, const wc_work *work)
{
    wc_lost_forget(lane, work);
    for (wc_part *part = (wc_part *)lane->begun.head, *next; part; part = next) {
        next = (wc_part *)part->node.next;
        if (!work || part->work == work)
            wc_list_remove(&lane->begun, &part->node);
    }
    wc_tx_frame *frames = &lane->tx[lane->tx_first];
    uint32_t kept = 0;
    uint64_t dropped = 0;
    for (uint32_t i = 0; i < lane->tx_count; i++) {
        wc_tx_frame *frame = &frames[i];
        if (frame->part && (!work || frame->part->work == work)) {
            if (i > 0 || lane->tx_sent == 0) {
                dropped += wc_frame_bytes(&frame->header);
                continue;
            }
            uint32_t length = wc_frame_rest(&frame->header);
            if (length && !(lane->tx_private = malloc(length))) {
                wc_lane_down(lane, ENOMEM, "no memory to complete a frame of an aborted operation");
                return;
            }
            if (length)
                memcpy(lane->tx_private, frame->payload, length);
            frame->payload = lane->tx_private;
            frame->part = NULL;
        }
        if (dropped && frame->part)
            wc_lost_move(lane, frame, dropped);
        frames[kept++] = *frame;
    }
    lane->tx_count = kept;
    lane->tx_end -= dropped;
}

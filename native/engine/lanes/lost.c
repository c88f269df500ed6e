/* What follows when a lane's connection is lost: its bytes, and no more.

   A connection is a stream, so all that got lost with it is told by one number: how many of its bytes the other end has
   taken. Whoever finds it broken closes it, reads no more of it, and says that number over the lane for notes, which no
   data can hold up; whoever hears so closes its end, too, and says its own. A sender has logged where on the connection
   each frame begins. So it knows which were taken, and gives the parts of all others back: any lane of the group may go on
   with them. The first of these frames may have been taken in part. Its part keeps what came (wc_partial), since bytes
   that were added cannot be added again, and only the rest of the frame follows, under the checksum of the whole one.

   Exactly once: a byte is taken from a connection before its end has said how far it came, or never; and it is sent again
   only if it lies beyond that. Until the other end has said so the lane sends nothing, whatever connection it has (owed).

   An op that is finished here may have frames that nobody has taken. So it is kept until it is committed (wc_release):
   then all have finished it, and so have all that they need. What it sends again is still there: bytes are written over
   only by what the other end has made of them, so after it has taken them.

   Numbers: each connection of a lane has a higher one than those before, and both ends know it by the same. An end may
   hear that one is lost which it never had. Then it says that nothing came, and takes it no more.

   The lane for notes may get lost, too, with what was said over it. So an end that is owed a word asks for it, and again
   when that lane is back. The other end can always answer: an owed lane sends nothing, so the connection that is asked for
   is the last lost one of which bytes were taken (took_on), or one after it, of which none were.

   What cannot be had again: frames through memory, whose other end has ended then; bytes whose checksum was wrong, or that
   broke the protocol; any, if there was no memory to log or keep them. */
#include "shared.h"

#include <stdlib.h>
#include <string.h>

void wc_lost_log(wc_lane *lane, const wc_tx_frame *frame)
{
    const uint64_t at = lane->tx_end;
    lane->tx_end += wc_frame_bytes(&frame->header);
    if (lane->stream.pipe || lane->log_lacks)
        return;
    if (lane->log_count == lane->log_room) {
        const uint32_t room = lane->log_room ? 2 * lane->log_room : 16;
        wc_logged *log = realloc(lane->log, room * sizeof *log);
        lane->log_lacks = !log;
        if (!log)
            return;
        lane->log = log;
        lane->log_room = room;
    }
    const wc_frame *header = &frame->header;
    lane->log[lane->log_count++] = (wc_logged){
        at, frame->part, header->offset, header->checksum, header->length, (uint32_t)header->taken};
}

void wc_lost_forget(wc_lane *lane, const wc_work *work)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < lane->log_count && work; i++)
        if (lane->log[i].part->work != work)
            lane->log[kept++] = lane->log[i];
    lane->log_count = kept;
}

void wc_lost_move(wc_lane *lane, const wc_tx_frame *frame, uint64_t by)
{
    for (uint32_t i = lane->log_count; i--;) /* it is one of the last */
        if (lane->log[i].part == frame->part && lane->log[i].offset == frame->header.offset) {
            lane->log[i].at -= by;
            return;
        }
}

/* What came of the frame that comes in. False: no memory. */
static bool keep_partial(wc_lane *lane)
{
    wc_part *part = lane->rx_part;
    const uint32_t have = lane->rx_frame.length - lane->rx_left;
    if (!lane->rx_body || !part || !have)
        return true;
    wc_partial *partial = part->partial = malloc(sizeof *partial);
    if (!partial)
        return false;
    *partial = (wc_partial){
        .header = lane->rx_frame, .have = have, .sum = lane->rx_sum, .tail_bytes = lane->rx_tail_bytes};
    memcpy(partial->tail, lane->rx_tail, sizeof partial->tail);
    return true;
}

bool wc_lost_begin(wc_lane *lane)
{
    if (lane->stream.pipe || lane->log_lacks || !keep_partial(lane))
        return false;
    for (wc_node *at = lane->group->queues.head; at; at = at->next) {
        const wc_op_queue *queue = (wc_op_queue *)at;
        for (size_t i = 0; i < queue->work->parts_count; i++) {
            wc_part *part = &queue->work->parts[i];
            if (part->queue == queue && part->lane == lane && part->direction == WC_RECV)
                part->lane = NULL;
        }
    }
    if (lane->owed || (!lane->tx_end && !lane->begun.head)) /* it has sent nothing over this one: none of it got lost */
        return true;
    lane->owed = lane->connection;
    lane->tx_end += lane->tx_sent; /* from here on: what the socket took */
    for (uint32_t i = 0; i < lane->tx_count; i++)
        lane->tx_end -= wc_frame_bytes(&lane->tx[lane->tx_first + i].header);
    return true;
}

void wc_lost_say(wc_lane *lane, uint64_t connection)
{
    if (lane->said < connection)
        lane->said = connection;
    const wc_lost lost = {lane->index, connection, connection == lane->took_on ? lane->took : 0, lane->owed == connection};
    wc_notes_say_lost(&lane->link->notes, &lost);
}

void wc_lost_say_again(wc_lane *lane)
{
    if (lane->owed)
        wc_lost_say(lane, lane->owed);
    if (lane->said > lane->owed && lane->stream.fd < 0)
        wc_lost_say(lane, lane->said);
}

/* Any lane of the group may go on with the part, from its cursor on. One that is released has all that it needs, whatever
   the other end says: its memory may be somebody else's. */
static void give_back(wc_lane *lane, wc_part *part)
{
    wc_work *work = part->work;
    if (part->node.listed)
        wc_list_remove(&lane->begun, &part->node);
    part->lane = NULL;
    pthread_mutex_lock(&work->engine->mutex);
    const bool kept = !work->released;
    atomic_store(&work->resent, kept || atomic_load(&work->resent));
    pthread_mutex_unlock(&work->engine->mutex);
    if (!kept)
        return;
    part->queue->unbegun++;
    wc_part_go(part);
}

/* The other end has taken so many bytes of the connection that is owed. */
static void resend(wc_lane *lane, uint64_t taken)
{
    for (uint32_t i = 0; i < lane->log_count; i++) {
        const wc_logged *frame = &lane->log[i];
        const uint64_t payload = frame->at + sizeof(wc_frame);
        if (frame->part->lane != lane || payload + frame->length - frame->taken <= taken)
            continue; /* its part was given back already, or it was taken */
        frame->part->cursor = frame->offset;
        frame->part->taken = frame->taken + (taken > payload ? (uint32_t)(taken - payload) : 0);
        frame->part->checksum = frame->checksum;
        give_back(lane, frame->part);
    }
    while (lane->begun.head)
        give_back(lane, (wc_part *)lane->begun.head);
    lane->log_count = 0;
    lane->tx_end = 0;
    lane->log_lacks = false;
}

void wc_lost_heard(wc_lane *lane, const wc_lost *lost)
{
    if (!lane->owed || lane->owed != lost->connection)
        return;
    if (lost->taken > lane->tx_end) {
        wc_notes_refuse(&lane->link->notes, lane->index, lost->taken, lane->tx_end);
        return;
    }
    resend(lane, lost->taken);
    lane->owed = 0;
    wc_ready_mark(&lane->worker->ready, WC_READY_GROUP, &lane->group->mark);
}

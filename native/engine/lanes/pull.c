/* Pulling: how lanes share what is to be sent, and why nothing waits for ever.

   A lane group is lanes of one link that one worker serves. Nobody hands a lane its work: lanes pull. Whichever has
   room takes the next part whose first frame could leave, so a slow lane takes few and no estimate of speed is needed.
   Each op under way has a queue there: the parts that no lane has begun, offered as soon as the bytes of their first
   frame are here. Of the oldest op a lane takes a part, at its first turn no more than an even number (fair_quota),
   since the first lane to be asked would take all. What a lane has begun it carries to its end: frames of one part come
   in order on one connection, and the other end needs to put nothing in order. Ops without turns are the exception:
   their parts are for the lane that they are meant for, and for no other.

   Why ascending seq. The other end takes no frame of an op that it has not posted: the frame waits in its socket, and
   so does all that follows on that lane. Both ends post in the same order. So a lane never goes back to an earlier op
   than it has begun (last_seq), and the frame at its head is always of the earliest op that it has anything of.

   Why it does not jump ahead, either. As long as parts that are meant for a lane are not begun, or one that it has
   begun is not done, it does not go on to a later op (meant_for), even if it has room and nothing is offered yet.
   Otherwise all lanes could be filled with a later op, which the other end posts only when the earlier one has come
   along: nobody could carry that one any more. So for the earliest unfinished op there is always a lane that can carry
   each of its parts; by induction over seqs every op that both ends have posted ends. Within an op there is no such
   order to keep: its steps wait for earlier steps only.

   Threads. A lane group, its lanes, its queues and their parts belong to one worker, and nothing here takes a lock.
   Part p of every step is on the same group, so what bounds a part is on its worker as well. A lane that leaves
   something for another to take marks the group, and all of its lanes are asked again. */
#include "shared.h"

void wc_queue_leave(wc_op_queue *queue)
{
    wc_lane_group *group = queue->group;
    if (!group)
        return;
    while (wc_list_take(&queue->offered))
        continue;
    wc_list_remove(&group->queues, &queue->node);
    queue->group = NULL;
}

static bool has_room(const wc_lane *lane)
{
    return lane->stream.fd >= 0 && !lane->blocked && !lane->owed && lane->tx_count == 0;
}

/* The op's unbegun parts are meant for a range of lanes, this one among them. */
static bool meant_for(const wc_op_queue *queue, const wc_lane *lane)
{
    uint32_t lanes = lane->link->lanes_count;
    return (lane->index + lanes - queue->work->first_lane) % lanes < queue->homes;
}

static wc_part *offered_part(const wc_op_queue *queue, const wc_lane *lane)
{
    wc_part *part = (wc_part *)queue->offered.head;
    while (part && queue->work->op.no_turns && part->home != lane->index)
        part = (wc_part *)part->node.next;
    return part;
}

/* How many parts of the queue are the lane's, if all that have room take as many. */
static uint32_t fair_quota(const wc_op_queue *queue, const wc_lane *lane)
{
    const wc_link *link = lane->link;
    if (queue->offered_count == 1 || queue->work->op.no_turns)
        return UINT32_MAX;
    uint32_t open = 1;
    for (uint32_t i = queue->group->index; i < link->lanes_count; i += link->groups_count)
        open += i != lane->index && has_room(&link->lanes[i]);
    return open == 1 ? UINT32_MAX : (queue->offered_count + open - 1) / open;
}

wc_part *wc_pull(wc_lane *lane, uint32_t *quota)
{
    wc_lane_group *group = lane->group;
    for (wc_op_queue *queue = (wc_op_queue *)group->queues.head; queue; queue = (wc_op_queue *)queue->node.next) {
        uint64_t seq = queue->work->op.seq;
        if (queue->unbegun == 0 || lane->last_seq > seq)
            continue;
        const wc_part *begun = (wc_part *)lane->begun.head;
        if (begun && begun->work->op.seq != seq)
            return NULL;
        wc_part *part = offered_part(queue, lane);
        if (!part && meant_for(queue, lane))
            return NULL;
        if (!part)
            continue;
        if (*quota == 0)
            *quota = fair_quota(queue, lane);
        wc_list_remove(&queue->offered, &part->node);
        queue->offered_count--;
        if (--queue->unbegun == 0)
            wc_ready_mark(&lane->worker->ready, WC_READY_GROUP, &group->mark); /* its lanes may go on to later ops */
        lane->last_seq = seq;
        part->lane = lane;
        wc_list_append(&lane->begun, &part->node);
        return part;
    }
    return NULL;
}

/* Lane groups: lanes of one link that one worker serves, and that share what is to be sent. pull.c says how. */
#include "shared.h"

/* A lane of the group. They are counted from 0, and from 0 again after the last. */
static wc_lane *lane_of(const wc_lane_group *group, uint32_t place)
{
    return &group->link->lanes[place % group->lanes_count * group->link->groups_count + group->index];
}

void wc_group_send(wc_lane_group *group)
{
    const wc_node *at = group->queues.head;
    while (at && !((wc_op_queue *)at)->offered.head)
        at = at->next;
    uint32_t first = at ? ((wc_part *)((wc_op_queue *)at)->offered.head)->home / group->link->groups_count : 0;
    for (uint32_t i = 0; i < group->lanes_count; i++)
        wc_lane_send(lane_of(group, first + i));
}

void wc_group_look(wc_lane_group *group)
{
    for (uint32_t i = 0; i < group->lanes_count; i++)
        wc_lane_resume(lane_of(group, i));
}

void wc_group_post(wc_op_queue *queue)
{
    wc_lane_group *group = queue->group;
    uint64_t seq = queue->work->op.seq;
    if (seq >= group->next_seq)
        group->next_seq = seq + 1;
    wc_list_append(&group->queues, &queue->node);
    wc_group_look(group);
}

/* All that the op has there, or with NULL all of every op. */
static void forget(wc_lane_group *group, wc_work *work)
{
    for (uint32_t i = 0; i < group->lanes_count; i++) {
        wc_lane_forget_tx(lane_of(group, i), work);
        wc_lane_forget_rx(lane_of(group, i), work);
    }
    for (wc_node *at = group->queues.head, *next; at; at = next) {
        next = at->next;
        if (!work || ((wc_op_queue *)at)->work == work)
            wc_queue_leave((wc_op_queue *)at);
    }
    wc_ready_mark(&lane_of(group, 0)->worker->ready, WC_READY_GROUP, &group->mark);
    wc_group_look(group);
}

void wc_group_leave(wc_lane_group *group, wc_op_queue *queue)
{
    wc_work *work = queue->work;
    if (queue->task->remaining || atomic_load(&work->resent)) {
        forget(group, work);
        return;
    }
    for (uint32_t i = 0; i < group->lanes_count; i++) /* it has finished: no lane has more of it */
        wc_lost_forget(lane_of(group, i), work);
    wc_queue_leave(queue);
}

void wc_group_set_epoch(wc_lane_group *group, uint64_t epoch)
{
    if (epoch <= group->epoch)
        return;
    group->epoch = epoch;
    group->next_seq = 0;
    for (uint32_t i = 0; i < group->lanes_count; i++)
        lane_of(group, i)->last_seq = 0;
    forget(group, NULL);
}

void wc_group_set_pace(wc_lane_group *group, uint64_t rate)
{
    for (uint32_t i = 0; i < group->lanes_count; i++)
        wc_lane_set_pace(lane_of(group, i), rate);
}

void wc_group_close(wc_lane_group *group)
{
    forget(group, NULL);
    for (uint32_t i = 0; i < group->lanes_count; i++)
        wc_lane_close(lane_of(group, i));
}

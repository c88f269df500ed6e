/* Lane groups, and what each op has to send there: see the beginnings of lane_group.c and pull.c. */
#ifndef WC_LANE_GROUP_H
#define WC_LANE_GROUP_H

#include "common.h"
#include "list.h"
#include "operations/part.h"

/* Lanes of a link that one worker serves, and that share what is to be sent. */
struct wc_lane_group {
    wc_node mark;          /* WC_READY_GROUP */
    wc_link *link;
    uint32_t index, lanes_count;
    uint64_t epoch;
    uint64_t next_seq;     /* 1 + the last seq posted here in this epoch; 0: none */
    wc_list queues;        /* of ops that are under way, in the order of their posts */
    uint64_t renewed_at;   /* ms: when the last of its lanes was, see window.c */
};

void wc_group_send(wc_lane_group *group); /* lanes that have room send what there is, in turns */
void wc_group_look(wc_lane_group *group); /* frames that wait are looked at again */
void wc_group_post(wc_op_queue *queue);
void wc_group_leave(wc_lane_group *group, wc_op_queue *queue); /* all that its op has there */
void wc_group_set_epoch(wc_lane_group *group, uint64_t epoch);
void wc_group_set_pace(wc_lane_group *group, uint64_t rate);
void wc_group_close(wc_lane_group *group); /* and its lanes, for good, silently */

/* What one op has to do on one lane group. */
struct wc_op_queue {
    wc_node node;            /* in the group's list */
    wc_work *work;
    wc_task *task;           /* of the group's worker */
    wc_lane_group *group;    /* NULL: the op is over, or given up */
    wc_list offered;         /* parts that no lane has begun, and whose first frame could leave */
    uint32_t offered_count;
    uint32_t unbegun;        /* parts to send that no lane has begun, offered or not */
    /* unbegun parts are meant for that many lanes of the link at most, from the op's first lane on */
    uint32_t homes;
    uint32_t numbers_count;
    const uint32_t *numbers; /* number of a step to receive -> 1 + its index, or 0 */
};

void wc_queue_leave(wc_op_queue *queue); /* the op is over, or given up; no lane has any part of it */
/* A part that the lane begins, or NULL. quota: 0, or how many it may begin */
wc_part *wc_pull(wc_lane *lane, uint32_t *quota);

#endif

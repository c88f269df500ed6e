/* Lane groups: see the beginning of lane_group.c. */
#ifndef WC_LANE_GROUP_H
#define WC_LANE_GROUP_H

#include "common.h"
#include "list.h"

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

#endif

/* What a lane group has to send of each op, and which of it a lane takes: see the beginning of pull.c. */
#ifndef WC_PULL_H
#define WC_PULL_H

#include "common.h"
#include "operations/part.h"

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

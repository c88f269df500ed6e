/* Links: all lanes to one other member, and the lane groups that they are of. */
#ifndef WC_LINK_H
#define WC_LINK_H

#include "common.h"
#include "lane.h"
#include "notes.h"
#include "lane_group.h"

struct wc_link {
    uint64_t id, epoch;     /* epoch: as the caller knows it; guarded by engine->mutex */
    uint64_t post;          /* number of the last post that used it; guarded by engine->mutex */
    uint32_t post_index;    /* there: among the op's links */
    uint64_t next_seq;      /* the least that may be posted in this epoch; guarded by engine->mutex */
    wc_command *closing;    /* made beforehand, so that closing cannot fail */
    wc_link *next;
    atomic_uint refs;       /* workers that have not processed the close, and posts that are being made */
    uint32_t lanes_count, groups_count;
    wc_lane_group *groups;
    wc_notes notes;
    wc_lane lanes[];
};

/* NULL: no memory */
wc_link *wc_link_new(wc_engine *engine, uint64_t id, uint32_t lanes, uint32_t lane_groups, uint64_t epoch);
void wc_link_free(wc_link *link);
void wc_link_unref(wc_link *link);
wc_link *wc_link_find(const wc_engine *engine, uint64_t id); /* engine->mutex held */
wc_link *wc_link_hold(wc_engine *engine, uint64_t id);       /* the same, kept until wc_link_unref */

#endif

/* Tracks: see the beginning of track.c. */
#ifndef WC_TRACK_H
#define WC_TRACK_H

#include "common.h"
#include "list.h"

/* Lanes of a link that one worker serves, and that share what is to be sent. */
struct wc_track {
    wc_node mark;          /* WC_READY_TRACK */
    wc_link *link;
    uint32_t index, lanes_count;
    uint64_t epoch;
    uint64_t next_seq;     /* 1 + the last seq posted here in this epoch; 0: none */
    wc_list shares;        /* of ops that are under way, in the order of their posts */
    uint64_t renewed_at;   /* ms: when the last of its lanes was, see window.c */
};

void wc_track_send(wc_track *track); /* lanes that have room send what there is, in turns */
void wc_track_look(wc_track *track); /* frames that wait are looked at again */
void wc_track_post(wc_share *share);
void wc_track_forget(wc_track *track, wc_work *work); /* all that the op has there, or with NULL all of every op */
void wc_track_set_epoch(wc_track *track, uint64_t epoch);
void wc_track_set_pace(wc_track *track, uint64_t rate);
void wc_track_close(wc_track *track); /* and its lanes, for good, silently */

#endif

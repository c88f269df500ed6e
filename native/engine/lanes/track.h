/* Tracks: see the beginning of track.c. */
#ifndef WC_TRACK_H
#define WC_TRACK_H

#include "common.h"

/* Lanes of a link that one worker serves, and that share what is to be sent. */
struct wc_track {
    wc_link *link;
    uint32_t index;
    uint64_t epoch;
    uint64_t next_seq;     /* 1 + the last seq posted here in this epoch; 0: none */
    wc_share *head, *tail; /* of ops that are under way, in the order of their posts */
    wc_track *next_left;   /* in a list of tracks that an op which is being cancelled has left */
    bool more;             /* a lane has left something that others, or itself, could take at once */
    uint64_t renewed_at;   /* ms: when the last of its lanes was, see window.c */
};

void wc_track_post(wc_track *track, wc_share *share);
void wc_share_offer(wc_part *part); /* its first frame could leave: any lane may take it */
/* Some of its bytes are here: if they make a frame and some lane has room, it leaves */
void wc_track_send_part(wc_part *part);
/* A part that the lane begins, or NULL. quota: 0, or how many it may begin */
wc_part *wc_track_take(wc_lane *lane, uint32_t *quota);
void wc_track_leave(wc_share *share); /* the op is over, or given up; no lane has any part of it */
/* Lanes that have room send what there is, in turns from lane `first` of the link on */
void wc_track_send(wc_track *track, uint32_t first);
void wc_track_go(wc_track *track); /* after commands: whatever can move, moves */
void wc_track_forget(wc_track *track, wc_work *work); /* all that the op has there, or with NULL all of every op */
void wc_track_set_epoch(wc_track *track, uint64_t epoch);

#endif

/* Tracks: lanes of one link that one worker serves, and that share what is to be sent. pull.c says how. */
#include "shared.h"

/* A lane of the track. They are counted from 0, and from 0 again after the last. */
static wc_lane *lane_of(const wc_track *track, uint32_t place)
{
    return &track->link->lanes[place % track->lanes_count * track->link->tracks_count + track->index];
}

void wc_track_send(wc_track *track)
{
    const wc_node *at = track->shares.head;
    while (at && !((wc_share *)at)->offered.head)
        at = at->next;
    uint32_t first = at ? ((wc_part *)((wc_share *)at)->offered.head)->home / track->link->tracks_count : 0;
    for (uint32_t i = 0; i < track->lanes_count; i++)
        wc_lane_send(lane_of(track, first + i));
}

void wc_track_look(wc_track *track)
{
    for (uint32_t i = 0; i < track->lanes_count; i++)
        wc_lane_resume(lane_of(track, i));
}

void wc_track_post(wc_share *share)
{
    wc_track *track = share->track;
    uint64_t seq = share->work->op.seq;
    if (seq >= track->next_seq)
        track->next_seq = seq + 1;
    wc_list_append(&track->shares, &share->node);
    wc_track_look(track);
}

void wc_track_forget(wc_track *track, wc_work *work)
{
    for (uint32_t i = 0; i < track->lanes_count; i++) {
        wc_lane_forget_tx(lane_of(track, i), work);
        wc_lane_forget_rx(lane_of(track, i), work);
    }
    for (wc_node *at = track->shares.head, *next; at; at = next) {
        next = at->next;
        if (!work || ((wc_share *)at)->work == work)
            wc_share_leave((wc_share *)at);
    }
    wc_ready_mark(&lane_of(track, 0)->worker->ready, WC_READY_TRACK, &track->mark);
    wc_track_look(track);
}

void wc_track_set_epoch(wc_track *track, uint64_t epoch)
{
    if (epoch <= track->epoch)
        return;
    track->epoch = epoch;
    track->next_seq = 0;
    for (uint32_t i = 0; i < track->lanes_count; i++)
        lane_of(track, i)->last_seq = 0;
    wc_track_forget(track, NULL);
}

void wc_track_set_pace(wc_track *track, uint64_t rate)
{
    for (uint32_t i = 0; i < track->lanes_count; i++)
        wc_lane_set_pace(lane_of(track, i), rate);
}

void wc_track_close(wc_track *track)
{
    wc_track_forget(track, NULL);
    for (uint32_t i = 0; i < track->lanes_count; i++)
        wc_lane_close(lane_of(track, i));
}

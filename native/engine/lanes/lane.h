/* Lanes: one socket each at a time, the frames that are on their way out, and the one that is coming in. Its worker alone
   touches a lane. */
#ifndef WC_LANE_H
#define WC_LANE_H

#include "checksum.h"
#include "common.h"
#include "list.h"
#include "operations/part.h"
#include "streams/stream.h"

typedef struct {
    wc_frame header;
    const uint8_t *payload;
    wc_part *part;  /* NULL: voided, completed from the lane's private copy */
    uint64_t saved; /* raw bytes that it stands for, less its payload */
    bool last;      /* of its part */
} wc_tx_frame;

/* Bytes of its payload that a frame has there. */
static inline uint32_t wc_frame_rest(const wc_frame *frame)
{
    return frame->length - (uint32_t)frame->taken;
}

/* Bytes that it takes there. */
static inline uint64_t wc_frame_bytes(const wc_frame *frame)
{
    return sizeof *frame + wc_frame_rest(frame);
}

/* A frame that was given to the connection, and where it begins there: see lost.c. */
typedef struct {
    uint64_t at;
    wc_part *part;
    uint64_t offset, checksum;
    uint32_t length, taken; /* as in the frame */
} wc_logged;

typedef struct {
    atomic_ullong bytes_sent, bytes_received, frames_sent, frames_received, frames_dropped, checksum_failures;
    atomic_bool parked, attached;
} wc_lane_counters;

struct wc_lane {
    wc_node mark;       /* WC_READY_LANE */
    wc_link *link;
    wc_lane_group *group;
    wc_worker *worker;
    uint32_t index;
    uint64_t given;     /* number of the newest connection that was handed over; guarded by engine->mutex */
    wc_stream stream;
    uint64_t connection; /* its number, or that of the last one */
    uint64_t said;      /* the highest that is lost as far as the other end was told: this one takes none up to there */
    uint64_t took_on, took; /* the last lost one of which bytes were taken, and how many */
    /* One that is lost, perhaps before the present one, of which the other end has yet to say how far it came: until then
       nothing leaves, and log and tx_end are of that one. 0: none */
    uint64_t owed;
    wc_logged *log;     /* what was sent over it */
    uint32_t log_count, log_room;
    bool log_lacks;     /* there was no memory for it */
    bool checksums;     /* of payloads, both ways */
    uint32_t armed;     /* epoll interest; 0: epoll does not know it yet */
    uint64_t pace;      /* bytes per second; 0: no limit */
    uint32_t unsent;    /* bytes that the socket takes beyond its window, as it is set there; 0: without limit */
    uint64_t last_seq;  /* of the newest op that it has begun a part of in this epoch */
    bool blocked;       /* the socket's send buffer is full, or it is others' turn */
    wc_node thirst;     /* it waits for the uplink's next bytes */
    uint64_t round;     /* of the worker, in which it may still send this much: */
    size_t round_bytes;
    wc_list begun;      /* parts whose next frame only this lane may send */

    wc_tx_frame tx[WC_TX_FRAMES];
    uint32_t tx_first, tx_count;
    size_t tx_sent;      /* bytes of frame tx_first, header included */
    uint64_t tx_end;     /* bytes that the connection has had when the last frame of tx is through; once lost: has had */
    uint8_t *tx_private; /* payload of a voided, half-sent frame */

    uint8_t rx_buffer[sizeof(wc_frame)];
    uint64_t rx_begin; /* bytes of the connection before the frame that comes in */
    uint32_t rx_have;  /* header bytes */
    bool rx_body;      /* rx_frame is accepted (or drained), rx_left payload bytes follow */
    bool rx_parked;
    bool rx_more;          /* there may be more at once, and epoll need not say so */
    size_t rx_budget;      /* bytes that it may still read before other lanes have their turn */
    wc_frame rx_frame;
    uint32_t rx_left;
    wc_checksum rx_sum; /* lags behind final payload, by less than a piece */
    wc_part *rx_part;   /* NULL: drained */
    uint8_t rx_tail[8]; /* of a reduction: bytes of an element that has not arrived whole */
    uint32_t rx_tail_bytes;

    wc_lane_counters counters;
    pthread_mutex_t info_mutex; /* guards the snapshot: the worker writes, callers read */
    uint8_t info[WC_TCP_INFO_BYTES];
    uint32_t info_bytes;
    uint64_t info_at; /* ms */
    bool bbr;            /* its congestion control, which was begun at: */
    uint64_t renewed_at; /* ms */
};

/* Lane.c */
void wc_lane_init(wc_lane *lane, wc_link *link, wc_worker *worker, uint32_t index);
void wc_lane_destroy(wc_lane *lane);
void wc_lane_attach_stream(wc_lane *lane, uint64_t connection, wc_stream stream, bool checksums);
void wc_lane_set_pace(wc_lane *lane, uint64_t rate);
void wc_lane_close(wc_lane *lane); /* for good, silently */
void wc_lane_interest(wc_lane *lane);
void wc_lane_serve(wc_lane *lane, uint32_t events); /* epoll tells of these */
/* The link is of no use any more */
void wc_lane_down(wc_lane *lane, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* The connection is lost, and no more than that where it can be helped: see lost.c */
void wc_lane_lost(wc_lane *lane, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
void wc_lane_resume(wc_lane *lane); /* the frame that waits, if one does, is looked at again */

void wc_lane_hear(wc_lane *lane, const wc_lost *lost); /* from the other end */

/* Lane_send.c */
void wc_lane_send(wc_lane *lane); /* what there is, as far as it has room */
void wc_lane_forget_tx(wc_lane *lane, const wc_work *work); /* all parts of work, or with NULL all parts */

/* Lost.c */
void wc_lost_log(wc_lane *lane, const wc_tx_frame *frame); /* that is on its way */
void wc_lost_forget(wc_lane *lane, const wc_work *work);   /* it will not be sent again; NULL: nothing will */
void wc_lost_move(wc_lane *lane, const wc_tx_frame *frame, uint64_t by); /* it begins earlier: some before it never leave */
bool wc_lost_begin(wc_lane *lane); /* before the socket goes. False: what is lost with it cannot be had again */
void wc_lost_say(wc_lane *lane, uint64_t connection); /* once it is closed */
void wc_lost_say_again(wc_lane *lane); /* the lane for notes had got lost, too */
void wc_lost_heard(wc_lane *lane, const wc_lost *lost);

/* Window.c */
void wc_window_begin(wc_lane *lane); /* of a new socket */
void wc_window_look(wc_lane *lane);  /* while it sends: the kernel's view, at most every WC_TCP_INFO_MS */

/* Lane_receive.c */
void wc_lane_receive(wc_lane *lane); /* one header or one read; it stays marked until it cannot go on */
void wc_lane_forget_rx(wc_lane *lane, const wc_work *work);

/* Over all of a header but the word itself */
static inline uint64_t wc_header_check(const wc_kernels *kernels, const wc_frame *header)
{
    return kernels->hash64(&header->version, sizeof *header - offsetof(wc_frame, version));
}

/* Match.c: what to do with the frame whose header has arrived. */
typedef enum { WC_ACCEPT, WC_DRAIN, WC_PARK, WC_DOWN } wc_verdict; /* ACCEPT: it is rx_part's. DOWN: the lane is */
wc_verdict wc_match(wc_lane *lane);

#endif

/* What the engine's own files share: engine, worker, link, track, lane, op, share, part. Nothing here is for callers. */
#ifndef WC_ENGINE_INTERNAL_H
#define WC_ENGINE_INTERNAL_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine.h"
#include "kernels.h"

_Static_assert(sizeof(wc_frame) == 48, "the frame header is 48 bytes on the wire");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "headers and digests are written as the machine stores them");

enum {
    WC_CHECKED_BYTES = 44,        /* of the header, covered by the checksum */
    WC_FLAG_CHECKSUM = 1,         /* wc_frame.flags */
    WC_TX_FRAMES = 8,             /* frames that one sendmsg carries at most */
    WC_TX_BATCH = 128 << 10,      /* no further frame joins a sendmsg that has this many bytes */
    WC_READ_BYTES = 256 << 10,    /* one read; with the source and the result it stays within a core's L2 */
    WC_WAKE_BYTES = 256 << 10,    /* what one lane may read, and send, before the other lanes have their turn */
    WC_LOCAL_BYTES = 256 << 10,   /* what a local step that waits for nothing does before the lanes have their turn */
    WC_IDLE_SCRATCH = 256 << 20,  /* scratch memory kept warm for the next op */
    WC_TCP_INFO_BYTES = 256,
    WC_LEAST_UNSENT = 32 << 10,   /* bytes that a lane may take beyond its window: half of that, within these bounds */
    WC_MOST_UNSENT = 256 << 10,
    WC_TCP_INFO_MS = 100,         /* a busy lane's tcp_info is looked at no more often */
    WC_MAX_SEGMENT = 16 << 20,
    WC_MIN_STRIPE = 4 << 10,      /* a multiple of every codec's block */
    WC_MAX_LANES = 256,
    WC_MAX_WORKERS = 64,
    WC_MAX_TRANSFERS = 1 << 16,
    WC_MAX_PARTS = 1 << 16,       /* of a transfer */
    WC_PART_FRAMES = 2,           /* shorter parts get shorter frames, so that a ring's steps overlap */
    WC_FINE_PARTS = 32,           /* for each lane: so many parts of a transfer may be as short as a digest block */
    WC_COARSE_PART = 256 << 10,   /* and if there are more, they need not be longer than this, bytes */
    WC_BUCKETS = 256,
};

typedef struct wc_part wc_part;
typedef struct wc_work wc_work;
typedef struct wc_lane wc_lane;
typedef struct wc_link wc_link;
typedef struct wc_track wc_track;
typedef struct wc_share wc_share;
typedef struct wc_worker wc_worker;
typedef struct wc_scratch wc_scratch;

/* A place in memory that a part reads or writes, for any range of the part. */
typedef struct {
    uint8_t *base;                /* of the transfer's first element */
    bool encoded;
} wc_spot;

/* What one lane, and so one worker, does of one step. */
struct wc_part {
    wc_part *prev, *next;         /* in a FIFO: its share's ready ones, a lane's begun ones, or the worker's local ones */
    wc_part *after[WC_AFTER];     /* what bounds it, byte by byte */
    wc_part *dependents;          /* parts that it bounds */
    wc_part *next_dependent[WC_AFTER]; /* in the list of after[i] */
    wc_work *work;
    wc_share *share;              /* NULL: of a local step */
    wc_lane *lane;                /* that has begun it, and carries it to its end; NULL: none yet */
    wc_spot to, left, right;
    uint64_t back;                /* where in back `to` is, if this makes a part of the result */
    uint64_t start;               /* of the transfer; blocks of the codec count from there */
    uint64_t begin, end, cursor;  /* bytes of raw elements; cursor: framed (send), or here (recv, local) */
    uint32_t worker;
    uint32_t home;                /* the lane that it is meant for */
    uint32_t segment;             /* send: frames end at absolute multiples of it */
    uint16_t number;
    uint8_t direction, action;
    bool encoded;                 /* bytes on the wire are; of a local part: some operand is */
    bool result, measured;
    bool queued;                  /* in a FIFO */
    bool arrived;                 /* recv: whole */
};

typedef struct {
    wc_part *head, *tail;
} wc_fifo;

/* What one op has to do on one track. */
struct wc_share {
    wc_share *prev, *next;        /* in the track's list */
    wc_work *work;
    wc_track *track;              /* NULL: the op is over, or given up */
    uint32_t worker;
    wc_fifo ready;                /* parts that no lane has begun, and whose first frame could leave */
    uint32_t ready_count;
    uint32_t unbegun;             /* parts to send that no lane has begun, ready or not */
    uint32_t homes;               /* unbegun parts are meant for that many lanes of the link at most, from the op's first lane on */
    uint32_t numbers_count;
    const uint32_t *numbers;      /* number of a transfer to receive -> 1 + its index, or 0 */
};

/* Where a step was cut into parts. */
typedef struct {
    size_t first;                 /* index of its first part */
    uint32_t count;
    uint64_t start, length;
} wc_step;

/* A posted op. Two counts: `unfinished` workers still touch its memory; `refs` keep this struct alive. */
struct wc_work {
    wc_op op;
    wc_work *next;                /* in the engine's table; guarded by engine->mutex */
    uint32_t cancels;             /* guarded by engine->mutex */
    atomic_uint unfinished, refs;
    atomic_bool aborted;          /* a worker let go of parts that were not finished */
    atomic_bool mismatched;       /* reported */
    atomic_ullong bytes_sent, saved;
    size_t itemsize;
    wc_reduce_fn reduce;
    wc_average_fn average;        /* NULL: WC_FINAL is a plain reduction */
    uint64_t block_raw, block_wire; /* bytes of the codec's block: of elements, on the wire */
    wc_engine *engine;
    wc_scratch *scratch;
    double *squares;              /* per worker: sums of the measured encodes' errors, and of what they encoded */
    uint64_t blocks;              /* 0: no digest */
    uint64_t *hashes;
    uint8_t *hashed;              /* per block; the rest straddle chunks and are hashed at the end */
    uint32_t *remaining;          /* per worker: parts not finished; touched by that worker only */
    size_t parts_count;
    wc_part *parts;               /* by transfer, then by part */
    wc_step *steps;               /* by transfer */
    size_t shares_count;
    wc_share *shares;             /* by link, then by track */
    uint32_t *numbers;            /* of all shares */
    uint32_t first_lane;          /* part 0 of each step is meant for it */
};

typedef struct {
    wc_frame header;
    const uint8_t *payload;
    wc_part *part;                /* NULL: voided, completed from the lane's private copy */
    uint64_t saved;               /* raw bytes that it stands for, less its payload */
    bool last;                    /* of its part */
} wc_tx_frame;

typedef struct {
    atomic_ullong bytes_sent, bytes_received, frames_sent, frames_received, frames_dropped, checksum_failures;
    atomic_bool parked, attached;
} wc_lane_counters;

struct wc_lane {
    wc_link *link;
    wc_track *track;
    wc_worker *worker;
    uint32_t index;
    int fd;                       /* -1: not attached */
    uint32_t armed;               /* epoll interest */
    uint32_t attachments;         /* so far; LANE_DOWN says which one it means */
    uint64_t pace;                /* bytes per second; 0: no limit */
    uint32_t unsent;              /* bytes that the socket takes beyond its window, as it is set there; 0: without limit */
    uint64_t last_seq;            /* of the newest op that it has begun a part of in this epoch */
    bool touched;                 /* bytes of this epoch have moved on the present or a former socket */
    bool barred;                  /* such a socket was lost: nothing moves until the epoch changes */
    bool blocked;                 /* the socket's send buffer is full, or it is others' turn */
    uint64_t turn;                /* of the worker, in which it may still send this much: */
    size_t turn_bytes;
    wc_fifo begun;                /* parts whose next frame only this lane may send */

    wc_tx_frame tx[WC_TX_FRAMES];
    uint32_t tx_first, tx_count;
    size_t tx_sent;               /* bytes of frame tx_first, header included */
    uint8_t *tx_private;          /* payload of a voided, half-sent frame */

    uint8_t rx_buffer[sizeof(wc_frame)];
    uint32_t rx_have;             /* header bytes */
    bool rx_body;                 /* rx_frame is accepted (or drained), rx_left payload bytes follow */
    bool rx_parked;
    wc_frame rx_frame;
    uint32_t rx_left, rx_crc;
    wc_part *rx_part;             /* NULL: drained */
    uint8_t rx_tail[8];           /* of a reduction: bytes of an element that has not arrived whole */
    uint32_t rx_tail_bytes;

    wc_lane_counters counters;
    pthread_mutex_t info_mutex;   /* guards the snapshot: the worker writes, callers read */
    uint8_t info[WC_TCP_INFO_BYTES];
    uint32_t info_bytes;
    uint64_t info_at;             /* ms */
};

/* Lanes of a link that one worker serves. They share what is to be sent: a lane that has room takes the next part, so a slow one takes few. */
struct wc_track {
    wc_link *link;
    uint32_t index;
    uint64_t epoch;
    uint64_t next_seq;            /* 1 + the last seq posted here in this epoch; 0: none */
    wc_share *head, *tail;        /* of ops that are under way, in the order of their posts */
    bool more;                    /* a lane has left something that others, or itself, could take at once */
};

struct wc_link {
    uint64_t id, epoch;           /* epoch: as the caller knows it; guarded by engine->mutex */
    uint64_t post;                /* number of the last post that used it; guarded by engine->mutex */
    size_t post_share;            /* there: index of its first share */
    uint32_t post_numbers;        /* there: of transfers to receive */
    wc_link *next;
    atomic_uint refs;             /* workers that have not processed the close */
    uint32_t lanes_count, tracks_count;
    wc_track *tracks;
    wc_lane lanes[];
};

enum { WC_CMD_ATTACH, WC_CMD_EPOCH, WC_CMD_PACE, WC_CMD_CLOSE, WC_CMD_POST, WC_CMD_CANCEL };

typedef struct wc_command wc_command;
struct wc_command {
    wc_command *next;
    int type;
    int fd;
    uint32_t lane;
    uint64_t number;              /* EPOCH: the epoch; PACE: the rate; CANCEL: its number; POST: cancels that must be through before */
    wc_link *link;
    wc_work *work;                /* holds a reference */
};

struct wc_worker {
    wc_engine *engine;
    uint32_t index;
    pthread_t thread;
    bool started;
    int epoll, wake;
    pthread_mutex_t mutex;        /* guards the incoming queue */
    wc_command *in_head, *in_tail;
    wc_command *todo;             /* taken from the queue; the first one may wait for other workers' cancels */
    atomic_ullong cancelled;      /* number of the last cancel processed */
    uint64_t turn;                /* counts its looks at epoll */
    wc_fifo locals;               /* local parts that wait for nothing but their turn */
    uint8_t *scratch;             /* WC_READ_BYTES, and room for a split element */
    uint8_t *decoded;             /* a digest block, for reductions that have no kernel for encoded operands */
};

typedef struct {
    pthread_mutex_t mutex;
    int fd;
    wc_event *ring;
    size_t cap, head, count;
    size_t reserved;              /* events that exist or may still come; cap is never below it */
} wc_events;

/* Memory of one attempt. */
struct wc_scratch {
    wc_scratch *next;
    size_t bytes;
    uint8_t *memory;
};

struct wc_engine {
    wc_config config;
    const wc_kernels *kernels;
    wc_events events;
    pthread_mutex_t mutex;        /* guards the tables and the order of commands. Taken before a worker's or the events' mutex */
    wc_link *links[WC_BUCKETS];
    wc_work *works[WC_BUCKETS];
    uint64_t cancels, posts;      /* numbers of commands; guarded by mutex */
    pthread_mutex_t scratch_mutex;
    wc_scratch *idle_scratch;     /* warm, the newest first; guarded by scratch_mutex */
    size_t idle_scratch_bytes;
    atomic_bool stopping;
    wc_worker *workers;
};

static inline size_t wc_bucket(uint64_t id)
{
    return (size_t)((id * 0x9e3779b97f4a7c15u) >> 56);
}

/* Counters have one writer. */
static inline void wc_count(atomic_ullong *counter, uint64_t n)
{
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n, memory_order_relaxed);
}

/* engine_events.c: emission cannot fail, because room is reserved when its cause is accepted. */
int wc_events_init(wc_events *events);
void wc_events_destroy(wc_events *events);
int wc_events_reserve(wc_events *events, size_t n); /* 0 or -1, ENOMEM */
void wc_events_release(wc_events *events, size_t n);
void wc_events_push(wc_events *events, const wc_event *event); /* uses one reservation */
int wc_events_take(wc_events *events, wc_event *out, int cap);

/* engine_op.c */
wc_work *wc_work_new(wc_engine *engine, const wc_op *op); /* NULL with errno; engine->mutex held */
void wc_work_free(wc_engine *engine, wc_work *work);
void wc_work_unref(wc_engine *engine, wc_work *work);
void wc_work_let_go(wc_engine *engine, wc_work *work, bool aborted); /* by each involved worker, once */
void wc_part_finish(wc_engine *engine, wc_part *part);
wc_part *wc_share_part(wc_share *share, uint16_t number, uint64_t offset); /* to receive; the one that holds this offset, or NULL */
void wc_work_hash(wc_engine *engine, wc_work *work, const wc_part *part, uint64_t from, uint64_t to); /* part->cursor went from..to */

/* engine_local.c */
uint64_t wc_wire_bytes(const wc_part *part, uint64_t from, uint64_t to); /* of these raw bytes of the part */
uint8_t *wc_spot_at(const wc_part *part, wc_spot spot, uint64_t cursor);
uint64_t wc_part_bound(const wc_part *part); /* how far the parts that it comes after let it go */
void wc_part_moved(wc_part *part); /* its cursor has moved: whoever waits for that goes on. The part must not be finished yet */
void wc_local_go(wc_worker *worker, wc_part *part, uint64_t limit); /* runs a local part for at most `limit` bytes */

/* engine_scratch.c */
wc_scratch *wc_scratch_take(wc_engine *engine, size_t bytes); /* NULL with errno */
void wc_scratch_give(wc_engine *engine, wc_scratch *scratch);
void wc_scratch_free_all(wc_engine *engine);

/* engine.c */
wc_link *wc_link_find(const wc_engine *engine, uint64_t id); /* engine->mutex held */
void wc_link_unref(wc_link *link);
void wc_command_drop(wc_engine *engine, wc_command *command); /* frees it and what it holds */

/* worker.c */
int wc_worker_start(wc_worker *worker, wc_engine *engine, uint32_t index);
void wc_worker_push(wc_worker *worker, wc_command *command); /* engine->mutex held; takes the command */
void wc_worker_wake(wc_worker *worker);
void wc_worker_destroy(wc_worker *worker); /* after the thread has ended */

/* track.c */
void wc_fifo_push(wc_fifo *fifo, wc_part *part);
void wc_fifo_remove(wc_fifo *fifo, wc_part *part);
void wc_track_post(wc_track *track, wc_share *share);
void wc_share_ready(wc_part *part); /* its first frame could leave: any lane may take it */
void wc_track_ready(wc_part *part); /* some of its bytes are there: if they make a frame and some lane has room, it leaves */
wc_part *wc_track_take(wc_lane *lane, uint32_t *quota); /* a part that the lane begins, or NULL. quota: 0, or how many it may begin */
void wc_track_leave(wc_share *share); /* the op is over, or given up; no lane has any part of it */
void wc_track_send(wc_track *track, uint32_t first); /* lanes that have room send what there is, in turns from lane `first` of the link on */
void wc_track_go(wc_track *track); /* after commands: whatever can move, moves */
void wc_track_forget(wc_track *track, wc_work *work); /* all that the op has there, or with NULL all of every op */
void wc_track_set_epoch(wc_track *track, uint64_t epoch);

/* lane.c */
void wc_lane_init(wc_lane *lane, wc_link *link, wc_worker *worker, uint32_t index);
void wc_lane_destroy(wc_lane *lane);
void wc_lane_set_fd(wc_lane *lane, int fd);
void wc_lane_set_pace(wc_lane *lane, uint64_t rate);
void wc_lane_close(wc_lane *lane); /* for good, silently */
void wc_lane_forget(wc_lane *lane, const wc_work *work); /* all parts of work, or with NULL all parts */
void wc_lane_interest(wc_lane *lane);
void wc_lane_ready(wc_lane *lane, uint32_t events);
void wc_lane_down(wc_lane *lane, int error, const char *format, ...) __attribute__((format(printf, 3, 4)));
void wc_lane_resume(wc_lane *lane); /* looks again at the frame that waits, if one does */

/* lane_send.c */
void wc_lane_send(wc_lane *lane); /* may set its track's `more` */
bool wc_frame_ready(const wc_part *part); /* whether all bytes of its next frame are there */
void wc_lane_forget_tx(wc_lane *lane, const wc_work *work);

/* lane_receive.c */
void wc_lane_receive(wc_lane *lane);
void wc_lane_forget_rx(wc_lane *lane, const wc_work *work);

#endif

/* A posted op: its parts, what of them each lane group has to carry, and who still works on it. */
#ifndef WC_OP_H
#define WC_OP_H

#include "common.h"
#include "hashes.h"
#include "owner.h"
#include "part.h"

/* What one worker does of an op. Its worker alone touches it. */
struct wc_task {
    wc_node mark;        /* WC_READY_END or WC_READY_TURN */
    wc_work *work;
    wc_worker *worker;
    uint32_t remaining;  /* parts not finished */
    wc_list turns;       /* local parts that wait for nothing but their turn */
    /* parts that read the input, by step; those whose bytes are all there have left */
    wc_part *unready, *last_unready;
    wc_task *next_unready; /* in the worker's list */
    double squares[2];   /* sums of the measured encodes' errors, and of what they encoded */
};

/* A link that an op uses. */
typedef struct {
    wc_link *link;    /* kept alive while the op is being posted */
    size_t queue;     /* index of its first queue */
    uint32_t numbers; /* of steps to receive */
} wc_op_link;

/* A link that an op's vote goes over. */
typedef struct {
    uint64_t id;
    wc_link *link; /* while it is told */
} wc_hearer;

/* Where a step was cut into parts. */
typedef struct {
    size_t first; /* index of its first part */
    uint32_t count;
    uint64_t start, length;
} wc_cuts;

/* One attempt of an operation. Two counts: `unfinished` workers still touch its memory; `refs` keep this struct
   alive. */
struct wc_work {
    wc_op op;
    wc_work *next;                  /* in the engine's table; guarded by engine->mutex */
    wc_command *cancelling;         /* made beforehand, so that a cancel cannot fail; NULL: sent. By engine->mutex */
    atomic_uint unfinished, refs;
    atomic_bool aborted;            /* a worker let go of parts that were not finished */
    atomic_bool mismatched;         /* told to the caller */
    atomic_bool resent;             /* some of it was given back to be sent again; becomes so under engine->mutex */
    bool settled, released;         /* finished here; committed, or of no use. Guarded by engine->mutex */
    atomic_ullong bytes_sent, in_memory, saved; /* bytes_sent: over sockets, in_memory: through pipes */
    atomic_ullong first, last;      /* see wc_event */
    size_t itemsize;
    wc_reduce_fn reduce;
    wc_average_fn average;          /* NULL: WC_FINAL is a plain reduction */
    uint64_t block_raw, block_wire; /* bytes of the codec's block: of elements, on the wire */
    wc_engine *engine;
    wc_scratch *scratch;
    wc_hashes hashes;               /* of the result */
    wc_task *tasks;                 /* per worker */
    atomic_uint unready;            /* parts for which not all of the input has been seen to be there */
    size_t parts_count;
    wc_part *parts;                 /* by step, then by part */
    wc_cuts *cuts;                  /* by step */
    uint32_t links_count;           /* those of links to reach are given back by wc_work_leave_links */
    wc_op_link *links;
    uint32_t *link_of;              /* by step, of those that have a link: index of it */
    size_t queues_count;
    wc_op_queue *queues;            /* by link, then by lane group */
    size_t numbers_count;
    uint32_t *numbers;              /* of all queues */
    uint32_t first_lane;            /* part 0 of each step is meant for it */
    bool speaks;                    /* its vote is to be sent; guarded by engine->mutex */
    wc_owner *owner;                /* that has started it, with a reference; NULL: the daemon has */
    uint64_t turn;                  /* of the owner, then */
    uint8_t vote[WC_NOTE_BYTES];
    wc_hearer *hearers;             /* by link that the op names for its vote */
    void *rooms[8];                 /* all arrays above */
    uint32_t rooms_count;
    bool lacks_memory;              /* for one of them */
};

/* Check.c */
bool wc_op_valid(const wc_engine *engine, const wc_op *op); /* but for its links */
uint64_t wc_block_raw(const wc_op *op); /* raw bytes of the codec's block; 1 without codec */
bool wc_result_coded(const wc_op *op); /* whether what its encoded form says is the result */

/* Cut.c: how an op is cut into parts, the same on both ends of every link. */
void wc_cut_count(wc_work *work); /* parts, queues and numbers; also numbers the queues of its links */
bool wc_cut(wc_work *work);       /* fills them in; false: two steps from one rank have the same number */

/* Op.c */
enum { WC_OP_EVENTS = 3 }; /* DONE, MISMATCH, CANCELLED */
/* NULL with errno. All that takes time is done here, without engine->mutex */
wc_work *wc_work_new(wc_engine *engine, const wc_op *op);
/* Posts for an owner, and takes over a reference to it, if it succeeds */
int wc_post_for(wc_engine *engine, const wc_op *op, wc_owner *owner, uint64_t turn);
void wc_work_leave_links(wc_work *work); /* once it is posted, or before it is freed */
void wc_work_free(wc_work *work);
void wc_work_unref(wc_work *work);
void wc_work_let_go(wc_work *work, bool aborted); /* by each involved worker, once */
/* Takes it out of the table and out of all workers, one after the other; engine->mutex held. Follow with wc_work_unref */
void wc_work_retire(wc_work *work);

#endif

/* Parts: what one lane, and so one worker, does of one step. Whose bytes they wait for, and who waits for theirs. */
#ifndef WC_PART_H
#define WC_PART_H

#include "common.h"
#include "lanes/checksum.h"
#include "list.h"

/* A place in memory that a part reads or writes, for any range of the part. */
typedef struct {
    uint8_t *base; /* of the step's first element */
    bool encoded;
} wc_spot;

/* The beginning of a frame, of which the rest comes over another connection: see lost.c. */
typedef struct {
    wc_frame header;
    uint32_t have; /* bytes of payload */
    wc_checksum sum;
    uint8_t tail[8];
    uint32_t tail_bytes;
} wc_partial;

struct wc_part {
    /* in a list: its queue's offered ones, a lane's begun ones, its task's local ones, or it is a WC_READY_PART */
    wc_node node;
    wc_part *after[WC_AFTER];          /* what bounds it, byte by byte */
    wc_part *dependents;               /* parts that it bounds */
    wc_part *next_dependent[WC_AFTER]; /* in the list of after[i] */
    wc_part *next_unready;             /* in its task's list */
    wc_work *work;
    wc_task *task;                     /* of its worker */
    wc_op_queue *queue;                /* NULL: of a local step */
    wc_lane *lane;                     /* that has begun it, and carries it to its end; NULL: none yet */
    wc_spot to, left, right;
    uint64_t result_at;                /* where among the result's elements `to` is, if this makes a part of the result */
    uint64_t input_at[2];              /* where in the input what it reads is; as result_at, of the step's first element */
    uint32_t awaited;                  /* of them: input is being filled */
    uint64_t start;                    /* of the step; blocks of the codec count from there */
    uint64_t begin, end, cursor;       /* bytes of raw elements; cursor: framed (send), or here (recv, local) */
    uint64_t framed;                   /* send: the highest cursor; what is lost is framed again */
    uint64_t checksum;                 /* send: of the next frame, if some of it was taken */
    uint32_t taken;                    /* send: bytes of the next frame that the other end has */
    uint32_t home;                     /* the lane that it is meant for */
    uint32_t segment;                  /* send: frames end at absolute multiples of it */
    uint16_t number;
    uint8_t direction, action;
    uint8_t noise;                     /* encode: which of the op's keys rounds */
    bool encoded;                      /* bytes on the wire are; of a local part: some operand is */
    bool result, measured;
    bool malformed;                    /* recv: a block of the codec is none */
    bool arrived;                      /* recv: whole */
    bool gone;                         /* send: once, whole */
    wc_partial *partial;               /* recv: what came of a frame over a connection that is lost; NULL: nothing */
};

/* Bytes on the wire of these raw bytes; `from` is at a block's boundary */
uint64_t wc_wire_bytes(const wc_part *part, uint64_t from, uint64_t to);
/* Wire bytes that cannot be taken in by halves: an element, or a block of the codec */
size_t wc_grain(const wc_part *part);
uint8_t *wc_spot_at(const wc_part *part, wc_spot spot, uint64_t cursor);
uint64_t wc_part_bound(const wc_part *part); /* how far the parts that it comes after let it go */
/* How far, up to `to`, what it reads of the input buffer is there */
uint64_t wc_part_filled(const wc_part *part, uint64_t to);
uint64_t wc_part_ready(const wc_part *part); /* how far both let it go */
/* To send: where its next frame ends. False: not all of the frame's bytes are here yet */
bool wc_part_frame(const wc_part *part, uint64_t *end);
bool wc_part_waits(const wc_part *part); /* whether it comes after others */
bool wc_part_sends_result(const wc_part *part); /* of the result buffer, as its bound has made it */
void wc_part_final(wc_part *part, uint64_t from); /* bytes [from, cursor) of its result are: they enter the digest */
void wc_part_go(wc_part *part); /* more of what it waits for may be there: if that is enough, it is marked as ready */
void wc_part_moved(wc_part *part); /* its cursor has: parts that wait for it go on */
void wc_part_finish(wc_part *part);

/* Local.c: a slice of a local part. One that comes after no other part has its turns, others go when they are ready. */
void wc_local_go(wc_part *part);
void wc_local_turn(wc_task *task); /* a slice of the first of its parts that wait for nothing */

#endif

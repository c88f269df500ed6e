/* Parts: what one lane, and so one worker, does of one step. Whose bytes they wait for, and who waits for theirs. */
#ifndef WC_PART_H
#define WC_PART_H

#include "common.h"

/* A place in memory that a part reads or writes, for any range of the part. */
typedef struct {
    uint8_t *base; /* of the step's first element */
    bool encoded;
} wc_spot;

struct wc_part {
    /* in a list: its share's offered ones, a lane's begun ones, or the worker's local ones */
    wc_part *prev, *next;
    wc_part *after[WC_AFTER];          /* what bounds it, byte by byte */
    wc_part *dependents;               /* parts that it bounds */
    wc_part *next_dependent[WC_AFTER]; /* in the list of after[i] */
    wc_part *next_gated;               /* in its op's gate */
    wc_work *work;
    wc_share *share;                   /* NULL: of a local step */
    wc_lane *lane;                     /* that has begun it, and carries it to its end; NULL: none yet */
    wc_spot to, left, right;
    uint64_t back;                     /* where in back `to` is, if this makes a part of the result */
    uint64_t front[2];                 /* where in front what it reads is; of the step's first element, as back */
    uint32_t gates;                    /* of them: front is being filled */
    uint64_t start;                    /* of the step; blocks of the codec count from there */
    uint64_t begin, end, cursor;       /* bytes of raw elements; cursor: framed (send), or here (recv, local) */
    uint32_t worker;
    uint32_t home;                     /* the lane that it is meant for */
    uint32_t segment;                  /* send: frames end at absolute multiples of it */
    uint16_t number;
    uint8_t direction, action;
    bool encoded;                      /* bytes on the wire are; of a local part: some operand is */
    bool result, measured;
    bool listed;                       /* in a list */
    bool arrived;                      /* recv: whole */
};

typedef struct {
    wc_part *head, *tail;
} wc_part_list;

/* An op's local parts that wait for nothing but their turn, at one worker. */
struct wc_turns {
    wc_turns *next; /* in the worker's ring; of one without parts: in none */
    wc_part_list parts;
};

void wc_list_append(wc_part_list *list, wc_part *part);
void wc_list_remove(wc_part_list *list, wc_part *part);

/* Of these raw bytes; `from` is at a block's boundary */
uint64_t wc_wire_bytes(const wc_part *part, uint64_t from, uint64_t to);
/* Wire bytes that cannot be taken in by halves: an element, or a block of the codec */
size_t wc_grain(const wc_part *part);
uint8_t *wc_spot_at(const wc_part *part, wc_spot spot, uint64_t cursor);
uint64_t wc_part_bound(const wc_part *part); /* how far the parts that it comes after let it go */
uint64_t wc_part_ready(const wc_part *part); /* how far these do, and what it reads of front is there */
bool wc_part_waits(const wc_part *part);     /* whether it comes after others */
bool wc_part_sends_result(const wc_part *part); /* of back, as its bound has made it */
void wc_part_final(wc_part *part, uint64_t from); /* bytes [from, cursor) of its result are: they enter the digest */
/* Its cursor has moved: whoever waits for that goes on. It must not be finished yet */
void wc_part_moved(wc_part *part);

/* Local.c: runs a local part for at most `limit` bytes. */
void wc_local_go(wc_worker *worker, wc_part *part, uint64_t limit);
/* One that comes after no other part gets its turns, if its bytes are there */
void wc_local_offer(wc_worker *worker, wc_part *part);
void wc_local_leave(wc_worker *worker, wc_part *part); /* it needs no more turns, or its op is given up */
void wc_local_turn(wc_worker *worker);                 /* of the next op that has such parts, if one has */

#endif

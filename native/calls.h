/* Prepared calls: a call that a client repeats in an epoch goes through a ring of slots in shared memory to the engine,
   which starts it, says the member's vote, counts the votes of the others and commits it. The daemon hears of it later.
   Its files are in engine/calls/. */
#ifndef WC_CALLS_H
#define WC_CALLS_H

#include "engine.h"

enum {
    WC_CALLS = 64,      /* slots of a ring; as many calls of a client may be under way in the engine */
    WC_PREPARED = 64,   /* calls that a client may have prepared */
    WC_VOTERS = 64,     /* other members whose votes the engine can count */
    WC_RECORDS = 512,   /* calls that the engine keeps until the daemon has heard of them */
    WC_VOTE_BYTES = 41, /* wancoll/wire/note.py has the layout */
};

/* What a client is told of a call that is committed. */
typedef struct {
    uint64_t seq, digest, bytes_sent, bytes_in_memory, bytes_saved;
    double codec_error;
} wc_answer;

/* A slot. The client writes `posted` and all before it, the engine `answered` and what lies between; each writes the
   number of the call last. Neither believes the other: both copy a slot before they look at it. */
typedef struct {
    uint64_t input, result; /* offsets in the arena */
    int64_t filled, shown;  /* the same, of the tables that Post has; -1: none */
    uint64_t prepared;      /* number of the prepared call */
    uint64_t posted;        /* the client's number of this call */
    wc_answer answer;
    uint64_t answered; /* the client's number: it is committed */
} wc_call;

/* The client's side; each is one call into C, so no signal of Python comes between. */
typedef struct {
    uint64_t count, number; /* of the calls that were posted; the client's number of the last one */
} wc_posted;
/* Posts a call in the next slot, and counts it. wake: the socket that tells the other end. */
void wc_call_post(wc_call *ring, wc_posted *posted, int wake, uint64_t number, uint64_t prepared, uint64_t input,
                  uint64_t result, int64_t filled, int64_t shown);
/* Whether call `number` is committed: then a copy of its slot is in `out`. */
int wc_call_committed(const wc_call *slot, uint64_t number, wc_call *out);

/* The daemon's side: one client. */
typedef struct wc_caller wc_caller;

/* What the engine says of one call that it has started. */
enum { WC_CALL_RUNS, WC_CALL_DONE, WC_CALL_COMMITTED };
typedef struct {
    wc_call call;     /* as the client has posted it, with what is known of the answer */
    uint64_t op;      /* id of its attempt in the engine */
    uint64_t began, ended; /* nanoseconds of CLOCK_MONOTONIC; ended: when it was committed */
    uint64_t state;   /* WC_CALL_RUNS and so on. Where it is done its vote was sent, or is about to be */
    uint64_t voters;  /* a bit for each other member whose vote is here, in the order of wc_terms.links */
    uint64_t digest;  /* that all these votes say */
} wc_call_record;

/* The terms on which the engine takes calls of a client. */
typedef struct {
    uint64_t epoch;     /* of the votes */
    uint64_t committed; /* seq: up to here all is committed */
    uint64_t called;    /* seq: up to here all is started; told only */
    uint64_t number;    /* the client's number of its next call */
    uint64_t op;        /* id of the next attempt */
    uint64_t claims[WC_VOTERS]; /* by voter: up to where it has said that all is committed */
    uint64_t links[WC_VOTERS]; /* of the voters: all other members */
    uint32_t voters;
} wc_terms;

/* A client with this ring and this arena. wake: a connected unix socket, of which the engine keeps a descriptor of its
   own. NULL with errno. The engine does not take calls yet. An event WC_EV_CALLS with op = id tells that calls wait
   which the engine does not take, or that it stopped taking them, or has many records: then hold, or look. */
wc_caller *wc_caller_new(wc_engine *engine, uint64_t id, wc_call *ring, void *arena, uint64_t arena_bytes, int wake);
/* The engine takes no calls any more, and forgets the client. */
void wc_caller_free(wc_caller *caller);
/* Prepares a call: op with its links, codec, vote (with epoch and fingerprint; committed, seq and digest are filled in)
   and so on, which stay there until wc_caller_clear or wc_caller_free; each attempt is a copy with its own id, seq and
   addresses. input, result: bytes in the arena that a client may name. Held clients only. */
void wc_caller_prepare(wc_caller *caller, uint64_t number, const wc_op *op, uint64_t input, uint64_t result);
/* Forgets all of them. Held clients only. */
void wc_caller_clear(wc_caller *caller);
/* From now on the engine takes the client's prepared calls. Nothing of the client may be open elsewhere. */
void wc_caller_lend(wc_caller *caller, const wc_terms *terms);
/* From now on the engine takes no calls of the client, sends no vote of theirs that it has not decided to send, and
   commits none. What it has started, in order, and was not told before, goes to `out` (room for WC_RECORDS), how far it
   has come to `terms`: the op of those that run answers as if it had been posted with wc_post. Returns how many. */
int wc_caller_hold(wc_caller *caller, wc_call_record *out, wc_terms *terms);
/* Tells of those that are committed, and goes on. oldest: when the oldest that is open began, 0: none is. */
int wc_caller_look(wc_caller *caller, wc_call_record *out, wc_terms *terms, uint64_t *oldest);
/* Takes a posted call out of the ring of a held client, if its number is `number`: 1, else 0. */
int wc_caller_next(wc_caller *caller, uint64_t number, wc_call *out);
/* Until this time, nanoseconds of CLOCK_BOOTTIME, votes are sent and calls committed (C8). */
void wc_lease(wc_engine *engine, uint64_t until);

#endif

/* The law of commit, as far as the engine has it: see the beginning of law.c. */
#ifndef WC_LAW_H
#define WC_LAW_H

#include "calls.h"

#include <stdbool.h>

/* A member's vote, or another one's. */
typedef struct {
    uint64_t epoch, committed, seq, digest, fingerprint;
} wc_vote;

/* One operation above what is committed. */
typedef struct {
    uint64_t fingerprint, digest, heard_digest;
    uint64_t voters; /* a bit for each that has said heard_digest */
    bool finished;   /* here, with digest */
} wc_votes;

/* One member's knowledge in one epoch, of a run of operations without gaps. Zeros: closed. */
typedef struct {
    bool open;
    uint32_t voters;
    uint64_t epoch;
    uint64_t committed, called; /* seqs: up to here committed; up to here started */
    uint64_t finished;          /* the highest seq that is finished here */
    uint64_t claims[WC_VOTERS];
    wc_votes counts[WC_CALLS];  /* by seq % WC_CALLS */
} wc_law;

void wc_law_open(wc_law *law, uint64_t epoch, uint32_t voters, uint64_t committed, const uint64_t *claims);
bool wc_law_full(const wc_law *law);                        /* whether no more may be started now */
uint64_t wc_law_start(wc_law *law, uint64_t fingerprint);   /* the next operation begins here: its seq */
bool wc_law_finish(wc_law *law, uint64_t seq, uint64_t digest); /* false: another member has another result */
bool wc_law_hear(wc_law *law, uint32_t voter, const wc_vote *vote); /* false: not for the engine to judge; nothing changed */
uint64_t wc_law_commit(wc_law *law);                        /* seq of an operation that is committed now, or 0 */
wc_votes *wc_law_votes(wc_law *law, uint64_t seq);

#endif

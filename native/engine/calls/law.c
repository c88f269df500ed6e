/* The law of commit, as far as the engine has it. Pure: no clock, no memory, no thread.

   wancoll/commit/tally.py is the law: an operation is committed when every member of the epoch has voted for it, all
   votes are equal, and everything below it is committed. The engine decides one case of that alone, the one that nearly
   all operations are: the member's operations above `committed` follow each other without gaps, the engine has started
   all of them, each vote is for one of these and equal to all that is known of it. It says yes only then. On all else it
   gives no answer, changes nothing, and the daemon takes over with what is known so far: who has voted, with which
   digest, and who claims how much. A property test holds that a yes here is a yes of the tally on the same history.

   Why that suffices for safety: a yes needs a vote of each member, and votes are facts that nobody takes back; each vote
   is kept with its one voter; and whoever is asked to freeze closes this first (wc_caller_hold), so nothing is committed
   after what the member reports. */
#include "law.h"

#include <string.h>

void wc_law_open(wc_law *law, uint64_t epoch, uint32_t voters, uint64_t committed, const uint64_t *claims)
{
    *law = (wc_law){
        .open = true, .voters = voters, .epoch = epoch, .committed = committed, .called = committed, .finished = committed};
    memcpy(law->claims, claims, voters * sizeof *claims);
}

wc_votes *wc_law_votes(wc_law *law, uint64_t seq)
{
    return &law->counts[seq % WC_CALLS];
}

bool wc_law_full(const wc_law *law)
{
    return law->called - law->committed == WC_CALLS;
}

uint64_t wc_law_start(wc_law *law, uint64_t fingerprint)
{
    *wc_law_votes(law, ++law->called) = (wc_votes){.fingerprint = fingerprint};
    return law->called;
}

/* Whether nobody has said another result than this member's own. */
static bool is_equal(const wc_votes *votes)
{
    return !votes->voters || votes->heard_digest == votes->digest;
}

bool wc_law_finish(wc_law *law, uint64_t seq, uint64_t digest)
{
    wc_votes *count = wc_law_votes(law, seq);
    count->finished = true;
    count->digest = digest;
    if (seq > law->finished)
        law->finished = seq;
    return is_equal(count);
}

bool wc_law_hear(wc_law *law, uint32_t voter, const wc_vote *vote)
{
    if (!law->open || vote->epoch != law->epoch || vote->committed > law->finished || vote->seq > law->called)
        return false;
    if (vote->seq > law->committed) {
        wc_votes *count = wc_law_votes(law, vote->seq);
        bool equal = vote->fingerprint == count->fingerprint && (!count->finished || vote->digest == count->digest) &&
                     (!count->voters || vote->digest == count->heard_digest);
        if (!equal)
            return false;
        count->heard_digest = vote->digest;
        count->voters |= (uint64_t)1 << voter;
    }
    if (vote->committed > law->claims[voter])
        law->claims[voter] = vote->committed;
    return true;
}

uint64_t wc_law_commit(wc_law *law)
{
    const wc_votes *next = wc_law_votes(law, law->committed + 1);
    uint64_t all = law->voters == 64 ? UINT64_MAX : ((uint64_t)1 << law->voters) - 1;
    if (!law->open || law->committed == law->called || !next->finished || next->voters != all || !is_equal(next))
        return 0;
    return ++law->committed;
}

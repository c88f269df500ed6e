/* Callers: clients whose prepared calls the engine starts and commits by itself, between the daemon's looks.

   A caller is either held or lent. While it is held the daemon's Python owns all of the member's state, and the
   engine only says that calls wait. The daemon lends it when nothing of the member is open; from then on its state is
   here: the engine takes calls out of the ring in the client's order, starts them, says their votes, hears those of the
   others, commits, and wakes the client. It gives no answer to anything unusual (a call that is not prepared, a vote that
   differs, any other note, a lease that is over, no memory): it tells the daemon, which holds the caller, takes over what
   is under way as if it had started it, and goes on by the rules in Python. So each step here has an equal one there, and
   whatever comes from the master is preceded by a hold.

   The client's memory is not believed: a slot is copied before it is looked at, regions must lie in the arena and apart.
   What a client writes to its ring harms itself alone. Waking the client never blocks, whatever it does to the socket. */
#include "shared.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void wake(int socket)
{
    if (send(socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        /* No room: the other end has such bytes to read. Or it is gone: others say so. */
    }
}

/* ---- the client's side ----------------------------------------------------------------------------------- */

void wc_call_post(wc_call *ring, wc_posted *posted, int socket, uint64_t number, uint64_t prepared, uint64_t input,
                  uint64_t result, int64_t filled, int64_t shown)
{
    wc_call *slot = &ring[posted->count % WC_CALLS];
    posted->number = number;
    __atomic_store_n(&posted->count, posted->count + 1, __ATOMIC_RELEASE);
    slot->input = input;
    slot->result = result;
    slot->filled = filled;
    slot->shown = shown;
    slot->prepared = prepared;
    __atomic_store_n(&slot->posted, number, __ATOMIC_RELEASE);
    wake(socket);
}

int wc_call_committed(const wc_call *slot, uint64_t number, wc_call *out)
{
    if (__atomic_load_n(&slot->answered, __ATOMIC_ACQUIRE) != number)
        return 0;
    *out = *slot;
    return 1;
}

/* ---- what is told ---------------------------------------------------------------------------------------- */

/* The daemon is to look; mutex held. */
static void tell_daemon(wc_caller *caller)
{
    if (caller->told)
        return;
    caller->told = true;
    const wc_event event = {.type = WC_EV_CALLS, .op = caller->id};
    wc_events_push(&caller->engine->events, &event);
}

/* The daemon looks: the next thing may be told again; mutex held. Without memory it looks at its own time only. */
static void looked(wc_caller *caller)
{
    if (caller->told && wc_events_reserve(&caller->engine->events, 1) == 0)
        caller->told = false;
}

static wc_call_record *record_of(wc_caller *caller, uint64_t seq)
{
    return &caller->records[seq % WC_RECORDS];
}

static bool lease_holds(const wc_caller *caller)
{
    return wc_now(CLOCK_BOOTTIME) < atomic_load_explicit(&caller->engine->lease, memory_order_relaxed);
}

/* Commits what can be committed; mutex held. */
static void commit(wc_caller *caller)
{
    bool any = false;
    if (!lease_holds(caller)) {
        tell_daemon(caller);
        return;
    }
    for (uint64_t seq; (seq = wc_law_commit(&caller->law));) {
        wc_call_record *record = record_of(caller, seq);
        record->state = WC_CALL_COMMITTED;
        record->ended = wc_now(CLOCK_MONOTONIC);
        wc_release(caller->engine, record->op);
        wc_call *slot = &caller->ring[(caller->cursor + WC_CALLS - (uint32_t)(caller->number - record->call.posted)) % WC_CALLS];
        slot->answer = record->call.answer;
        __atomic_store_n(&slot->answered, record->call.posted, __ATOMIC_RELEASE);
        any = true;
    }
    if (any)
        wake(caller->wake);
}

/* ---- what the client posts ------------------------------------------------------------------------------- */

static bool holds(const wc_caller *caller, uint64_t at, uint64_t bytes)
{
    return at <= caller->arena_bytes && bytes <= caller->arena_bytes - at;
}

/* Whether all regions lie in the arena, tables aligned to a cache line, and apart: the engine reads and writes there. */
static bool fits(const wc_caller *caller, const wc_prepared *prepared, const wc_call *call)
{
    const uint64_t blocks[2] = {(prepared->input + WC_DIGEST_BLOCK - 1) / WC_DIGEST_BLOCK,
                                (prepared->result + WC_DIGEST_BLOCK - 1) / WC_DIGEST_BLOCK};
    const uint64_t at[4] = {call->input, call->result, (uint64_t)call->filled, (uint64_t)call->shown};
    const uint64_t bytes[4] = {prepared->input, prepared->result, call->filled >= 0 ? blocks[0] : 0,
                               call->shown >= 0 ? blocks[1] * sizeof(uint32_t) : 0};
    for (int i = 0; i < 4; i++) {
        if (!bytes[i])
            continue;
        if (!holds(caller, at[i], bytes[i]) || (i >= 2 && at[i] % 64))
            return false;
        for (int j = 0; j < i; j++)
            if (bytes[j] && at[i] < at[j] + bytes[j] && at[j] < at[i] + bytes[i])
                return false;
    }
    return true;
}

/* Starts the call. False: it is the daemon's. */
static bool start(wc_caller *caller, const wc_call *call)
{
    const wc_prepared *prepared = &caller->prepared[call->prepared % WC_PREPARED];
    if (!call->prepared || prepared->number != call->prepared || !fits(caller, prepared, call) || !lease_holds(caller))
        return false;
    const uint64_t seq = caller->law.called + 1;
    uint8_t vote[WC_VOTE_BYTES];
    wc_op op = prepared->op;
    memcpy(vote, op.vote, WC_VOTE_BYTES);
    memcpy(vote + 9, &caller->law.committed, 8);
    memcpy(vote + 17, &seq, 8);
    op.vote = vote;
    op.id = caller->op;
    op.seq = seq;
    op.input = caller->arena + call->input;
    op.result = (uint8_t *)caller->arena + call->result;
    op.filled = call->filled >= 0 && prepared->input ? caller->arena + call->filled : NULL;
    op.shown = call->shown >= 0 ? (uint32_t *)(caller->arena + call->shown) : NULL;
    op.attempt = 1;
    atomic_fetch_add(&caller->refs, 1);
    if (wc_post_for(caller->engine, &op, &caller->owner, caller->turn) < 0) {
        atomic_fetch_sub(&caller->refs, 1); /* the daemon holds another one */
        return false;
    }
    wc_law_start(&caller->law, op.fingerprint);
    *record_of(caller, seq) = (wc_call_record){.call = *call, .op = op.id, .began = wc_now(CLOCK_MONOTONIC)};
    record_of(caller, seq)->call.answer.seq = seq;
    caller->op++;
    return true;
}

/* Takes what the client has posted; mutex held. */
static void take_calls(wc_caller *caller)
{
    while (caller->law.open) {
        const wc_call *slot = &caller->ring[caller->cursor];
        if (__atomic_load_n(&slot->posted, __ATOMIC_ACQUIRE) != caller->number || wc_law_full(&caller->law))
            return; /* or a commit comes first, which looks again */
        const wc_call call = *slot;
        __atomic_signal_fence(__ATOMIC_SEQ_CST); /* from here on the copy counts */
        const bool room = caller->law.called - caller->told_upto < WC_RECORDS;
        if (!room || call.posted != caller->number || !start(caller, &call)) {
            tell_daemon(caller);
            return;
        }
        caller->cursor = (caller->cursor + 1) % WC_CALLS;
        caller->number++;
    }
}

static void serve(wc_owner *owner)
{
    wc_caller *caller = (wc_caller *)owner;
    char bytes[64];
    ssize_t n = recv(caller->wake, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
        epoll_ctl(caller->engine->workers[0].epoll, EPOLL_CTL_DEL, caller->wake, NULL); /* the client has gone */
    pthread_mutex_lock(&caller->mutex);
    if (caller->law.open)
        take_calls(caller);
    else
        tell_daemon(caller);
    pthread_mutex_unlock(&caller->mutex);
}

/* ---- votes ----------------------------------------------------------------------------------------------- */

static bool hear(wc_owner *owner, uint32_t voter, const uint8_t *bytes, uint32_t length)
{
    wc_caller *caller = (wc_caller *)owner;
    uint64_t fields[5];
    if (length != WC_VOTE_BYTES || bytes[0] != 1)
        return false;
    memcpy(fields, bytes + 1, sizeof fields);
    const wc_vote vote = {fields[0], fields[1], fields[2], fields[3], fields[4]};
    pthread_mutex_lock(&caller->mutex);
    bool heard = wc_law_hear(&caller->law, voter, &vote);
    if (heard) {
        commit(caller);
        take_calls(caller);
    }
    pthread_mutex_unlock(&caller->mutex);
    return heard;
}

static bool finished(wc_work *work, const wc_event *event, bool *speaks)
{
    wc_caller *caller = (wc_caller *)work->owner;
    pthread_mutex_lock(&caller->mutex);
    const bool ours = caller->law.open && caller->turn == work->turn;
    if (ours && !lease_holds(caller)) {
        *speaks = false; /* and the daemon, which is told that this one has finished, finds that out */
        tell_daemon(caller);
    }
    const bool taken = ours && *speaks;
    if (taken) {
        wc_call_record *record = record_of(caller, work->op.seq);
        record->state = WC_CALL_DONE;
        record->call.answer = (wc_answer){
            .seq = work->op.seq,
            .digest = event->value,
            .bytes_sent = event->extra,
            .bytes_in_memory = event->in_memory,
            .bytes_saved = event->saved,
            .codec_error = event->norm_squares > 0 ? sqrt(event->error_squares / event->norm_squares) : 0,
        };
        if (!wc_law_finish(&caller->law, work->op.seq, work->op.vote_digest ? event->value : 0))
            tell_daemon(caller);
        commit(caller);
        take_calls(caller);
    }
    pthread_mutex_unlock(&caller->mutex);
    return taken;
}

/* ---- the daemon's side ----------------------------------------------------------------------------------- */

static void unref(wc_owner *owner)
{
    wc_caller *caller = (wc_caller *)owner;
    if (atomic_fetch_sub(&caller->refs, 1) > 1)
        return;
    close(caller->wake);
    pthread_mutex_destroy(&caller->mutex);
    free(caller);
}

wc_caller *wc_caller_new(wc_engine *engine, uint64_t id, wc_call *ring, void *arena, uint64_t arena_bytes, int socket)
{
    wc_caller *caller = calloc(1, sizeof *caller);
    wc_command *forgetting = caller ? calloc(1, sizeof *forgetting) : NULL;
    if (!forgetting || wc_events_reserve(&engine->events, 1) < 0) {
        free(forgetting);
        free(caller);
        errno = ENOMEM;
        return NULL;
    }
    caller->owner = (wc_owner){finished, hear, serve, unref};
    caller->engine = engine;
    caller->id = id;
    caller->ring = ring;
    caller->arena = arena;
    caller->arena_bytes = arena_bytes;
    caller->wake = fcntl(socket, F_DUPFD_CLOEXEC, 0); /* its own, since the first worker may be about to read it */
    caller->forgetting = forgetting;
    atomic_init(&caller->refs, 2);
    pthread_mutex_init(&caller->mutex, NULL);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uintptr_t)caller | WC_OWNER};
    if (caller->wake >= 0 && epoll_ctl(engine->workers[0].epoll, EPOLL_CTL_ADD, caller->wake, &event) == 0)
        return caller;
    int error = errno;
    if (caller->wake >= 0)
        close(caller->wake);
    wc_events_release(&engine->events, 1);
    free(forgetting);
    free(caller);
    errno = error;
    return NULL;
}

/* Hands the notes of the voters to the first worker, for the caller, or back to the daemon. No mutex held. */
static void route(wc_caller *caller, const wc_terms *terms, bool lent)
{
    for (uint32_t i = 0; i < terms->voters; i++) {
        wc_link *link = wc_link_hold(caller->engine, terms->links[i]);
        if (!link)
            continue; /* it was closed: the daemon knows */
        wc_notes_route(&link->notes, lent ? &caller->owner : NULL, i);
        wc_link_unref(link);
    }
}

void wc_caller_prepare(wc_caller *caller, uint64_t number, const wc_op *op, uint64_t input, uint64_t result)
{
    pthread_mutex_lock(&caller->mutex);
    caller->prepared[number % WC_PREPARED] = (wc_prepared){number, *op, input, result};
    pthread_mutex_unlock(&caller->mutex);
}

void wc_caller_clear(wc_caller *caller)
{
    pthread_mutex_lock(&caller->mutex);
    memset(caller->prepared, 0, sizeof caller->prepared);
    pthread_mutex_unlock(&caller->mutex);
}

void wc_caller_lend(wc_caller *caller, const wc_terms *terms)
{
    pthread_mutex_lock(&caller->mutex);
    wc_law_open(&caller->law, terms->epoch, terms->voters, terms->committed, terms->claims);
    memcpy(caller->links, terms->links, sizeof caller->links);
    caller->turn++;
    caller->told_upto = terms->committed;
    caller->number = terms->number;
    caller->op = terms->op;
    looked(caller);
    pthread_mutex_unlock(&caller->mutex);
    route(caller, terms, true);
    pthread_mutex_lock(&caller->mutex);
    take_calls(caller);
    pthread_mutex_unlock(&caller->mutex);
}

static int tell(wc_caller *caller, wc_call_record *out, wc_terms *terms, uint64_t upto)
{
    int count = 0;
    for (uint64_t seq = caller->told_upto + 1; seq <= upto; seq++) {
        const wc_votes *found = wc_law_votes(&caller->law, seq);
        out[count] = *record_of(caller, seq);
        if (out[count].state != WC_CALL_COMMITTED) {
            out[count].voters = found->voters;
            out[count].digest = found->heard_digest;
        }
        count++;
    }
    terms->epoch = caller->law.epoch;
    terms->committed = caller->law.committed;
    terms->called = caller->law.called;
    terms->number = caller->number;
    terms->op = caller->op;
    terms->voters = caller->law.voters;
    memcpy(terms->claims, caller->law.claims, sizeof terms->claims);
    memcpy(terms->links, caller->links, sizeof terms->links);
    return count;
}

int wc_caller_hold(wc_caller *caller, wc_call_record *out, wc_terms *terms)
{
    pthread_mutex_lock(&caller->mutex);
    int count = 0;
    const bool open = caller->law.open;
    looked(caller);
    if (open) {
        count = tell(caller, out, terms, caller->law.called);
        caller->law.open = false;
    }
    pthread_mutex_unlock(&caller->mutex);
    if (open)
        route(caller, terms, false);
    return open ? count : -1;
}

int wc_caller_look(wc_caller *caller, wc_call_record *out, wc_terms *terms, uint64_t *oldest)
{
    int count = -1;
    pthread_mutex_lock(&caller->mutex);
    if (caller->law.open) {
        looked(caller);
        count = tell(caller, out, terms, caller->law.committed);
        caller->told_upto = caller->law.committed;
        *oldest = caller->law.called > caller->law.committed ? record_of(caller, caller->law.committed + 1)->began : 0;
        take_calls(caller); /* there may be room for their records now */
    }
    pthread_mutex_unlock(&caller->mutex);
    return count;
}

int wc_caller_next(wc_caller *caller, uint64_t number, wc_call *out)
{
    pthread_mutex_lock(&caller->mutex);
    const wc_call *slot = &caller->ring[caller->cursor];
    bool found = !caller->law.open && __atomic_load_n(&slot->posted, __ATOMIC_ACQUIRE) == number;
    if (found) {
        *out = *slot;
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        found = out->posted == number;
        caller->cursor = (caller->cursor + found) % WC_CALLS;
    }
    pthread_mutex_unlock(&caller->mutex);
    return found;
}

void wc_caller_free(wc_caller *caller)
{
    wc_engine *engine = caller->engine;
    pthread_mutex_lock(&caller->mutex);
    caller->law.open = false;
    bool reserved = !caller->told;
    caller->told = true; /* the first worker may still come here: it has nothing to tell */
    wc_command *forgetting = caller->forgetting;
    pthread_mutex_unlock(&caller->mutex);
    if (reserved)
        wc_events_release(&engine->events, 1);
    epoll_ctl(engine->workers[0].epoll, EPOLL_CTL_DEL, caller->wake, NULL);
    *forgetting = (wc_command){.worker = &engine->workers[0], .type = WC_CMD_FORGET, .stream.fd = -1, .owner = &caller->owner};
    pthread_mutex_lock(&engine->mutex);
    wc_command_send(forgetting);
    pthread_mutex_unlock(&engine->mutex);
    unref(&caller->owner);
}

void wc_lease(wc_engine *engine, uint64_t until)
{
    atomic_store(&engine->lease, until);
}

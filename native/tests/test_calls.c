/* Prepared calls under the sanitizers: members whose engines start, vote for and commit calls, while their daemons take
   the members over and lend them again at any moment; and clients that write nonsense to their rings. */
#include "bed.h"

#include <stdatomic.h>

#include "../calls.h"

enum { RANKS = 3, COUNT = 600, CALLS = 600, PREPARED_NUMBER = 7, ARENA = 1 << 16, FINGERPRINT = 4711 };

/* One member: its client's ring and arena, its engine's caller, and what its daemon knows while it holds it. */
typedef struct {
    bed *b;
    int rank;
    wc_call *ring;
    uint8_t *arena;
    int client, daemon; /* ends of the socket over which they wake each other */
    wc_caller *caller;
    wc_step steps[4 * MAX_RANKS];
    uint8_t vote[WC_VOTE_BYTES];
    uint64_t others[RANKS];
    wc_op op;
    uint64_t committed, number, next_op;
    wc_posted posted;
    atomic_ulong answered; /* the client's number up to which its daemon has answered */
    atomic_bool over;
    long held, taken_over; /* how often, and with how many calls under way */
    uint64_t seed;
    pthread_t client_thread, daemon_thread;
} member;

static void prepare(member *m)
{
    const int ring[RANKS] = {0, 1, 2};
    const uint64_t epoch = 1, fingerprint = FINGERPRINT;
    memset(m->vote, 0, sizeof m->vote);
    m->vote[0] = 1;
    memcpy(m->vote + 1, &epoch, 8);
    memcpy(m->vote + 33, &fingerprint, 8);
    for (int s = 0, i = 0; s < RANKS; s++)
        if (s != m->rank)
            m->others[i++] = link_to(s);
    m->op = (wc_op){
        .epoch = 1, .fingerprint = FINGERPRINT, .bytes = {COUNT * 4, COUNT * 4}, .dtype = WC_I32, .op = WC_SUM, .divisor = RANKS,
        .lanes = m->b->lanes, .lane_groups = m->b->lane_groups, .digest = 1, .steps = m->steps,
        .steps_count = ring_schedule(m->steps, ring, RANKS, m->rank, COUNT, 4), .vote = m->vote, .vote_bytes = sizeof m->vote,
        .vote_digest = 25, .vote_links = m->others, .vote_links_count = RANKS - 1,
    };
    wc_caller_prepare(m->caller, PREPARED_NUMBER, &m->op, COUNT * 4, COUNT * 4);
}

static void lend(member *m)
{
    wc_terms terms = {.epoch = 1, .committed = m->committed, .number = m->number, .op = m->next_op, .voters = RANKS - 1};
    memcpy(terms.links, m->others, sizeof m->others);
    for (int i = 0; i < RANKS - 1; i++)
        terms.claims[i] = m->committed;
    wc_caller_lend(m->caller, &terms);
}

static uint64_t draw(member *m, uint64_t below)
{
    m->seed = m->seed * 6364136223846793005u + 1442695040888963407u;
    return (m->seed >> 33) % below;
}

/* ---- the client ------------------------------------------------------------------------------------------ */

static int32_t *tensor(member *m, uint64_t number, bool result)
{
    return (int32_t *)(m->arena + (number % 4) * 16384 + (result ? 8192 : 0));
}

static bool await(member *m, uint64_t number)
{
    wc_call out;
    for (int waited = 0; waited < DEADLINE_MS; waited += 10) {
        if (atomic_load(&m->answered) >= number || wc_call_committed(&m->ring[(number - 1) % WC_CALLS], number, &out))
            return true;
        struct pollfd waiting = {.fd = m->client, .events = POLLIN};
        if (poll(&waiting, 1, 10) > 0) {
            char bytes[64];
            (void)!recv(m->client, bytes, sizeof bytes, MSG_DONTWAIT);
        }
    }
    return false;
}

/* Up to three calls are under way. */
static void *run_client(void *argument)
{
    member *m = argument;
    bool right = true;
    for (uint64_t number = 1; number <= CALLS + 3 && right; number++) {
        if (number > 3) {
            right = await(m, number - 3);
            const int32_t *sum = tensor(m, number - 3, true);
            for (int i = 0; i < COUNT && right; i++)
                right = sum[i] == RANKS * (int32_t)(number - 3 + (uint64_t)i) + 3;
        }
        if (number > CALLS)
            continue;
        int32_t *input = tensor(m, number, false);
        for (int i = 0; i < COUNT; i++)
            input[i] = (int32_t)number + i + m->rank;
        wc_call_post(m->ring, &m->posted, m->client, number, PREPARED_NUMBER,
                     (uint64_t)((uint8_t *)input - m->arena), (uint64_t)((uint8_t *)tensor(m, number, true) - m->arena), -1, -1);
    }
    CHECK(right);
    atomic_store(&m->over, true);
    return NULL;
}

/* ---- the daemon ------------------------------------------------------------------------------------------ */

/* Ends what was under way by events and notes, as the daemon does, and starts what came meanwhile. */
static void go_on(member *m, wc_call_record *records, int count, wc_terms *terms)
{
    bool done[WC_CALLS] = {false};
    uint64_t voters[WC_CALLS] = {0}, called = terms->called;
    m->number = terms->number;
    m->next_op = terms->op;
    m->committed = terms->committed;
    for (int i = 0; i < count; i++) {
        const uint64_t seq = records[i].call.answer.seq;
        if (records[i].state == WC_CALL_COMMITTED)
            continue;
        m->taken_over++;
        done[seq % WC_CALLS] = records[i].state == WC_CALL_DONE;
        voters[seq % WC_CALLS] = records[i].voters;
    }
    wc_call call;
    wc_engine *engine = m->b->engines[m->rank];
    for (int turns = 0; turns < DEADLINE_MS; turns++) {
        if (called - m->committed < 3 && wc_caller_next(m->caller, m->number, &call)) {
            wc_op op = m->op;
            uint8_t vote[WC_VOTE_BYTES];
            memcpy(vote, m->vote, sizeof vote);
            memcpy(vote + 9, &m->committed, 8);
            op.seq = ++called;
            memcpy(vote + 17, &op.seq, 8);
            op.vote = vote, op.id = m->next_op++, op.input = m->arena + call.input, op.result = m->arena + call.result;
            CHECK(wc_post(engine, &op) == 0);
            done[called % WC_CALLS] = false, voters[called % WC_CALLS] = 0;
            m->number++;
        }
        wc_event event;
        while (wc_engine_events(engine, &event, 1))
            if (event.type == WC_EV_DONE && CHECK(event.voted))
                done[(event.op - 1000 * (uint64_t)(m->rank + 1)) % WC_CALLS] = true;
        wc_note notes[8];
        for (int n = wc_notes_take(engine, notes, 8); n > 0; n--) {
            uint64_t seq;
            memcpy(&seq, notes[n - 1].bytes + 17, 8);
            for (int i = 0; i < RANKS - 1; i++)
                if (m->others[i] == notes[n - 1].link && CHECK(seq <= called) && seq > m->committed)
                    voters[seq % WC_CALLS] |= (uint64_t)1 << i;
        }
        while (m->committed < called && done[(m->committed + 1) % WC_CALLS] && voters[(m->committed + 1) % WC_CALLS] == 3)
            atomic_store(&m->answered, ++m->committed); /* seqs and numbers are alike here */
        if (m->committed == called)
            return;
        struct pollfd waiting[2] = {{.fd = wc_engine_fd(engine), .events = POLLIN}, {.fd = wc_notes_fd(engine), .events = POLLIN}};
        poll(waiting, 2, 1);
    }
    CHECK(!"what was taken over ends");
}

static void *run_daemon(void *argument)
{
    member *m = argument;
    wc_call_record *records = calloc(WC_RECORDS, sizeof *records);
    wc_terms terms;
    uint64_t oldest, last = 0;
    while (!atomic_load(&m->over)) {
        struct pollfd waiting = {.fd = wc_engine_fd(m->b->engines[m->rank]), .events = POLLIN};
        poll(&waiting, 1, (int)draw(m, 3));
        const int told = wc_caller_look(m->caller, records, &terms, &oldest);
        CHECK(told >= 0 && terms.committed >= last && terms.called >= terms.committed);
        for (int i = 0; i < told; i++)
            CHECK(records[i].state == WC_CALL_COMMITTED && records[i].call.answer.seq == last + 1 + (uint64_t)i);
        last = terms.committed;
        if (draw(m, 2))
            continue;
        const int count = wc_caller_hold(m->caller, records, &terms);
        m->held++;
        CHECK(count >= 0);
        CHECK(wc_caller_hold(m->caller, records + WC_RECORDS / 2, &(wc_terms){0}) == -1); /* again is nothing */
        go_on(m, records, count, &terms);
        last = m->committed;
        if (draw(m, 4) == 0) {
            wc_caller_clear(m->caller);
            wc_caller_prepare(m->caller, PREPARED_NUMBER, &m->op, COUNT * 4, COUNT * 4);
        }
        lend(m);
    }
    free(records);
    return NULL;
}

/* ---- tests ----------------------------------------------------------------------------------------------- */

static void start(bed *b, member *members, uint32_t workers, uint64_t lease)
{
    bed_start(b, RANKS, 2, workers, 1 << 16, 1 << 14);
    for (int r = 0; r < RANKS; r++)
        for (int s = 0; s < r; s++)
            bed_attach(b, r, s, 2);
    for (int r = 0; r < RANKS; r++) {
        member *m = &members[r];
        int ends[2];
        must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
        *m = (member){.b = b, .rank = r, .client = ends[0], .daemon = ends[1], .number = 1, .next_op = 1000 * (uint64_t)(r + 1) + 1,
                      .seed = (uint64_t)r + 1};
        m->ring = calloc(WC_CALLS, sizeof *m->ring);
        m->arena = calloc(1, ARENA);
        wc_lease(b->engines[r], lease);
        m->caller = wc_caller_new(b->engines[r], (uint64_t)r, m->ring, m->arena, ARENA, m->daemon);
        must(m->caller != NULL, "caller");
        prepare(m);
        lend(m);
    }
}

static void stop(bed *b, member *members)
{
    for (int r = 0; r < RANKS; r++)
        wc_caller_free(members[r].caller);
    bed_stop(b);
    for (int r = 0; r < RANKS; r++) {
        close(members[r].client);
        close(members[r].daemon);
        free(members[r].ring);
        free(members[r].arena);
    }
}

/* All calls come out right, whoever has committed them. */
static void test_takeovers(uint32_t workers)
{
    bed b;
    member members[RANKS];
    long held = 0, taken_over = 0;
    start(&b, members, workers, UINT64_MAX);
    for (int r = 0; r < RANKS; r++) {
        pthread_create(&members[r].client_thread, NULL, run_client, &members[r]);
        pthread_create(&members[r].daemon_thread, NULL, run_daemon, &members[r]);
    }
    for (int r = 0; r < RANKS; r++) {
        pthread_join(members[r].client_thread, NULL);
        pthread_join(members[r].daemon_thread, NULL);
        held += members[r].held;
        taken_over += members[r].taken_over;
    }
    CHECK(held > 20 && taken_over > 20);
    stop(&b, members);
}

/* Without a lease nothing begins; what has begun is not voted for, and the daemon is told. */
static void test_a_lease_that_is_over(void)
{
    bed b;
    member members[RANKS];
    wc_call_record *records = calloc(WC_RECORDS, sizeof *records);
    wc_terms terms;
    start(&b, members, 1, UINT64_MAX);
    for (int r = 0; r < 2; r++)
        wc_call_post(members[r].ring, &members[r].posted, members[r].client, 1, PREPARED_NUMBER, 0, 8192, -1, -1);
    usleep(20000); /* both wait for the third; a slow machine makes the test easier, not wrong */
    wc_lease(b.engines[0], 1);
    wc_call_post(members[2].ring, &members[2].posted, members[2].client, 1, PREPARED_NUMBER, 0, 8192, -1, -1);
    bool done = false, told = false;
    for (int i = 0; i < 2; i++) {
        const wc_event event = next_event(b.engines[0], 5000);
        done |= event.type == WC_EV_DONE && CHECK(!event.voted);
        told |= event.type == WC_EV_CALLS && CHECK(event.op == 0);
    }
    CHECK(told);
    const int count = wc_caller_hold(members[0].caller, records, &terms);
    CHECK(count == 0 || (count == 1 && done && records[0].state == WC_CALL_RUNS));
    CHECK(terms.committed == 0);
    for (int r = 1; r < RANKS; r++) {
        CHECK(wc_caller_hold(members[r].caller, records, &terms) == 1);
        CHECK(terms.committed == 0 && !(records[0].voters & 1)); /* no vote of the first one, whose link is the first */
    }
    free(records);
    stop(&b, members);
}

/* A client that goes, in the middle of its wake-ups: nothing is told any more, and no descriptor is read that has its
   number by now. */
static void test_clients_that_go(void)
{
    wc_config config = {.workers = 1, .segment = 1 << 16, .stripe = 1 << 14};
    wc_engine *engine = wc_engine_new(&config);
    wc_call *ring = calloc(WC_CALLS, sizeof *ring);
    uint8_t *arena = calloc(1, ARENA);
    long kept = 0;
    for (int round = 0; round < 3000; round++) {
        int ends[2];
        must(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
        wc_caller *caller = wc_caller_new(engine, (uint64_t)round, ring, arena, ARENA, ends[1]);
        must(caller != NULL, "caller");
        for (int i = 0; i < round % 4; i++)
            must(send(ends[0], "", 1, MSG_NOSIGNAL) == 1, "send");
        if (round % 3)
            close(ends[0]);
        wc_caller_free(caller);
        close(ends[1]);
        int others[2]; /* one of them has the number */
        must(socketpair(AF_UNIX, SOCK_STREAM, 0, others) == 0, "socketpair");
        must(send(others[0], "kept", 4, 0) == 4 && send(others[1], "kept", 4, 0) == 4, "send");
        for (int i = 0; i < 2; i++) {
            char bytes[8];
            kept += recv(others[i], bytes, sizeof bytes, MSG_DONTWAIT) == 4;
            close(others[i]);
        }
        if (!(round % 3))
            close(ends[0]);
        wc_event event;
        while (wc_engine_events(engine, &event, 1))
            CHECK(event.type == WC_EV_CALLS);
    }
    CHECK(kept == 6000);
    CHECK(wc_link_open(engine, 1, 1, 1, 1) == 0);
    int pair[2];
    tcp_pair(pair);
    CHECK(wc_lane_attach(engine, 1, 0, 1, pair[0], 1) == 0); /* reserves room for an event: the books are right */
    close(pair[1]);
    CHECK(next_event(engine, 5000).type == WC_EV_LANE_DOWN);
    wc_engine_free(engine);
    free(ring);
    free(arena);
}

/* A client that writes to its ring what it likes harms itself alone. */
static void test_nonsense(void)
{
    bed b;
    member members[RANKS];
    start(&b, members, 1, UINT64_MAX);
    const wc_call bad[] = {
        {.posted = 2, .prepared = PREPARED_NUMBER, .result = 8192, .filled = -1, .shown = -1}, /* another number */
        {.posted = 1, .prepared = PREPARED_NUMBER + WC_PREPARED, .result = 8192, .filled = -1, .shown = -1},
        {.posted = 1, .prepared = 0, .result = 8192, .filled = -1, .shown = -1},
        {.posted = 1, .prepared = PREPARED_NUMBER, .input = ARENA - COUNT * 4 + 1, .result = 0, .filled = -1, .shown = -1},
        {.posted = 1, .prepared = PREPARED_NUMBER, .input = UINT64_MAX - 8, .result = 8192, .filled = -1, .shown = -1},
        {.posted = 1, .prepared = PREPARED_NUMBER, .result = INT64_MAX, .filled = -1, .shown = -1},
        {.posted = 1, .prepared = PREPARED_NUMBER, .result = COUNT * 4 - 1, .filled = -1, .shown = -1}, /* not apart */
        {.posted = 1, .prepared = PREPARED_NUMBER, .result = 8192, .filled = 32768 + 1, .shown = -1},   /* not aligned */
        {.posted = 1, .prepared = PREPARED_NUMBER, .result = 8192, .filled = ARENA, .shown = -1},
        {.posted = 1, .prepared = PREPARED_NUMBER, .result = 8192, .filled = -1, .shown = 8192},
        {.posted = 1, .prepared = PREPARED_NUMBER, .result = 8192, .filled = 64, .shown = -1},
    };
    wc_call_record *records = calloc(WC_RECORDS, sizeof *records);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        wc_terms terms;
        members[0].posted = (wc_posted){0};
        wc_call_post(members[0].ring, &members[0].posted, members[0].client, bad[i].posted, bad[i].prepared, bad[i].input, bad[i].result,
                     bad[i].filled, bad[i].shown);
        const wc_event event = next_event(b.engines[0], i ? 5000 : 50);
        CHECK(event.type == (i ? WC_EV_CALLS : 0)); /* a number that comes later is no mistake */
        CHECK(wc_caller_hold(members[0].caller, records, &terms) == 0 && terms.number == 1);
        lend(&members[0]);
        while (next_event(b.engines[0], 0).type) /* it looks at the slot again */
            continue;
        CHECK(wc_caller_hold(members[0].caller, records, &terms) == 0);
        memset(members[0].ring, 0, sizeof *members[0].ring);
        lend(&members[0]);
        while (next_event(b.engines[0], 0).type)
            continue;
    }
    free(records);
    stop(&b, members);
}

int main(void)
{
    test_takeovers(1);
    test_takeovers(3);
    test_a_lease_that_is_over();
    test_clients_that_go();
    test_nonsense();
    printf("%ld checks passed, %ld failed\n", passed, failed);
    return failed != 0;
}

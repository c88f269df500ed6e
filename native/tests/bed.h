/* Test bed for test_engine.c: engines in one process, joined by loopback TCP, and ring schedules for them. */
#ifndef WC_TESTS_BED_H
#define WC_TESTS_BED_H

#define _GNU_SOURCE

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../engine.h"
#include "../kernels.h"
#include "certificate.h"

enum { MAX_RANKS = 5, MAX_BED_LANES = 8, DEADLINE_MS = 30000, GUARD = 4096, RAW_LINK = 900 };

static long passed, failed;

/* In this thread: how many allocations of the engine succeed before one fails; negative: all do. */
static _Thread_local long allocations = -1;

bool wc_test_no_memory(void);
bool wc_test_no_memory(void)
{
    if (allocations != 0) {
        allocations -= allocations > 0;
        return false;
    }
    errno = ENOMEM;
    return true;
}

static _Thread_local uint64_t gap; /* of this thread, drawn anew each time from there; 0: none */

void wc_test_gap(void);
void wc_test_gap(void)
{
    if (gap)
        gap = gap * 6364136223846793005u + 1;
    for (volatile uint64_t i = gap >> 51; i; i--)
        continue;
}

/* The checksum of a frame, as engine.h describes it. */
static inline uint64_t checksum_of(uint64_t offset, const uint8_t *payload, size_t n)
{
    const wc_kernels *k = wc_kernels_default();
    uint64_t both[2] = {0};
    for (size_t at = 0, piece; at < n; at += piece) {
        piece = WC_DIGEST_BLOCK - (size_t)((offset + at) % WC_DIGEST_BLOCK);
        piece = piece < n - at ? piece : n - at;
        both[1] = k->hash64(payload + at, piece);
        both[0] = k->hash64(both, sizeof both);
    }
    return both[0];
}

/* A header with its check. */
static inline wc_frame with_check(wc_frame frame)
{
    frame.check = wc_kernels_default()->hash64(&frame.version, sizeof frame - 8);
    return frame;
}

#define CHECK(condition) check((condition) != 0, #condition, __func__, __LINE__)

static bool check(bool ok, const char *what, const char *where, int line)
{
    __atomic_fetch_add(ok ? &passed : &failed, 1, __ATOMIC_RELAXED); /* tests have threads */
    if (!ok) {
        fprintf(stderr, "FAILED %s, line %d: %s\n", where, line, what);
    }
    return ok;
}

static void must(bool ok, const char *what)
{
    if (!ok) {
        perror(what);
        exit(2);
    }
}

/* A tensor with guards on both sides. */
typedef struct {
    uint8_t *memory, *data;
    size_t bytes;
} buffer;

static inline buffer buffer_new(size_t bytes)
{
    buffer b = {.memory = malloc(bytes + 2 * GUARD), .bytes = bytes};
    must(b.memory != NULL, "malloc");
    memset(b.memory, 0x5a, bytes + 2 * GUARD);
    b.data = b.memory + GUARD;
    return b;
}

/* Frees it; false if somebody wrote outside. */
static inline bool buffer_free(buffer *b)
{
    bool intact = true;
    for (size_t i = 0; i < GUARD; i++)
        intact &= b->memory[i] == 0x5a && b->data[b->bytes + i] == 0x5a;
    free(b->memory);
    return intact;
}

static void tcp_pair(int fds[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    must(bind(listener, (struct sockaddr *)&address, sizeof address) == 0 && listen(listener, 1) == 0, "listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    fds[0] = socket(AF_INET, SOCK_STREAM, 0);
    must(connect(fds[0], (struct sockaddr *)&address, sizeof address) == 0, "connect");
    fds[1] = accept(listener, NULL, NULL);
    close(listener);
    for (int i = 0; i < 2; i++) {
        fcntl(fds[i], F_SETFL, O_NONBLOCK);
        setsockopt(fds[i], IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int)); /* as lanes have it */
    }
}

/* ---- TLS ---------------------------------------------------------------------------------------------- */

/* One key for so many records: 0, all. NULL: there is no OpenSSL 3 here. */
static inline wc_tls_identity *test_identity(void)
{
    char why[200] = "";
    wc_tls_identity *made = wc_tls_identity_new(TEST_CERTIFICATE, TEST_KEY, why, sizeof why);
    if (!made && errno != ENOSYS) {
        fprintf(stderr, "%s\n", why);
        exit(2);
    }
    return made;
}

/* Both ends of a connection, through their handshakes; out[0] has dialled. False: one has failed. */
static bool tls_pair(const wc_tls_identity *identity, const int fds[2], wc_tls *out[2])
{
    int left[2] = {WC_TLS_READS, WC_TLS_READS};
    for (int i = 0; i < 2; i++)
        must((out[i] = wc_tls_new(identity, fds[i], i)) != NULL, "wc_tls_new");
    while (left[0] > 0 || left[1] > 0)
        for (int i = 0; i < 2; i++)
            if (left[i] && (left[i] = wc_tls_handshake(out[i])) < 0)
                return false;
    return true;
}

static const wc_tls_identity *sealing; /* the bed's lanes are TLS, by this; NULL: plain */
static uint64_t piping;                /* or go through memory, so many bytes each way; 0: through sockets */

/* Memory for a pipe. */
static int pipe_memory(uint64_t half)
{
    int memory = memfd_create("pipe", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    must(memory >= 0 && ftruncate(memory, (off_t)(WC_PIPE_HEAD + 2 * half)) == 0, "memfd");
    must(fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0, "seals");
    return memory;
}

/* The next event of an engine; type 0 after timeout_ms without one. */
static wc_event next_event(wc_engine *engine, int timeout_ms)
{
    wc_event event = {0};
    struct pollfd waiting = {.fd = wc_engine_fd(engine), .events = POLLIN};
    while (wc_engine_events(engine, &event, 1) == 0)
        if (poll(&waiting, 1, timeout_ms) == 0)
            return (wc_event){0};
    return event;
}

typedef struct {
    int ranks;
    uint32_t lanes, lane_groups;
    wc_engine *engines[MAX_RANKS];
    int fds[MAX_RANKS][MAX_RANKS][MAX_BED_LANES]; /* numbers only: the engines own them */
} bed;

static uint64_t link_to(int rank)
{
    return 100 + (uint64_t)rank;
}

static inline void bed_attach(bed *b, int r, int s, uint32_t lane)
{
    int pair[2];
    if (piping)
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "socketpair");
    else
        tcp_pair(pair);
    b->fds[r][s][lane] = pair[0];
    b->fds[s][r][lane] = pair[1];
    if (sealing) {
        wc_tls *ends[2];
        must(tls_pair(sealing, pair, ends), "handshake");
        must(wc_lane_attach_tls(b->engines[r], link_to(s), lane, 1, ends[0], 0) == 0, "attach");
        must(wc_lane_attach_tls(b->engines[s], link_to(r), lane, 1, ends[1], 0) == 0, "attach");
        return;
    }
    if (piping) {
        int memory = pipe_memory(piping);
        must(wc_lane_attach_pipe(b->engines[r], link_to(s), lane, 1, pair[0], memory, 1, 1) == 0, "attach");
        must(wc_lane_attach_pipe(b->engines[s], link_to(r), lane, 1, pair[1], memory, 0, 1) == 0, "attach");
        close(memory);
        return;
    }
    must(wc_lane_attach(b->engines[r], link_to(s), lane, 1, pair[0], 1) == 0, "attach");
    must(wc_lane_attach(b->engines[s], link_to(r), lane, 1, pair[1], 1) == 0, "attach");
}

static uint32_t bed_lane_groups(uint32_t lanes, uint32_t workers)
{
    return lanes < workers ? lanes : workers;
}

static uint64_t uplink; /* bytes per second of engines that start; 0: without limit */

static inline void bed_start(bed *b, int ranks, uint32_t lanes, uint32_t workers, uint32_t segment, uint32_t stripe)
{
    wc_config config = {.workers = workers, .segment = segment, .stripe = stripe, .uplink = uplink};
    *b = (bed){.ranks = ranks, .lanes = lanes, .lane_groups = bed_lane_groups(lanes, workers)};
    for (int r = 0; r < ranks; r++)
        must((b->engines[r] = wc_engine_new(&config)) != NULL, "wc_engine_new");
    for (int r = 0; r < ranks; r++) {
        for (int s = 0; s < r; s++) {
            must(wc_link_open(b->engines[r], link_to(s), lanes, bed_lane_groups(lanes, workers), 1) == 0, "link");
            must(wc_link_open(b->engines[s], link_to(r), lanes, bed_lane_groups(lanes, workers), 1) == 0, "link");
            for (uint32_t lane = 0; lane < lanes; lane++)
                bed_attach(b, r, s, lane);
        }
    }
}

static void bed_stop(bed *b)
{
    for (int r = 0; r < b->ranks; r++)
        wc_engine_free(b->engines[r]);
}

static inline void bed_epoch(bed *b, int r, uint64_t epoch)
{
    for (int s = 0; s < b->ranks; s++)
        if (s != r)
            must(wc_link_epoch(b->engines[r], link_to(s), epoch) == 0, "epoch");
}

/* The ring of wancoll.schedule.ring; `ring` lists the members in order, me is an index into it. */
static uint32_t ring_schedule(wc_step *out, const int *ring, int n, int me, uint64_t count, size_t itemsize)
{
    uint32_t lines = 0;
    int32_t last = -1;
    int32_t passed_on[MAX_RANKS]; /* by chunk: the step that sends its partial sums from result */
    memset(passed_on, -1, sizeof passed_on);
    uint16_t numbers[2] = {0, 0};
    const uint64_t links[2] = {link_to(ring[(me + 1) % n]), link_to(ring[(me + n - 1) % n])};
    for (int step = 0; n > 1 && step < 2 * (n - 1); step++) {
        bool scatter = step < n - 1;
        int sent = scatter ? me - step : me + 1 - (step - (n - 1));
        sent = ((sent % n) + n) % n;
        int chunks[2] = {sent, (sent + n - 1) % n};
        for (int way = WC_SEND; way <= WC_RECV; way++) {
            uint64_t base = count / (uint64_t)n, longer = count % (uint64_t)n, c = (uint64_t)chunks[way];
            uint64_t begin = (c * base + (c < longer ? c : longer)) * itemsize, length = (base + (c < longer)) * itemsize;
            if (length == 0)
                continue;
            wc_place result = {.buffer = WC_RESULT, .offset = begin}, input = {.buffer = WC_INPUT, .offset = begin};
            if (way == WC_SEND && step)
                passed_on[chunks[way]] = (int32_t)lines;
            out[lines++] = (wc_step){
                .link = links[way],
                .start = begin,
                .length = length,
                .to = result,
                .left = way == WC_SEND && step ? result : input,
                .after = {way == WC_SEND ? last : scatter ? -1 : passed_on[chunks[way]], -1},
                .number = numbers[way]++,
                .direction = (uint8_t)way,
                .action = (uint8_t)(way == WC_SEND || !scatter ? WC_COPY : step == n - 2 ? WC_FINAL : WC_REDUCE),
                .result = way == WC_RECV && step >= n - 2,
            };
        }
        last = (int32_t)lines - 1;
    }
    for (int way = WC_SEND; n > 1 && way <= WC_RECV; way++)
        if (numbers[way] == 0)
            out[lines++] = (wc_step){.link = links[way], .to = {.buffer = WC_RESULT}, .after = {-1, -1}, .direction = (uint8_t)way};
    if (n == 1 && count)
        out[lines++] = (wc_step){.length = count * itemsize, .to = {.buffer = WC_RESULT}, .after = {-1, -1},
                                     .direction = WC_LOCAL, .result = 1};
    return lines;
}

typedef struct {
    uint64_t id, epoch, seq, fingerprint, count;
    uint32_t dtype, op;
    const uint8_t *filled;
    uint32_t *shown, attempt;
    bool says; /* to the next one in the ring, and over a link that is not there: its id, then the digest */
} call;

static inline int post_ring(bed *b, const int *ring, int n, int me, call c, buffer input, buffer result)
{
    wc_step lines[4 * MAX_RANKS];
    size_t itemsize = wc_dtype_size((int)c.dtype);
    wc_op op = {
        .id = c.id, .epoch = c.epoch, .seq = c.seq, .fingerprint = c.fingerprint, .input = input.data, .result = result.data,
        .bytes = {c.count * itemsize, c.count * itemsize}, .dtype = c.dtype, .op = c.op, .divisor = (uint32_t)n, .lanes = b->lanes, .lane_groups = b->lane_groups,
        .steps_count = ring_schedule(lines, ring, n, me, c.count, itemsize), .digest = 1, .steps = lines,
        .filled = c.filled, .shown = c.shown, .attempt = c.attempt,
    };
    const uint64_t said[2] = {c.id}, hearers[2] = {99, link_to(ring[(me + 1) % n])};
    if (c.says)
        op.vote = said, op.vote_bytes = sizeof said, op.vote_digest = 8, op.vote_links = hearers, op.vote_links_count = 2;
    return wc_post(b->engines[ring[me]], &op);
}

#endif

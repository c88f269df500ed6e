/* Connections of lanes that are lost: at every byte of a small operation, and at random in large ones. Between the engines
   a pump passes on what they send, and closes connections; the main thread attaches others. So are those of the lane for
   notes, over which is said how far the others came. Each result has the right values, so nothing was added twice or left
   out. */
#include <stdatomic.h>

#include "bed.h"
#include "draw.h"

enum { MOST = 6 + 1, ROOM = 8192, FEW = 4000 }; /* FEW: bytes, of some notes */

/* One connection of a lane: what each end sends goes through the pump. */
typedef struct wire wire;
struct wire {
    wire *older; /* the pump may be about to look at it */
    int fd[2];
    int from, to;
    uint32_t lane;
    uint64_t connection, passed[2], cut[2]; /* cut: bytes after which it is closed */
    uint8_t held[2][ROOM];
    size_t have[2];
    bool open;
    int silent; /* one end's, which has not noticed that it is lost; 0: none */
};

typedef struct {
    bed b;
    int ranks;
    wire *wires[MAX_RANKS][MAX_RANKS][MOST]; /* by ends, from the higher to the lower rank, and by lane */
    pthread_t thread;
    pthread_mutex_t mutex; /* guards the wires */
    int wake;
    bool stop;
    atomic_ulong cuts;
    uint64_t quiet;      /* rounds of run() in which no lane gets another connection: those of 1 and 0 that are to have one: */
    uint64_t away[MOST]; /* by lane, what they lost */
    uint64_t epoch;
} world;

static void close_wire(world *w, wire *one)
{
    if (!one->open)
        return;
    for (int end = 0; end < 2; end++)
        close(one->fd[end]);
    one->open = false;
    atomic_fetch_add(&w->cuts, 1);
}

/* Passes on what it can, in one direction. */
static void pass(world *w, wire *one, int end, short can)
{
    if (!one->open)
        return;
    uint64_t left = one->cut[end] - one->passed[end] - one->have[end];
    size_t room = ROOM - one->have[end] < left ? ROOM - one->have[end] : (size_t)left;
    if (room && can & (POLLIN | POLLHUP | POLLERR)) {
        ssize_t n = read(one->fd[end], one->held[end] + one->have[end], room);
        if (n == 0 || (n < 0 && errno != EAGAIN)) {
            close_wire(w, one);
            return;
        }
        one->have[end] += n > 0 ? (size_t)n : 0;
    }
    if (one->have[end]) {
        ssize_t n = send(one->fd[1 - end], one->held[end], one->have[end], MSG_NOSIGNAL);
        if (n > 0) {
            one->passed[end] += (size_t)n;
            one->have[end] -= (size_t)n;
            memmove(one->held[end], one->held[end] + n, one->have[end]);
        } else if (n < 0 && errno != EAGAIN) {
            close_wire(w, one);
            return;
        }
    }
    if (one->passed[end] == one->cut[end])
        close_wire(w, one);
}

static void *pump(void *argument)
{
    world *w = argument;
    for (bool stop = false; !stop;) {
        struct pollfd fds[1 + 2 * MAX_RANKS * MAX_RANKS * MOST] = {{.fd = w->wake, .events = POLLIN}};
        wire *of[sizeof fds / sizeof *fds];
        nfds_t count = 1;
        pthread_mutex_lock(&w->mutex);
        for (int r = 0; r < w->ranks; r++)
            for (int s = 0; s < r; s++)
                for (uint32_t lane = 0; lane <= w->b.lanes; lane++) {
                    wire *one = w->wires[r][s][lane];
                    for (int end = 0; one && one->open && end < 2; end++) {
                        of[count] = one;
                        short out = one->have[1 - end] ? POLLOUT : 0, in = one->have[end] < ROOM ? POLLIN : 0;
                        fds[count++] = (struct pollfd){.fd = one->fd[end], .events = (short)(in | out)};
                    }
                }
        stop = w->stop;
        pthread_mutex_unlock(&w->mutex);
        poll(fds, count, 100);
        uint64_t ignored;
        if (fds[0].revents && read(w->wake, &ignored, sizeof ignored) < 0)
            continue;
        pthread_mutex_lock(&w->mutex);
        for (nfds_t i = 1; i < count; i++)
            if (fds[i].revents && of[i]->open)
                for (int end = 0; end < 2; end++)
                    pass(w, of[i], end, fds[i].fd == of[i]->fd[end] ? fds[i].revents : 0);
        pthread_mutex_unlock(&w->mutex);
    }
    return NULL;
}

static void wake_pump(world *w)
{
    must(eventfd_write(w->wake, 1) == 0, "eventfd");
}

/* Another connection of the lane; from cut[end] bytes on it is no more. */
static void connect_lane(world *w, int r, int s, uint32_t lane, uint64_t connection, const uint64_t cut[2])
{
    int near[2], far[2];
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, near) == 0, "socketpair");
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, far) == 0, "socketpair");
    wire *one = calloc(1, sizeof *one);
    must(one != NULL, "calloc");
    *one = (wire){.fd = {near[1], far[1]}, .from = r, .to = s, .lane = lane, .connection = connection,
                  .cut = {cut[0], cut[1]}, .open = true};
    pthread_mutex_lock(&w->mutex);
    wire *old = w->wires[r][s][lane];
    w->wires[r][s][lane] = one;
    if (old && old->open)
        close_wire(w, old);
    one->older = old;
    pthread_mutex_unlock(&w->mutex);
    wake_pump(w);
    must(wc_lane_attach(w->b.engines[r], link_to(s), lane, connection, near[0], 1) == 0, "attach");
    must(wc_lane_attach(w->b.engines[s], link_to(r), lane, connection, far[0], 1) == 0, "attach");
}

static const uint64_t NEVER[2] = {UINT64_MAX, UINT64_MAX};

static void world_start(world *w, int ranks, uint32_t lanes, uint32_t workers, uint32_t segment)
{
    wc_config config = {.workers = workers, .segment = segment, .stripe = 4096};
    *w = (world){.ranks = ranks, .epoch = 1, .wake = eventfd(0, EFD_NONBLOCK)};
    w->b = (bed){.ranks = ranks, .lanes = lanes, .lane_groups = bed_lane_groups(lanes, workers)};
    pthread_mutex_init(&w->mutex, NULL);
    for (int r = 0; r < ranks; r++)
        must((w->b.engines[r] = wc_engine_new(&config)) != NULL, "wc_engine_new");
    must(pthread_create(&w->thread, NULL, pump, w) == 0, "pthread_create");
    for (int r = 0; r < ranks; r++)
        for (int s = 0; s < r; s++) {
            must(wc_link_open(w->b.engines[r], link_to(s), lanes, w->b.lane_groups, 1) == 0, "link");
            must(wc_link_open(w->b.engines[s], link_to(r), lanes, w->b.lane_groups, 1) == 0, "link");
            for (uint32_t lane = 0; lane <= lanes; lane++)
                connect_lane(w, r, s, lane, 1, NEVER);
        }
}

static void world_stop(world *w)
{
    pthread_mutex_lock(&w->mutex);
    w->stop = true;
    pthread_mutex_unlock(&w->mutex);
    wake_pump(w);
    pthread_join(w->thread, NULL);
    bed_stop(&w->b);
    for (int r = 0; r < w->ranks; r++)
        for (int s = 0; s < r; s++)
            for (uint32_t lane = 0; lane <= w->b.lanes; lane++) {
                close_wire(w, w->wires[r][s][lane]);
                for (wire *one = w->wires[r][s][lane], *older; one; one = older) {
                    older = one->older;
                    if (one->silent)
                        close(one->silent);
                    free(one);
                }
            }
    close(w->wake);
    pthread_mutex_destroy(&w->mutex);
}

/* A lane is lost at one end: the first that says so gets both another connection. */
static void lost(world *w, int rank, const wc_event *event, uint64_t every)
{
    const int other = (int)(event->link - link_to(0)), r = rank > other ? rank : other, s = rank > other ? other : rank;
    if (!CHECK(event->extra == 1) || event->value < w->wires[r][s][event->lane]->connection)
        return;
    if (w->quiet) {
        w->away[event->lane] = event->value;
        return;
    }
    every = every && event->lane == w->b.lanes ? FEW : every;
    const uint64_t cut[2] = {every ? draw() % every : UINT64_MAX, every ? draw() % every : UINT64_MAX};
    connect_lane(w, r, s, event->lane, event->value + 1, cut);
}

/* Ends when all ranks have finished this many ops, from `first` on, in whatever order. Lanes that are lost get others, cut
   off in their turn after up to `every` bytes, unless that is 0. */
static bool run(world *w, uint64_t first, uint64_t ops, uint64_t every)
{
    uint64_t done[MAX_RANKS] = {0};
    for (int r = 0; r < w->ranks;) {
        if (w->quiet && !--w->quiet)
            for (uint32_t lane = 0; lane <= w->b.lanes; lane++) {
                lost(w, 1, &(wc_event){.link = link_to(0), .lane = lane, .value = w->away[lane], .extra = 1}, every);
                w->away[lane] = 0;
            }
        struct pollfd fds[2 * MAX_RANKS];
        for (int i = 0; i < w->ranks; i++) {
            fds[2 * i] = (struct pollfd){.fd = wc_engine_fd(w->b.engines[i]), .events = POLLIN};
            fds[2 * i + 1] = (struct pollfd){.fd = wc_notes_fd(w->b.engines[i]), .events = POLLIN};
        }
        if (poll(fds, 2 * (nfds_t)w->ranks, w->quiet ? 1 : DEADLINE_MS) <= 0 && !CHECK(w->quiet))
            return false;
        for (int i = 0; i < w->ranks; i++) {
            wc_note notes[64];
            for (int more = 0; more < 8; more++) /* what lanes have lost is no note to be counted */
                CHECK(wc_notes_take(w->b.engines[i], notes, 64) == 0);
            wc_event event;
            while (wc_engine_events(w->b.engines[i], &event, 1)) {
                if (event.type == WC_EV_LANE_DOWN)
                    lost(w, i, &event, every);
                else if (CHECK(event.type == WC_EV_DONE || event.type == WC_EV_CANCELLED) && event.op >= first)
                    done[i] |= 1ull << (event.op - first); /* one that is given up may say both */
            }
        }
        while (r < w->ranks && done[r] == (1ull << ops) - 1)
            r++;
    }
    return true;
}

/* Posts an all-reduce on all ranks: element i of rank r is r * 1000 + i % 997 + seq. */
static void post_all(world *w, uint64_t seq, uint64_t count, buffer *input, buffer *result)
{
    const int ring[MAX_RANKS] = {0, 1, 2, 3, 4};
    for (int r = 0; r < w->ranks; r++) {
        for (uint64_t i = 0; i < count; i++)
            ((int64_t *)input[r].data)[i] = r * 1000 + (int64_t)(i % 997) + (int64_t)seq;
        call c = {.id = seq, .epoch = w->epoch, .seq = seq, .fingerprint = 7, .count = count, .dtype = WC_I64, .op = WC_SUM};
        must(post_ring(&w->b, ring, w->ranks, r, c, input[r], result[r]) == 0, "post");
    }
}

static void check_all(const world *w, uint64_t seq, uint64_t count, const buffer *result)
{
    const int64_t n = w->ranks;
    long wrong = 0;
    for (int r = 0; r < n; r++)
        for (uint64_t i = 0; i < count; i++)
            wrong += ((int64_t *)result[r].data)[i] != 1000 * n * (n - 1) / 2 + n * ((int64_t)(i % 997) + (int64_t)seq);
    CHECK(wrong == 0);
}

/* The ops up to `upto` are committed; their memory is used again. All have what they need, or none would have finished: the
   thread sanitizer cannot see that, since it goes through sockets, so here the workers say that they are through. */
static void release_all(world *w, uint64_t first, uint64_t upto)
{
    for (int r = 0; r < w->ranks; r++) {
        for (uint64_t seq = first; seq <= upto; seq++)
            wc_release(w->b.engines[r], seq);
        CHECK(wc_fence(w->b.engines[r]) == 0);
    }
}

/* Bytes that one lane has passed on in one direction. */
static uint64_t passed_on(world *w, int r, int s, uint32_t lane, int end)
{
    pthread_mutex_lock(&w->mutex);
    uint64_t bytes = w->wires[r][s][lane]->passed[end];
    pthread_mutex_unlock(&w->mutex);
    return bytes;
}

static void at_every_byte(int ranks, uint32_t lanes, uint32_t workers, uint64_t count, uint64_t step)
{
    buffer input[MAX_RANKS], result[MAX_RANKS];
    for (int r = 0; r < ranks; r++)
        input[r] = buffer_new(count * 8), result[r] = buffer_new(count * 8);
    uint64_t seq = 1, last = 0;
    world w;
    world_start(&w, ranks, lanes, workers, WC_DIGEST_BLOCK);
    post_all(&w, seq, count, input, result); /* how much there is */
    if (!run(&w, seq, 1, 0))
        exit(1);
    release_all(&w, seq, seq);
    for (uint32_t i = 0; i < 2 * lanes; i++) {
        const uint64_t bytes = passed_on(&w, 1, 0, i / 2, (int)i % 2);
        last = bytes > last ? bytes : last;
    }
    for (uint64_t at = 0; at < last; at += step)
        for (int end = 0; end < 2; end++) {
            const uint32_t lane = (uint32_t)(at / step % lanes);
            const uint64_t cut[2] = {end ? UINT64_MAX : at, end ? at : UINT64_MAX};
            connect_lane(&w, 1, 0, lane, w.wires[1][0][lane]->connection + 1, cut);
            if (at / step % 2)
                connect_lane(&w, 1, 0, lanes, w.wires[1][0][lanes]->connection + 1, (uint64_t[]){draw() % FEW, draw() % FEW});
            post_all(&w, ++seq, count, input, result);
            if (!run(&w, seq, 1, 0))
                exit(1);
            check_all(&w, seq, count, result);
            release_all(&w, seq, seq);
        }
    CHECK(atomic_load(&w.cuts) >= last / step);
    printf("at every %llu of %llu bytes, %d ranks, %u lanes, %u workers: %lu connections\n", (unsigned long long)step,
           (unsigned long long)last, ranks, lanes, workers, (unsigned long)atomic_load(&w.cuts));
    world_stop(&w);
    for (int r = 0; r < ranks; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* Many ops in flight, large ones, the first of which is given up while its frames leave, and each connection is cut off
   after up to `every` bytes. */
static void at_random(int ranks, uint32_t lanes, uint32_t workers, uint64_t count, int rounds, uint64_t every, uint64_t seed)
{
    enum { FLIGHT = 3 };
    buffer input[FLIGHT][MAX_RANKS], result[FLIGHT][MAX_RANKS];
    for (int f = 0; f < FLIGHT; f++)
        for (int r = 0; r < ranks; r++)
            input[f][r] = buffer_new(count * 8), result[f][r] = buffer_new(count * 8);
    world w;
    world_start(&w, ranks, lanes, workers, WC_DIGEST_BLOCK);
    state += seed;
    for (uint32_t lane = 0; lane <= lanes; lane++) {
        const uint64_t cut[2] = {draw() % (lane < lanes ? every : FEW), draw() % (lane < lanes ? every : FEW)};
        connect_lane(&w, 1, 0, lane, 2, cut);
    }
    for (uint64_t seq = 0; seq < (uint64_t)rounds * FLIGHT; seq += FLIGHT) {
        for (int f = 0; f < FLIGHT; f++)
            post_all(&w, seq + (uint64_t)f + 1, count, input[f], result[f]);
        if (draw() % 2)
            usleep(draw() % 300);
        for (int r = 0; r < ranks; r++)
            wc_cancel(w.b.engines[r], seq + 1);
        if (!run(&w, seq + 1, FLIGHT, every))
            exit(1);
        for (int f = 1; f < FLIGHT; f++)
            check_all(&w, seq + (uint64_t)f + 1, count, result[f]);
        release_all(&w, seq + 1, seq + FLIGHT);
    }
    printf("at random within %llu bytes, %d ranks, %u lanes, %u workers: %lu connections\n", (unsigned long long)every, ranks,
           lanes, workers, (unsigned long)atomic_load(&w.cuts));
    world_stop(&w);
    for (int f = 0; f < FLIGHT; f++)
        for (int r = 0; r < ranks; r++)
            CHECK(buffer_free(&input[f][r]) && buffer_free(&result[f][r]));
}

/* All lanes of a link break at once while ops run, that for notes too; one end may not notice before it has others. They
   come some time later, and perhaps break again before they all have come. Meanwhile the op may be given up, and the epoch
   end. */
static void all_at_once(uint32_t lanes, uint32_t workers, uint64_t count, int rounds)
{
    buffer input[2], result[2];
    for (int r = 0; r < 2; r++)
        input[r] = buffer_new(count * 8), result[r] = buffer_new(count * 8);
    world w;
    world_start(&w, 2, lanes, workers, WC_DIGEST_BLOCK);
    for (uint64_t seq = 1; seq <= (uint64_t)rounds; seq++) {
        post_all(&w, seq, count, input, result);
        usleep(draw() % 2000);
        const int deaf = draw() % 2 ? (int)(draw() % 2) : -1;
        pthread_mutex_lock(&w.mutex);
        for (uint32_t lane = 0; lane <= lanes; lane++) {
            wire *one = w.wires[1][0][lane];
            if (deaf >= 0 && one->open)
                one->silent = dup(one->fd[deaf]);
            close_wire(&w, one);
        }
        pthread_mutex_unlock(&w.mutex);
        wake_pump(&w);
        w.quiet = 2 + draw() % 40;
        const bool ends = draw() % 3 == 0;
        w.epoch += ends && draw() % 2;
        for (int r = 0; r < 2; r++) {
            if (ends)
                wc_cancel(w.b.engines[r], seq);
            CHECK(wc_link_epoch(w.b.engines[r], link_to(1 - r), w.epoch) == 0);
        }
        if (!run(&w, seq, 1, draw() % 4 ? 0 : 20000))
            exit(1);
        if (!ends)
            check_all(&w, seq, count, result);
        release_all(&w, seq, seq);
    }
    printf("all at once, %u lanes, %u workers: %lu connections\n", lanes, workers, (unsigned long)atomic_load(&w.cuts));
    world_stop(&w);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* Takes what comes for so long, without connecting anything. */
static void serve(world *w, int ms, uint64_t done[2])
{
    for (int left = ms / 5; left; left--) {
        usleep(5000);
        for (int r = 0; r < 2; r++) {
            wc_note notes[8];
            CHECK(wc_notes_take(w->b.engines[r], notes, 8) == 0);
            wc_event event;
            while (wc_engine_events(w->b.engines[r], &event, 1))
                if (event.type == WC_EV_DONE)
                    done[r] = event.op;
        }
    }
}

/* One end has a second connection, and sends over it, which the other one never had; that has the third one before it
   hears so, or after. */
static void one_that_an_end_never_had(bool late)
{
    enum { COUNT = 200 };
    buffer input[2], result[2];
    for (int r = 0; r < 2; r++)
        input[r] = buffer_new(COUNT * 8), result[r] = buffer_new(COUNT * 8);
    world w;
    uint64_t done[2] = {0};
    int second[2], third[2];
    world_start(&w, 2, 1, 1, WC_DIGEST_BLOCK);
    pthread_mutex_lock(&w.mutex);
    close_wire(&w, w.wires[1][0][0]);
    pthread_mutex_unlock(&w.mutex);
    wake_pump(&w);
    serve(&w, 100, done);
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, second) == 0, "socketpair");
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, third) == 0, "socketpair");
    must(wc_lane_attach(w.b.engines[0], link_to(1), 0, 2, second[1], 1) == 0, "attach");
    post_all(&w, 1, COUNT, input, result);
    serve(&w, 100, done);
    if (!late)
        must(wc_lane_attach(w.b.engines[1], link_to(0), 0, 3, third[0], 1) == 0, "attach");
    close(second[0]);
    serve(&w, 100, done);
    if (late)
        must(wc_lane_attach(w.b.engines[1], link_to(0), 0, 3, third[0], 1) == 0, "attach");
    must(wc_lane_attach(w.b.engines[0], link_to(1), 0, 3, third[1], 1) == 0, "attach");
    for (int tries = 0; tries < 50 && !(done[0] && done[1]); tries++)
        serve(&w, 100, done);
    if (CHECK(done[0] && done[1]))
        check_all(&w, 1, COUNT, result);
    release_all(&w, 1, 1);
    world_stop(&w);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* What the other end cannot have taken, and a connection that there cannot be, end the link. */
static void what_cannot_be(void)
{
    const wc_lost lies[] = {{0, 1, UINT64_MAX, 0}, {0, 0, 0, 0}, {7, 1, 0, 1}};
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        wc_config config = {.workers = 1, .segment = WC_DIGEST_BLOCK, .stripe = 4096};
        wc_engine *engine = wc_engine_new(&config);
        int data[2], said[2];
        must(engine && wc_link_open(engine, RAW_LINK, 1, 1, 1) == 0, "engine");
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, data) == 0, "socketpair");
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, said) == 0, "socketpair");
        must(wc_lane_attach(engine, RAW_LINK, 0, 1, data[0], 1) == 0, "attach");
        must(wc_lane_attach(engine, RAW_LINK, 1, 1, said[0], 1) == 0, "attach");
        uint8_t bytes[4096] = {1};
        wc_step step = {.link = RAW_LINK, .length = sizeof bytes, .left = {.buffer = WC_INPUT}, .after = {-1, -1}};
        wc_op op = {.id = 1, .epoch = 1, .seq = 1, .input = bytes, .bytes = {sizeof bytes}, .divisor = 1, .lanes = 1,
                    .lane_groups = 1, .steps_count = 1, .steps = &step};
        must(wc_post(engine, &op) == 0, "post");
        CHECK(next_event(engine, DEADLINE_MS).type == WC_EV_DONE);
        wc_note_frame frame = {.version = WC_FRAME_VERSION, .type = WC_FRAME_LOST, .length = sizeof lies[i]};
        memcpy(frame.bytes, &lies[i], sizeof lies[i]);
        frame.check = (uint32_t)wc_kernels_default()->hash64(&frame.version, sizeof frame - offsetof(wc_note_frame, version));
        must(send(said[1], &frame, sizeof frame, 0) == sizeof frame, "send");
        bool refused = false;
        for (int tries = 0; tries < 200 && !refused; tries++) {
            wc_note note;
            CHECK(wc_notes_take(engine, &note, 1) == 0);
            const wc_event event = next_event(engine, 10);
            refused = event.type == WC_EV_LANE_DOWN && event.lane == 1 && event.error == EPROTO && !event.extra;
        }
        CHECK(refused);
        wc_engine_free(engine);
        close(data[1]);
        close(said[1]);
    }
}

int main(int argc, char **argv)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const uint64_t more = argc > 1 ? strtoull(argv[1], NULL, 10) : 1; /* so many times as many rounds */
    one_that_an_end_never_had(false);
    one_that_an_end_never_had(true);
    what_cannot_be();
    all_at_once(1, 1, 30000, 20 * (int)more);
    all_at_once(3, 2, 100000, 20 * (int)more);
    at_every_byte(2, 1, 1, 200, more > 1 ? 1 : 7);
    at_every_byte(2, 2, 1, 200, more > 1 ? 1 : 7);
    at_every_byte(3, 2, 2, 300, more > 1 ? 1 : 23);
    at_every_byte(2, 3, 1, 40000, more > 1 ? 331 : 9973); /* several frames, several parts */
    for (uint64_t seed = 1; seed <= more; seed++) {
        at_random(2, 1, 1, 30000, 10, 200000, seed);
        at_random(2, 4, 2, 100000, 10, 300000, seed);
        at_random(3, 3, 1, 100000, 10, 500000, seed);
        at_random(2, 6, 1, 100000, 10, 20000, seed);
    }
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed > 0;
}

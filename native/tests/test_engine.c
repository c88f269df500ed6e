/* Drives real engines in one process: values, epochs, cancels, lost lanes, hostile bytes. Made to run under the
   sanitizers. Exit code 0 if all checks passed. */
#include "bed.h"
#include "digest.h"
#include "draw.h"

#include <sys/epoll.h>

#include "streams/pipe.h"

static const int ALL[MAX_RANKS] = {0, 1, 2, 3, 4};

static int32_t value(int rank, uint64_t i)
{
    return (int32_t)((i * 2654435761u) % 1000003u) + rank * 1000;
}

static void fill(buffer b, int rank)
{
    for (uint64_t i = 0; i < b.bytes / 4; i++)
        ((int32_t *)b.data)[i] = value(rank, i);
}

static bool is_sum(buffer b, const int *ring, int n)
{
    for (uint64_t i = 0; i < b.bytes / 4; i++) {
        int32_t want = 0;
        for (int r = 0; r < n; r++)
            want += value(ring[r], i);
        if (((int32_t *)b.data)[i] != want)
            return false;
    }
    return true;
}

static bool is_input(buffer b, int rank)
{
    for (uint64_t i = 0; i < b.bytes / 4; i++)
        if (((int32_t *)b.data)[i] != value(rank, i))
            return false;
    return true;
}

static uint64_t digest_in(const uint8_t *data, size_t bytes, size_t block)
{
    const wc_kernels *k = wc_kernels_default();
    size_t blocks = (bytes + block - 1) / block;
    uint64_t *hashes = calloc(blocks + 1, 8);
    for (size_t i = 0; i < blocks; i++) {
        size_t left = bytes - i * block;
        hashes[i] = k->hash64(data + i * block, left < block ? left : block);
    }
    uint64_t result = k->hash64(hashes, blocks * 8);
    free(hashes);
    return result;
}

static uint64_t digest_of(buffer b)
{
    return digest_in(b.data, b.bytes, WC_DIGEST_BLOCK);
}

enum { CODED_BLOCK = WC_DIGEST_BLOCK / 512 * 132 }; /* of int8 */

static call sum_of(uint64_t id, uint64_t epoch, uint64_t seq, uint64_t count)
{
    return (call){.id = id, .epoch = epoch, .seq = seq, .fingerprint = 7, .count = count, .dtype = WC_I32, .op = WC_SUM};
}

static void test_ring(int n, uint32_t lanes, uint32_t workers, uint64_t count)
{
    bed b;
    buffer input[MAX_RANKS], result[MAX_RANKS];
    bed_start(&b, n, lanes, workers, 65536, 65536);
    for (int r = 0; r < n; r++) {
        input[r] = buffer_new(count * 4);
        result[r] = buffer_new(count * 4);
        fill(input[r], r);
        CHECK(post_ring(&b, ALL, n, r, sum_of(1, 1, 5, count), input[r], result[r]) == 0);
    }
    for (int r = 0; r < n; r++) {
        wc_event event = next_event(b.engines[r], DEADLINE_MS);
        CHECK(event.type == WC_EV_DONE && event.op == 1);
        CHECK(is_sum(result[r], ALL, n) && is_input(input[r], r));
        CHECK(event.value == digest_of(result[r]));
        CHECK((event.extra > 0) == (n > 1) && event.in_memory == (piping ? event.extra : 0));
    }
    bed_stop(&b);
    for (int r = 0; r < n; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* Stripes of all sizes, of which each thread takes the next one. */
static void test_stripes(void)
{
    enum { COUNT = 200, BYTES = 3 * WC_DIGEST_BLOCK };
    wc_stripe stripes[COUNT];
    buffer memory = buffer_new(BYTES);
    fill(memory, 1);
    for (int i = 0; i < COUNT; i++)
        stripes[i] = (wc_stripe){(uint64_t)(uintptr_t)memory.data, draw() % BYTES, 0};
    CHECK(wc_digest_stripes(stripes, COUNT, 4) == 0);
    for (int i = 0; i < COUNT; i++)
        CHECK(stripes[i].digest == digest_of((buffer){.data = memory.data, .bytes = stripes[i].bytes}));
    CHECK(buffer_free(&memory));
}

static void test_pipelined(void)
{
    enum { OPS = 8, N = 3 };
    bed b;
    buffer input[N][OPS], result[N][OPS];
    bed_start(&b, N, 3, 2, 65536, 65536);
    for (int r = 0; r < N; r++) {
        for (int o = 0; o < OPS; o++) {
            uint64_t count = (uint64_t)o * 40000 + 1;
            input[r][o] = buffer_new(count * 4);
            result[r][o] = buffer_new(count * 4);
            fill(input[r][o], r);
            CHECK(post_ring(&b, ALL, N, r, sum_of(1 + (uint64_t)o, 1, 1 + (uint64_t)o, count), input[r][o], result[r][o]) == 0);
        }
    }
    for (int r = 0; r < N; r++)
        for (int o = 0; o < OPS; o++)
            CHECK(next_event(b.engines[r], DEADLINE_MS).type == WC_EV_DONE);
    bed_stop(&b);
    for (int r = 0; r < N; r++) {
        for (int o = 0; o < OPS; o++) {
            CHECK(is_sum(result[r][o], ALL, N));
            CHECK(buffer_free(&input[r][o]) && buffer_free(&result[r][o]));
        }
    }
}

/* Rank 2 leaves at a random moment in mid-op; 0 and 1 go on without it, in the same memory, at once. */
static void test_shrink(int round)
{
    enum { N = 3, COUNT = 700001 };
    static const int TWO[2] = {0, 1};
    bed b;
    buffer input[N], result[N];
    bed_start(&b, N, 4, 2, 65536, 65536);
    for (int r = 0; r < N; r++) {
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        fill(input[r], r);
    }
    for (int r = 0; r < N - round % 2; r++) /* in odd rounds rank 2 never posts: the others stand still in mid-op */
        CHECK(post_ring(&b, ALL, N, r, sum_of(1, 1, 1, COUNT), input[r], result[r]) == 0);
    usleep((useconds_t)(draw() % 3000));
    for (int r = 0; r < 2; r++) {
        bed_epoch(&b, r, 2);
        CHECK(wc_cancel(b.engines[r], 1) == 0);
        CHECK(post_ring(&b, TWO, 2, r, sum_of(2, 2, 1, COUNT), input[r], result[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        bool cancelled = false, done = false;
        while (!cancelled || !done) {
            wc_event event = next_event(b.engines[r], DEADLINE_MS);
            if (!CHECK(event.type == WC_EV_CANCELLED || event.type == WC_EV_DONE))
                break;
            cancelled |= event.type == WC_EV_CANCELLED && event.op == 1;
            done |= event.type == WC_EV_DONE && event.op == 2;
            if (event.type == WC_EV_DONE && event.op == 2)
                CHECK(event.value == digest_of(result[r]));
        }
        CHECK(is_sum(result[r], TWO, 2) && is_input(input[r], r));
    }
    bed_stop(&b);
    for (int r = 0; r < N; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* A cancel within an epoch: what the other end still sends for it is dropped, the next op runs. */
static void test_cancel(void)
{
    enum { COUNT = 300000 };
    bed b;
    buffer input[2], result[2];
    bed_start(&b, 2, 2, 2, 65536, 65536);
    for (int r = 0; r < 2; r++) {
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        fill(input[r], r);
    }
    CHECK(wc_cancel(b.engines[0], 77) == 0);
    wc_event event = next_event(b.engines[0], DEADLINE_MS);
    CHECK(event.type == WC_EV_CANCELLED && event.op == 77);

    for (int r = 0; r < 2; r++) {
        CHECK(post_ring(&b, ALL, 2, r, sum_of(1, 1, 1, COUNT), input[r], result[r]) == 0);
        CHECK(wc_cancel(b.engines[r], 1) == 0);
        CHECK(post_ring(&b, ALL, 2, r, sum_of(2, 1, 2, COUNT), input[r], result[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        bool cancelled = false, done = false;
        while (!cancelled || !done) {
            event = next_event(b.engines[r], DEADLINE_MS);
            if (!CHECK(event.type == WC_EV_CANCELLED || event.type == WC_EV_DONE))
                break;
            cancelled |= event.type == WC_EV_CANCELLED;
            done |= event.type == WC_EV_DONE && event.op == 2;
        }
        CHECK(is_sum(result[r], ALL, 2));
    }
    bed_stop(&b);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* Fills one rank's input while the engine reads it: blocks in a shuffled order, with pauses. */
typedef struct {
    pthread_t thread;
    buffer whole, input;
    uint8_t *filled;
    uint64_t seed;
    int bell;
} filler;

static void *fill_blocks(void *argument)
{
    filler *f = argument;
    uint64_t blocks = (f->input.bytes + WC_DIGEST_BLOCK - 1) / WC_DIGEST_BLOCK, stride = 1 + 2 * (f->seed % 7);
    while (blocks % stride == 0 && stride > 1)
        stride += 2;
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t block = (i * stride + f->seed) % blocks, at = block * WC_DIGEST_BLOCK, left = f->input.bytes - at;
        memcpy(f->input.data + at, f->whole.data + at, left < WC_DIGEST_BLOCK ? left : WC_DIGEST_BLOCK);
        __atomic_store_n(&f->filled[block], 1, __ATOMIC_RELEASE);
        if (i % 3 != 1 || i + 1 == blocks)
            must(eventfd_write(f->bell, 1) == 0, "bell");
        if (i % 5 == f->seed % 5)
            usleep((useconds_t)(f->seed % 700));
    }
    return NULL;
}

/* Fronts are filled while the op runs; in odd rounds rank 2 leaves meanwhile, and the others go on waiting. */
static void test_input_readiness(int round)
{
    enum { N = 3, COUNT = 700001, BLOCKS = COUNT * 4 / WC_DIGEST_BLOCK + 1 };
    static const int TWO[2] = {0, 1};
    int left = round % 2 ? 2 : N;
    bed b;
    buffer result[N];
    filler fillers[N];
    static uint32_t shown[N][BLOCKS];
    bed_start(&b, N, 3, 2, 65536, 65536);
    memset(shown, 0, sizeof shown);
    for (int r = 0; r < N; r++) {
        result[r] = buffer_new(COUNT * 4);
        fillers[r] = (filler){.whole = buffer_new(COUNT * 4), .input = buffer_new(COUNT * 4), .seed = draw() % 1000,
                              .filled = calloc(BLOCKS, 1), .bell = eventfd(0, EFD_NONBLOCK)};
        fill(fillers[r].whole, r);
        must(wc_bell_add(b.engines[r], fillers[r].bell) == 0, "bell");
        call c = sum_of(1, 1, 1, COUNT);
        c.filled = fillers[r].filled, c.shown = shown[r], c.attempt = 1;
        CHECK(post_ring(&b, ALL, N, r, c, fillers[r].input, result[r]) == 0);
    }
    for (int r = 0; r < N; r++)
        must(pthread_create(&fillers[r].thread, NULL, fill_blocks, &fillers[r]) == 0, "thread");
    if (left < N) {
        usleep((useconds_t)(draw() % 3000));
        CHECK(wc_cancel(b.engines[2], 1) == 0);
        for (int r = 0; r < left; r++) {
            bed_epoch(&b, r, 2);
            CHECK(wc_cancel(b.engines[r], 1) == 0);
            call c = sum_of(2, 2, 1, COUNT);
            c.filled = fillers[r].filled, c.shown = shown[r], c.attempt = 2;
            CHECK(post_ring(&b, TWO, 2, r, c, fillers[r].input, result[r]) == 0);
        }
    }
    for (int r = 0; r < left; r++) {
        wc_event event;
        do
            event = next_event(b.engines[r], DEADLINE_MS);
        while (event.type == WC_EV_CANCELLED || (event.type == WC_EV_DONE && left < N && event.op == 1));
        CHECK(event.type == WC_EV_DONE);
        bool all = true;
        for (int i = 0; i < BLOCKS; i++)
            all &= __atomic_load_n(&shown[r][i], __ATOMIC_ACQUIRE) == (left < N ? 2 : 1);
        CHECK(all && is_sum(result[r], ALL, left));
    }
    for (int r = 0; r < N; r++)
        pthread_join(fillers[r].thread, NULL);
    for (int r = 0; r < N; r++)
        wc_bell_remove(b.engines[r], fillers[r].bell);
    bed_stop(&b);
    for (int r = 0; r < N; r++) {
        CHECK(is_input(fillers[r].input, r) && buffer_free(&fillers[r].input));
        CHECK(buffer_free(&fillers[r].whole) && buffer_free(&result[r]));
        free(fillers[r].filled);
        close(fillers[r].bell);
    }
}

/* Ops whose inputs are filled at once: the small ones are the last in the worker's queue, and end before the large one,
   which has many parts (fine) or a long one. */
static void test_local_steps_take_turns(bool fine)
{
    enum { OPS = 3, LARGE = 64 << 20, SMALL = 4096 };
    wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
    wc_engine *engine = wc_engine_new(&config);
    must(engine != NULL, "engine");
    uint8_t *filled = calloc(LARGE / WC_DIGEST_BLOCK, 1);
    int bell = eventfd(0, EFD_NONBLOCK);
    must(wc_bell_add(engine, bell) == 0, "bell");
    buffer input[OPS], result[OPS];
    for (int i = 0; i < OPS; i++) { /* a bell looks at the op that was posted last, first: the large one */
        size_t bytes = i == OPS - 1 ? LARGE : SMALL;
        input[i] = buffer_new(bytes), result[i] = buffer_new(bytes);
        fill(input[i], i);
        const wc_step copy = {.length = bytes, .to = {.buffer = WC_RESULT}, .after = {-1, -1}, .direction = WC_LOCAL, .result = 1};
        wc_op op = {.id = (uint64_t)i, .epoch = 1, .seq = 1, .fingerprint = 7, .input = input[i].data, .result = result[i].data,
                    .bytes = {bytes, bytes}, .dtype = WC_I32, .op = WC_SUM, .divisor = 1, .lanes = 1, .lane_groups = 1,
                    .stripe = fine ? 65536 : LARGE, .steps_count = 1, .digest = 1, .steps = &copy, .filled = filled};
        must(wc_post(engine, &op) == 0, "post");
    }
    must(next_event(engine, 50).type == 0, "nothing is there");
    for (size_t i = 0; i < LARGE / WC_DIGEST_BLOCK; i++)
        __atomic_store_n(&filled[i], 1, __ATOMIC_RELEASE);
    must(eventfd_write(bell, 1) == 0, "bell");
    bool last = false;
    for (int i = 0; i < OPS; i++) {
        wc_event event = next_event(engine, DEADLINE_MS);
        CHECK(event.type == WC_EV_DONE && !last);
        last = event.op == OPS - 1;
    }
    CHECK(last);
    wc_bell_remove(engine, bell);
    wc_engine_free(engine);
    for (int i = 0; i < OPS; i++)
        CHECK(is_input(result[i], i) && buffer_free(&input[i]) && buffer_free(&result[i]));
    free(filled);
    close(bell);
}

/* The next event but for that of the other lane, which ends here too if the other end was faster. */
static wc_event after_hang_up(wc_engine *engine)
{
    wc_event event;
    do
        event = next_event(engine, DEADLINE_MS);
    while (event.type == WC_EV_LANE_DOWN && event.lane == 0);
    return event;
}

/* A lane is lost for good, and its link with it: another link takes its place. */
static void test_lane_loss(void)
{
    enum { COUNT = 1000000 };
    bed b;
    buffer input[2], result[2];
    bed_start(&b, 2, 2, 1, 65536, 65536);
    for (int r = 0; r < 2; r++) {
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        fill(input[r], r);
    }
    CHECK(post_ring(&b, ALL, 2, 0, sum_of(1, 1, 1, COUNT), input[0], result[0]) == 0);
    shutdown(b.fds[0][1][1], SHUT_RDWR);
    for (int r = 0; r < 2; r++) {
        wc_event event = next_event(b.engines[r], DEADLINE_MS);
        CHECK(event.type == WC_EV_LANE_DOWN && event.lane == 1 && event.link == link_to(1 - r));
    }
    wc_lane_stats stats;
    CHECK(wc_lane_statistics(b.engines[0], link_to(1), 1, &stats) == 0 && !stats.attached);
    CHECK(wc_lane_statistics(b.engines[0], link_to(1), 2, &stats) == -1 && errno == ENOENT);
    int pair[2];
    tcp_pair(pair);
    CHECK(wc_lane_attach(b.engines[0], link_to(1), 1, 1, pair[0], 1) == -1 && errno == EINVAL);
    CHECK(wc_lane_attach(b.engines[1], link_to(0), 0, 1, pair[1], 1) == -1 && errno == EINVAL); /* it has one that is well */
    for (int r = 0; r < 2; r++) {
        CHECK(wc_link_close(b.engines[r], link_to(1 - r)) == 0);
        must(wc_link_open(b.engines[r], link_to(1 - r), b.lanes, b.lane_groups, 2) == 0, "link");
    }
    for (uint32_t lane = 0; lane < b.lanes; lane++)
        bed_attach(&b, 0, 1, lane);
    for (int r = 0; r < 2; r++) {
        if (r == 0)
            CHECK(wc_cancel(b.engines[r], 1) == 0 && after_hang_up(b.engines[r]).type == WC_EV_CANCELLED);
        CHECK(post_ring(&b, ALL, 2, r, sum_of(2, 2, 1, COUNT), input[r], result[r]) == 0);
    }
    for (int r = 0; r < 2; r++)
        CHECK(after_hang_up(b.engines[r]).type == WC_EV_DONE && is_sum(result[r], ALL, 2));
    CHECK(wc_link_close(b.engines[0], link_to(1)) == 0);
    CHECK(next_event(b.engines[1], DEADLINE_MS).type == WC_EV_LANE_DOWN);
    CHECK(next_event(b.engines[0], 50).type == 0); /* closing says nothing here */
    CHECK(wc_link_close(b.engines[0], link_to(1)) == -1 && errno == EINVAL);
    bed_stop(&b);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* An all-reduce of whole tensors in int8: encode, send to all, receive from all into scratch, add up in rank order. */
static uint32_t exchange_schedule(wc_step *out, uint64_t *scratch, int n, int me, uint64_t count)
{
    const wc_codec_block block = wc_codec_shape(WC_CODEC_INT8);
    const uint64_t coded = (count + block.elements - 1) / block.elements * block.bytes;
    const wc_place input = {.buffer = WC_INPUT}, result = {.buffer = WC_RESULT};
    uint32_t steps = 0;
    int32_t last = -1, here[MAX_RANKS];
    wc_place codes[MAX_RANKS];
    for (int r = 0; r < n; r++)
        codes[r] = (wc_place){.buffer = WC_SCRATCH, .encoded = 1, .offset = (uint64_t)r * coded};
    *scratch = (uint64_t)n * coded;
    wc_step step = {.length = count * 4, .after = {-1, -1}};
    here[me] = (int32_t)steps;
    out[steps] = step, out[steps].direction = WC_LOCAL, out[steps].action = WC_ENCODE, out[steps].to = codes[me], out[steps].left = input;
    out[steps++].measured = 1;
    for (int r = 0; r < n; r++) {
        if (r == me)
            continue;
        out[steps] = step, out[steps].direction = WC_SEND, out[steps].link = link_to(r), out[steps].left = codes[me];
        out[steps++].after[0] = here[me];
        here[r] = (int32_t)steps;
        out[steps] = step, out[steps].direction = WC_RECV, out[steps].link = link_to(r), out[steps++].to = codes[r];
    }
    for (int r = 0; r < n; r++) {
        out[steps] = step, out[steps].direction = WC_LOCAL, out[steps].to = result, out[steps].left = r ? result : codes[0];
        out[steps].action = r == 0 ? WC_DECODE : r == n - 1 ? WC_FINAL : WC_REDUCE;
        out[steps].result = r == n - 1;
        if (r)
            out[steps].right = codes[r];
        out[steps].after[0] = here[r];
        out[steps].after[1] = last;
        last = (int32_t)steps++;
    }
    return steps;
}

static int post_exchange(bed *b, int n, int me, call c, buffer input, buffer result)
{
    wc_step lines[4 * MAX_RANKS];
    wc_op op = {
        .id = c.id, .epoch = c.epoch, .seq = c.seq, .fingerprint = c.fingerprint, .input = input.data, .result = result.data,
        .bytes = {c.count * 4, c.count * 4}, .dtype = WC_F32, .op = c.op, .codec = WC_CODEC_INT8, .coded = 1u << WC_SCRATCH, .divisor = (uint32_t)n,
        .lanes = b->lanes, .lane_groups = b->lane_groups, .digest = 1, .steps = lines, .filled = c.filled,
    };
    op.steps_count = exchange_schedule(lines, &op.bytes[WC_SCRATCH], n, me, c.count);
    return wc_post(b->engines[me], &op);
}

/* Quantized ops beside plain ones; in odd rounds they are cancelled at a random moment and run again with fewer
   ranks. */
static void test_quantized(int round)
{
    enum { N = 3, COUNT = 300001 };
    int n = N;
    bed b;
    buffer input[N], result[N];
    bed_start(&b, N, 3, 1 + (uint32_t)round % 2, 65536, 8192);
    for (int r = 0; r < N; r++) {
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        for (uint64_t i = 0; i < COUNT; i++)
            ((float *)input[r].data)[i] = (float)(i % 1000) * (float)(r + 1);
    }
    buffer codes = buffer_new((COUNT + 127) / 128 * 132); /* what lies where the result's encoded form is hashed */
    wc_kernels_default()->encode[WC_CODEC_INT8][WC_F32](codes.data, input[0].data, COUNT, NULL);
    const uint64_t digest = digest_in(codes.data, codes.bytes, CODED_BLOCK);
    CHECK(buffer_free(&codes));
    call c = {.id = 1, .epoch = 1, .seq = 1, .fingerprint = 7, .count = COUNT, .dtype = WC_F32, .op = WC_SUM};
    for (int r = 0; r < N - round / 2 % 2; r++)
        CHECK(post_exchange(&b, n, r, c, input[r], result[r]) == 0);
    if (round % 2) {
        usleep((useconds_t)(draw() % 3000));
        n = 2, c.id = 2, c.epoch = 2;
        for (int r = 0; r < n; r++) {
            bed_epoch(&b, r, 2);
            CHECK(wc_cancel(b.engines[r], 1) == 0 && post_exchange(&b, n, r, c, input[r], result[r]) == 0);
        }
    } else if (round / 2 % 2) {
        CHECK(post_exchange(&b, n, N - 1, c, input[N - 1], result[N - 1]) == 0);
    }
    for (int r = 0; r < n; r++) {
        wc_event event;
        do
            event = next_event(b.engines[r], DEADLINE_MS);
        while (event.type == WC_EV_CANCELLED || (event.type == WC_EV_DONE && event.op != c.id));
        CHECK(event.type == WC_EV_DONE && event.value == digest && event.saved > 0);
        CHECK(event.error_squares > 0 && event.error_squares < 1e-4 * event.norm_squares);
        CHECK(!memcmp(result[r].data, result[0].data, COUNT * 4));
        for (uint64_t i = 0; i < COUNT; i += 101) {
            double want = (double)(i % 1000) * (n == 3 ? 6 : 3), got = ((float *)result[r].data)[i];
            CHECK(got > want - 30 && got < want + 30);
        }
    }
    bed_stop(&b);
    for (int r = 0; r < N; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

static void test_mismatch(void)
{
    enum { COUNT = 100000 };
    bed b;
    buffer input[2], result[2];
    bed_start(&b, 2, 8, 2, 65536, 65536);
    for (int r = 0; r < 2; r++) {
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        fill(input[r], r);
        call c = sum_of(1, 1, 3, r ? COUNT / 1000 : COUNT);
        c.fingerprint = 50 + (uint64_t)r;
        CHECK(post_ring(&b, ALL, 2, r, c, input[r], result[r]) == 0);
    }
    for (int r = 0; r < 2; r++) {
        wc_event event = next_event(b.engines[r], DEADLINE_MS);
        CHECK(event.type == WC_EV_MISMATCH && event.op == 1 && event.value == 3 && event.extra == 51 - (uint64_t)r);
        CHECK(next_event(b.engines[r], 30).type == 0);
    }
    for (int r = 0; r < 2; r++) {
        bed_epoch(&b, r, 2);
        CHECK(wc_cancel(b.engines[r], 1) == 0);
        CHECK(next_event(b.engines[r], DEADLINE_MS).type == WC_EV_CANCELLED);
        CHECK(post_ring(&b, ALL, 2, r, sum_of(2, 2, 4, COUNT), input[r], result[r]) == 0);
    }
    for (int r = 0; r < 2; r++)
        CHECK(next_event(b.engines[r], DEADLINE_MS).type == WC_EV_DONE && is_sum(result[r], ALL, 2));
    bed_stop(&b);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* One engine whose only neighbour is this test: it waits for 64 int32 to copy. */
typedef struct {
    wc_engine *engine;
    int fd;
    buffer result;
} raw;

enum { RAW_BYTES = 256 };

static raw raw_start(uint32_t checksums)
{
    wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
    wc_step line = {.link = RAW_LINK, .length = RAW_BYTES, .to = {.buffer = WC_RESULT}, .after = {-1, -1}, .direction = WC_RECV};
    raw r = {.engine = wc_engine_new(&config), .result = buffer_new(RAW_BYTES)};
    int pair[2];
    tcp_pair(pair);
    r.fd = pair[0];
    must(r.engine && wc_link_open(r.engine, RAW_LINK, 1, 1, 5) == 0 && wc_lane_attach(r.engine, RAW_LINK, 0, 1, pair[1], checksums) == 0, "raw");
    wc_op op = {.id = 1, .epoch = 5, .seq = 2, .fingerprint = 7, .input = r.result.data, .result = r.result.data, .bytes = {0, RAW_BYTES},
                .dtype = WC_I32, .divisor = 1, .lanes = 1, .lane_groups = 1, .steps_count = 1, .steps = &line};
    CHECK(wc_post(r.engine, &op) == 0);
    return r;
}

static void raw_stop(raw *r)
{
    close(r->fd);
    wc_engine_free(r->engine);
    CHECK(buffer_free(&r->result));
}

static wc_frame good_frame(void)
{
    return (wc_frame){.version = WC_FRAME_VERSION, .epoch = 5, .seq = 2, .fingerprint = 7, .length = RAW_BYTES};
}

/* With its check words; a checksum that is not 0 stays as it is. */
static wc_frame sealed(wc_frame frame, const uint8_t *payload, size_t bytes)
{
    if (frame.checksum == 0)
        frame.checksum = checksum_of(frame.offset, payload, bytes);
    return with_check(frame);
}

static void raw_send(raw *r, wc_frame frame, const uint8_t *payload, size_t piece)
{
    uint8_t bytes[sizeof frame + RAW_BYTES];
    size_t length = frame.length <= RAW_BYTES ? frame.length : 0, size = sizeof frame + length;
    frame = sealed(frame, payload, length);
    memcpy(bytes, &frame, sizeof frame);
    memcpy(bytes + sizeof frame, payload, length);
    for (size_t at = 0; at < size; at += piece)
        send(r->fd, bytes + at, size - at < piece ? size - at : piece, MSG_NOSIGNAL);
}

/* A whole frame; the socket blocks. */
static void put_frame(int fd, wc_frame frame, const uint8_t *payload)
{
    frame = sealed(frame, payload, frame.length);
    if (send(fd, &frame, sizeof frame, MSG_NOSIGNAL) > 0 && send(fd, payload, frame.length, MSG_NOSIGNAL) < 0)
        return; /* the engine has closed its end */
}

/* Two neighbours of an engine, which the test plays. The op that is cancelled (1) has sent what A needs, and half of
   what B needs; op 2 waits for a frame of A, and sends to B after it. A cancel lets op 2 go on, over B's lane, where op
   1 has a part that could be sent by now: it must have left that lane before. */
static void test_cancel_leaves_all_lane_groups_first(void)
{
    enum { A = 201, B = 202, HALF = WC_DIGEST_BLOCK, BYTES = 2 * HALF };
    wc_config config = {.workers = 1, .segment = HALF, .stripe = BYTES};
    wc_engine *engine = wc_engine_new(&config);
    int a[2], b[2];
    tcp_pair(a), tcp_pair(b);
    must(wc_link_open(engine, A, 1, 1, 1) == 0 && wc_link_open(engine, B, 1, 1, 1) == 0, "link");
    must(wc_lane_attach(engine, A, 0, 1, a[0], 1) == 0 && wc_lane_attach(engine, B, 0, 1, b[0], 1) == 0, "attach");
    static uint8_t input[2][BYTES], result[2][BYTES], filled[2][2], payload[HALF], heard[4 * BYTES];
    memset(filled, 0, sizeof filled);
    filled[0][0] = 1;
    const wc_step first[] = {
        {.link = A, .length = HALF, .left = {.buffer = WC_INPUT}, .after = {-1, -1}, .direction = WC_SEND},
        {.link = B, .length = BYTES, .left = {.buffer = WC_INPUT}, .after = {-1, -1}, .direction = WC_SEND},
    };
    const wc_step second[] = {
        {.link = A, .length = HALF, .to = {.buffer = WC_RESULT}, .left = {.buffer = WC_INPUT}, .after = {-1, -1},
         .direction = WC_RECV, .action = WC_REDUCE},
        {.link = B, .length = HALF, .left = {.buffer = WC_RESULT}, .after = {0, -1}, .direction = WC_SEND},
    };
    for (int i = 0; i < 2; i++) {
        wc_op op = {.id = 1 + (uint64_t)i, .epoch = 1, .seq = 1 + (uint64_t)i, .fingerprint = 7, .input = input[i], .result = result[i],
                    .bytes = {BYTES, BYTES}, .dtype = WC_I32, .op = WC_SUM, .divisor = 1, .lanes = 1, .lane_groups = 1, .stripe = BYTES,
                    .steps_count = 2, .steps = i ? second : first, .filled = filled[i]};
        must(wc_post(engine, &op) == 0, "post");
    }
    put_frame(a[1], (wc_frame){.version = WC_FRAME_VERSION, .epoch = 1, .seq = 2, .fingerprint = 7, .length = HALF}, payload);
    wc_lane_stats to_a = {0}, to_b = {0};
    for (int i = 0; i < DEADLINE_MS && !(to_a.parked && to_b.frames_sent); i++) {
        usleep(1000);
        CHECK(wc_lane_statistics(engine, A, 0, &to_a) == 0 && wc_lane_statistics(engine, B, 0, &to_b) == 0);
    }
    CHECK(to_a.parked && to_b.frames_sent == 1); /* op 2's frame waits for its input; op 1 has sent B one of two */
    __atomic_store_n(&filled[0][1], 1, __ATOMIC_RELEASE); /* no bell says so: the cancel is what looks next */
    __atomic_store_n(&filled[1][0], 1, __ATOMIC_RELEASE);
    CHECK(wc_cancel(engine, 1) == 0);
    wc_event event = next_event(engine, DEADLINE_MS);
    CHECK(event.type == WC_EV_CANCELLED && event.op == 1);
    event = next_event(engine, DEADLINE_MS);
    CHECK(event.type == WC_EV_DONE && event.op == 2);
    CHECK(wc_lane_statistics(engine, B, 0, &to_b) == 0 && to_b.frames_sent == 2);
    fcntl(b[1], F_SETFL, 0);
    CHECK(recv(b[1], heard, 2 * (sizeof(wc_frame) + HALF), MSG_WAITALL) == 2 * (sizeof(wc_frame) + HALF));
    CHECK(((wc_frame *)(heard + sizeof(wc_frame) + HALF))->seq == 2);
    wc_engine_free(engine);
    close(a[1]), close(b[1]);
}

static void test_frames(void)
{
    enum { V = WC_FRAME_VERSION };
    uint8_t payload[RAW_BYTES];
    for (int i = 0; i < RAW_BYTES; i++)
        payload[i] = (uint8_t)(i * 7 + 1);
    for (size_t piece = 1; piece < 400; piece += 61) { /* headers and elements split anywhere; old frames are dropped */
        raw r = raw_start(1);
        wc_frame old = good_frame(), cancelled = good_frame();
        old.epoch = 4;
        cancelled.seq = 1;
        raw_send(&r, old, payload, piece);
        raw_send(&r, cancelled, payload, piece);
        raw_send(&r, good_frame(), payload, piece);
        CHECK(next_event(r.engine, DEADLINE_MS).type == WC_EV_DONE && !memcmp(r.result.data, payload, RAW_BYTES));
        wc_lane_stats stats;
        CHECK(wc_lane_statistics(r.engine, RAW_LINK, 0, &stats) == 0);
        CHECK(stats.frames_dropped == 2 && stats.frames_received == 1 && stats.bytes_received == 3 * (sizeof(wc_frame) + RAW_BYTES));
        raw_stop(&r);
    }
    struct {
        uint64_t epoch, seq, offset;
        uint32_t length, checksum, error;
        uint16_t number;
        uint8_t version, reserved;
    } bad[] = {
        {5, 2, 0, RAW_BYTES, 0, EPROTO, 0, V - 1, 0}, {5, 2, 0, RAW_BYTES, 0, EPROTO, 0, V, 1},
        {5, 2, 4, 4, 0, EPROTO, 0, V, 0},             {5, 2, 0, RAW_BYTES + 4, 0, EPROTO, 0, V, 0},
        {5, 2, 0, 65540, 0, EPROTO, 0, V, 0},         {5, 2, 0, 3, 0, EPROTO, 0, V, 0},
        {5, 2, 0, 0, 0, EPROTO, 0, V, 0},             {5, 2, 0, RAW_BYTES, 0, EPROTO, 1, V, 0},
        {5, 2, 0, RAW_BYTES, 1, EBADMSG, 0, V, 0},    {4, 2, 0, RAW_BYTES, 1, EBADMSG, 0, V, 0},
        {5, 2, UINT64_MAX, 4, 0, EPROTO, 0, V, 0},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        raw r = raw_start(1);
        wc_frame frame = good_frame();
        frame.epoch = bad[i].epoch, frame.seq = bad[i].seq, frame.offset = bad[i].offset, frame.version = bad[i].version;
        frame.reserved = bad[i].reserved, frame.length = bad[i].length, frame.checksum = bad[i].checksum, frame.number = bad[i].number;
        raw_send(&r, frame, payload, 4096);
        wc_event event = next_event(r.engine, DEADLINE_MS);
        if (!CHECK(event.type == WC_EV_LANE_DOWN && event.error == (int)bad[i].error && event.text[0]))
            fprintf(stderr, "  case %zu: event %u, error %d, %s\n", i, event.type, event.error, event.text);
        CHECK(wc_cancel(r.engine, 1) == 0 && next_event(r.engine, DEADLINE_MS).type == WC_EV_CANCELLED);
        raw_stop(&r);
    }
}

/* A frame of a newer epoch waits until this end has learnt of it; a hang-up ends the wait. */
static void test_parked(void)
{
    uint8_t payload[RAW_BYTES] = {9};
    for (int hang_up = 0; hang_up < 2; hang_up++) {
        raw r = raw_start(1);
        wc_frame frame = good_frame();
        frame.epoch = 6;
        raw_send(&r, frame, payload, 4096);
        wc_lane_stats stats = {0};
        for (int i = 0; i < DEADLINE_MS && !stats.parked; i++) {
            usleep(1000);
            CHECK(wc_lane_statistics(r.engine, RAW_LINK, 0, &stats) == 0);
        }
        CHECK(stats.parked);
        if (hang_up) {
            shutdown(r.fd, SHUT_WR);
            wc_event event = next_event(r.engine, DEADLINE_MS);
            CHECK(event.type == WC_EV_LANE_DOWN && event.error == 0);
        } else {
            wc_step line = {.link = RAW_LINK, .length = RAW_BYTES, .to = {.buffer = WC_RESULT}, .after = {-1, -1}, .direction = WC_RECV};
            wc_op op = {.id = 2, .epoch = 6, .seq = 2, .fingerprint = 7, .input = r.result.data, .result = r.result.data,
                        .bytes = {0, RAW_BYTES}, .dtype = WC_I32, .divisor = 1, .lanes = 1, .lane_groups = 1, .steps_count = 1, .steps = &line};
            CHECK(wc_post(r.engine, &op) == -1 && errno == EINVAL); /* not the link's epoch */
            CHECK(wc_link_epoch(r.engine, RAW_LINK, 6) == 0 && wc_cancel(r.engine, 1) == 0 && wc_post(r.engine, &op) == 0);
            CHECK(next_event(r.engine, DEADLINE_MS).type == WC_EV_CANCELLED);
            CHECK(next_event(r.engine, DEADLINE_MS).type == WC_EV_DONE && r.result.data[0] == 9);
            CHECK(wc_link_epoch(r.engine, RAW_LINK, 5) == -1 && errno == EINVAL);
        }
        raw_stop(&r);
    }
}

/* Rank 0 of a ring of three, with this test as both neighbours. In odd rounds the all-gather's bytes of a chunk come
   before the reduce-scatter's, which would land in the same place: no correct neighbour could have made them yet. */
static void test_early(int round)
{
    enum { N = 3, CHUNK = 65536, TOTAL = N * CHUNK };
    static const int in_turn[] = {0, 1, 2, 3}, too_early[] = {3, 0, 1, 2}, chunk_of[] = {2, 1, 0, 2};
    wc_config config = {.workers = 1, .segment = CHUNK, .stripe = CHUNK};
    wc_engine *engine = wc_engine_new(&config);
    int pairs[N][2];
    for (int other = 1; other < N; other++) {
        tcp_pair(pairs[other]);
        fcntl(pairs[other][0], F_SETFL, 0);
        must(wc_link_open(engine, link_to(other), 1, 1, 5) == 0, "link");
        must(wc_lane_attach(engine, link_to(other), 0, 1, pairs[other][1], 1) == 0, "attach");
    }
    buffer input = buffer_new(TOTAL), result = buffer_new(TOTAL);
    memset(input.data, 1, TOTAL);
    wc_step lines[4 * N];
    wc_op op = {.id = 1, .epoch = 5, .seq = 2, .fingerprint = 7, .input = input.data, .result = result.data, .bytes = {TOTAL, TOTAL},
                .dtype = WC_U8, .op = WC_SUM, .divisor = N, .lanes = 1, .lane_groups = 1, .digest = 1, .steps = lines,
                .steps_count = ring_schedule(lines, ALL, N, 0, TOTAL, 1)};
    must(wc_post(engine, &op) == 0, "post");
    uint8_t *bytes = malloc(2 * (CHUNK + sizeof(wc_frame)));
    for (int i = 0; i < 4; i++) {
        int number = round % 2 ? too_early[i] : in_turn[i];
        if (number == 3 && round % 2 == 0) { /* what it is made of: rank 0's first two frames, the second with number 0's */
            size_t want = 2 * (CHUNK + sizeof(wc_frame));
            CHECK(recv(pairs[1][0], bytes, want, MSG_WAITALL) == (ssize_t)want && bytes[want - 1] == 3);
        }
        memset(bytes, number < 2 ? 2 : 3, CHUNK);
        wc_frame frame = good_frame();
        frame.number = (uint16_t)number, frame.offset = (uint64_t)chunk_of[number] * CHUNK, frame.length = CHUNK;
        put_frame(pairs[2][0], frame, bytes);
    }
    wc_event event = next_event(engine, DEADLINE_MS);
    if (round % 2)
        CHECK(event.type == WC_EV_LANE_DOWN && event.error == EPROTO && event.link == link_to(2));
    else
        CHECK(event.type == WC_EV_DONE && event.value == digest_of(result) && result.data[TOTAL - 1] == 3);
    wc_engine_free(engine);
    for (int other = 1; other < N; other++)
        close(pairs[other][0]);
    free(bytes);
    CHECK(buffer_free(&input) && buffer_free(&result));
}

/* One bit of what rank 0 sends to rank 1 is flipped on the way, each bit of an op's frames in turn: rank 1 always finds
   its lane corrupt, and another link takes its place. */
static void test_flips(void)
{
    enum { COUNT = 16, HALF = COUNT / 2 * 4, STREAM = 2 * (int)(sizeof(wc_frame) + HALF) };
    wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
    bed b = {.ranks = 2, .lanes = 1, .lane_groups = 1};
    buffer input[2], result[2];
    for (int r = 0; r < 2; r++) {
        must((b.engines[r] = wc_engine_new(&config)) != NULL, "wc_engine_new");
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        fill(input[r], r);
    }
    uint64_t id = 0, epoch = 0;
    for (int bit = -1; bit < STREAM * 8; bit++) { /* -1: none, to see that the whole stream is tried */
        int ends[2][2], passed_on = 0;
        for (int r = 0; r < 2; r++) {
            tcp_pair(ends[r]);
            must(wc_link_open(b.engines[r], link_to(1 - r), 1, 1, epoch + 1) == 0, "link");
            must(wc_lane_attach(b.engines[r], link_to(1 - r), 0, 1, ends[r][0], 1) == 0, "attach");
            CHECK(post_ring(&b, ALL, 2, r, sum_of(id + 1, epoch + 1, 1, COUNT), input[r], result[r]) == 0);
        }
        id++, epoch++;
        wc_event event[2] = {{0}, {0}};
        while (!event[1].type) {
            struct pollfd waiting[] = {{.fd = ends[0][1], .events = POLLIN}, {.fd = ends[1][1], .events = POLLIN},
                                       {.fd = wc_engine_fd(b.engines[1]), .events = POLLIN}};
            if (!CHECK(poll(waiting, 3, DEADLINE_MS) > 0))
                break; /* a silent wait */
            for (int r = 0; r < 2; r++) {
                uint8_t bytes[STREAM];
                ssize_t n = waiting[r].revents ? recv(ends[r][1], bytes, sizeof bytes, 0) : 0;
                if (n <= 0)
                    continue;
                if (r == 0 && bit >= 8 * passed_on && bit < 8 * (passed_on + (int)n))
                    bytes[bit / 8 - passed_on] ^= (uint8_t)(1u << bit % 8);
                passed_on += r == 0 ? (int)n : 0;
                send(ends[1 - r][1], bytes, (size_t)n, MSG_NOSIGNAL);
            }
            if (waiting[2].revents)
                event[1] = next_event(b.engines[1], 0);
        }
        if (bit < 0) {
            CHECK(event[1].type == WC_EV_DONE && passed_on == STREAM && is_sum(result[1], ALL, 2));
        } else if (!CHECK(event[1].type == WC_EV_LANE_DOWN && event[1].error == EBADMSG)) {
            fprintf(stderr, "  bit %d: event %u, error %d, %s\n", bit, event[1].type, event[1].error, event[1].text);
        }
        for (int r = 0; r < 2; r++) {
            uint8_t rest[STREAM];
            CHECK(wc_link_close(b.engines[r], link_to(1 - r)) == 0 && wc_cancel(b.engines[r], id) == 0);
            fcntl(ends[r][1], F_SETFL, 0);
            while (recv(ends[r][1], rest, sizeof rest, 0) > 0) /* until the engine has closed its end */
                continue;
            close(ends[r][1]);
        }
        for (int r = 0; r < 2; r++) /* what rank 0 has finished, or heard of its lane, comes before */
            do
                event[r] = next_event(b.engines[r], DEADLINE_MS);
            while (event[r].type && event[r].type != WC_EV_CANCELLED && CHECK(event[r].type != WC_EV_MISMATCH));
    }
    bed_stop(&b);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* One frame of several pieces, of each kind that a receiver tells apart, with one bit flipped or none, in reads of any
   size. The first and the last piece are no blocks of the digest; those between are, but for `shifted`. */
static void test_flips_of_kinds(void)
{
    enum { IN_PLACE, SHIFTED, NOT_HASHED, REDUCED, ENCODED, DRAINED, GIVEN_UP, KINDS };
    enum { START = 4096, RAW = 3 * 65536 + 512, TOTAL = START + RAW, SEGMENT = 1 << 20 };
    static uint8_t bytes[sizeof(wc_frame) + RAW], input[TOTAL];
    const wc_place result = {.buffer = WC_RESULT};
    wc_config config = {.workers = 1, .segment = SEGMENT, .stripe = SEGMENT};
    for (int kind = 0; kind < KINDS; kind++) {
        const uint32_t length = kind == ENCODED ? RAW / 512 * 132 : RAW;
        for (int round = 0; round < 40; round++) {
            wc_engine *engine = wc_engine_new(&config);
            buffer out = buffer_new(kind == ENCODED ? TOTAL / 512 * 132 : TOTAL);
            memset(out.data, 0, out.bytes);
            int pair[2];
            tcp_pair(pair);
            fcntl(pair[0], F_SETFL, 0);
            must(engine && wc_link_open(engine, RAW_LINK, 1, 1, 5) == 0 && wc_lane_attach(engine, RAW_LINK, 0, 1, pair[1], 1) == 0, "raw");
            wc_step steps[1] = {{.link = RAW_LINK, .start = START, .length = RAW, .to = result, .left = {.buffer = WC_INPUT},
                                 .after = {-1, -1}, .direction = WC_RECV, .action = kind == REDUCED ? WC_FINAL : WC_COPY, .result = 1}};
            steps[0].to.offset = kind == SHIFTED ? 0 : START;
            wc_op op = {.id = 1, .epoch = 5, .seq = 2, .fingerprint = 7, .input = input, .result = out.data, .bytes = {TOTAL, TOTAL, TOTAL},
                        .dtype = kind == ENCODED ? WC_F32 : WC_I32, .codec = kind == ENCODED ? WC_CODEC_INT8 : WC_CODEC_NONE,
                        .divisor = 1, .lanes = 1, .lane_groups = 1, .digest = kind != NOT_HASHED, .steps_count = 1, .steps = steps};
            if (kind == ENCODED) {
                op.coded = 1u << WC_RESULT | 1u << WC_SCRATCH;
                steps[0].to = (wc_place){.buffer = WC_RESULT, .encoded = 1, .offset = START / 512 * 132};
            }
            CHECK(wc_post(engine, &op) == 0);
            wc_frame frame = good_frame();
            frame.offset = START, frame.length = length, frame.epoch = kind == DRAINED ? 4 : 5;
            for (uint32_t i = 0; i < length; i++)
                bytes[sizeof frame + i] = (uint8_t)draw();
            frame.checksum = checksum_of(START, bytes + sizeof frame, length);
            frame = with_check(frame);
            memcpy(bytes, &frame, sizeof frame);
            size_t size = sizeof frame + length, flipped = round % 4 == 1 ? draw() % (sizeof frame * 8) : draw() % (size * 8);
            if (round % 4) /* else none: what is right is taken */
                bytes[flipped / 8] ^= (uint8_t)(1u << flipped % 8);
            bool down = false, cancelled = false;
            for (size_t at = 0, n; at < size && !down; at += n) {
                if (kind == GIVEN_UP && !cancelled && at > size / 2) {
                    CHECK(wc_cancel(engine, 1) == 0);
                    if (round % 4 == 0) /* before the rest is sent: a busy worker would finish it */
                        CHECK(next_event(engine, DEADLINE_MS).type == WC_EV_CANCELLED);
                    cancelled = true;
                }
                n = 1 + draw() % (round % 2 ? 5000 : (int)(size / 3));
                n = n < size - at ? n : size - at;
                down = send(pair[0], bytes + at, n, MSG_NOSIGNAL) < 0;
            }
            shutdown(pair[0], SHUT_WR);
            wc_event event;
            do
                event = next_event(engine, DEADLINE_MS);
            while (event.type == WC_EV_CANCELLED);
            if (round % 4) {
                if (!CHECK(event.type == WC_EV_LANE_DOWN && event.error == EBADMSG))
                    fprintf(stderr, "  kind %d, bit %zu: event %u, error %d, %s\n", kind, flipped, event.type, event.error, event.text);
            } else if (kind == DRAINED || kind == GIVEN_UP) {
                CHECK(event.type == WC_EV_LANE_DOWN && event.error == 0);
            } else if (!CHECK(event.type == WC_EV_DONE && (!op.digest || event.value == digest_in(out.data, out.bytes, kind == ENCODED ? CODED_BLOCK : WC_DIGEST_BLOCK)))) {
                fprintf(stderr, "  kind %d: event %u, error %d, %s\n", kind, event.type, event.error, event.text);
            }
            wc_engine_free(engine);
            close(pair[0]);
            CHECK(buffer_free(&out));
        }
    }
}

/* Lanes whose ends have agreed to do without checksums: payloads are believed, headers are not. */
static void test_without_checksums(void)
{
    uint8_t payload[RAW_BYTES] = {3};
    for (int flipped = 0; flipped < 2; flipped++) {
        raw r = raw_start(0);
        wc_frame frame = good_frame();
        frame.checksum = 1;
        frame = sealed(frame, payload, RAW_BYTES);
        frame.fingerprint ^= (uint64_t)flipped << 40;
        send(r.fd, &frame, sizeof frame, MSG_NOSIGNAL);
        send(r.fd, payload, RAW_BYTES, MSG_NOSIGNAL);
        wc_event event = next_event(r.engine, DEADLINE_MS);
        CHECK(flipped ? event.type == WC_EV_LANE_DOWN && event.error == EBADMSG : event.type == WC_EV_DONE);
        raw_stop(&r);
    }
}

static void test_garbage(void)
{
    for (int round = 0; round < 300; round++) {
        raw r = raw_start(1);
        uint8_t bytes[1024];
        size_t size = draw() % sizeof bytes + 1;
        wc_frame frame = good_frame();
        for (size_t i = 0; i < sizeof bytes; i++)
            bytes[i] = round % 3 == 0 ? 0 : (uint8_t)draw();
        if (round % 3 == 2) { /* nearly right: one byte of a good header is changed */
            frame = sealed(frame, bytes + sizeof frame, RAW_BYTES);
            memcpy(bytes, &frame, sizeof frame);
            bytes[draw() % sizeof frame] ^= (uint8_t)(1 + draw() % 255);
        }
        send(r.fd, bytes, size, MSG_NOSIGNAL);
        shutdown(r.fd, SHUT_WR); /* truncated, or followed by nothing */
        wc_event event = next_event(r.engine, DEADLINE_MS);
        CHECK(event.type == WC_EV_LANE_DOWN && (event.error == EBADMSG || event.error == 0));
        raw_stop(&r);
    }
}

/* Seqs on a link go up within an epoch: an older one would be drained in silence. */
static void test_seqs(void)
{
    bed b;
    buffer memory = buffer_new(64);
    bed_start(&b, 2, 1, 1, 65536, 65536);
    CHECK(post_ring(&b, ALL, 2, 0, sum_of(1, 1, 3, 16), memory, memory) == 0);
    for (uint64_t seq = 2; seq <= 3; seq++)
        CHECK(post_ring(&b, ALL, 2, 0, sum_of(2, 1, seq, 16), memory, memory) == -1 && errno == EINVAL);
    CHECK(post_ring(&b, ALL, 2, 0, sum_of(2, 1, 4, 16), memory, memory) == 0);
    bed_epoch(&b, 0, 2);
    CHECK(post_ring(&b, ALL, 2, 0, sum_of(3, 2, 1, 16), memory, memory) == 0);
    bed_stop(&b);
    CHECK(buffer_free(&memory));
}

/* Every allocation of every call fails once: the call is refused whole, and goes well the next time. */
static void test_no_memory(void)
{
    enum { COUNT = 300000, FAILS = 100 };
    wc_config config = {.workers = 2, .segment = 65536, .stripe = 65536};
    bed b = {.ranks = 2, .lanes = 2, .lane_groups = 2};
    buffer input[2], result[2];
    int tries = 0;
    for (int r = 0; r < 2; r++) {
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        for (uint64_t i = 0; i < COUNT; i++)
            ((float *)input[r].data)[i] = 1.0f;
        for (allocations = 0; !b.engines[r] && tries < FAILS; allocations = ++tries)
            CHECK((b.engines[r] = wc_engine_new(&config)) != NULL || errno == ENOMEM);
        must(b.engines[r] != NULL && tries > 5, "wc_engine_new");
        int result = -1;
        for (allocations = tries = 0; result < 0 && tries < FAILS; allocations = ++tries)
            CHECK((result = wc_link_open(b.engines[r], link_to(1 - r), 2, 2, 1)) == 0 || errno == ENOMEM);
        CHECK(result == 0 && tries == 5); /* link, lane groups, a command to close it for each worker */
        tries = 0;
    }
    for (uint32_t lane = 0; lane < 2; lane++) {
        int pair[2], lost[2];
        tcp_pair(lost);
        allocations = 0;
        CHECK(wc_lane_attach(b.engines[0], link_to(1), lane, 1, lost[0], 1) == -1 && errno == ENOMEM);
        allocations = -1;
        close(lost[1]);
        tcp_pair(pair);
        for (int r = 0; r < 2; r++)
            must(wc_lane_attach(b.engines[r], link_to(1 - r), lane, 1, pair[r], 1) == 0, "attach");
    }
    static const uint8_t filled[COUNT * 4 / WC_DIGEST_BLOCK + 1] = {[0 ... COUNT * 4 / WC_DIGEST_BLOCK] = 1};
    call c = {.id = 1, .epoch = 1, .seq = 1, .fingerprint = 7, .count = COUNT, .dtype = WC_F32, .op = WC_SUM,
              .filled = filled};
    for (int r = 0; r < 2; r++) {
        int posted = -1;
        for (allocations = tries = 0; posted < 0 && tries < FAILS; allocations = ++tries)
            CHECK((posted = post_exchange(&b, 2, r, c, input[r], result[r])) == 0 || errno == ENOMEM);
        CHECK(posted == 0 && tries > 12);
    }
    allocations = -1;
    for (int r = 0; r < 2; r++)
        CHECK(next_event(b.engines[r], DEADLINE_MS).type == WC_EV_DONE && ((float *)result[r].data)[COUNT - 1] == 2.0f);
    c.id = 2, c.seq = 2;
    CHECK(post_exchange(&b, 2, 0, c, input[0], result[0]) == 0);
    allocations = 0; /* what ends something cannot fail */
    CHECK(wc_cancel(b.engines[0], 2) == 0 && wc_cancel(b.engines[0], 2) == 0);
    CHECK(wc_link_epoch(b.engines[0], link_to(1), 2) == -1 && errno == ENOMEM);
    CHECK(wc_link_close(b.engines[0], link_to(1)) == 0);
    allocations = -1;
    wc_event event;
    CHECK((event = next_event(b.engines[0], DEADLINE_MS)).type == WC_EV_CANCELLED && event.op == 2);
    bed_stop(&b);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* Somebody sends empty frames of an old epoch without end; another link of the same worker has its turns. */
static void test_flood(void)
{
    enum { BATCH = 1024, OPS = 200 };
    raw r = raw_start(1);
    int pair[2];
    tcp_pair(pair);
    must(wc_link_open(r.engine, RAW_LINK + 1, 1, 1, 5) == 0, "link");
    must(wc_lane_attach(r.engine, RAW_LINK + 1, 0, 1, pair[1], 1) == 0, "attach");
    wc_frame old = good_frame(), frames[BATCH];
    old.epoch = 4, old.length = 0;
    for (int i = 0; i < BATCH; i++)
        frames[i] = sealed(old, NULL, 0);
    uint8_t payload[RAW_BYTES] = {5};
    size_t at = 0;
    raw_send(&r, good_frame(), payload, 4096);
    CHECK(next_event(r.engine, DEADLINE_MS).type == WC_EV_DONE);
    for (uint64_t id = 2; id < OPS; id++) {
        wc_step line = {.link = RAW_LINK, .length = RAW_BYTES, .to = {.buffer = WC_RESULT}, .after = {-1, -1}, .direction = WC_RECV};
        wc_op op = {.id = id, .epoch = 5, .seq = id + 1, .fingerprint = 7, .input = r.result.data, .result = r.result.data,
                    .bytes = {0, RAW_BYTES}, .dtype = WC_I32, .divisor = 1, .lanes = 1, .lane_groups = 1, .steps_count = 1, .steps = &line};
        wc_frame frame = good_frame();
        frame.seq = op.seq;
        ssize_t n;
        while ((n = send(pair[0], (uint8_t *)frames + at, sizeof frames - at, MSG_NOSIGNAL)) > 0)
            at = (at + (size_t)n) % sizeof frames;
        CHECK(wc_post(r.engine, &op) == 0);
        raw_send(&r, frame, payload, 4096);
        CHECK(next_event(r.engine, DEADLINE_MS).type == WC_EV_DONE);
    }
    wc_lane_stats stats;
    CHECK(wc_lane_statistics(r.engine, RAW_LINK + 1, 0, &stats) == 0 && stats.attached && stats.frames_dropped > OPS);
    close(pair[0]);
    raw_stop(&r);
}

/* ---- notes ------------------------------------------------------------------------------------------- */

/* Waits for notes, at most `cap` of them; 0: none came in time. */
static int next_notes(wc_engine *engine, wc_note *out, int cap, int timeout_ms)
{
    struct pollfd waiting = {.fd = wc_notes_fd(engine), .events = POLLIN};
    int taken = 0;
    while ((taken = wc_notes_take(engine, out, cap)) == 0)
        if (poll(&waiting, 1, timeout_ms) == 0)
            return 0;
    return taken;
}

/* The note that has this number: its bytes, and how many. */
static uint32_t numbered(uint64_t number, uint8_t *bytes)
{
    memset(bytes, (int)(number * 7), WC_NOTE_BYTES);
    memcpy(bytes, &number, sizeof number);
    return (uint32_t)(sizeof number + number % (WC_NOTE_BYTES - sizeof number + 1));
}

static bool is_numbered(const wc_note *note, uint64_t link, uint64_t number)
{
    uint8_t bytes[WC_NOTE_BYTES];
    uint32_t length = numbered(number, bytes);
    return note->link == link && note->length == length && !memcmp(note->bytes, bytes, length);
}

static int send_numbered(wc_engine *engine, uint64_t link, uint64_t number)
{
    uint8_t bytes[WC_NOTE_BYTES];
    uint32_t length = numbered(number, bytes);
    return wc_note_send(engine, link, bytes, length);
}

/* Two ranks whose links have lanes for notes. */
static void notes_start(bed *b)
{
    bed_start(b, 2, 1, 1, 65536, 65536);
    uint8_t byte = 0;
    CHECK(wc_note_send(b->engines[0], link_to(1), &byte, 1) == -1 && errno == ENOTCONN);
    bed_attach(b, 1, 0, 1);
}

/* While a frame of an op that is not posted waits on the only lane for data, notes pass, both ways and in order. */
static void test_notes_pass_what_waits(void)
{
    enum { COUNT = 300 };
    bed b;
    notes_start(&b);
    buffer input = buffer_new(1024), result = buffer_new(1024);
    CHECK(post_ring(&b, ALL, 2, 0, sum_of(1, 1, 3, 256), input, result) == 0);
    wc_lane_stats stats = {0};
    for (int i = 0; i < DEADLINE_MS && !stats.parked; i++) {
        usleep(1000);
        CHECK(wc_lane_statistics(b.engines[1], link_to(0), 0, &stats) == 0);
    }
    CHECK(stats.parked);
    for (int r = 0; r < 2; r++)
        for (uint64_t i = 0; i < COUNT; i++)
            CHECK(send_numbered(b.engines[r], link_to(1 - r), i) == 0);
    for (int r = 0; r < 2; r++) {
        wc_note notes[7];
        for (uint64_t seen = 0; seen < COUNT;) {
            int n = next_notes(b.engines[r], notes, 7, DEADLINE_MS);
            if (!CHECK(n > 0))
                break;
            for (int i = 0; i < n; i++)
                CHECK(is_numbered(&notes[i], link_to(1 - r), seen++));
        }
        CHECK(wc_lane_statistics(b.engines[r], link_to(1 - r), 1, &stats) == 0 && stats.attached);
        CHECK(stats.frames_sent == COUNT && stats.frames_received == COUNT);
        CHECK(stats.bytes_sent == COUNT * sizeof(wc_note_frame) && stats.bytes_received == stats.bytes_sent);
    }
    bed_stop(&b);
    CHECK(buffer_free(&input) && buffer_free(&result));
}

/* Nobody takes notes: the sender is told at last; then none is missing, and there is room again. */
static void test_notes_wait_in_the_socket(void)
{
    bed b;
    notes_start(&b);
    uint64_t sent = 0, seen = 0;
    while (send_numbered(b.engines[0], link_to(1), sent) == 0)
        sent++;
    CHECK(errno == EAGAIN && sent > 4096);
    while (seen < sent) {
        wc_note notes[64];
        CHECK(wc_notes_take(b.engines[0], notes, 64) == 0); /* nothing came; what waits leaves */
        int n = next_notes(b.engines[1], notes, 64, DEADLINE_MS);
        if (!CHECK(n > 0))
            break;
        for (int i = 0; i < n; i++)
            CHECK(is_numbered(&notes[i], link_to(0), seen++));
    }
    wc_note note;
    CHECK(send_numbered(b.engines[0], link_to(1), 5) == 0);
    CHECK(next_notes(b.engines[1], &note, 1, DEADLINE_MS) == 1 && is_numbered(&note, link_to(0), 5));
    struct pollfd quiet[] = {{.fd = wc_notes_fd(b.engines[0]), .events = POLLIN}, {.fd = wc_notes_fd(b.engines[1]), .events = POLLIN}};
    CHECK(poll(quiet, 2, 0) == 0);
    bed_stop(&b);
}

/* What was sent before a link was closed arrives, and then its end is told, once. */
static void test_notes_end_with_the_link(void)
{
    bed b;
    notes_start(&b);
    wc_note note;
    CHECK(send_numbered(b.engines[0], link_to(1), 1) == 0 && wc_link_close(b.engines[0], link_to(1)) == 0);
    CHECK(next_notes(b.engines[1], &note, 1, DEADLINE_MS) == 1 && is_numbered(&note, link_to(0), 1));
    CHECK(next_notes(b.engines[1], &note, 1, 100) == 0);
    unsigned lost = 0;
    for (int i = 0; i < 2; i++) {
        wc_event event = next_event(b.engines[1], DEADLINE_MS);
        CHECK(event.type == WC_EV_LANE_DOWN && event.error == 0 && event.link == link_to(0));
        lost |= 1u << event.lane;
    }
    CHECK(lost == 3);
    CHECK(next_event(b.engines[1], 10).type == 0 && next_event(b.engines[0], 10).type == 0);
    CHECK(send_numbered(b.engines[1], link_to(0), 1) == -1 && errno == ENOTCONN);
    CHECK(send_numbered(b.engines[0], link_to(1), 1) == -1 && errno == EINVAL);
    bed_stop(&b);
}

static wc_note_frame sealed_note(wc_note_frame frame)
{
    frame.check = (uint32_t)wc_kernels_default()->hash64(&frame.version, sizeof frame - 4);
    return frame;
}

/* Frames that no engine sends end the lane; those before them have arrived. */
static void test_bad_notes(void)
{
    const wc_note_frame good = {.version = WC_FRAME_VERSION, .type = WC_FRAME_NOTE, .length = 3, .bytes = {1, 2, 3}};
    enum { FIELDS = 5, BITS = 8 * (int)sizeof(wc_note_frame) };
    for (int i = 0; i < FIELDS + BITS; i++) {
        raw r = raw_start(1);
        int pair[2];
        tcp_pair(pair);
        must(wc_lane_attach(r.engine, RAW_LINK, 1, 1, pair[1], 1) == 0, "attach");
        wc_note_frame frames[2] = {sealed_note(good), good};
        wc_note_frame *bad = &frames[1];
        bad->version = i == 0 ? WC_FRAME_VERSION + 1 : WC_FRAME_VERSION;
        bad->type = i == 1 ? 0 : i == 2 ? 2 : WC_FRAME_NOTE;
        bad->length = i == 3 ? 0 : i == 4 ? WC_NOTE_BYTES + 1 : 3;
        *bad = sealed_note(*bad);
        if (i >= FIELDS)
            ((uint8_t *)bad)[(i - FIELDS) / 8] ^= (uint8_t)(1u << (i - FIELDS) % 8);
        size_t cut = i % 2 ? sizeof good + 1 : 2 * sizeof good - 1; /* it comes in two pieces */
        send(pair[0], frames, cut, MSG_NOSIGNAL);
        wc_note note = {0};
        CHECK(next_notes(r.engine, &note, 1, DEADLINE_MS) == 1 && note.length == 3 && note.bytes[2] == 3);
        send(pair[0], (uint8_t *)frames + cut, sizeof frames - cut, MSG_NOSIGNAL);
        struct pollfd waiting = {.fd = wc_notes_fd(r.engine), .events = POLLIN};
        wc_event event = {0};
        while (!event.type && CHECK(poll(&waiting, 1, DEADLINE_MS) > 0)) {
            CHECK(wc_notes_take(r.engine, &note, 1) == 0);
            event = next_event(r.engine, 0);
        }
        CHECK(event.type == WC_EV_LANE_DOWN && event.lane == 1 && event.error == (i < FIELDS ? EPROTO : EBADMSG));
        close(pair[0]);
        raw_stop(&r);
    }
}

typedef struct {
    wc_engine *engine;
    uint64_t link;
    int count;
} writer;

static void *write_notes(void *argument)
{
    const writer *w = argument;
    for (int i = 0; i < w->count; i++)
        while (send_numbered(w->engine, w->link, 1) < 0)
            if (errno != EAGAIN)
                return NULL;
    return NULL;
}

/* Several threads send while others take, and the link is closed under all of them. */
static void test_notes_from_threads(void)
{
    enum { EACH = 2000 };
    for (int closed = 0; closed < 2; closed++) {
        bed b;
        notes_start(&b);
        pthread_t threads[4];
        writer writers[2] = {{b.engines[0], link_to(1), EACH}, {b.engines[1], link_to(0), EACH}};
        for (int i = 0; i < 4; i++)
            must(pthread_create(&threads[i], NULL, write_notes, &writers[i % 2]) == 0, "thread");
        for (int seen[2] = {0, 0}, dry = 0; (seen[0] < 2 * EACH || seen[1] < 2 * EACH) && dry < 100;) {
            wc_note notes[8];
            int before = seen[0] + seen[1];
            for (int r = 0; r < 2; r++) {
                int n = next_notes(b.engines[r], notes, 8, 0);
                for (int i = 0; i < n; i++)
                    CHECK(is_numbered(&notes[i], link_to(1 - r), 1));
                seen[r] += n;
            }
            if (closed && seen[0] > 100)
                wc_link_close(b.engines[0], link_to(1));
            if (closed && seen[0] + seen[1] == before)
                dry++, usleep(1000);
        }
        for (int i = 0; i < 4; i++)
            pthread_join(threads[i], NULL);
        bed_stop(&b);
    }
}

/* Ops send their votes themselves, each with its digest, but those that were withheld in time or cancelled: who has
   withheld and then taken all events knows which. */
static void test_ops_send_votes(void)
{
    enum { OPS = 400, COUNT = 256 };
    bed b;
    notes_start(&b);
    buffer input[2], result[2];
    uint64_t said = 0, kept = 0;
    for (int r = 0; r < 2; r++) {
        input[r] = buffer_new(COUNT * 4);
        result[r] = buffer_new(COUNT * 4);
        fill(input[r], r);
    }
    for (uint64_t seq = 1; seq <= OPS; seq++) {
        const int way = (int)(seq % 4); /* 0, 1: nobody stops it. 2: it is withheld, 3: cancelled, on rank 0 */
        call c = sum_of(seq, 1, seq, COUNT);
        c.says = true;
        CHECK(post_ring(&b, ALL, 2, 0, c, input[0], result[0]) == 0);
        if (seq % 8 == 6) /* surely in time: rank 1 has yet to begin */
            wc_vote_withhold(b.engines[0], seq);
        CHECK(post_ring(&b, ALL, 2, 1, c, input[1], result[1]) == 0);
        usleep(way >= 2 ? (useconds_t)(seq % 7) * 20 : 0);
        if (way == 2)
            wc_vote_withhold(b.engines[0], seq);
        if (way == 3)
            CHECK(wc_cancel(b.engines[0], seq) == 0);
        wc_event event[2] = {{0}};
        bool known = wc_engine_events(b.engines[0], event, 1) == 1;
        if (!known)
            event[0] = next_event(b.engines[0], DEADLINE_MS);
        CHECK(event[0].type == WC_EV_DONE || (way == 3 && event[0].type == WC_EV_CANCELLED));
        CHECK(event[0].type != WC_EV_DONE || known || way < 2 || !event[0].voted);
        CHECK(event[0].type != WC_EV_DONE || way >= 2 || event[0].voted);
        CHECK(event[0].type == WC_EV_DONE || !event[0].voted);
        wc_note note;
        if (event[0].voted) {
            CHECK(next_notes(b.engines[1], &note, 1, DEADLINE_MS) == 1 && note.link == link_to(0) && note.length == 16);
            CHECK(!memcmp(note.bytes, &seq, 8) && !memcmp(note.bytes + 8, &event[0].value, 8) && event[0].value);
        } else {
            CHECK(next_notes(b.engines[1], &note, 1, 2) == 0);
        }
        said += event[0].voted;
        kept += !event[0].voted;
        if (way == 3) { /* the next epoch is a clean start */
            CHECK(wc_cancel(b.engines[1], seq) == 0);
            for (int r = 0; r < 2; r++) {
                while (event[r].type != WC_EV_CANCELLED)
                    event[r] = next_event(b.engines[r], DEADLINE_MS);
                while (next_notes(b.engines[r], &note, 1, 1))
                    ;
            }
            bed_stop(&b);
            notes_start(&b);
            continue;
        }
        event[1] = next_event(b.engines[1], DEADLINE_MS);
        CHECK(event[1].type == WC_EV_DONE && event[1].voted && event[1].value == event[0].value);
        CHECK(next_notes(b.engines[0], &note, 1, DEADLINE_MS) == 1 && !memcmp(note.bytes + 8, &event[1].value, 8));
    }
    CHECK(said >= OPS / 2 && kept >= OPS / 8);
    bed_stop(&b);
    for (int r = 0; r < 2; r++)
        CHECK(buffer_free(&input[r]) && buffer_free(&result[r]));
}

/* A link over which nobody takes notes breaks, and its op is done all the same. */
static void test_ops_send_votes_to_nobody(void)
{
    bed b;
    notes_start(&b);
    buffer input = buffer_new(64), result = buffer_new(64);
    while (send_numbered(b.engines[0], link_to(1), 1) == 0)
        ;
    for (int r = 0; r < 2; r++) {
        call c = sum_of(1, 1, 1, 0);
        c.says = r == 0;
        CHECK(post_ring(&b, ALL, 2, r, c, input, result) == 0);
    }
    bool down = false, done = false;
    while (!down || !done) {
        wc_event event = next_event(b.engines[0], DEADLINE_MS);
        if (!CHECK(event.type != 0))
            break;
        down |= event.type == WC_EV_LANE_DOWN && event.lane == 1 && event.error == ENOBUFS;
        done |= event.type == WC_EV_DONE && event.voted;
    }
    bed_stop(&b);
    CHECK(buffer_free(&input) && buffer_free(&result));
}

static void test_arguments(void)
{
    wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
    wc_config bad[] = {config, config, config, config};
    bad[0].workers = 0, bad[1].segment = 1000, bad[2].stripe = 0, bad[3].segment = 1u << 30;
    for (int i = 0; i < 4; i++)
        CHECK(wc_engine_new(&bad[i]) == NULL && errno == EINVAL);
    wc_engine *engine = wc_engine_new(&config);
    uint8_t memory[64] = {0};
    CHECK(wc_link_open(engine, 1, 0, 1, 1) == -1 && wc_link_open(engine, 1, 2, 3, 1) == -1 && wc_link_open(engine, 1, 2, 0, 1) == -1);
    CHECK(wc_link_open(engine, 1, 2, 1, 1) == 0 && wc_link_open(engine, 1, 2, 1, 1) == -1);
    CHECK(wc_lane_attach(engine, 1, 2, 1, -1, 1) == -1 && wc_lane_attach(engine, 2, 0, 1, -1, 1) == -1);
    int spare = dup(0);
    CHECK(wc_lane_attach(engine, 1, 3, 1, spare, 1) == -1 && errno == EINVAL && fcntl(spare, F_GETFD) < 0); /* closed */
    CHECK(wc_note_send(engine, 1, memory, 0) == -1 && errno == EINVAL && wc_note_send(engine, 9, memory, 1) == -1 && errno == EINVAL);
    CHECK(wc_note_send(engine, 1, memory, WC_NOTE_BYTES + 1) == -1 && errno == EINVAL);
    wc_step good = {.link = 1, .length = 64, .to = {.buffer = WC_RESULT}, .after = {-1, -1}, .direction = WC_RECV, .action = WC_COPY};
    wc_op op = {.id = 1, .epoch = 1, .input = memory, .result = memory, .bytes = {64, 64}, .dtype = WC_F32, .divisor = 1, .lanes = 2, .lane_groups = 1,
                .steps_count = 1};
    enum { BAD = 14 };
    wc_step lines[BAD];
    for (int i = 0; i < BAD; i++)
        lines[i] = good;
    lines[0].length = 65, lines[1].to.offset = UINT64_MAX - 3, lines[2].link = 9, lines[3].action = WC_DECODE, lines[4].after[0] = 0;
    lines[5].to.offset = 2, lines[5].length = 8, lines[6].to.buffer = WC_INPUT, lines[7].to.buffer = WC_BUFFERS, lines[8].length = 68;
    lines[9].to.buffer = WC_SCRATCH, lines[10].to.encoded = 1, lines[11].direction = WC_LOCAL, lines[11].after[1] = 5;
    lines[12].direction = WC_LOCAL, lines[12].length = 0, lines[13].direction = WC_SEND, lines[13].result = 1;
    for (int i = 0; i < BAD; i++) {
        op.steps = &lines[i];
        CHECK(wc_post(engine, &op) == -1 && errno == EINVAL);
    }
    op.steps = &good;
    op.vote = memory, op.vote_bytes = WC_NOTE_BYTES + 1;
    CHECK(wc_post(engine, &op) == -1 && errno == EINVAL);
    op.vote_bytes = 16, op.vote_digest = 9;
    CHECK(wc_post(engine, &op) == -1 && errno == EINVAL);
    op.vote_digest = 8, op.vote_links_count = 1;
    CHECK(wc_post(engine, &op) == -1 && errno == EINVAL);
    op.vote_bytes = 0;
    CHECK(wc_post(engine, &op) == 0 && wc_post(engine, &op) == -1); /* the id is taken */
    wc_engine_free(engine);
}

/* What does not look at the wire goes the same way over TLS, where this machine has it. */
static void test_sealed(void)
{
    wc_tls_identity *identity = test_identity();
    sealing = identity;
    if (!sealing)
        return;
    test_ring(2, 1, 1, 203530);
    test_ring(3, 3, 2, 203530);
    test_pipelined();
    for (int round = 0; round < 10; round++)
        test_shrink(round);
    test_cancel();
    test_input_readiness(0);
    sealing = NULL;
    wc_tls_identity_free(identity);
}

/* Lanes through memory: whole ops, ends in mid-op, losses; little memory, so that each end often waits. */
static void test_pipes(void)
{
    for (piping = 8192; piping <= 1 << 18; piping *= 32) {
        for (int n = 2; n <= 4; n++)
            test_ring(n, 3, 2, 203530);
        test_pipelined();
        for (int round = 0; round < 4; round++)
            test_shrink(round);
        for (int round = 0; round < 2; round++)
            test_quantized(round);
        test_cancel();
        test_cancel_leaves_all_lane_groups_first();
        test_input_readiness(1);
        test_lane_loss();
        test_mismatch();
    }
    piping = 0;
}

/* What the first page has of a direction, as in pipe.c. */
typedef struct {
    uint64_t written, gap0[7], read, gap1[7];
    uint32_t reader_waits, gap2[15], writer_waits, gap3[15];
} half;

/* Both ends of a pipe, and its first page. */
static half *pipe_ends(uint64_t size, wc_stream ends[2])
{
    int pair[2], memory = pipe_memory(size);
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "socketpair");
    for (int i = 0; i < 2; i++)
        ends[i] = (wc_stream){.fd = pair[i], .pipe = wc_pipe_new(memory, pair[i], i == 0)};
    half *page = mmap(NULL, WC_PIPE_HEAD, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    must(page != MAP_FAILED, "mmap");
    close(memory);
    return page;
}

/* One end of a pipe that sends numbers and hears them back, each as soon as it can. */
typedef struct {
    wc_stream stream;
    bool begins;
    uint64_t turns, wrong, lost; /* lost: nobody woke it, though there was something */
} speaker;

static void *speak(void *argument)
{
    speaker *s = argument;
    gap = 1 + s->begins;
    for (uint64_t turn = 0; turn < 2 * s->turns; turn++) {
        uint64_t number = turn, got = 0, *at = (turn % 2 == 0) == s->begins ? &number : &got;
        struct iovec piece = {at, sizeof *at};
        bool more, sends = at == &number;
        while (sends ? wc_stream_send(&s->stream, &piece, 1) < 0 : wc_stream_receive(&s->stream, &piece, 1, &more) < 0) {
            struct pollfd waiting = {.fd = s->stream.fd, .events = POLLIN};
            s->lost += poll(&waiting, 1, 2000) == 0;
            wc_stream_events(&s->stream, EPOLLIN);
            if (s->lost)
                return NULL;
        }
        s->wrong += !sends && got != turn;
    }
    return NULL;
}

/* Each end looks once more before it waits: so of two that act in the same moment one wakes the other. */
static void test_pipes_wake(void)
{
    enum { TURNS = 30000 };
    wc_stream streams[2];
    half *page = pipe_ends(4096, streams);
    speaker ends[2];
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        ends[i] = (speaker){.stream = streams[i], .begins = i == 0, .turns = TURNS};
        must(pthread_create(&threads[i], NULL, speak, &ends[i]) == 0, "thread");
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
        CHECK(ends[i].lost == 0 && ends[i].wrong == 0);
    }
    for (int i = 0; i < 2; i++)
        wc_stream_close(&ends[i].stream, true);
    munmap(page, WC_PIPE_HEAD);
}

/* What an end has written before it ended is read; one that is full, and one that has nothing, has epoll wait. */
static void test_ends_of_pipes(void)
{
    enum { SIZE = 4096 };
    static uint8_t bytes[2 * SIZE];
    wc_stream ends[2];
    half *page = pipe_ends(SIZE, ends);
    struct iovec piece = {bytes, sizeof bytes};
    bool more;
    CHECK(wc_stream_receive(&ends[1], &piece, 1, &more) == -1 && errno == EAGAIN);
    CHECK(!(wc_stream_interest(&ends[1], true, false) & EPOLLOUT));
    CHECK(wc_stream_send(&ends[0], &piece, 1) == SIZE);
    CHECK(!(wc_stream_interest(&ends[0], false, true) & EPOLLOUT));
    CHECK(wc_stream_send(&ends[0], &piece, 1) == -1 && errno == EAGAIN);
    CHECK(!(wc_stream_interest(&ends[0], false, true) & EPOLLOUT));
    CHECK(wc_pipe_taken(page, 1) == 0 && wc_pipe_taken(page, 0) == 0);
    piece.iov_len = 100;
    CHECK(wc_stream_receive(&ends[1], &piece, 1, &more) == 100 && more);
    CHECK(wc_stream_interest(&ends[1], true, false) & EPOLLOUT); /* there may be more */
    CHECK(wc_pipe_taken(page, 1) == 100 && wc_pipe_taken(page, 0) == 0);
    CHECK(wc_stream_events(&ends[0], EPOLLIN) & EPOLLOUT && wc_stream_interest(&ends[0], false, true) & EPOLLOUT);
    wc_stream_close(&ends[0], true);
    for (int i = 0; i < 3; i++) /* a byte that wakes comes first, perhaps, and epoll would tell again */
        wc_stream_events(&ends[1], EPOLLIN | EPOLLRDHUP);
    piece.iov_len = sizeof bytes;
    CHECK(wc_stream_receive(&ends[1], &piece, 1, &more) == SIZE - 100);
    CHECK(wc_stream_receive(&ends[1], &piece, 1, &more) == 0);
    wc_stream_close(&ends[1], true);
    munmap(page, WC_PIPE_HEAD);
    static const uint64_t impossible[] = {1, SIZE, 1ull << 40}; /* of what was read: nothing was written yet */
    for (size_t i = 0; i < 3; i++) {
        page = pipe_ends(SIZE, ends);
        __atomic_store_n(&page[0].read, impossible[i], __ATOMIC_SEQ_CST);
        CHECK(wc_stream_send(&ends[0], &piece, 1) == -1 && errno == EPROTO);
        for (int k = 0; k < 2; k++)
            wc_stream_close(&ends[k], true);
        munmap(page, WC_PIPE_HEAD);
    }
}

/* A link of `engine` with one lane that is a pipe, whose other end is the caller's. Returns the memory. */
static half *raw_pipe(wc_engine *engine, uint64_t size, int *other)
{
    int pair[2], memory = pipe_memory(size);
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "socketpair");
    half *at = mmap(NULL, WC_PIPE_HEAD + 2 * size, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    must(at != MAP_FAILED, "mmap");
    must(wc_link_open(engine, RAW_LINK, 1, 1, 1) == 0, "link");
    must(wc_lane_attach_pipe(engine, RAW_LINK, 0, 1, pair[0], memory, 1, 1) == 0, "attach");
    close(memory);
    *other = pair[1];
    return at;
}

/* A neighbour that writes over the counts, sends garbage or ends harms its lane alone. */
static void test_bad_pipes(void)
{
    enum { SIZE = 8192 };
    for (int kind = 0; kind < 4; kind++) {
        wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
        wc_engine *engine = wc_engine_new(&config);
        int other;
        half *halves = raw_pipe(engine, SIZE, &other);
        if (kind == 0)
            __atomic_store_n(&halves[1].written, SIZE + 1, __ATOMIC_SEQ_CST); /* more than there is room for */
        if (kind == 1)
            __atomic_store_n(&halves[1].written, UINT64_MAX, __ATOMIC_SEQ_CST); /* before the beginning */
        if (kind == 2)
            __atomic_store_n(&halves[1].written, SIZE, __ATOMIC_SEQ_CST); /* zeros, which are no frame */
        if (kind == 3)
            shutdown(other, SHUT_RDWR);
        else
            must(send(other, "", 1, 0) == 1, "send");
        wc_event event = next_event(engine, DEADLINE_MS);
        CHECK(event.type == WC_EV_LANE_DOWN && event.link == RAW_LINK);
        CHECK(event.error == (kind == 3 ? 0 : kind == 2 ? EBADMSG : EPROTO));
        CHECK(next_event(engine, 50).type == 0);
        munmap(halves, WC_PIPE_HEAD + 2 * SIZE);
        close(other);
        wc_engine_free(engine);
    }
}

/* Memory that could vanish, or of an odd size, is refused; the socket is the engine's then, too. */
static void test_refused_pipes(void)
{
    wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
    wc_engine *engine = wc_engine_new(&config);
    static const int64_t sizes[] = {0, WC_PIPE_HEAD, WC_PIPE_HEAD + 4096, WC_PIPE_HEAD + 3 * 8192, WC_PIPE_HEAD + (4 << 20), 8192};
    must(wc_link_open(engine, RAW_LINK, 1, 1, 1) == 0, "link");
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        bool whole = sizes[i] == 8192; /* right but for the seal: it may shrink */
        int memory = memfd_create("pipe", MFD_CLOEXEC | MFD_ALLOW_SEALING), pair[2];
        must(ftruncate(memory, whole ? WC_PIPE_HEAD + 2 * 4096 : sizes[i]) == 0, "size");
        must(fcntl(memory, F_ADD_SEALS, whole ? F_SEAL_GROW : F_SEAL_SHRINK) == 0, "seals");
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "socketpair");
        CHECK(wc_lane_attach_pipe(engine, RAW_LINK, 0, 1, pair[0], memory, 0, 1) < 0 && errno == EINVAL);
        char byte;
        CHECK(recv(pair[1], &byte, 1, MSG_DONTWAIT) == 0);
        close(pair[1]);
        close(memory);
    }
    wc_engine_free(engine);
}

int main(void)
{
    static const uint64_t counts[] = {0, 1, 3, 1025, 203530};
    for (int n = 1; n <= 4; n++)
        for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
            for (uint32_t lanes = 1; lanes <= 3; lanes += 2)
                test_ring(n, lanes, lanes == 3 ? 2 : 1, counts[c]);
    test_stripes();
    test_pipelined();
    uplink = 3 << 20;
    test_ring(3, 3, 2, 70001);
    for (int round = 0; round < 20; round++)
        test_shrink(round);
    test_cancel();
    test_lane_loss();
    test_sealed();
    uplink = 0;
    for (int round = 0; round < 40; round++)
        test_shrink(round);
    for (int round = 0; round < 20; round++)
        test_quantized(round);
    test_cancel();
    test_cancel_leaves_all_lane_groups_first();
    for (int round = 0; round < 20; round++)
        test_input_readiness(round);
    test_local_steps_take_turns(true);
    test_local_steps_take_turns(false);
    test_lane_loss();
    test_mismatch();
    test_frames();
    test_parked();
    for (int round = 0; round < 2; round++)
        test_early(round);
    test_flips();
    test_flips_of_kinds();
    test_without_checksums();
    test_garbage();
    test_seqs();
    test_no_memory();
    test_flood();
    test_notes_pass_what_waits();
    test_notes_wait_in_the_socket();
    test_notes_end_with_the_link();
    test_bad_notes();
    test_notes_from_threads();
    test_ops_send_votes();
    test_ops_send_votes_to_nobody();
    test_arguments();
    test_sealed();
    test_pipes();
    test_pipes_wake();
    test_ends_of_pipes();
    test_bad_pipes();
    test_refused_pipes();
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed != 0;
}

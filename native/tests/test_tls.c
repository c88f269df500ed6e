/* TLS lanes of a real engine against an end that the test holds, with a wire between them on which the test says how far
   bytes come: in pieces, cut, flipped, and with frames that are cancelled at every byte of a record. */
#include "../engine/streams/tls.h"
#pragma GCC diagnostic ignored "-Wunused-function" /* of the bed, which has more than is used here */
#include "bed.h"
#include "draw.h"

#include <stdatomic.h>

enum { SEQ = 3, EPOCH = 5 };

/* ---- what the engine's socket takes ------------------------------------------------------------------- */

static atomic_int meant = -1; /* of this socket */
static atomic_long room;      /* it takes so many bytes more */

ssize_t wc_test_send(int fd, const void *bytes, size_t n, int flags);
ssize_t wc_test_send(int fd, const void *bytes, size_t n, int flags)
{
    if (fd != atomic_load(&meant))
        return send(fd, bytes, n, flags);
    long most = atomic_load(&room);
    if (most == 0) {
        poll(NULL, 0, 1); /* the real one has room: epoll says so again at once */
        errno = EAGAIN;
        return -1;
    }
    /* no MSG_MORE: the kernel would wait 200 ms for what does not come */
    ssize_t sent = send(fd, bytes, (size_t)most < n ? (size_t)most : n, flags & ~MSG_MORE);
    if (sent > 0)
        atomic_fetch_sub(&room, sent);
    return sent;
}

static atomic_uint good_for = 1 << 22; /* records: each key */

uint32_t wc_test_records(void);
uint32_t wc_test_records(void)
{
    return atomic_load(&good_for);
}

/* ---- a wire ------------------------------------------------------------------------------------------- */

typedef struct {
    wc_engine *engine;
    uint64_t link;
    int near[2], far[2]; /* the engine's socket and the wire's end; the wire's end and the other's socket */
    wc_tls *other;
    wc_frame header;     /* that the other end is at, and how much of it and its payload is there */
    size_t have;
    uint8_t *payload;
} wire;

static void await_bytes(int fd)
{
    poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, DEADLINE_MS);
}

static long carry(int from, int to, size_t most)
{
    uint8_t bytes[4096];
    long got = recv(from, bytes, most < sizeof bytes ? most : sizeof bytes, MSG_DONTWAIT);
    for (long at = 0, sent; at < got; at += sent) {
        sent = send(to, bytes + at, (size_t)(got - at), MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0)
            sent = errno == EAGAIN ? 0 : got - at; /* nobody is there any more */
    }
    return got > 0 ? got : 0;
}

static uint64_t next_link(void)
{
    static uint64_t links = 1000;
    return ++links;
}

static wire wire_at(wc_engine *engine, const wc_tls_identity *identity, uint64_t link, uint32_t lane)
{
    wire w = {.engine = engine, .link = link, .payload = malloc(1 << 20)};
    tcp_pair(w.near);
    tcp_pair(w.far);
    wc_tls *ours = wc_tls_new(identity, w.near[0], 1);
    w.other = wc_tls_new(identity, w.far[1], 0);
    must(ours && w.other && w.payload, "wire");
    for (int a = 1, b = 1; a || b;) {
        b = wc_tls_handshake(w.other);
        while (carry(w.far[0], w.near[1], 4096))
            ;
        a = wc_tls_handshake(ours);
        while (carry(w.near[1], w.far[0], 4096))
            ;
        must(a >= 0 && b >= 0, "handshake");
    }
    wc_tls_take(w.other);
    must(wc_lane_attach_tls(engine, w.link, lane, 1, ours, 0) == 0, "attach");
    return w;
}

static wire wire_up(wc_engine *engine, const wc_tls_identity *identity)
{
    uint64_t link = next_link();
    must(wc_link_open(engine, link, 1, 1, EPOCH) == 0, "link");
    return wire_at(engine, identity, link, 0);
}

static void wire_down(wire *w)
{
    wc_link_close(w->engine, w->link);
    for (uint64_t id = 1; id < 16; id++)
        wc_release(w->engine, id);
    wc_tls_free(w->other);
    close(w->near[1]);
    close(w->far[0]);
    close(w->far[1]);
    free(w->payload);
}

/* The next event that is not of a wire before. */
static wc_event event_of(const wire *w, int timeout_ms)
{
    wc_event event;
    do
        event = next_event(w->engine, timeout_ms);
    while (event.type == WC_EV_LANE_DOWN && event.link != w->link);
    return event;
}

static uint8_t byte_of(uint64_t seq, uint64_t i)
{
    return (uint8_t)(seq * 31 + i * 7 + i / 251);
}

/* Sends (or receives) `bytes` bytes. */
static wc_op lane_op(const wire *w, wc_step *step, uint64_t id, uint64_t seq, int direction, uint8_t *memory, uint64_t bytes)
{
    *step = (wc_step){.link = w->link, .length = bytes, .to = {.buffer = WC_RESULT}, .left = {.buffer = WC_INPUT},
                      .after = {-1, -1}, .direction = (uint8_t)direction, .result = direction == WC_RECV};
    return (wc_op){.id = id, .epoch = EPOCH, .seq = seq, .fingerprint = 7, .input = memory, .result = memory,
                   .bytes = {direction == WC_SEND ? bytes : 0, direction == WC_RECV ? bytes : 0}, .dtype = WC_U8,
                   .divisor = 1, .lanes = 1, .lane_groups = 1, .steps_count = 1, .digest = direction == WC_RECV, .steps = step};
}

/* What the other end can read now. Returns whole frames that came, up to one. */
static bool take_frame(wire *w)
{
    for (;;) {
        uint8_t *to = w->have < sizeof w->header ? (uint8_t *)&w->header + w->have : w->payload + w->have - sizeof w->header;
        size_t wanted = w->have < sizeof w->header ? sizeof w->header - w->have : sizeof w->header + w->header.length - w->have;
        if (w->have >= sizeof w->header && wanted == 0)
            return true;
        int n = wc_tls_read(w->other, to, (uint32_t)wanted);
        if (n <= 0)
            return false;
        w->have += (size_t)n;
    }
}

static bool payload_is(const wire *w, uint64_t seq)
{
    for (uint64_t i = 0; i < w->header.length; i++)
        if (w->payload[i] != byte_of(seq, w->header.offset + i))
            return false;
    return true;
}

/* Sealed by the other end: frames of an op that the engine receives. Returns the bytes of plaintext that were taken. */
static size_t frame_text(uint8_t *out, uint64_t seq, uint64_t offset, uint32_t length)
{
    wc_frame header = with_check((wc_frame){.version = WC_FRAME_VERSION, .length = length, .epoch = EPOCH, .seq = seq,
                                            .fingerprint = 7, .offset = offset});
    memcpy(out, &header, sizeof header);
    for (uint32_t i = 0; i < length; i++)
        out[sizeof header + i] = byte_of(seq, offset + i);
    return sizeof header + length;
}

/* ---- tests -------------------------------------------------------------------------------------------- */

/* Both ways at once, in pieces of any size, with new keys every few records of each end. */
static void test_pieces(wc_engine *engine, const wc_tls_identity *identity, uint32_t records, size_t longest)
{
    enum { FRAME = 65536, TOTAL = 4 * FRAME };
    atomic_store(&good_for, records);
    wire w = wire_up(engine, identity);
    buffer input = buffer_new(TOTAL), result = buffer_new(TOTAL);
    for (uint64_t i = 0; i < TOTAL; i++)
        input.data[i] = byte_of(SEQ, i);
    wc_step steps[2];
    wc_op out = lane_op(&w, &steps[0], 1, SEQ, WC_SEND, input.data, TOTAL);
    wc_op in = lane_op(&w, &steps[1], 2, SEQ + 1, WC_RECV, result.data, TOTAL);
    CHECK(wc_post(engine, &out) == 0 && wc_post(engine, &in) == 0);
    uint8_t *text = malloc(TOTAL + 4 * sizeof(wc_frame));
    size_t size = 0, said = 0, came = 0;
    for (uint64_t at = 0; at < TOTAL; at += FRAME)
        size += frame_text(text + size, SEQ + 1, at, FRAME);
    int done = 0;
    for (uint64_t turn = 0; (came < TOTAL || done < 2) && turn < 4000000; turn++) {
        if (said < size) {
            size_t n = 1 + draw() % 40000;
            int taken = wc_tls_write(w.other, text + said, (uint32_t)(n < size - said ? n : size - said));
            said += taken > 0 ? (size_t)taken : 0;
        } else {
            wc_tls_flush(w.other);
        }
        long moved = carry(w.far[0], w.near[1], 1 + draw() % longest) + carry(w.near[1], w.far[0], 1 + draw() % longest);
        if (take_frame(&w)) {
            CHECK(w.header.seq == SEQ && w.header.checksum == 0 && payload_is(&w, SEQ));
            came += w.header.length;
            w.have = 0;
        }
        wc_event event = event_of(&w, moved ? 0 : 1);
        if (event.type && !CHECK(event.type == WC_EV_DONE)) {
            fprintf(stderr, "%zu of %d bytes came, %zu of %zu sent: %s\n", came, TOTAL, said, size, event.text);
            break;
        }
        done += event.type == WC_EV_DONE;
    }
    CHECK(came == TOTAL && done == 2);
    bool right = true;
    for (uint64_t i = 0; i < TOTAL; i++)
        right &= result.data[i] == byte_of(SEQ + 1, i);
    CHECK(right);
    wire_down(&w);
    atomic_store(&good_for, 1 << 22);
    free(text);
    CHECK(buffer_free(&input));
    CHECK(buffer_free(&result));
}

/* What was opened before the connection broke is handed over first, and then that it is broken. */
static void test_held(const wc_tls_identity *identity)
{
    int fds[2];
    tcp_pair(fds);
    wc_tls *ours = wc_tls_new(identity, fds[0], 1), *other = wc_tls_new(identity, fds[1], 0);
    must(ours && other, "ends");
    for (int a = 1, b = 1; a || b;) {
        b = wc_tls_handshake(other);
        a = wc_tls_handshake(ours);
        must(a >= 0 && b >= 0, "handshake");
    }
    uint8_t text[100], got[100];
    for (uint64_t i = 0; i < sizeof text; i++)
        text[i] = byte_of(SEQ, i);
    CHECK(wc_tls_write(other, text, sizeof text) == sizeof text);
    await_bytes(fds[0]);
    CHECK(wc_tls_read(ours, got, 40) == 40);
    shutdown(fds[0], SHUT_WR);
    CHECK(wc_tls_write(ours, text, 1) == -1 && errno == EPIPE);
    CHECK(wc_tls_read(ours, got + 40, 100) == 60 && memcmp(got, text, sizeof text) == 0);
    CHECK(wc_tls_read(ours, got, 1) == -1 && errno == EPIPE);
    wc_tls_free(ours);
    wc_tls_free(other);
    close(fds[0]);
    close(fds[1]);
}

/* The wire ends after so many bytes: cut off, unless the other end has said that it ends there. Then one is flipped. */
static void test_ends(wc_engine *engine, const wc_tls_identity *identity)
{
    enum { BYTES = 100, SEALED = sizeof(wc_frame) + BYTES + 22, NOTICE = 24 };
    uint8_t text[sizeof(wc_frame) + BYTES], sealed[SEALED + NOTICE];
    for (size_t end = 0; end <= 2 * sizeof sealed; end++) {
        bool flips = end > sizeof sealed;
        size_t at = flips ? end - sizeof sealed - 1 : end;
        wire w = wire_up(engine, identity);
        buffer result = buffer_new(BYTES);
        wc_step step;
        wc_op in = lane_op(&w, &step, 3, SEQ, WC_RECV, result.data, BYTES);
        CHECK(wc_post(engine, &in) == 0);
        size_t size = frame_text(text, SEQ, 0, BYTES);
        CHECK(wc_tls_write(w.other, text, (uint32_t)size) == (int)size);
        wc_tls_end(w.other);
        for (size_t have = 0; have < sizeof sealed;) {
            await_bytes(w.far[0]);
            ssize_t n = recv(w.far[0], sealed + have, sizeof sealed - have, MSG_DONTWAIT);
            have += n > 0 ? (size_t)n : 0;
        }
        if (flips)
            sealed[at] ^= (uint8_t)(1u << draw() % 8);
        size_t sent = flips ? sizeof sealed : at;
        must(send(w.near[1], sealed, sent, 0) == (ssize_t)sent, "send");
        shutdown(w.near[1], SHUT_WR);
        bool whole = at >= SEALED, orderly = !flips && at == sizeof sealed;
        wc_event event = event_of(&w, DEADLINE_MS);
        if (whole && CHECK(event.type == WC_EV_DONE))
            event = event_of(&w, DEADLINE_MS);
        CHECK(event.type == WC_EV_LANE_DOWN && event.link == w.link);
        if (!CHECK(flips ? event.error != 0 : event.error == (orderly ? 0 : ECONNRESET)))
            fprintf(stderr, "byte %zu: %d %s\n", end, event.error, event.text);
        if (!whole)
            CHECK(wc_cancel(engine, 3) == 0 && event_of(&w, DEADLINE_MS).type == WC_EV_CANCELLED);
        wire_down(&w);
        CHECK(buffer_free(&result));
    }
}

/* The other end sends new keys with each byte of a frame: it is put out long before the frame is whole. */
static void test_barren(wc_engine *engine, const wc_tls_identity *identity)
{
    enum { BYTES = 8000 };
    atomic_store(&good_for, 1);
    wire w = wire_up(engine, identity);
    buffer result = buffer_new(BYTES);
    wc_step step;
    wc_op in = lane_op(&w, &step, 7, SEQ, WC_RECV, result.data, BYTES);
    CHECK(wc_post(engine, &in) == 0);
    uint8_t text[sizeof(wc_frame) + BYTES];
    size_t size = frame_text(text, SEQ, 0, BYTES);
    for (size_t at = 0; at < size; at++) {
        CHECK(wc_tls_write(w.other, text + at, 1) == 1);
        while (carry(w.far[0], w.near[1], 4096))
            ;
    }
    wc_event event = event_of(&w, DEADLINE_MS);
    CHECK(event.type == WC_EV_LANE_DOWN && event.link == w.link && event.error == EPROTO);
    CHECK(strstr(event.text, "more records than data") != NULL);
    CHECK(wc_cancel(engine, 7) == 0 && event_of(&w, DEADLINE_MS).type == WC_EV_CANCELLED);
    wire_down(&w);
    atomic_store(&good_for, 1 << 22);
    CHECK(buffer_free(&result));
}

/* Count the records with new keys, a byte after each, that one of our ends takes before it gives up the other. */
static int taken_keys(const wc_tls_identity *identity, bool owned)
{
    enum { MANY = 1000 };
    wc_tls *ends[2];
    atomic_store(&good_for, 1);
    int fds[2], taken = 0;
    uint8_t text[MANY] = {0}, in[MANY];
    tcp_pair(fds);
    must(tls_pair(identity, fds, ends), "handshake");
    if (owned)
        wc_tls_take(ends[1]);
    for (int i = 0; i < MANY; i++)
        CHECK(wc_tls_write(ends[0], text, 1) == 1);
    for (int n = 1; n > 0 || (n < 0 && errno == EAGAIN); taken += n > 0 ? n : 0) {
        await_bytes(fds[1]);
        n = wc_tls_read(ends[1], in, MANY);
    }
    CHECK(errno == EPROTO && strstr(wc_tls_reason(ends[1]), "more records than data") != NULL);
    for (int i = 0; i < 2; i++) {
        wc_tls_free(ends[i]);
        close(fds[i]);
    }
    atomic_store(&good_for, 1 << 22);
    return taken - 1; /* the first byte has none before it */
}

/* ---- attacks ------------------------------------------------------------------------------------------ */

enum { LANES = 2, FRAMES = 4, FRAME = 4096, TEXT = FRAMES * (sizeof(wc_frame) + FRAME), MOST_RECORDS = 32 };

/* What a lane's other end has sealed: its records, in the order in which they reach the engine. */
typedef struct {
    uint8_t *record[MOST_RECORDS];
    size_t size[MOST_RECORDS];
    int count;
} sealed_lane;

static void put_record(sealed_lane *lane, int at, const uint8_t *record, size_t size)
{
    for (int i = lane->count++; i > at; i--) {
        lane->record[i] = lane->record[i - 1];
        lane->size[i] = lane->size[i - 1];
    }
    lane->record[at] = malloc(size);
    lane->size[at] = size;
    memcpy(lane->record[at], record, size);
}

static void take_record(sealed_lane *lane, int at)
{
    free(lane->record[at]);
    lane->count--;
    for (int i = at; i < lane->count; i++) {
        lane->record[i] = lane->record[i + 1];
        lane->size[i] = lane->size[i + 1];
    }
}

/* One thing that whoever sits on the path may do. False: it has come to nothing. */
static bool attack(sealed_lane *lanes)
{
    sealed_lane *lane = &lanes[draw() % LANES], *other = &lanes[draw() % LANES];
    int at = (int)(draw() % (uint64_t)lane->count), from = (int)(draw() % (uint64_t)other->count);
    switch (draw() % 8) {
    case 0: /* a bit */
        lane->record[at][draw() % lane->size[at]] ^= (uint8_t)(1u << draw() % 8);
        break;
    case 1: /* drop */
        take_record(lane, at);
        break;
    case 2: /* repeat */
        put_record(lane, at + 1, lane->record[at], lane->size[at]);
        break;
    case 3: /* reorder */
        from = (at + 1 + (int)(draw() % (uint64_t)(lane->count - 1))) % lane->count;
        put_record(lane, from < at ? from : from + 1, lane->record[at], lane->size[at]);
        take_record(lane, from < at ? at + 1 : at);
        break;
    case 4: /* splice: a record of the same or the other lane, in between */
        put_record(lane, at, other->record[from], other->size[from]);
        break;
    case 5: /* or in place of one */
        put_record(lane, at, other->record[from], other->size[from]);
        take_record(lane, at + 1);
        return lane != other || at != from;
    case 6: /* bytes are lost */
        lane->size[at] = draw() % lane->size[at];
        break;
    default: /* nothing */
        return false;
    }
    return true;
}

/* Two lanes carry an op to the engine, and somebody on the path does what attack() says: nothing that is changed is ever
   taken for right, and what was attacked is lost at the latest when its connection ends. */
static void test_attack(wc_engine *engine, const wc_tls_identity *identity, uint64_t seed)
{
    enum { BYTES = LANES * FRAMES * FRAME };
    uint64_t link = next_link();
    wire wires[LANES];
    sealed_lane lanes[LANES] = {{.count = 0}};
    uint8_t text[sizeof(wc_frame) + FRAME], sealed[2 * TEXT];
    buffer result = buffer_new(BYTES);
    state = seed * 0x9e3779b97f4a7c15u + 1;
    must(wc_link_open(engine, link, LANES, 1, EPOCH) == 0, "link");
    for (uint32_t l = 0; l < LANES; l++) {
        wires[l] = wire_at(engine, identity, link, l);
        for (uint64_t f = 0; f < FRAMES; f++) {
            size_t size = frame_text(text, SEQ, (l * FRAMES + f) * FRAME, FRAME);
            must(wc_tls_write(wires[l].other, text, (uint32_t)size) == (int)size, "write");
        }
        size_t have = 0;
        while (have < FRAMES * (sizeof text + 22)) {
            await_bytes(wires[l].far[0]);
            ssize_t n = recv(wires[l].far[0], sealed + have, sizeof sealed - have, MSG_DONTWAIT);
            have += n > 0 ? (size_t)n : 0;
        }
        for (size_t at = 0, size; at < have; at += size) {
            size = 5 + (size_t)(sealed[at + 3] << 8 | sealed[at + 4]);
            put_record(&lanes[l], lanes[l].count, sealed + at, size);
        }
    }
    wc_step step;
    wc_op in = lane_op(&wires[0], &step, 6, SEQ, WC_RECV, result.data, BYTES);
    in.lanes = LANES;
    in.stripe = FRAMES * FRAME;
    CHECK(wc_post(engine, &in) == 0);
    bool changed = attack(lanes);
    for (int l = 0; l < LANES; l++) {
        while (lanes[l].count) {
            send(wires[l].near[1], lanes[l].record[0], lanes[l].size[0], MSG_NOSIGNAL);
            take_record(&lanes[l], 0);
        }
        shutdown(wires[l].near[1], SHUT_WR);
    }
    int down = 0, errors = 0;
    bool done = false;
    while (down < LANES) {
        wc_event event = event_of(&wires[0], DEADLINE_MS);
        if (!CHECK(event.type == WC_EV_DONE || event.type == WC_EV_LANE_DOWN))
            break;
        done |= event.type == WC_EV_DONE;
        down += event.type == WC_EV_LANE_DOWN;
        errors += event.type == WC_EV_LANE_DOWN && event.error != 0;
    }
    CHECK(errors == LANES); /* none of them has ended in order */
    bool right = true;
    for (uint64_t i = 0; i < BYTES; i++)
        right &= result.data[i] == byte_of(SEQ, i);
    if (!CHECK(done ? right : changed))
        fprintf(stderr, "attack %llu: %s\n", (unsigned long long)seed, done ? "wrong bytes" : "not done, though nothing was changed");
    if (!done)
        CHECK(wc_cancel(engine, 6) == 0 && event_of(&wires[0], DEADLINE_MS).type == WC_EV_CANCELLED);
    for (int l = 0; l < LANES; l++)
        wire_down(&wires[l]);
    CHECK(buffer_free(&result));
}

/* An op is given up when the socket has taken so many bytes of it, and its memory is written over at once: the frame that
   was begun comes whole and as it was, the next op after it. */
static void test_cancel_at(wc_engine *engine, const wc_tls_identity *identity, long taken)
{
    enum { BYTES = 60000, NEXT = 3000 }; /* more than the three records that are sealed at most before the socket is full */
    wire w = wire_up(engine, identity);
    buffer input = buffer_new(BYTES), next = buffer_new(NEXT);
    for (uint64_t i = 0; i < BYTES; i++)
        input.data[i] = byte_of(SEQ, i);
    for (uint64_t i = 0; i < NEXT; i++)
        next.data[i] = byte_of(SEQ + 1, i);
    wc_step step;
    atomic_store(&room, taken);
    atomic_store(&meant, w.near[0]);
    wc_op first = lane_op(&w, &step, 4, SEQ, WC_SEND, input.data, BYTES);
    CHECK(wc_post(engine, &first) == 0);
    long came = 0;
    while (came < taken) {
        await_bytes(w.near[1]);
        came += carry(w.near[1], w.far[0], 4096);
    }
    CHECK(wc_cancel(engine, 4) == 0 && event_of(&w, DEADLINE_MS).type == WC_EV_CANCELLED);
    memset(input.data, 0xee, BYTES);
    wc_op second = lane_op(&w, &step, 5, SEQ + 1, WC_SEND, next.data, NEXT);
    CHECK(wc_post(engine, &second) == 0);
    atomic_store(&room, 1L << 40);
    size_t before = 0;
    for (int turn = 0; turn < 1000000; turn++) {
        long moved = carry(w.near[1], w.far[0], 4096);
        if (!take_frame(&w)) {
            if (!moved)
                await_bytes(w.near[1]);
            continue;
        }
        if (!CHECK(payload_is(&w, w.header.seq)))
            fprintf(stderr, "cancelled after %ld bytes: seq %d, offset %d\n", taken, (int)w.header.seq, (int)w.header.offset);
        w.have = 0;
        if (w.header.seq == SEQ + 1)
            break;
        before += w.header.length;
    }
    CHECK(w.header.seq == SEQ + 1 && before <= BYTES);
    CHECK(event_of(&w, DEADLINE_MS).type == WC_EV_DONE);
    atomic_store(&meant, -1);
    wire_down(&w);
    CHECK(buffer_free(&input));
    CHECK(buffer_free(&next));
}

/* With arguments: every so many bytes of a record are looked at (of the one after it, fewer), and there are so many
   attacks: 1 10000 is all, in three minutes of one core. */
int main(int count, char **arguments)
{
    long every = count > 1 ? atol(arguments[1]) : 331, attacks = count > 2 ? atol(arguments[2]) : 300;
    wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
    wc_tls_identity *identity = test_identity();
    if (!identity) {
        printf("no OpenSSL 3 here\n");
        return 0;
    }
    wc_engine *engine = wc_engine_new(&config);
    must(engine != NULL, "wc_engine_new");
    test_pieces(engine, identity, 1 << 22, 4096);
    for (uint32_t records = 1; records < 4; records++)
        test_pieces(engine, identity, records, records == 2 ? 60 : 4096);
    test_barren(engine, identity);
    test_held(identity);
    CHECK(taken_keys(identity, false) == 0);
    int taken = taken_keys(identity, true);
    if (!CHECK(taken > 0 && taken < 40))
        fprintf(stderr, "%d keys were taken\n", taken);
    test_ends(engine, identity);
    long first = 16384 + 22, step; /* a whole record */
    for (long taken = 0; taken < 2 * first; taken += step) {
        test_cancel_at(engine, identity, taken);
        step = taken < 100 ? every / 30 + 1 : taken < first + 100 ? every : 2 + 10 * every;
    }
    for (long seed = 0; seed < attacks; seed++)
        test_attack(engine, identity, (uint64_t)seed);
    wc_engine_free(engine);
    wc_tls_identity_free(identity);
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed != 0;
}

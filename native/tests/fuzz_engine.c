/* A fuzzer's target: an engine whose neighbour says what the input says. `make fuzz-native` lets libFuzzer drive it,
   `make san` replays the corpus and seeded mutations of it with a driver of its own.

   An input is a program: raw bytes on a lane, frames with check words that are right and fields that may be, notes
   alike, posts, cancels, epochs. Whatever it says: nothing outside the op's memory is written (the address sanitizer
   sees to that), a digest is of the bytes in memory, each lane ends once, every op ends, calls only differ where a frame
   said so, and notes are no other than those that were sent, in order. */
#pragma GCC diagnostic ignored "-Wunused-function" /* of the bed, which has more than is used here */
#include "bed.h" /* first: it says which system's functions there are */

#include <dirent.h>
#include <sys/stat.h>
#include <time.h>

enum { LANES = 2, NOTES = LANES, SOCKETS, CHUNK = 256, TOTAL = 3 * CHUNK, OPS = 3, LONGEST = 4096, SEQ = 5, EPOCH_STEP = 16 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct {
    const uint8_t *at, *end;
} input;

static uint8_t next_byte(input *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

typedef struct {
    wc_engine *engine;
    uint8_t *input, *result[OPS];
    uint64_t link, epoch, id; /* of this input; ids count up over all of them */
    bool posted[OPS], cancelled[OPS], differs, checksums;
    int fds[SOCKETS];
    int live, lanes; /* ops and lanes that have not ended */
    uint64_t notes, noted; /* sent whole and right so far, and those of them that arrived */
    bool mixed; /* raw bytes were sent on the lane for notes */
} bench;

static const uint64_t SIZES[OPS] = {TOTAL, 132, 0}; /* of results; the second one's is encoded */

static void insist(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "not so: %s\n", what);
        abort();
    }
}

static uint64_t digest_of(const uint8_t *data, size_t bytes)
{
    const wc_kernels *k = wc_kernels_default();
    uint64_t hash = k->hash64(data, bytes);
    return bytes ? k->hash64(&hash, sizeof hash) : k->hash64(&hash, 0);
}

/* Op 0: partial sums that are passed on and overwritten by the result, a last reduction, a copy. Op 1: an encoded
   receive, and what it is decoded. Op 2: an empty frame. */
static uint32_t steps_of(int which, uint64_t link, wc_step *out)
{
    const wc_place result = {.buffer = WC_RESULT}, input = {.buffer = WC_INPUT};
    wc_step recv = {.link = link, .length = CHUNK, .to = result, .left = input, .after = {-1, -1}, .direction = WC_RECV};
    if (which == 2) {
        out[0] = recv, out[0].length = 0;
        return 1;
    }
    if (which == 1) {
        const wc_place coded = {.buffer = WC_RESULT, .encoded = 1}, scratch = {.buffer = WC_SCRATCH};
        out[0] = recv, out[0].to = coded, out[0].result = 1;
        out[1] = (wc_step){.length = CHUNK, .to = scratch, .left = coded, .after = {0, -1}, .direction = WC_LOCAL, .action = WC_DECODE};
        return 2;
    }
    out[0] = recv, out[0].action = WC_REDUCE;
    out[1] = (wc_step){.link = link, .length = CHUNK, .left = result, .after = {0, -1}, .direction = WC_SEND};
    out[2] = recv, out[2].number = 1, out[2].after[0] = 1, out[2].result = 1;
    for (uint64_t i = 1; i < 3; i++) {
        wc_step *step = &out[2 + i];
        *step = recv, step->start = i * CHUNK, step->to.offset = i * CHUNK, step->left.offset = i * CHUNK;
        step->number = (uint16_t)(1 + i), step->result = 1, step->action = i == 1 ? WC_FINAL : WC_COPY;
    }
    return 5;
}

static void post(bench *b, int which)
{
    wc_step steps[8];
    wc_op op = {.id = b->id + (uint64_t)which, .epoch = b->epoch, .seq = SEQ + (uint64_t)which, .fingerprint = 7,
                .input = b->input, .result = b->result[which], .bytes = {TOTAL, which == 1 ? CHUNK : SIZES[which], CHUNK},
                .coded = which == 1 ? 1u << WC_RESULT | 1u << WC_SCRATCH : 0,
                .dtype = which == 1 ? WC_F32 : WC_I32, .codec = which == 1 ? WC_CODEC_INT8 : WC_CODEC_NONE, .divisor = 2,
                .lanes = LANES, .lane_groups = 1, .digest = 1, .steps = steps};
    if (b->posted[which])
        return;
    op.steps_count = steps_of(which, b->link, steps);
    if (wc_post(b->engine, &op) == 0) {
        b->posted[which] = true;
        b->live++;
    } else {
        insist(errno == EINVAL, "a post is refused for its seq or epoch only");
    }
}

static void raw_bytes(bench *b, input *in)
{
    int lane = next_byte(in) % SOCKETS;
    b->mixed |= lane == NOTES;
    size_t n = next_byte(in), rest = (size_t)(in->end - in->at);
    n = n < rest ? n : rest;
    send(b->fds[lane], in->at, n, MSG_NOSIGNAL);
    in->at += n;
}

/* Each field is right unless the input says otherwise. */
static void frame(bench *b, input *in)
{
    uint8_t wrong = next_byte(in), what = next_byte(in), which = what % OPS;
    int lane = what / OPS % LANES;
    uint16_t number = (uint16_t)(what / OPS / LANES % 4);
    wc_frame header = {.version = WC_FRAME_VERSION, .number = which ? 0 : number, .epoch = b->epoch, .seq = SEQ + which, .fingerprint = 7,
                       .offset = which == 0 && number > 1 ? (number - 1u) * CHUNK : 0,
                       .length = which == 2 ? 0 : which == 1 ? 132 / 2 : CHUNK};
    if (wrong & 1)
        header.number = next_byte(in);
    if (wrong & 2)
        header.epoch += (uint64_t)(int64_t)(int8_t)next_byte(in);
    if (wrong & 4)
        header.seq += (uint64_t)(int64_t)(int8_t)next_byte(in);
    if (wrong & 8)
        header.offset += (uint64_t)(int64_t)(int8_t)next_byte(in) * 4;
    if (wrong & 16)
        header.length = next_byte(in) * (next_byte(in) % 2 ? 1u : 300u);
    if (wrong & 32) {
        header.fingerprint += next_byte(in);
        b->differs |= header.fingerprint != 7;
    }
    uint8_t bytes[sizeof header + LONGEST];
    size_t payload = header.length < LONGEST ? header.length : LONGEST;
    memset(bytes + sizeof header, next_byte(in), payload);
    header.checksum = checksum_of(header.offset, bytes + sizeof header, payload);
    if (wrong & 64)
        header.checksum ^= next_byte(in);
    header = with_check(header);
    memcpy(bytes, &header, sizeof header);
    size_t size = sizeof header + payload, piece = wrong & 128 ? 1u + next_byte(in) : size;
    for (size_t at = 0; at < size; at += piece)
        send(b->fds[lane], bytes + at, size - at < piece ? size - at : piece, MSG_NOSIGNAL);
}

static void take_notes(bench *b)
{
    wc_note notes[3];
    for (int n; (n = wc_notes_take(b->engine, notes, 3)) > 0;)
        for (int i = 0; i < n; i++) {
            insist(notes[i].link == b->link && notes[i].length >= 1 && notes[i].length <= WC_NOTE_BYTES, "notes have their bounds");
            uint64_t number;
            memcpy(&number, notes[i].bytes, sizeof number);
            insist(b->mixed || notes[i].length < sizeof number || number == b->noted, "notes arrive in order");
            b->noted++;
        }
}

/* A note that says which one it is, right unless the input says otherwise. */
static void note(bench *b, input *in)
{
    uint8_t wrong = next_byte(in);
    wc_note_frame frame = {.version = WC_FRAME_VERSION, .type = WC_FRAME_NOTE, .length = sizeof b->notes};
    memcpy(frame.bytes, &b->notes, sizeof b->notes);
    if (wrong & 1)
        frame.length = next_byte(in);
    if (wrong & 2)
        frame.type = next_byte(in);
    if (wrong & 4)
        frame.version = next_byte(in);
    frame.check = (uint32_t)wc_kernels_default()->hash64(&frame.version, sizeof frame - 4);
    if (wrong & 8)
        ((uint8_t *)&frame)[next_byte(in) % sizeof frame] ^= next_byte(in);
    size_t piece = wrong & 16 ? 1u + next_byte(in) : sizeof frame;
    for (size_t at = 0; at < sizeof frame; at += piece)
        send(b->fds[NOTES], (uint8_t *)&frame + at, sizeof frame - at < piece ? sizeof frame - at : piece, MSG_NOSIGNAL);
    b->notes++;
    take_notes(b); /* else the socket may be full, and one would be missing */
}

static void take_event(bench *b)
{
    take_notes(b);
    wc_event event = next_event(b->engine, DEADLINE_MS);
    int which = (int)(event.op - b->id);
    insist(event.type != 0, "every op and every lane ends");
    insist(event.type != WC_EV_MISMATCH || b->differs, "calls differ only where a frame says so");
    if (event.type == WC_EV_DONE)
        insist(event.value == digest_of(b->result[which], SIZES[which]), "a digest is of the bytes in memory");
    b->live -= event.type == WC_EV_CANCELLED;
    b->lanes -= event.type == WC_EV_LANE_DOWN;
}

/* The input as a block of a sparse codec that it names, with zeros behind it: what is no block decodes as zeros. */
static void sparse_block(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"generic", "avx2", "avx512", "neon"};
    const uint32_t codec = size < 2 ? 0 : (1u + (data[0] | data[1] << 8) % WC_SPARSE_WHOLE) << 8 | (size % 2 ? 8 : 2);
    const wc_codec_block block = wc_codec_shape((int)codec);
    const size_t n = 1 + size * 13 % WC_SPARSE_BLOCK;
    if (size < 2)
        return;
    uint8_t *coded = calloc(block.bytes, 1), *x = malloc(n * sizeof(float)), *y = malloc(n * sizeof(float));
    memcpy(coded, data + 2, size - 2 < block.bytes ? size - 2 : block.bytes);
    bool valid = wc_codec_valid(codec, coded, n), all_zero = true;
    wc_decode(wc_kernels_default(), codec, WC_F32, x, coded, n);
    for (size_t i = 0; i < n * sizeof(float); i++)
        all_zero &= x[i] == 0;
    insist(valid || all_zero, "what is no block decodes as zeros");
    for (int k = 0; k < 4; k++) {
        if (!wc_kernels_named(names[k]))
            continue;
        wc_decode(wc_kernels_named(names[k]), codec, WC_F32, y, coded, n);
        insist(memcmp(x, y, n * sizeof(float)) == 0, "all tables decode alike");
    }
    free(coded), free(x), free(y);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bench b;
    sparse_block(data, size);
    if (!b.engine) {
        wc_config config = {.workers = 1, .segment = 65536, .stripe = 65536};
        must((b.engine = wc_engine_new(&config)) != NULL, "wc_engine_new");
        must((b.input = calloc(1, TOTAL)) != NULL, "calloc");
        for (int i = 0; i < OPS; i++)
            must((b.result[i] = malloc(SIZES[i])) != NULL || !SIZES[i], "malloc");
        b.id = 1;
    }
    input in = {data, data + size};
    uint8_t options = next_byte(&in);
    b.checksums = options & 1;
    b.link++, b.epoch += EPOCH_STEP, b.lanes = SOCKETS, b.live = 0, b.differs = false;
    b.notes = b.noted = 0, b.mixed = false;
    memset(b.posted, 0, sizeof b.posted), memset(b.cancelled, 0, sizeof b.cancelled);
    must(wc_link_open(b.engine, b.link, LANES, 1, b.epoch) == 0, "link");
    for (uint32_t lane = 0; lane < SOCKETS; lane++) {
        int pair[2];
        must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) == 0, "socketpair");
        b.fds[lane] = pair[0];
        must(wc_lane_attach(b.engine, b.link, lane, 1, pair[1], b.checksums) == 0, "attach");
    }
    for (int i = 0; i < OPS; i++)
        if (options & (2 << i))
            post(&b, i);
    while (in.at < in.end) {
        uint8_t what = next_byte(&in);
        switch (what % 8) {
        case 0:
            raw_bytes(&b, &in);
            break;
        case 1:
            post(&b, what / 8 % OPS);
            break;
        case 2:
            if (b.posted[what / 8 % OPS] && !b.cancelled[what / 8 % OPS])
                must(wc_cancel(b.engine, b.id + what / 8 % OPS) == 0, "cancel");
            b.cancelled[what / 8 % OPS] |= b.posted[what / 8 % OPS];
            break;
        case 3:
            must(wc_link_epoch(b.engine, b.link, ++b.epoch) == 0, "epoch");
            break;
        case 4:
            note(&b, &in);
            break;
        default:
            frame(&b, &in);
        }
    }
    for (int lane = 0; lane < SOCKETS; lane++)
        shutdown(b.fds[lane], SHUT_WR);
    while (b.lanes)
        take_event(&b);
    insist(b.noted <= b.notes || b.mixed, "no note comes twice");
    for (int i = 0; i < OPS; i++)
        if (b.posted[i] && !b.cancelled[i])
            must(wc_cancel(b.engine, b.id + (uint64_t)i) == 0, "cancel");
    while (b.live)
        take_event(&b);
    must(wc_link_close(b.engine, b.link) == 0, "close");
    for (int lane = 0; lane < SOCKETS; lane++)
        close(b.fds[lane]);
    b.id += OPS;
    return 0;
}

#ifndef WC_LIBFUZZER

static uint64_t state = 88172645463325252u;
static uint64_t draw(void) /* xorshift64 (Marsaglia, 2003) */
{
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

static size_t read_file(const char *path, uint8_t *out)
{
    FILE *file = fopen(path, "rb");
    must(file != NULL, path);
    size_t n = fread(out, 1, LONGEST, file);
    fclose(file);
    return n;
}

static size_t mutate(uint8_t *data, size_t size)
{
    for (uint64_t times = 1 + draw() % 4; times; times--) {
        size_t at = size ? draw() % size : 0;
        switch (draw() % 4) {
        case 0: /* a byte goes */
            if (size)
                memmove(data + at, data + at + 1, --size - at);
            break;
        case 1: /* a byte comes */
            if (size < LONGEST) {
                memmove(data + at + 1, data + at, size++ - at);
                data[at] = (uint8_t)draw();
            }
            break;
        default:
            if (size)
                data[at] = draw() % 2 ? (uint8_t)draw() : data[at] ^ (uint8_t)(1u << draw() % 8);
        }
    }
    return size;
}

/* The corpus in a folder, then mutations of it for so many seconds. */
int main(int count, char **arguments)
{
    must(count == 3, "usage: fuzz_engine FOLDER SECONDS");
    static uint8_t corpus[4096][LONGEST];
    static size_t sizes[4096];
    size_t files = 0;
    long runs = 0;
    DIR *folder = opendir(arguments[1]);
    must(folder != NULL, arguments[1]);
    for (struct dirent *entry; (entry = readdir(folder)) && files < 4096;) {
        char path[4096];
        snprintf(path, sizeof path, "%s/%s", arguments[1], entry->d_name);
        if (entry->d_name[0] != '.')
            sizes[files] = read_file(path, corpus[files]), files++;
    }
    closedir(folder);
    must(files > 0, "an empty corpus");
    for (size_t i = 0; i < files; i++, runs++)
        LLVMFuzzerTestOneInput(corpus[i], sizes[i]);
    for (time_t end = time(NULL) + atol(arguments[2]); time(NULL) < end; runs++) {
        static uint8_t data[LONGEST];
        size_t i = draw() % files;
        memcpy(data, corpus[i], sizes[i]);
        LLVMFuzzerTestOneInput(data, mutate(data, sizes[i]));
    }
    printf("%zu files, %ld inputs\n", files, runs);
    return 0;
}

#endif

/* The engine's face: worker threads that move framed bytes over lanes and reduce them on the way. Its files are in
   engine/. */
#ifndef WC_ENGINE_H
#define WC_ENGINE_H

#include <stddef.h>
#include <stdint.h>

#define WC_FRAME_VERSION 4
/* Bytes. A digest is XXH3_64(le64(XXH3_64(block 0)), le64(XXH3_64(block 1)), ...), blocks at absolute offsets of the
   tensor, each in its encoded form where there is a codec. */
#define WC_DIGEST_BLOCK 65536u

/* Every frame on a lane: this header, little endian, then `length` payload bytes. */
typedef struct {
    uint64_t check; /* XXH3-64 of the 56 bytes after it; nothing of them is believed before it is verified */
    uint8_t version;
    uint8_t reserved; /* 0 */
    uint16_t number; /* counts the steps from one rank to another, within an op */
    /* payload bytes, at most the receiver's segment; encoded ones are fewer than the raw ones they stand for */
    uint32_t length;
    uint64_t epoch;
    uint64_t seq;
    uint64_t fingerprint; /* of the op's descriptor */
    uint64_t offset; /* in the whole, bytes of raw elements */
    /* of the payload, 0 without bytes and on lanes whose ends have agreed to do without. It is cut where offset + bytes
       before is a multiple of WC_DIGEST_BLOCK; from 0 on, sum = XXH3_64(le64(sum), le64(XXH3_64(piece))) */
    uint64_t checksum;
    /* Bytes of the payload that came over a connection which was lost in the middle of this frame: only the others
       follow. Length and checksum are of the whole */
    uint64_t taken;
} wc_frame;

/* What a link's note lane carries, and nothing else: frames of one size, little endian. */
#define WC_NOTE_BYTES 128
typedef struct {
    uint32_t check; /* the low half of the XXH3-64 of all that follows; nothing of it is believed before it is verified */
    uint8_t version; /* as of the other frames */
    uint8_t type; /* WC_FRAME_NOTE, WC_FRAME_LOST */
    uint16_t length; /* of the note, 1 to WC_NOTE_BYTES */
    uint8_t bytes[128]; /* the note, or a wc_lost, then zeros */
} wc_note_frame;
enum { WC_FRAME_NOTE = 1, WC_FRAME_LOST };

/* A lane's connection is lost, and this end reads no more of it: so many of its bytes it has taken. Said again, it
   changes nothing. asks: nobody has told this end yet how many of its own were taken. */
typedef struct {
    uint64_t lane, connection, taken, asks;
} wc_lost;

typedef struct wc_engine wc_engine;

typedef struct {
    uint32_t workers; /* threads; lane group t of every link belongs to worker t % workers */
    uint32_t segment; /* largest frame payload, bytes, a multiple of WC_DIGEST_BLOCK */
    uint32_t stripe; /* a step is not cut into parts smaller than this, bytes */
    uint64_t uplink; /* bytes per second that all lanes together give to their sockets at most; 0: without limit */
} wc_config;

enum { WC_SEND, WC_RECV, WC_LOCAL }; /* as wancoll.schedule.steps.Direction */
enum { WC_COPY, WC_REDUCE, WC_FINAL, WC_ENCODE, WC_DECODE }; /* as wancoll.schedule.steps.Action */
enum { WC_INPUT, WC_RESULT, WC_SCRATCH, WC_BUFFERS }; /* as wancoll.schedule.steps.Buffer */
enum { WC_AFTER = 2 }; /* steps that may bound one */

typedef struct {
    uint64_t offset; /* in the buffer, bytes, of the step's first element */
    uint8_t buffer;
    uint8_t encoded; /* the bytes there are in the op's codec */
} wc_place;

/* One step of a schedule: wancoll.schedule.steps.Step says what the fields mean. */
typedef struct {
    uint64_t link; /* of a wire step */
    uint64_t start, length; /* bytes of raw elements; length may be 0: one empty frame still travels */
    wc_place to, left, right;
    int32_t after[2]; /* indices of the earlier steps that bound this one, or -1. Only a receive may come after a send */
    uint16_t number;
    uint8_t direction;
    uint8_t action;
    uint8_t result; /* what is written to the result buffer is final, and so is its encoded form */
    uint8_t measured; /* of WC_ENCODE: its error is added up */
} wc_step;

typedef struct {
    uint64_t id; /* the caller's, unique among live ops */
    uint64_t epoch, seq, fingerprint;
    const void *input; /* never written */
    void *result;
    /* of the input's and the result's elements, and of scratch; the engine finds the memory for scratch */
    uint64_t bytes[3];
    uint32_t dtype, op;
    uint32_t codec;
    /* bits 1 << WC_INPUT and 1 << WC_RESULT: that buffer holds encoded bytes. 1 << WC_SCRATCH: the result is what its
       encoded form says, of which the digest is; it begins where scratch does unless the result's buffer has it */
    uint32_t coded;
    uint32_t kept; /* 1: the result buffer has room for as many elements more, which steps may use and are not digested */
    uint32_t stochastic; /* rounding of the codec; nearest otherwise */
    uint64_t noise[3]; /* keys of stochastic rounding: for results (measured), for what is in the input, for sums */
    uint32_t divisor; /* for WC_FINAL of avg: the world size */
    uint32_t lanes; /* of the epoch's links; part p is meant for lane (seq + p) % lanes: small ops take turns */
    uint32_t lane_groups; /* of the epoch's links */
    uint32_t no_turns; /* 1: part p goes to lane p % lanes and no other, for all ops of the epoch: lane 0 stays warm */
    uint32_t stripe; /* as in wc_config, for this op; 0: the engine's */
    uint32_t steps_count;
    uint32_t digest; /* 0: no digest wanted (no data) */
    const wc_step *steps; /* copied by wc_post */
    /* A byte for each WC_DIGEST_BLOCK of the input's elements: not 0 once the block is there, for good. Steps wait for
       what they read; whoever sets a byte then rings a bell. NULL: all of the input buffer is there */
    const uint8_t *filled;
    /* A word for each WC_DIGEST_BLOCK of the result's elements: becomes `attempt` when the block is final, with release.
       Needs a digest. NULL: nobody looks */
    uint32_t *shown;
    uint32_t attempt;
    /* The vote that the engine sends over these links the moment the op has finished, unless it was withheld; copied by
       wc_post. 0 bytes: none. Where the digest goes in it, little endian; 0: nowhere */
    const void *vote;
    const uint64_t *vote_links;
    uint32_t vote_bytes, vote_links_count, vote_digest;
} wc_op;

enum {
    WC_EV_DONE = 1, /* op finished here: value = digest, extra = bytes sent, in_memory = those of them that went
                       through pipes, saved = raw bytes that the codec kept off the wire, error_squares and norm_squares
                       = sums over the measured encodes, voted = its vote is sent, or about to be */
    WC_EV_CANCELLED, /* the engine no longer touches the op's memory */
    WC_EV_LANE_DOWN, /* link, lane, value = number of the connection; error = errno (0: closed by the other end, EPROTO: broke
                        the protocol, EBADMSG: checksum); text says more. extra = 1: its ops go on, over other lanes and as
                        soon as there is another connection (wc_lane_attach); 0: the link is of no use any more, close it */
    WC_EV_MISMATCH, /* link; op's seq met another fingerprint: value = seq, extra = the other's fingerprint */
    WC_EV_CALLS, /* op = id of a caller, see calls.h */
};

typedef struct {
    uint32_t type;
    uint32_t lane;
    uint32_t voted;
    uint64_t link;
    uint64_t op;
    uint64_t value;
    uint64_t extra;
    uint64_t in_memory, saved;
    double error_squares, norm_squares;
    uint64_t first, last; /* of a DONE or CANCELLED op, while traced: when the first and the last of what others sent came,
                             nanoseconds of CLOCK_MONOTONIC; 0: nothing did */
    int32_t error;
    char text[100];
} wc_event;

/* NULL with errno on failure. Starts the workers. */
wc_engine *wc_engine_new(const wc_config *config);
/* Stops the workers, closes every lane, frees all. */
void wc_engine_free(wc_engine *engine);
/* Readable while events wait (eventfd, non-blocking). */
int wc_engine_fd(const wc_engine *engine);
/* Takes up to cap events; resets the eventfd. Returns how many. */
int wc_engine_events(wc_engine *engine, wc_event *out, int cap);

/* A note that came. */
typedef struct {
    uint64_t link;
    uint32_t length;
    uint8_t bytes[128];
} wc_note;
/* Readable while notes wait, or lanes of notes have something to do: then take some. */
int wc_notes_fd(const wc_engine *engine);
/* Takes notes, up to cap of them (at least 1), those of a link in order; what is left waits in its socket, and links
   take turns. Returns how many; 0 need not mean that none wait. */
int wc_notes_take(wc_engine *engine, wc_note *out, int cap);
/* Sends a note of `length` bytes over the link's note lane: at once, from this thread, or as soon as its socket has
   room. Any thread may. 0, or -1 with errno (EINVAL: no such link, or not 1 to WC_NOTE_BYTES; ENOTCONN: it has no note
   lane yet, or lost it; EAGAIN: too many wait to leave). */
int wc_note_send(wc_engine *engine, uint64_t link, const void *bytes, uint32_t length);
/* From now on the op's vote is not sent any more. Where it is too late WC_EV_DONE waits, or was taken, and says so. An
   op that is cancelled has none either. */
void wc_vote_withhold(wc_engine *engine, uint64_t op);
/* Whether the engine notes from now on when bytes come (wc_event.first, last). Any thread may. */
void wc_trace(wc_engine *engine, int on);

/* ---- TLS 1.3, by OpenSSL 3 of the system, which is loaded when it is first wanted ---- */

/* What this end shows of itself where it accepts: PEM texts of a certificate that its key has signed, and of that Ed25519
   key. NULL with errno (ENOSYS: no OpenSSL 3; EINVAL; ENOMEM), and the reason as text in `size` bytes. Any number of
   connections may be made of it, also when it is freed. */
typedef struct wc_tls_identity wc_tls_identity;
wc_tls_identity *wc_tls_identity_new(const char *certificate, const char *key, char *reason, uint32_t size);
void wc_tls_identity_free(wc_tls_identity *identity);

/* One end of a connection on a connected, non-blocking socket, which stays the caller's until the engine takes both.
   Only the acceptor shows a certificate: whoever dials looks at its key (wc_tls_key). One thread at a time. NULL: no
   memory. */
typedef struct wc_tls wc_tls;
wc_tls *wc_tls_new(const wc_tls_identity *identity, int fd, int accepts);
void wc_tls_free(wc_tls *tls);
enum { WC_TLS_READS = 1, WC_TLS_WRITES = 2 };
/* Goes on with the handshake. 0: it is through; WC_TLS_READS, WC_TLS_WRITES: call again when the socket can be read,
   written; -1 with errno. Where this end dials, the other one's refusal comes as a failure of what is read first. */
int wc_tls_handshake(wc_tls *tls);
enum { WC_KEY_BYTES = 32 };
/* The Ed25519 key that the acceptor has shown, and proved to have. -1: it has shown another kind, or this end accepts. */
int wc_tls_key(const wc_tls *tls, uint8_t *out);
/* Like recv and send of a socket that does not block, for what is said before the engine takes it. What was sent may still
   be here: flush returns 1 when all has left, 0 if the socket is full, -1 with errno. */
int wc_tls_read(wc_tls *tls, void *out, uint32_t size);
int wc_tls_write(wc_tls *tls, const void *bytes, uint32_t size);
int wc_tls_flush(wc_tls *tls);
/* Why it has failed. */
const char *wc_tls_reason(const wc_tls *tls);

/* All calls below only queue a command for the workers: they return at once and take effect in the order of the calls.
   0, or -1 with errno (EINVAL: arguments; ENOMEM). */

/* A link with `lanes` lanes, none attached yet, at `epoch`. Lane i is of track i % lane_groups. The lanes of a group share
   what is to be sent: any of them carries what it has room for. Both ends must say the same numbers. */
int wc_link_open(wc_engine *engine, uint64_t link, uint32_t lanes, uint32_t lane_groups, uint64_t epoch);
/* The lane's connected, non-blocking stream socket; the lane after the last one, number `lanes`, is for notes, and a
   link need not have it. The engine owns fd from here on, also on failure.
   connection: its number, from 1 on; both ends say the same. A lane takes another one in place of one that is lost, or that
   the other end has lost, and bytes that were lost with that go over other lanes, or this one: both ends tell each other
   over the lane for notes how far they came. EINVAL: it had one of this number or above, or is the one for notes.
   checksums: whether payloads carry one, both ways; both ends must say the same. Headers always do. */
int wc_lane_attach(wc_engine *engine, uint64_t link, uint32_t lane, uint64_t connection, int fd, uint32_t checksums);
/* The same for a sealed connection, whose handshake is over; the engine owns tls, and its socket. */
int wc_lane_attach_tls(wc_engine *engine, uint64_t link, uint32_t lane, uint64_t connection, wc_tls *tls,
                       uint32_t checksums);
/* The same for a lane within a machine, through memory: fd, a unix socket between the two ends, only wakes the other one
   then. memory: a memfd of WC_PIPE_HEAD + 2 x n bytes, n a power of two from 4096 to WC_MOST_PIPE, that is sealed against
   shrinking; it stays the caller's. first: this end made it. Not for notes. Where it is lost, so is its link. EINVAL: the memory is of another kind. */
enum { WC_PIPE_HEAD = 4096, WC_MOST_PIPE = 1 << 20 };
int wc_lane_attach_pipe(wc_engine *engine, uint64_t link, uint32_t lane, uint64_t connection, int fd, int memory, int first,
                        uint32_t checksums);
/* By its memory's first WC_PIPE_HEAD bytes: how many bytes of the end that is the first, or the other one, its neighbour
   says that it has read. */
uint64_t wc_pipe_taken(const void *memory, int first);
/* From now on the link is at `epoch`: frames of older epochs are drained and dropped, and so are parts of older epochs
   that wait (a frame that is half sent is completed from a private copy). Call it for every link of the group before
   posting the first op of the epoch. */
int wc_link_epoch(wc_engine *engine, uint64_t link, uint64_t epoch);
/* From now on each lane of the link sends at most `rate` bytes per second; 0: no limit. */
int wc_link_pace(wc_engine *engine, uint64_t link, uint64_t rate);
/* Closes the link's lanes; no LANE_DOWN events follow for it. */
int wc_link_close(wc_engine *engine, uint64_t link);
/* Starts an op. EINVAL: the id is taken by a live op, a link is not open, is not at the op's epoch or has another
   number of lanes or lane groups, two steps from one rank have the same number, a place does not lie within its buffer, or
   a link has had an op of this seq or a later one in this epoch. The memory of an op that was cancelled before may be used again at once: no
   worker starts before all have let go of that one. */
int wc_post(wc_engine *engine, const wc_op *op);
/* Takes an op out of everything; answered by one WC_EV_CANCELLED, or by WC_EV_DONE and then WC_EV_CANCELLED if it had
   just finished; however often it is said before the answer, there is one. Cannot fail for a live op. One that is finished
   or unknown is answered with WC_EV_CANCELLED too. */
int wc_cancel(wc_engine *engine, uint64_t op);
/* An op that has finished is kept, since what it has sent may have to be sent again. No more: it is committed, or nothing
   of this attempt counts. 1: some of it was sent again, and its memory may be read until wc_fence returns; else nobody
   reads it any more. Unknown ops are none. */
int wc_release(wc_engine *engine, uint64_t op);
/* Returns when the workers are through with all that was said before: soon, since they wait for nothing. -1: ENOMEM */
int wc_fence(wc_engine *engine);
/* Whether parts of the op wait for bytes of the input buffer that are not filled yet; 0 for an unknown one. */
int wc_op_lacks_input(wc_engine *engine, uint64_t op);

/* From now on a write to the eventfd makes the workers look which blocks of the input are there. Nobody has to read it. The
   caller keeps it, and removes it before closing it. 0, or -1 with errno. */
int wc_bell_add(wc_engine *engine, int fd);
void wc_bell_remove(wc_engine *engine, int fd);

typedef struct {
    uint64_t bytes_sent, bytes_received; /* on the wire, headers included */
    uint64_t frames_sent, frames_received, frames_dropped; /* dropped: of older epochs, of cancelled or finished ops */
    uint64_t checksum_failures;
    uint32_t parked; /* the next frame waits for a post or a newer epoch */
    uint32_t attached;
} wc_lane_stats;
/* A snapshot. 0, or -1 with errno ENOENT. */
int wc_lane_statistics(wc_engine *engine, uint64_t link, uint32_t lane, wc_lane_stats *out);
/* The newest snapshot of the lane's struct tcp_info, taken at most ten times a second while it sends: bytes copied to
   out, 0 if there is none, -1 with errno ENOENT. */
int wc_lane_tcp_info(wc_engine *engine, uint64_t link, uint32_t lane, void *out, uint32_t size);

#endif

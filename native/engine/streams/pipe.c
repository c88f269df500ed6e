/* Pipes: the bytes of a lane between two processes of one machine, through memory that both have mapped.

   The memory has two halves, one for each direction: a count of the bytes ever written, one of the bytes ever read,
   and the bytes, which go around. Each end changes its own two counts and believes the other's only as far as they
   are possible; it keeps its own outside, so that a neighbour who writes over them harms itself. What is read is copied
   out once, and looked at only then.

   Nobody spins. An end that finds nothing, or no room, says so in the half and looks once more; the other end, once it
   has changed its count, takes that word back and sends a byte over the unix socket on which the two met. Each side
   writes first and looks then, in one order for both (sequentially consistent), so that one of the two sees the other.
   The socket also says when a neighbour has ended. A byte that finds no room is not needed: others wait there.

   The first page holds the counts, each on a line of its own; then come the bytes of the first half and of the second.
   Whoever dialled made it and writes to the first half. It is sealed against shrinking: there is no SIGBUS. */
#include "pipe.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>

enum { PAGE = WC_PIPE_HEAD, SLICES = 4 }; /* counts are told after each such share of a half: so both ends copy at once */

typedef struct {
    _Alignas(64) atomic_ullong written;
    _Alignas(64) atomic_ullong read;
    _Alignas(64) atomic_uint reader_waits;
    _Alignas(64) atomic_uint writer_waits;
} wc_half;

_Static_assert(2 * sizeof(wc_half) <= PAGE, "the counts fit into a page");

struct wc_pipe {
    int socket;
    uint64_t size; /* of a half, a power of two */
    wc_half *out, *in;
    uint8_t *out_bytes, *in_bytes;
    uint64_t written, read;
    bool full, asked, ended;
};

static uint64_t all(uint64_t half)
{
    return PAGE + 2 * half;
}

wc_pipe *wc_pipe_new(int memory, int socket, bool first)
{
    struct stat found;
    int seals = fcntl(memory, F_GET_SEALS);
    uint64_t size = !fstat(memory, &found) && found.st_size > PAGE ? ((uint64_t)found.st_size - PAGE) / 2 : 0;
    if (seals < 0 || !(seals & F_SEAL_SHRINK) || size < PAGE || size > WC_MOST_PIPE || size & (size - 1) ||
        (uint64_t)found.st_size != all(size)) {
        errno = EINVAL;
        return NULL;
    }
    wc_pipe *pipe = calloc(1, sizeof *pipe);
    void *at = pipe ? mmap(NULL, all(size), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0) : MAP_FAILED;
    if (at == MAP_FAILED) {
        free(pipe);
        errno = ENOMEM;
        return NULL;
    }
    wc_half *halves = at;
    uint8_t *bytes = (uint8_t *)at + PAGE;
    *pipe = (wc_pipe){
        .socket = socket,
        .size = size,
        .out = &halves[first ? 0 : 1],
        .in = &halves[first ? 1 : 0],
        .out_bytes = bytes + (first ? 0 : size),
        .in_bytes = bytes + (first ? size : 0),
    };
    return pipe;
}

void wc_pipe_free(wc_pipe *pipe)
{
    if (!pipe)
        return;
    wc_half *at = pipe->out < pipe->in ? pipe->out : pipe->in;
    munmap(at, all(pipe->size));
    free(pipe);
}

/* One direction, as this end sees it. */
typedef struct {
    bool out;
    uint64_t *own;          /* how far this end is */
    atomic_ullong *told;    /* where it says so */
    atomic_ullong *theirs;  /* how far the other end is */
    atomic_uint *waits;     /* this end does */
    atomic_uint *they_wait;
} wc_way;

static wc_way way(wc_pipe *pipe, bool out)
{
    wc_half *half = out ? pipe->out : pipe->in;
    if (out)
        return (wc_way){true, &pipe->written, &half->written, &half->read, &half->writer_waits, &half->reader_waits};
    return (wc_way){false, &pipe->read, &half->read, &half->written, &half->reader_waits, &half->writer_waits};
}

/* Bytes that can be moved now. More than a half: the other end's count is impossible. */
static uint64_t possible(const wc_pipe *pipe, const wc_way *way)
{
    uint64_t theirs = atomic_load(way->theirs);
    return way->out ? pipe->size - (*way->own - theirs) : theirs - *way->own;
}

static void tell(const wc_pipe *pipe, const wc_way *way)
{
    atomic_store(way->told, *way->own);
    WC_GAP();
    if (atomic_load(way->they_wait) && atomic_exchange(way->they_wait, 0) &&
        send(pipe->socket, "", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
        /* It is gone, which epoll says, or has other bytes to read. */
    }
}

/* Whether nothing can be moved, also not after the other end could know that this one waits. */
static bool must_wait(const wc_pipe *pipe, const wc_way *way)
{
    if (possible(pipe, way))
        return false;
    WC_GAP();
    atomic_store(way->waits, 1);
    return !possible(pipe, way);
}

/* n bytes, which do not reach around the end of the half. */
static void copy(const wc_pipe *pipe, const wc_way *way, uint8_t *own, size_t n)
{
    uint8_t *at = (way->out ? pipe->out_bytes : pipe->in_bytes) + (*way->own & (pipe->size - 1));
    memcpy(way->out ? at : own, way->out ? own : at, n);
}

static uint64_t least(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

/* Moves as much as there is of the pieces, and can be moved now: how many bytes; -1 with errno. */
static ssize_t move(wc_pipe *pipe, const wc_way *way, const struct iovec *pieces, int count)
{
    uint64_t can = possible(pipe, way), slice = pipe->size / SLICES, untold = 0;
    size_t moved = 0;
    for (int i = 0; i < count && can; i++) {
        for (size_t done = 0, n; done < pieces[i].iov_len && can; done += n) {
            if (can > pipe->size) {
                errno = EPROTO;
                return -1;
            }
            n = (size_t)least(least(pieces[i].iov_len - done, can), slice - untold);
            n = (size_t)least(n, pipe->size - (*way->own & (pipe->size - 1)));
            copy(pipe, way, (uint8_t *)pieces[i].iov_base + done, n);
            *way->own += n;
            moved += n;
            untold += n;
            can -= n;
            if (untold == slice) {
                tell(pipe, way);
                untold = 0;
            }
            if (!can)
                can = possible(pipe, way);
        }
    }
    if (untold)
        tell(pipe, way);
    return (ssize_t)moved;
}

ssize_t wc_pipe_receive(wc_pipe *pipe, const struct iovec *pieces, int count)
{
    const wc_way in = way(pipe, false);
    bool ended = pipe->ended; /* looked at before the bytes: an end that has ended wrote them before */
    pipe->asked = must_wait(pipe, &in);
    if (!pipe->asked)
        return move(pipe, &in, pieces, count);
    if (ended)
        return 0;
    errno = EAGAIN;
    return -1;
}

/* To an end that has ended, too: what it wrote before is to be read first, and then the lane is down. */
ssize_t wc_pipe_send(wc_pipe *pipe, const struct iovec *pieces, int count)
{
    const wc_way out = way(pipe, true);
    ssize_t sent = 0;
    if (!must_wait(pipe, &out))
        sent = move(pipe, &out, pieces, count);
    pipe->full = sent >= 0 && must_wait(pipe, &out);
    if (sent)
        return sent;
    errno = EAGAIN;
    return -1;
}

void wc_pipe_wake(wc_pipe *pipe)
{
    char bytes[64];
    ssize_t n = recv(pipe->socket, bytes, sizeof bytes, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        pipe->ended = true;
    const wc_way out = way(pipe, true);
    if (pipe->full)
        pipe->full = must_wait(pipe, &out);
}

bool wc_pipe_is_full(const wc_pipe *pipe)
{
    return pipe->full;
}

bool wc_pipe_asked(const wc_pipe *pipe)
{
    return pipe->asked;
}

uint64_t wc_pipe_taken(const void *memory, int first)
{
    const wc_half *halves = memory;
    return atomic_load(&halves[first ? 0 : 1].read);
}

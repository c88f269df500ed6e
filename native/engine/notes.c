/* Notes: short messages from one end of a link to the other, in order, on a connection that carries nothing else.

   A frame of an op that is not posted waits in its lane's socket, and so does all that follows on that lane. What
   members say to each other so that the op can be posted must not wait behind it: hence a lane of its own. There is no
   queue and no thread is woken: the sender, perhaps a worker whose op has ended, writes a note to the socket, and
   whoever takes notes reads it from there. What is not taken stays in the socket. So a flood is the sender's problem,
   and no note needs room anywhere else. Sockets that have something are in an epoll of their own, which wc_notes_fd
   gives out. A connection that is lost takes notes along: another one may take its place, and callers say again over it what
   matters. */
#include "shared.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

_Static_assert(sizeof(wc_note_frame) == 8 + WC_NOTE_BYTES, "a note's frame has no gaps");

void wc_notes_init(wc_notes *notes, wc_engine *engine, uint64_t link, uint32_t lane)
{
    notes->engine = engine;
    notes->link = link;
    notes->lane = lane;
    notes->stream.fd = -1;
    pthread_mutex_init(&notes->mutex, NULL);
}

void wc_notes_destroy(wc_notes *notes)
{
    if (notes->stream.fd >= 0)
        wc_stream_close(&notes->stream, true);
    free(notes->unsent);
    pthread_mutex_destroy(&notes->mutex);
}

/* The epoll that tells of the socket. */
static int epoll_of(const wc_notes *notes)
{
    return notes->owner ? notes->engine->workers[0].epoll : notes->engine->notes;
}

/* Whether whole notes are here: the first worker has left them. */
static bool waits(const wc_notes *notes)
{
    return notes->have >= sizeof(wc_note_frame);
}

static void drop_socket(wc_notes *notes, bool orderly)
{
    /* a forked child may hold a copy: close is not enough */
    epoll_ctl(epoll_of(notes), EPOLL_CTL_DEL, notes->stream.fd, NULL);
    wc_stream_close(&notes->stream, orderly);
    notes->stats.attached = 0;
}

static void end(wc_notes *notes, bool goes_on, int error, const char *format, va_list arguments)
{
    wc_event event = wc_event_lane_down(notes->link, notes->lane, error, format, arguments);
    event.value = notes->connection;
    event.extra = goes_on;
    drop_socket(notes, false);
    wc_events_push(&notes->engine->events, &event);
}

/* The link is of no use any more. */
static void __attribute__((format(printf, 3, 4))) down(wc_notes *notes, int error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    end(notes, false, error, format, arguments);
    va_end(arguments);
}

/* The connection is lost, and the notes on it. */
static void __attribute__((format(printf, 3, 4))) lost(wc_notes *notes, int error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    end(notes, true, error, format, arguments);
    va_end(arguments);
}

/* Tells epoll what the lane waits for: notes, and room for those that have not left. Sealed ones that came with others
   and are not in the socket any more, and those that the first worker has left, are announced as room, which there is as a
   rule; else when the other end reads. */
static void interest(wc_notes *notes)
{
    uint32_t wanted = EPOLLIN | (notes->count || wc_stream_unsent(&notes->stream) || notes->more || waits(notes) ? EPOLLOUT : 0);
    if (wanted == notes->armed)
        return;
    struct epoll_event event = {.events = wanted, .data.u64 = notes->owner ? (uintptr_t)notes | WC_NOTES : notes->link};
    const int how = notes->armed ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;
    if (epoll_ctl(epoll_of(notes), how, notes->stream.fd, &event) < 0)
        down(notes, errno, "notes: %s", strerror(errno));
    else
        notes->armed = wanted;
}

void wc_notes_attach(wc_notes *notes, uint64_t connection, wc_stream stream)
{
    int on = 1;
    setsockopt(stream.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* other kinds of sockets need none */
    pthread_mutex_lock(&notes->mutex);
    if (notes->stream.fd >= 0)
        lost(notes, 0, "notes: another connection takes its place");
    notes->stream = stream;
    notes->connection = connection;
    notes->armed = notes->first = notes->count = 0;
    notes->sent = notes->have = 0;
    if (notes->closed) { /* meanwhile */
        wc_stream_close(&notes->stream, true);
        wc_events_release(&notes->engine->events, 1);
    } else {
        notes->more = wc_stream_holds(&stream);
        notes->stats.attached = 1;
        interest(notes);
    }
    pthread_mutex_unlock(&notes->mutex);
}

void wc_notes_route(wc_notes *notes, wc_owner *owner, uint32_t voter)
{
    pthread_mutex_lock(&notes->mutex);
    const bool open = notes->stream.fd >= 0 && owner != notes->owner;
    if (open && notes->armed)
        epoll_ctl(epoll_of(notes), EPOLL_CTL_DEL, notes->stream.fd, NULL);
    notes->owner = owner;
    notes->voter = voter;
    if (open) {
        notes->armed = 0;
        interest(notes);
    }
    pthread_mutex_unlock(&notes->mutex);
}

void wc_notes_close(wc_notes *notes)
{
    pthread_mutex_lock(&notes->mutex);
    notes->closed = true;
    if (notes->stream.fd >= 0) {
        drop_socket(notes, true);
        wc_events_release(&notes->engine->events, 1);
    }
    pthread_mutex_unlock(&notes->mutex);
}

void wc_notes_statistics(wc_notes *notes, wc_lane_stats *out)
{
    pthread_mutex_lock(&notes->mutex);
    *out = notes->stats;
    pthread_mutex_unlock(&notes->mutex);
}

static uint32_t check_of(const wc_notes *notes, const wc_note_frame *frame)
{
    const size_t size = sizeof *frame - offsetof(wc_note_frame, version);
    return (uint32_t)notes->engine->kernels->hash64(&frame->version, size);
}

/* ---- out ---------------------------------------------------------------------------------------------- */

/* What waits leaves, as far as the socket has room. */
static void flush(wc_notes *notes)
{
    while (notes->stream.fd >= 0 && (notes->count || wc_stream_unsent(&notes->stream))) {
        struct iovec left = {NULL, sizeof(wc_note_frame) - notes->sent};
        if (notes->count)
            left.iov_base = (uint8_t *)&notes->unsent[notes->first] + notes->sent;
        ssize_t n = wc_stream_send(&notes->stream, &left, notes->count ? 1 : 0);
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        if (n < 0) {
            lost(notes, errno, "notes: %s", wc_stream_reason(&notes->stream, errno));
            return;
        }
        notes->stats.bytes_sent += (uint64_t)n;
        notes->sent += (size_t)n;
        if (notes->sent == sizeof(wc_note_frame)) {
            notes->stats.frames_sent++;
            notes->first = (notes->first + 1) % notes->room;
            notes->count--;
            notes->sent = 0;
        }
    }
}

/* False: there are too many, or no memory. */
static bool make_room(wc_notes *notes)
{
    const uint32_t room = notes->room ? 2 * notes->room : 16;
    wc_note_frame *unsent = room <= WC_NOTES_UNSENT ? malloc(room * sizeof *unsent) : NULL;
    for (uint32_t i = 0; unsent && i < notes->count; i++)
        unsent[i] = notes->unsent[(notes->first + i) % notes->room];
    if (!unsent)
        return false;
    free(notes->unsent);
    notes->unsent = unsent;
    notes->room = room;
    notes->first = 0;
    return true;
}

static int put(wc_notes *notes, uint8_t type, const void *bytes, uint32_t length)
{
    if (notes->stream.fd < 0)
        return ENOTCONN;
    if (notes->count == notes->room && !make_room(notes))
        return EAGAIN;
    bool waited = notes->count > 0 || wc_stream_unsent(&notes->stream);
    wc_note_frame *frame = &notes->unsent[(notes->first + notes->count++) % notes->room];
    *frame = (wc_note_frame){.version = WC_FRAME_VERSION, .type = type, .length = (uint16_t)length};
    memcpy(frame->bytes, bytes, length);
    frame->check = check_of(notes, frame);
    if (waited)
        return 0; /* epoll says when there is room */
    flush(notes);
    if (notes->stream.fd >= 0)
        interest(notes);
    return notes->stream.fd >= 0 ? 0 : ENOTCONN;
}

int wc_notes_put(wc_notes *notes, const void *bytes, uint32_t length)
{
    pthread_mutex_lock(&notes->mutex);
    int error = put(notes, WC_FRAME_NOTE, bytes, length);
    pthread_mutex_unlock(&notes->mutex);
    return error;
}

static void tell(wc_notes *notes, uint8_t type, const void *bytes, uint32_t length)
{
    pthread_mutex_lock(&notes->mutex);
    if (put(notes, type, bytes, length) == EAGAIN)
        down(notes, ENOBUFS, "notes: the other end takes none");
    pthread_mutex_unlock(&notes->mutex);
}

void wc_notes_tell(wc_notes *notes, const void *bytes, uint32_t length)
{
    tell(notes, WC_FRAME_NOTE, bytes, length);
}

void wc_notes_say_lost(wc_notes *notes, const wc_lost *lost)
{
    tell(notes, WC_FRAME_LOST, lost, sizeof *lost);
}

void wc_notes_refuse(wc_notes *notes, uint32_t lane, uint64_t taken, uint64_t sent)
{
    pthread_mutex_lock(&notes->mutex);
    if (notes->stream.fd >= 0)
        down(notes, EPROTO, "notes: protocol: %llu bytes taken from lane %u, which has sent %llu",
             (unsigned long long)taken, lane, (unsigned long long)sent);
    pthread_mutex_unlock(&notes->mutex);
}

/* ---- in ----------------------------------------------------------------------------------------------- */

/* False: the lane is down. */
static bool accept_frame(wc_notes *notes, const wc_note_frame *frame)
{
    uint32_t check = check_of(notes, frame);
    if (check != frame->check) {
        notes->stats.checksum_failures++;
        down(notes, EBADMSG, "notes: checksum: %08x over a frame that says %08x", check, frame->check);
    } else if (frame->version != WC_FRAME_VERSION || frame->type < WC_FRAME_NOTE || frame->type > WC_FRAME_LOST) {
        down(notes, EPROTO, "notes: protocol: version %u, type %u of frames, expected %u, %u or %u", frame->version,
             frame->type, WC_FRAME_VERSION, WC_FRAME_NOTE, WC_FRAME_LOST);
    } else if (frame->length < 1 || frame->length > WC_NOTE_BYTES) {
        down(notes, EPROTO, "notes: protocol: a note of %u bytes, expected 1 to %u", frame->length, WC_NOTE_BYTES);
    }
    return notes->stream.fd >= 0;
}

/* One read of at most `cap` notes. */
static void read_some(wc_notes *notes, int cap)
{
    size_t most = (size_t)(cap < WC_NOTES_AT_ONCE ? cap : WC_NOTES_AT_ONCE) * sizeof(wc_note_frame);
    struct iovec room = {(uint8_t *)notes->in + notes->have, most - notes->have};
    bool more;
    ssize_t n = wc_stream_receive(&notes->stream, &room, 1, &more);
    notes->more = more && wc_stream_holds(&notes->stream);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return;
    if (n <= 0) {
        const char *why = n < 0 ? wc_stream_reason(&notes->stream, errno) : "closed by the other end";
        lost(notes, n < 0 ? errno : 0, "notes: %s", why);
        return;
    }
    notes->stats.bytes_received += (uint64_t)n;
    notes->have += (size_t)n;
}

/* The other end has lost a lane: its worker is to hear it. */
static void hear_lost(wc_notes *notes, const wc_note_frame *frame)
{
    wc_link *link = (wc_link *)((char *)notes - offsetof(wc_link, notes));
    wc_lost lost;
    memcpy(&lost, frame->bytes, sizeof lost);
    if (frame->length != sizeof lost || lost.lane >= link->lanes_count || !lost.connection) {
        down(notes, EPROTO, "notes: protocol: connection %llu of lane %llu is lost, expected 1 or above of one below %u",
             (unsigned long long)lost.connection, (unsigned long long)lost.lane, link->lanes_count);
        return;
    }
    wc_command *command = atomic_load(&notes->losing) < WC_MOST_LOSING ? calloc(1, sizeof *command) : NULL;
    if (!command) {
        down(notes, ENOBUFS, "notes: too many lanes are lost at once");
        return;
    }
    atomic_fetch_add(&notes->losing, 1);
    *command = (wc_command){
        .worker = link->lanes[lost.lane].worker, .type = WC_CMD_LOST, .stream.fd = -1, .link = link, .lost = lost};
    wc_command_send(command); /* before the link's close, which waits for this mutex */
}

/* Whole notes, at most `cap`, go to the owner, as far as it takes them, or to out. Reads only where none is left. */
static int receive(wc_notes *notes, wc_note *out, int cap)
{
    if (!waits(notes))
        read_some(notes, cap);
    int taken = 0, told = 0;
    const int whole = (int)(notes->have / sizeof(wc_note_frame));
    for (; notes->stream.fd >= 0 && taken < whole && taken < cap; taken++) {
        const wc_note_frame *frame = &notes->in[taken];
        if (!accept_frame(notes, frame))
            return told;
        if (frame->type == WC_FRAME_LOST)
            hear_lost(notes, frame);
        else if (!notes->owner)
            out[told] = (wc_note){.link = notes->link, .length = frame->length};
        else if (!notes->owner->hear(notes->owner, notes->voter, frame->bytes, frame->length))
            break;
        notes->stats.frames_received++;
        if (frame->type == WC_FRAME_NOTE && !notes->owner)
            memcpy(out[told++].bytes, frame->bytes, frame->length);
    }
    notes->have -= (size_t)taken * sizeof(wc_note_frame);
    memmove(notes->in, &notes->in[taken], notes->have);
    return told;
}

static int serve(wc_notes *notes, uint32_t events, wc_note *out, int cap)
{
    int taken = 0;
    if (notes->stream.fd >= 0 && (events & EPOLLOUT))
        flush(notes);
    if (notes->stream.fd >= 0 && (notes->more || waits(notes) || events & ~(uint32_t)EPOLLOUT))
        taken = receive(notes, out, cap);
    if (notes->stream.fd >= 0)
        interest(notes);
    return taken;
}

int wc_notes_serve(wc_notes *notes, uint32_t events, wc_note *out, int cap)
{
    int taken = 0;
    pthread_mutex_lock(&notes->mutex);
    if (!notes->owner) /* else it is the first worker's since epoll told */
        taken = serve(notes, events, out, cap);
    pthread_mutex_unlock(&notes->mutex);
    return taken;
}

void wc_notes_listen(wc_notes *notes, uint32_t events)
{
    pthread_mutex_lock(&notes->mutex);
    if (notes->owner)
        serve(notes, events, NULL, WC_NOTES_AT_ONCE);
    const bool left = notes->owner && waits(notes);
    pthread_mutex_unlock(&notes->mutex);
    if (left)
        wc_notes_route(notes, NULL, 0);
}

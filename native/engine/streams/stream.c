/* Streams: see stream.h. */
#include "pipe.h"
#include "tls.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

static size_t total(const struct iovec *pieces, int count)
{
    size_t bytes = 0;
    for (int i = 0; i < count; i++)
        bytes += pieces[i].iov_len;
    return bytes;
}

ssize_t wc_stream_receive(wc_stream *stream, struct iovec *pieces, int count, bool *more)
{
    if (stream->tls)
        return wc_tls_receive(stream->tls, pieces, count, more);
    if (stream->pipe) {
        ssize_t got = wc_pipe_receive(stream->pipe, pieces, count);
        *more = got > 0;
        return got;
    }
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    ssize_t n;
    do
        n = recvmsg(stream->fd, &message, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    *more = n > 0 && (size_t)n == total(pieces, count);
    return n;
}

ssize_t wc_stream_send(wc_stream *stream, struct iovec *pieces, int count)
{
    if (stream->tls)
        return wc_tls_send(stream->tls, pieces, count);
    if (stream->pipe)
        return wc_pipe_send(stream->pipe, pieces, count);
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = (size_t)count};
    ssize_t n;
    do
        n = sendmsg(stream->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    return n;
}

const char *wc_stream_reason(const wc_stream *stream, int error)
{
    return stream->tls ? wc_tls_reason(stream->tls) : strerror(error);
}

uint32_t wc_stream_interest(const wc_stream *stream, bool reads, bool writes)
{
    const wc_pipe *pipe = stream->pipe;
    if (pipe) { /* what it waits for comes as input; what it need not wait for is said as room, which there is */
        bool now = (reads && !wc_pipe_asked(pipe)) || (writes && !wc_pipe_is_full(pipe));
        return EPOLLRDHUP | EPOLLIN | (now ? EPOLLOUT : 0);
    }
    return EPOLLRDHUP | (reads ? EPOLLIN : 0) | (writes || wc_stream_unsent(stream) ? EPOLLOUT : 0);
}

uint32_t wc_stream_events(const wc_stream *stream, uint32_t events)
{
    if (!stream->pipe)
        return events;
    if (events & ~(uint32_t)EPOLLOUT)
        wc_pipe_wake(stream->pipe);
    return events | EPOLLIN | EPOLLOUT;
}

bool wc_stream_unsent(const wc_stream *stream)
{
    return stream->tls && wc_tls_unsent(stream->tls);
}

bool wc_stream_holds(const wc_stream *stream)
{
    return stream->tls && wc_tls_holds(stream->tls);
}

bool wc_stream_in_memory(const wc_stream *stream)
{
    return stream->pipe;
}

void wc_stream_rest(const wc_stream *stream, bool rest)
{
    if (stream->tls)
        wc_tls_rest(stream->tls, rest);
}

void wc_stream_close(wc_stream *stream, bool orderly)
{
    /* Reset instead of an orderly end: an end queued behind data would not reach a neighbour that has stopped
       reading. */
    const struct linger reset = {.l_onoff = 1};
    if (!orderly)
        setsockopt(stream->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    else if (stream->tls)
        wc_tls_end(stream->tls);
    wc_tls_free(stream->tls);
    wc_pipe_free(stream->pipe);
    close(stream->fd);
    *stream = (wc_stream){.fd = -1};
}

/* Streams: see stream.h. */
#include "tls.h"

#include <errno.h>
#include <string.h>
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

bool wc_stream_unsent(const wc_stream *stream)
{
    return stream->tls && wc_tls_unsent(stream->tls);
}

bool wc_stream_holds(const wc_stream *stream)
{
    return stream->tls && wc_tls_holds(stream->tls);
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
    close(stream->fd);
    *stream = (wc_stream){.fd = -1};
}

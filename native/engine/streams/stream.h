/* Streams: the bytes of one connection, in and out. No other state of the engine knows what they are made of on the
   way. */
#ifndef WC_STREAM_H
#define WC_STREAM_H

#include "common.h"

#include <sys/types.h>
#include <sys/uio.h>

typedef struct {
    int fd;        /* -1: not here yet, or lost */
    wc_tls *tls;   /* NULL: plain, or: */
    wc_pipe *pipe; /* NULL: the socket carries the bytes */
} wc_stream;

/* What has come, into the pieces in order: how many bytes, 0 at an orderly end, -1 with errno (EAGAIN: epoll says when
   there is more). *more: there may be more at once, and epoll need not say so. */
ssize_t wc_stream_receive(wc_stream *stream, struct iovec *pieces, int count, bool *more);
/* How many bytes of the pieces, in order, it has taken: they are on their way, whatever becomes of the memory they were
   in. -1 with errno (EAGAIN: epoll says when there is room). */
ssize_t wc_stream_send(wc_stream *stream, struct iovec *pieces, int count);
/* Why it has failed, for people; error: the errno that it gave. */
const char *wc_stream_reason(const wc_stream *stream, int error);
/* What epoll shall tell, of one that is to be read, and of one that waits for room; the other end's end always. */
uint32_t wc_stream_interest(const wc_stream *stream, bool reads, bool writes);
/* What of that it means that epoll has told these events. */
uint32_t wc_stream_events(const wc_stream *stream, uint32_t events);
/* Whether something that it has taken waits for room: then send, of nothing at least, when there is some. */
bool wc_stream_unsent(const wc_stream *stream);
/* Whether there are bytes that came and are not in the socket any more. */
bool wc_stream_holds(const wc_stream *stream);
/* Whether its bytes go through memory that both ends share. */
bool wc_stream_in_memory(const wc_stream *stream);
/* While it rests it takes nothing from the socket; what it holds can be had. */
void wc_stream_rest(const wc_stream *stream, bool rest);
/* Ends it, the descriptor too. orderly: the other end is told so, else it takes it for cut off (a plain one cannot). */
void wc_stream_close(wc_stream *stream, bool orderly);

#endif

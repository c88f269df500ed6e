/* Pipes: see the beginning of pipe.c. */
#ifndef WC_PIPE_H
#define WC_PIPE_H

#include "stream.h"

/* NULL with errno (EINVAL: the memory has another size than wc_lane_attach_pipe says, or may shrink; ENOMEM). first: the end that made
   the memory. */
wc_pipe *wc_pipe_new(int memory, int socket, bool first);
void wc_pipe_free(wc_pipe *pipe);
/* The calls of a stream */
ssize_t wc_pipe_receive(wc_pipe *pipe, const struct iovec *pieces, int count);
ssize_t wc_pipe_send(wc_pipe *pipe, const struct iovec *pieces, int count);
/* Takes what has come on the socket: that there is something to look at, or that the other end is gone. */
void wc_pipe_wake(wc_pipe *pipe);
bool wc_pipe_is_full(const wc_pipe *pipe); /* no room yet: the other end wakes this one when it has made some */
bool wc_pipe_asked(const wc_pipe *pipe); /* nothing is there, and the other end wakes this one when there is something */

#endif

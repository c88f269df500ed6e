/* A lane: one socket, the parts that it has begun, and what happens to them when the socket is lost or an epoch
   ends. */
#include "shared.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

void wc_lane_init(wc_lane *lane, wc_link *link, wc_worker *worker, uint32_t index)
{
    lane->link = link;
    lane->group = &link->groups[index % link->groups_count];
    lane->worker = worker;
    lane->index = index;
    lane->stream.fd = -1;
    pthread_mutex_init(&lane->info_mutex, NULL);
}

void wc_lane_destroy(wc_lane *lane)
{
    if (lane->stream.fd >= 0)
        wc_stream_close(&lane->stream, true);
    free(lane->tx_private);
    free(lane->log);
    pthread_mutex_destroy(&lane->info_mutex);
}

/* Tells epoll what this lane waits for: input unless parked, room to send if blocked. */
void wc_lane_interest(wc_lane *lane)
{
    if (lane->stream.fd < 0)
        return;
    uint32_t wanted = wc_stream_interest(&lane->stream, !lane->rx_parked, lane->blocked);
    atomic_store_explicit(&lane->counters.parked, lane->rx_parked, memory_order_relaxed);
    if (wanted == lane->armed)
        return;
    struct epoll_event event = {.events = wanted, .data.ptr = lane};
    if (epoll_ctl(lane->worker->epoll, lane->armed ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, lane->stream.fd, &event) < 0)
        wc_lane_down(lane, errno, "epoll: %s", strerror(errno));
    else
        lane->armed = wanted;
}

/* The parts that it has begun wait: for the other end to say how far they came, or for the end of their op. */
static void drop_socket(wc_lane *lane, bool orderly)
{
    /* a forked child may hold a copy: close is not enough */
    epoll_ctl(lane->worker->epoll, EPOLL_CTL_DEL, lane->stream.fd, NULL);
    wc_stream_close(&lane->stream, orderly);
    if (lane->thirst.listed)
        wc_list_remove(&lane->worker->thirsty, &lane->thirst);
    lane->tx_first = lane->tx_count = 0;
    lane->tx_sent = 0;
    free(lane->tx_private);
    lane->tx_private = NULL;
    lane->rx_part = NULL;
    lane->rx_parked = lane->rx_body = lane->rx_more = lane->blocked = false;
    lane->rx_have = lane->armed = 0;
    pthread_mutex_lock(&lane->info_mutex);
    lane->info_bytes = 0;
    pthread_mutex_unlock(&lane->info_mutex);
    lane->info_at = 0;
    atomic_store_explicit(&lane->counters.attached, false, memory_order_relaxed);
    atomic_store_explicit(&lane->counters.parked, false, memory_order_relaxed);
}

static void end(wc_lane *lane, bool goes_on, int error, const char *format, va_list arguments)
{
    if (lane->stream.fd < 0)
        return;
    wc_event event = wc_event_lane_down(lane->link->id, lane->index, error, format, arguments);
    const uint64_t taken = lane->rx_begin + (lane->rx_body ? wc_frame_bytes(&lane->rx_frame) - lane->rx_left : 0);
    event.value = lane->connection;
    event.extra = goes_on && wc_lost_begin(lane);
    drop_socket(lane, false);
    if (event.extra) {
        if (taken) {
            lane->took_on = lane->connection;
            lane->took = taken;
        }
        wc_lost_say(lane, lane->connection);
    }
    wc_events_push(&lane->worker->engine->events, &event);
}

void wc_lane_down(wc_lane *lane, int error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    end(lane, false, error, format, arguments);
    va_end(arguments);
}

void wc_lane_lost(wc_lane *lane, int error, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    end(lane, true, error, format, arguments);
    va_end(arguments);
}

void wc_lane_hear(wc_lane *lane, const wc_lost *lost)
{
    const bool here = lost->connection == lane->connection && lane->stream.fd >= 0;
    if (here)
        wc_lane_lost(lane, 0, "the other end has lost it");
    const bool news = lost->connection > lane->said; /* perhaps of one that this end never had */
    wc_lost_heard(lane, lost);
    if (news || (lost->asks && !here))
        wc_lost_say(lane, lost->connection);
}

void wc_lane_set_pace(wc_lane *lane, uint64_t rate)
{
    lane->pace = rate;
    uint64_t most = rate ? rate : UINT64_MAX;
    if (lane->stream.fd >= 0)
        /* kinds of sockets that have no pace need none */
        setsockopt(lane->stream.fd, SOL_SOCKET, SO_MAX_PACING_RATE, &most, sizeof most);
}

/* There may be something to receive. */
static void receive(wc_lane *lane)
{
    lane->rx_budget = WC_ROUND_BYTES;
    lane->rx_more = true;
    wc_ready_mark(&lane->worker->ready, WC_READY_LANE, &lane->mark);
}

void wc_lane_attach_stream(wc_lane *lane, uint64_t connection, wc_stream stream, bool checksums)
{
    int fd = stream.fd, on = 1;
    if (lane->stream.fd >= 0)
        wc_lane_lost(lane, 0, "another connection takes its place");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* other kinds of sockets need none */
    lane->stream = stream;
    lane->connection = connection;
    lane->checksums = checksums;
    lane->rx_begin = lane->last_seq = 0;
    if (!lane->owed) /* else the log is of the one before */
        lane->tx_end = lane->log_count = lane->log_lacks = 0;
    socklen_t size = sizeof lane->unsent;
    if (getsockopt(fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &lane->unsent, &size) < 0 || lane->unsent > WC_MOST_UNSENT)
        lane->unsent = 0; /* other kinds of sockets, or as the system has it */
    if (lane->pace)
        wc_lane_set_pace(lane, lane->pace);
    wc_window_begin(lane);
    atomic_store_explicit(&lane->counters.attached, true, memory_order_relaxed);
    wc_lane_interest(lane);
    wc_ready_mark(&lane->worker->ready, WC_READY_GROUP, &lane->group->mark);
    if (connection <= lane->said) /* the other end has lost it already, and knows that nothing came */
        wc_lane_lost(lane, 0, "the other end has lost it");
    else if (wc_stream_holds(&lane->stream))
        receive(lane);
}

void wc_lane_close(wc_lane *lane)
{
    if (lane->stream.fd >= 0) {
        drop_socket(lane, true);
        wc_events_release(&lane->worker->engine->events, 1);
    }
}

void wc_lane_resume(wc_lane *lane)
{
    if (!lane->rx_parked)
        return;
    lane->rx_parked = false;
    receive(lane);
}

void wc_lane_serve(wc_lane *lane, uint32_t events)
{
    const uint32_t ended = EPOLLHUP | EPOLLERR | EPOLLRDHUP;
    if (lane->stream.fd < 0)
        return;
    events = wc_stream_events(&lane->stream, events);
    if (events & EPOLLOUT) {
        lane->blocked = false;
        wc_ready_mark(&lane->worker->ready, WC_READY_GROUP, &lane->group->mark);
    }
    if (!lane->rx_parked && (events & (EPOLLIN | ended))) {
        receive(lane);
    } else if (events & ended) {
        int error = 0; /* of a sealed one, too: whether its end was orderly stands behind what is not read */
        socklen_t size = sizeof error;
        getsockopt(lane->stream.fd, SOL_SOCKET, SO_ERROR, &error, &size);
        wc_lane_lost(lane, error, "%s", error ? strerror(error) : "closed by the other end");
    }
}

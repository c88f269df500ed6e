/* Events to the caller: a ring that grows only when its room is reserved, and one eventfd. */
#include "shared.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

uint64_t wc_now(int clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

int wc_events_init(wc_events *events)
{
    pthread_mutex_init(&events->mutex, NULL);
    events->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    return events->fd < 0 ? -1 : 0;
}

void wc_events_destroy(wc_events *events)
{
    if (events->fd >= 0)
        close(events->fd);
    free(events->ring);
    pthread_mutex_destroy(&events->mutex);
}

static int grow(wc_events *events, size_t cap)
{
    wc_event *ring = calloc(cap, sizeof *ring);
    if (!ring)
        return -1;
    for (size_t i = 0; i < events->count; i++)
        ring[i] = events->ring[(events->head + i) % events->cap];
    free(events->ring);
    events->ring = ring;
    events->cap = cap;
    events->head = 0;
    return 0;
}

int wc_events_reserve(wc_events *events, size_t n)
{
    int result = 0;
    pthread_mutex_lock(&events->mutex);
    if (events->reserved + n > events->cap) {
        size_t cap = events->cap ? events->cap : 64;
        while (cap < events->reserved + n)
            cap *= 2;
        result = grow(events, cap);
    }
    if (result == 0)
        events->reserved += n;
    pthread_mutex_unlock(&events->mutex);
    if (result)
        errno = ENOMEM;
    return result;
}

void wc_events_release(wc_events *events, size_t n)
{
    pthread_mutex_lock(&events->mutex);
    events->reserved -= n;
    pthread_mutex_unlock(&events->mutex);
}

bool wc_events_put(wc_events *events, const wc_event *event)
{
    pthread_mutex_lock(&events->mutex);
    events->ring[(events->head + events->count) % events->cap] = *event;
    bool first = events->count++ == 0;
    pthread_mutex_unlock(&events->mutex);
    return first;
}

void wc_events_signal(wc_events *events)
{
    pthread_mutex_lock(&events->mutex);
    if (events->count && eventfd_write(events->fd, 1) < 0) {
        /* Only a counter at its maximum refuses, and then the fd is readable anyway. */
    }
    pthread_mutex_unlock(&events->mutex);
}

void wc_events_push(wc_events *events, const wc_event *event)
{
    if (wc_events_put(events, event))
        wc_events_signal(events);
}

wc_event wc_event_lane_down(uint64_t link, uint32_t lane, int error, const char *format, va_list arguments)
{
    wc_event event = {.type = WC_EV_LANE_DOWN, .link = link, .lane = lane, .error = error};
    vsnprintf(event.text, sizeof event.text, format, arguments);
    return event;
}

int wc_events_take(wc_events *events, wc_event *out, int cap)
{
    int taken = 0;
    pthread_mutex_lock(&events->mutex);
    while (taken < cap && events->count) {
        out[taken++] = events->ring[events->head];
        events->head = (events->head + 1) % events->cap;
        events->count--;
    }
    events->reserved -= (size_t)taken;
    if (events->count == 0) {
        eventfd_t ignored;
        if (eventfd_read(events->fd, &ignored) < 0) {
            /* EAGAIN: nothing had been signalled. */
        }
    }
    pthread_mutex_unlock(&events->mutex);
    return taken;
}

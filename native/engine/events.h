/* Events to the caller. Telling one cannot fail: its room is reserved when its cause is accepted. */
#ifndef WC_EVENTS_H
#define WC_EVENTS_H

#include "common.h"

#include <stdarg.h>

typedef struct {
    pthread_mutex_t mutex;
    int fd;
    wc_event *ring;
    size_t cap, head, count;
    size_t reserved; /* events that exist or may still come; cap is never below it */
} wc_events;

int wc_events_init(wc_events *events);
void wc_events_destroy(wc_events *events);
int wc_events_reserve(wc_events *events, size_t n); /* 0 or -1, ENOMEM */
void wc_events_release(wc_events *events, size_t n);
void wc_events_push(wc_events *events, const wc_event *event); /* uses one reservation */
bool wc_events_put(wc_events *events, const wc_event *event);  /* the same; true: wc_events_signal has to follow */
void wc_events_signal(wc_events *events);
/* LANE_DOWN; what the format says is for people */
wc_event wc_event_lane_down(uint64_t link, uint32_t lane, int error, const char *format, va_list arguments);
int wc_events_take(wc_events *events, wc_event *out, int cap);
uint64_t wc_now(int clock); /* nanoseconds of that clock; events tell of CLOCK_MONOTONIC */

#endif

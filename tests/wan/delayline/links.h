/* What a packet meets on its way, as arithmetic: rates with finite queues, loss, delay and jitter. */
#ifndef LINKS_H
#define LINKS_H
#include <stdint.h>

/* Times are nanoseconds since the start, as double: exact to far below one of them for months. */

typedef struct {
    double ns_per_byte, queue_ns; /* 0: without limit; the longest wait */
    double busy; /* until when it sends what it has */
} shaper;

typedef struct {
    uint64_t offered, lost, dropped_up, dropped_path, dropped_down, delivered; /* packets */
    uint64_t sent_bytes, delivered_bytes; /* past the uplink; to the receiver */
} path_counters;

typedef struct {
    shaper link;
    double delay, jitter; /* ns */
    int reorder;
    double loss_good, loss_bad, to_bad, to_good; /* probabilities for each packet: the model of Gilbert and Elliott */
    int bad;
    double knot, value, next_value; /* jitter: since when, from what, to what it goes */
    double last; /* arrival */
    uint64_t random;
    path_counters count;
} path;

void set_shaper(shaper *s, double bits_per_second, double queue_bytes);

/* When the last byte of what comes at `at` has left; negative if the queue has no room for it. */
double send_through(shaper *s, double at, unsigned bytes);

int is_lost(path *p);

/* When what enters the propagation at `at` arrives. */
double propagate(path *p, double at);

#endif

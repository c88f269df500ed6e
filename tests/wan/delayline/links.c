/* What a packet meets on its way, as arithmetic: rates with finite queues, loss, delay and jitter. */
#include "links.h"

/* In [0, 1): splitmix64. */
static double draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

void set_shaper(shaper *s, double bits_per_second, double queue_bytes)
{
    s->ns_per_byte = bits_per_second > 0 ? 8e9 / bits_per_second : 0;
    s->queue_ns = queue_bytes * s->ns_per_byte;
}

double send_through(shaper *s, double at, unsigned bytes)
{
    if (s->ns_per_byte == 0)
        return at;
    double begin = at > s->busy ? at : s->busy, end = begin + bytes * s->ns_per_byte;
    if (end - at > s->queue_ns)
        return -1;
    return s->busy = end;
}

int is_lost(path *p)
{
    if (p->to_bad > 0 && draw(&p->random) < (p->bad ? p->to_good : p->to_bad))
        p->bad = !p->bad;
    double chance = p->bad ? p->loss_bad : p->loss_good;
    return chance > 0 && draw(&p->random) < chance;
}

static double draw_jitter(path *p)
{
    return p->jitter * (2 * draw(&p->random) - 1);
}

/* Jitter that keeps the order wanders: straight lines between values drawn every 2 x jitter. Their slope is never below -1, so what leaves
   later arrives later. */
static double wander(path *p, double at)
{
    double period = 2 * p->jitter;
    if (at - p->knot > 2 * period) {
        p->knot = at;
        p->value = draw_jitter(p);
        p->next_value = draw_jitter(p);
    }
    for (; at - p->knot > period; p->knot += period) {
        p->value = p->next_value;
        p->next_value = draw_jitter(p);
    }
    return p->value + (p->next_value - p->value) * (at - p->knot) / period;
}

double propagate(path *p, double at)
{
    double arrival = at + p->delay;
    if (p->reorder)
        return arrival + (p->jitter > 0 ? draw_jitter(p) : 0);
    if (p->jitter > 0)
        arrival += wander(p, at);
    if (arrival < p->last)
        arrival = p->last; /* the delay was just made shorter */
    return p->last = arrival;
}

/* Gates: front may be filled while the op runs. Parts that read it go as far as its blocks are there, a byte for each
   says so, and a bell (an eventfd that whoever fills it writes to) says when there are more. */
#include "shared.h"

#include <errno.h>
#include <sys/epoll.h>

/* How far [from, to) of front is there. */
static uint64_t filled_until(const wc_op *op, uint64_t from, uint64_t to)
{
    for (uint64_t at = from; at < to; at += WC_DIGEST_BLOCK - at % WC_DIGEST_BLOCK)
        if (!__atomic_load_n(&op->filled[at / WC_DIGEST_BLOCK], __ATOMIC_ACQUIRE))
            return at;
    return to;
}

uint64_t wc_gate_bound(const wc_part *part, uint64_t to)
{
    for (uint32_t i = 0; i < part->gates; i++) {
        uint64_t shift = part->front[i] - part->start; /* may wrap around: so do the sums */
        to = filled_until(&part->work->op, part->cursor + shift, to + shift) - shift;
    }
    return to;
}

void wc_gate_keep(wc_part *part, const wc_place *place)
{
    if (part->work->op.filled && place->buffer == WC_FRONT)
        part->front[part->gates++] = place->offset;
}

void wc_gate_join(wc_gate *gate, wc_part *part)
{
    *(gate->tail ? &gate->tail->next_gated : &gate->head) = part;
    gate->tail = part;
    atomic_fetch_add(&part->work->gated, 1);
}

/* Forgets a part whose front is all there: for good, whatever becomes of the bytes that say so. */
static bool opened(wc_part *part, wc_part **at)
{
    if (wc_gate_bound(part, part->end) < part->end)
        return false;
    *at = part->next_gated;
    part->gates = 0;
    atomic_fetch_sub(&part->work->gated, 1);
    return true;
}

void wc_gate_enter(wc_worker *worker, wc_work *work)
{
    if (!work->gates)
        return;
    wc_gate *gate = &work->gates[worker->index];
    gate->work = work;
    gate->next = worker->gates;
    worker->gates = gate;
    for (wc_part **at = &gate->head; *at;) /* what was filled before: no bell will ring for it */
        if (!opened(*at, at))
            at = &(*at)->next_gated;
}

void wc_gate_leave(wc_worker *worker, wc_work *work)
{
    if (!work->gates)
        return;
    wc_gate **at = &worker->gates;
    while (*at && *at != &work->gates[worker->index])
        at = &(*at)->next;
    if (*at)
        *at = (*at)->next;
}

static void go(wc_worker *worker, wc_part *part)
{
    if (part->direction == WC_SEND)
        wc_track_send_part(part);
    else if (part->direction == WC_LOCAL && !wc_part_waits(part))
        wc_local_offer(worker, part);
    else if (part->direction == WC_LOCAL)
        wc_local_go(worker, part, UINT64_MAX);
}

/* More of the op's front may be there. It may end meanwhile: whoever calls holds a reference. */
static void look(wc_worker *worker, wc_work *work)
{
    wc_gate *gate = &work->gates[worker->index];
    bool receives = false;
    for (wc_part **at = &gate->head; *at && work->remaining[worker->index];) {
        wc_part *part = *at;
        receives |= part->direction == WC_RECV;
        if (!opened(part, at))
            at = &part->next_gated;
        go(worker, part);
    }
    for (size_t i = 0; i < work->shares_count && receives; i++)
        if (work->shares[i].worker == worker->index && work->shares[i].track)
            wc_track_go(work->shares[i].track);
}

void wc_gates_look(wc_worker *worker)
{
    uint64_t round = ++worker->bells;
    for (;;) { /* from the start each time: any op may end in a look at one */
        wc_gate *gate = worker->gates;
        while (gate && gate->looked == round)
            gate = gate->next;
        if (!gate)
            return;
        gate->looked = round;
        wc_work *work = gate->work;
        atomic_fetch_add(&work->refs, 1);
        look(worker, work);
        wc_work_unref(worker->engine, work);
    }
}

int wc_bell_add(wc_engine *engine, int fd)
{
    for (uint32_t i = 0; i < engine->config.workers; i++) {
        /* by edge: nobody has to read it, and whoever holds a copy cannot keep a worker awake but by writing */
        struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = WC_BELL};
        if (epoll_ctl(engine->workers[i].epoll, EPOLL_CTL_ADD, fd, &event) < 0) {
            int error = errno;
            while (i--)
                epoll_ctl(engine->workers[i].epoll, EPOLL_CTL_DEL, fd, NULL);
            errno = error;
            return -1;
        }
    }
    return 0;
}

void wc_bell_remove(wc_engine *engine, int fd)
{
    for (uint32_t i = 0; i < engine->config.workers; i++)
        epoll_ctl(engine->workers[i].epoll, EPOLL_CTL_DEL, fd, NULL);
}

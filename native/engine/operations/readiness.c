/* Input readiness: the input may be filled while the op runs. Parts that read it go as far as its blocks are there, a
   byte for each says so, and a bell (an eventfd that whoever fills it writes to) says when there are more. */
#include "shared.h"

#include <errno.h>
#include <sys/epoll.h>

/* Forgets a part whose input is all there: for good, whatever becomes of the bytes that say so. */
static bool opened(wc_part *part, wc_part **at)
{
    if (wc_part_filled(part, part->end) < part->end)
        return false;
    *at = part->next_unready;
    part->awaited = 0;
    atomic_fetch_sub(&part->work->unready, 1);
    return true;
}

void wc_readiness_enter(wc_task *task)
{
    if (!task->work->op.filled)
        return;
    task->next_unready = task->worker->unready;
    task->worker->unready = task;
    for (wc_part **at = &task->unready; *at;) /* what was filled before: no bell will ring for it */
        if (!opened(*at, at))
            at = &(*at)->next_unready;
}

void wc_readiness_leave(wc_task *task)
{
    wc_task **at = &task->worker->unready;
    while (*at && *at != task)
        at = &(*at)->next_unready;
    if (*at)
        *at = task->next_unready;
}

/* More of the op's input may be there. */
static void look(wc_task *task)
{
    const wc_work *work = task->work;
    bool receives = false;
    for (wc_part **at = &task->unready; *at;) {
        wc_part *part = *at;
        receives |= part->direction == WC_RECV;
        if (!opened(part, at))
            at = &part->next_unready;
        wc_part_go(part);
    }
    for (size_t i = 0; i < work->queues_count && receives; i++)
        if (work->queues[i].task == task && work->queues[i].group)
            wc_group_look(work->queues[i].group);
}

void wc_readiness_look(wc_worker *worker)
{
    for (wc_task *task = worker->unready; task; task = task->next_unready)
        look(task);
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

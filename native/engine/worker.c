/* A worker thread: one epoll over its lanes, one inbox of commands, one ready queue. It parks in epoll_wait; the
   first one looks on for 20 us before, where there are cores enough. */
#include "shared.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "shares.h"

enum { BATCH = 64, CORES = 8, PATIENCE = 20000 /* ns */ };

/* ---- what is ready --------------------------------------------------------------------------------------- */

/* All parts that the worker had of an op are finished. */
static void end(wc_task *task)
{
    task->remaining = 0;
    wc_readiness_leave(task);
    wc_work_let_go(task->work, false);
}

/* The op leaves the worker's lane groups, with all that it would send again. */
static void leave(wc_worker *worker, wc_work *work)
{
    for (size_t i = 0; i < work->queues_count; i++) {
        wc_op_queue *queue = &work->queues[i];
        if (queue->task == &work->tasks[worker->index] && queue->node.listed) /* else it has none of it */
            wc_group_leave(queue->group, queue);
    }
}

/* Goes on with what is marked, and with what that marks, until nothing is. */
static void drain(wc_worker *worker)
{
    wc_list *ready = worker->ready.of;
    for (void *mark;;) {
        if ((mark = wc_list_take(&ready[WC_READY_END])))
            end(mark);
        else if ((mark = wc_list_take(&ready[WC_READY_GROUP])))
            wc_group_send(mark);
        else if ((mark = wc_list_take(&ready[WC_READY_PART])))
            wc_local_go(mark);
        else if ((mark = ready[WC_READY_LANE].head))
            wc_lane_receive(mark); /* it leaves when its turn is over */
        else
            return;
    }
}

/* Local parts that wait for nothing have WC_LOCAL_BYTES, then lanes and commands come. Ops take turns. */
static void take_turns(wc_worker *worker)
{
    for (uint32_t i = 0; i < WC_LOCAL_BYTES / WC_DIGEST_BLOCK; i++) {
        wc_task *task = wc_list_take(&worker->ready.of[WC_READY_TURN]);
        if (!task)
            return;
        wc_local_turn(task);
        drain(worker);
    }
}

/* Lanes that wait for the uplink take their turn, as long as it has something. */
static void quench(wc_worker *worker)
{
    while (worker->thirsty.head && !wc_uplink_wait(&worker->engine->uplink))
        wc_lane_send((wc_lane *)((char *)wc_list_take(&worker->thirsty) - offsetof(wc_lane, thirst)));
}

/* Milliseconds for which the worker may sleep if nothing happens; -1: for ever. */
static int may_sleep(const wc_worker *worker)
{
    if (worker->ready.of[WC_READY_TURN].head)
        return 0;
    return worker->thirsty.head ? (int)((wc_uplink_wait(&worker->engine->uplink) + 999999) / 1000000) : -1;
}

/* ---- commands -------------------------------------------------------------------------------------------- */

/* Frees a command and what it holds. */
static void drop(wc_command *command)
{
    if (command->type == WC_CMD_ATTACH && command->stream.fd >= 0)
        wc_stream_close(&command->stream, true);
    if (command->type == WC_CMD_CLOSE)
        wc_link_unref(command->link);
    if (command->work)
        wc_work_unref(command->work);
    if (command->owner)
        command->owner->unref(command->owner);
    free(command);
}

static void drop_all(wc_command *list)
{
    for (wc_command *next; list; list = next) {
        next = list->next;
        drop(list);
    }
}

/* Ops given up by another worker may still be writing where this op will: it starts when all cancels before it are
   through. */
static bool cancels_through(const wc_engine *engine, uint64_t number)
{
    for (uint32_t i = 0; i < engine->config.workers; i++)
        if (atomic_load(&engine->workers[i].cancelled) < number)
            return false;
    return true;
}

static void post(wc_worker *worker, wc_work *work)
{
    wc_task *task = &work->tasks[worker->index];
    if (work->parts_count == 0)
        wc_ready_mark(&worker->ready, WC_READY_END, &task->mark);
    for (size_t i = 0; i < work->queues_count; i++)
        if (work->queues[i].task == task)
            wc_group_post(&work->queues[i]);
    wc_readiness_enter(task); /* before anything is looked at: what is filled from here on, a bell tells */
    for (size_t i = 0; i < work->parts_count; i++)
        if (work->parts[i].task == task)
            wc_part_go(&work->parts[i]);
}

static void cancel(wc_worker *worker, wc_work *work)
{
    wc_task *task = &work->tasks[worker->index];
    leave(worker, work);
    if (task->remaining == 0)
        return;
    task->remaining = 0;
    if (task->mark.listed)
        wc_list_remove(&worker->ready.of[WC_READY_TURN], &task->mark);
    wc_readiness_leave(task);
    wc_work_let_go(work, true);
}

static void execute(wc_worker *worker, wc_command *command)
{
    wc_link *link = command->link;
    const uint32_t first = worker->index, workers = worker->engine->config.workers;
    switch (command->type) {
    case WC_CMD_ATTACH:
        wc_lane_attach_stream(&link->lanes[command->lane], command->number, command->stream, command->checksums);
        command->stream.fd = -1;
        break;
    case WC_CMD_EPOCH:
        for (uint32_t i = first; i < link->groups_count; i += workers)
            wc_group_set_epoch(&link->groups[i], command->number);
        break;
    case WC_CMD_PACE:
        for (uint32_t i = first; i < link->groups_count; i += workers)
            wc_group_set_pace(&link->groups[i], command->number);
        break;
    case WC_CMD_CLOSE:
        for (uint32_t i = first; i < link->groups_count; i += workers)
            wc_group_close(&link->groups[i]);
        break;
    case WC_CMD_POST:
        post(worker, command->work);
        break;
    case WC_CMD_CANCEL:
        cancel(worker, command->work);
        atomic_store(&worker->cancelled, command->number);
        break;
    case WC_CMD_RELEASE:
        leave(worker, command->work);
        break;
    case WC_CMD_LOST:
        atomic_fetch_sub(&link->notes.losing, 1);
        wc_lane_hear(&link->lanes[command->lost.lane], &command->lost);
        break;
    case WC_CMD_NOTES: /* its lane for notes is here, or here again */
        for (uint32_t i = 0; i < link->lanes_count; i++)
            if (link->lanes[i].worker == worker)
                wc_lost_say_again(&link->lanes[i]);
        break;
    case WC_CMD_FENCE:
        pthread_mutex_lock(&command->fence->mutex);
        if (--command->fence->left == 0)
            pthread_cond_signal(&command->fence->through);
        pthread_mutex_unlock(&command->fence->mutex);
        break;
    case WC_CMD_FORGET: /* no event names it any more */
        break;
    }
}

static void run_commands(wc_worker *worker)
{
    wc_engine *engine = worker->engine;
    bool cancelled = false;
    wc_command **at = &worker->todo;
    while (*at)
        at = &(*at)->next;
    *at = wc_inbox_take(&worker->inbox);
    while (worker->todo) {
        wc_command *command = worker->todo;
        if (command->type == WC_CMD_POST && !cancels_through(engine, command->number))
            break; /* the worker that is behind wakes this one */
        worker->todo = command->next;
        cancelled |= command->type == WC_CMD_CANCEL;
        execute(worker, command);
        drain(worker);
        drop(command);
    }
    for (uint32_t i = 0; cancelled && i < engine->config.workers; i++)
        if (i != worker->index)
            wc_inbox_wake(&engine->workers[i].inbox);
}

/* ---- the thread ------------------------------------------------------------------------------------------ */

/* What comes next often comes at once, and to be woken takes longer than to wait for it: where a core is free for that,
   an op of 4 KiB takes four fifths of the time. Only the worker that has all short ops of a machine (no_turns) does it:
   with eight, ops of 1 MiB took a tenth longer. */
static int wait_for(const wc_worker *worker, struct epoll_event *events, int timeout)
{
    if (timeout && worker->patience)
        for (uint64_t end = wc_now(CLOCK_MONOTONIC) + worker->patience; wc_now(CLOCK_MONOTONIC) < end;) {
            int n = epoll_wait(worker->epoll, events, BATCH, 0);
            if (n)
                return n;
        }
    return epoll_wait(worker->epoll, events, BATCH, timeout);
}

static void *run(void *argument)
{
    wc_worker *worker = argument;
    wc_fpenv_enter();
    while (!atomic_load(&worker->engine->stopping)) {
        struct epoll_event events[BATCH];
        int n = wait_for(worker, events, may_sleep(worker));
        worker->round++;
        bool woken = false, rung = false;
        for (int i = 0; i < n; i++) {
            const uint64_t mark = events[i].data.u64;
            void *at = (void *)(uintptr_t)(mark & ~(uint64_t)(WC_OWNER | WC_NOTES));
            if (mark == WC_BELL)
                rung = true;
            else if (mark & WC_OWNER)
                ((wc_owner *)at)->serve(at);
            else if (mark & WC_NOTES)
                wc_notes_listen(at, events[i].events);
            else if (at)
                wc_lane_serve(at, events[i].events);
            woken |= !at || mark & WC_OWNER; /* commands wait: its own, or those of others */
        }
        if (rung)
            wc_readiness_look(worker);
        quench(worker);
        drain(worker);
        if (woken) /* after the lanes: commands may free lanes that this batch names */
            run_commands(worker);
        take_turns(worker);
    }
    return NULL;
}

static int start_thread(wc_worker *worker)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the thread inherits it: signals are the caller's business */
    int error = pthread_create(&worker->thread, NULL, run, worker);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error) {
        errno = error;
        return -1;
    }
    char name[16];
    snprintf(name, sizeof name, "wancoll-%02u", worker->index % 100);
    pthread_setname_np(worker->thread, name);
    return 0;
}

int wc_worker_start(wc_worker *worker, wc_engine *engine, uint32_t index)
{
    worker->engine = engine;
    worker->index = index;
    worker->patience = index == 0 && wc_cores() >= CORES ? PATIENCE : 0;
    worker->epoll = epoll_create1(EPOLL_CLOEXEC);
    worker->inbox.wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    worker->read_buffer = aligned_alloc(4096, WC_READ_BYTES + 4096);
    worker->decoded = aligned_alloc(4096, WC_DIGEST_BLOCK);
    pthread_mutex_init(&worker->inbox.mutex, NULL);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (worker->epoll >= 0 && worker->inbox.wake >= 0 && worker->read_buffer && worker->decoded &&
        epoll_ctl(worker->epoll, EPOLL_CTL_ADD, worker->inbox.wake, &event) == 0 && start_thread(worker) == 0) {
        worker->started = true;
        return 0;
    }
    int error = errno;
    wc_worker_destroy(worker);
    errno = error;
    return -1;
}

void wc_worker_destroy(wc_worker *worker)
{
    drop_all(worker->todo);
    drop_all(worker->inbox.head);
    if (worker->epoll >= 0)
        close(worker->epoll);
    if (worker->inbox.wake >= 0)
        close(worker->inbox.wake);
    free(worker->read_buffer);
    free(worker->decoded);
    pthread_mutex_destroy(&worker->inbox.mutex);
}

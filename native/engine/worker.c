/* A worker thread: one epoll over its lanes, one queue of commands. It parks in epoll_wait and never spins. */
#include "shared.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { BATCH = 64 };

void wc_worker_wake(wc_worker *worker)
{
    if (eventfd_write(worker->wake, 1) < 0) {
        /* Only a counter at its maximum refuses, and then the worker is being woken anyway. */
    }
}

void wc_worker_push(wc_worker *worker, wc_command *command)
{
    command->next = NULL;
    pthread_mutex_lock(&worker->mutex);
    bool first = !worker->in_head;
    *(first ? &worker->in_head : &worker->in_tail->next) = command;
    worker->in_tail = command;
    pthread_mutex_unlock(&worker->mutex);
    if (first)
        wc_worker_wake(worker);
}

wc_command *wc_commands_new(const wc_engine *engine, int type, const uint32_t *wanted)
{
    wc_command *list = NULL;
    for (uint32_t i = 0; i < engine->config.workers; i++) {
        if (wanted && !wanted[i])
            continue;
        wc_command *command = calloc(1, sizeof *command);
        if (!command) {
            wc_commands_free(list);
            errno = ENOMEM;
            return NULL;
        }
        command->type = type;
        command->lane = i; /* here: the worker it is for */
        command->stream.fd = -1;
        command->next = list;
        list = command;
    }
    return list;
}

void wc_commands_free(wc_command *list)
{
    for (wc_command *next; list; list = next) {
        next = list->next;
        free(list);
    }
}

/* Frees a command and what it holds. */
static void drop(wc_engine *engine, wc_command *command)
{
    if (command->type == WC_CMD_ATTACH && command->stream.fd >= 0)
        wc_stream_close(&command->stream, true);
    if (command->type == WC_CMD_CLOSE)
        wc_link_unref(command->link);
    if (command->work)
        wc_work_unref(engine, command->work);
    free(command);
}

static void drop_all(wc_engine *engine, wc_command *list)
{
    for (wc_command *next; list; list = next) {
        next = list->next;
        drop(engine, list);
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
    if (work->parts_count == 0) {
        work->remaining[worker->index] = 0;
        wc_work_let_go(worker->engine, work, false);
        return;
    }
    for (size_t i = 0; i < work->shares_count; i++) {
        wc_share *share = &work->shares[i];
        if (share->worker == worker->index)
            wc_track_post(share->track, share);
    }
    wc_gate_enter(worker, work); /* before anything is looked at: what is filled from here on, a bell tells */
    for (size_t i = 0; i < work->parts_count; i++) {
        wc_part *part = &work->parts[i];
        if (part->worker != worker->index)
            continue;
        if (part->direction == WC_SEND && wc_frame_complete(part))
            wc_share_offer(part);
        else if (part->direction == WC_LOCAL && !wc_part_waits(part))
            wc_local_offer(worker, part);
    }
    for (size_t i = 0; i < work->shares_count; i++)
        if (work->shares[i].worker == worker->index && work->shares[i].track) /* else the op is done already */
            wc_track_go(work->shares[i].track);
}

static void cancel(wc_worker *worker, wc_work *work)
{
    uint32_t *remaining = &work->remaining[worker->index];
    if (*remaining == 0)
        return;
    for (size_t i = 0; i < work->parts_count; i++) {
        wc_part *part = &work->parts[i];
        if (part->worker != worker->index)
            continue;
        if (part->direction == WC_LOCAL && part->listed)
            wc_local_leave(worker, part);
    }
    wc_track *left = NULL;
    for (size_t i = 0; i < work->shares_count; i++) {
        wc_track *track = work->shares[i].worker == worker->index ? work->shares[i].track : NULL;
        if (!track)
            continue;
        wc_track_forget(track, work);
        track->next_left = left;
        left = track;
    }
    *remaining = 0;
    wc_gate_leave(worker, work);
    wc_work_let_go(worker->engine, work, true);
    /* Last: a track that goes on moves other ops, and these move other tracks. Where this op still had parts, they
       would be sent, and the op would end a second time. */
    for (; left; left = left->next_left)
        wc_track_go(left);
}

static void set_epoch(wc_worker *worker, wc_link *link, uint64_t epoch)
{
    for (uint32_t i = worker->index; i < link->tracks_count; i += worker->engine->config.workers)
        wc_track_set_epoch(&link->tracks[i], epoch);
}

static void set_pace(wc_worker *worker, wc_link *link, uint64_t rate)
{
    for (uint32_t i = 0; i < link->lanes_count; i++)
        if (link->lanes[i].worker == worker)
            wc_lane_set_pace(&link->lanes[i], rate);
}

static void close_link(wc_worker *worker, wc_link *link)
{
    for (uint32_t i = worker->index; i < link->tracks_count; i += worker->engine->config.workers)
        wc_track_forget(&link->tracks[i], NULL);
    for (uint32_t i = 0; i < link->lanes_count; i++)
        if (link->lanes[i].worker == worker)
            wc_lane_close(&link->lanes[i]);
}

static void execute(wc_worker *worker, wc_command *command)
{
    switch (command->type) {
    case WC_CMD_ATTACH:
        wc_lane_attach_stream(&command->link->lanes[command->lane], command->stream, command->checksums);
        command->stream.fd = -1;
        break;
    case WC_CMD_EPOCH:
        set_epoch(worker, command->link, command->number);
        break;
    case WC_CMD_PACE:
        set_pace(worker, command->link, command->number);
        break;
    case WC_CMD_CLOSE:
        close_link(worker, command->link);
        break;
    case WC_CMD_POST:
        post(worker, command->work);
        break;
    case WC_CMD_CANCEL:
        cancel(worker, command->work);
        atomic_store(&worker->cancelled, command->number);
        break;
    }
}

static void take_commands(wc_worker *worker)
{
    eventfd_t ignored;
    if (eventfd_read(worker->wake, &ignored) < 0) {
        /* EAGAIN: somebody's wake came together with one that was read before. */
    }
    pthread_mutex_lock(&worker->mutex);
    wc_command **at = &worker->todo;
    while (*at)
        at = &(*at)->next;
    *at = worker->in_head;
    worker->in_head = worker->in_tail = NULL;
    pthread_mutex_unlock(&worker->mutex);
}

static void run_commands(wc_worker *worker)
{
    wc_engine *engine = worker->engine;
    bool cancelled = false;
    while (worker->todo) {
        wc_command *command = worker->todo;
        if (command->type == WC_CMD_POST && !cancels_through(engine, command->number))
            break; /* the worker that is behind wakes this one */
        worker->todo = command->next;
        cancelled |= command->type == WC_CMD_CANCEL;
        execute(worker, command);
        drop(engine, command);
    }
    for (uint32_t i = 0; cancelled && i < engine->config.workers; i++)
        if (i != worker->index)
            wc_worker_wake(&engine->workers[i]);
}

static void *run(void *argument)
{
    wc_worker *worker = argument;
    wc_engine *engine = worker->engine;
    wc_fpenv_enter();
    while (!atomic_load(&engine->stopping)) {
        struct epoll_event events[BATCH];
        int n = epoll_wait(worker->epoll, events, BATCH, worker->last_turn ? 0 : -1);
        worker->round++;
        bool woken = false, rung = false;
        for (int i = 0; i < n; i++) {
            if (events[i].data.u64 == WC_BELL)
                rung = true;
            else if (events[i].data.ptr)
                wc_lane_serve(events[i].data.ptr, events[i].events);
            else
                woken = true;
        }
        if (woken) { /* after the lanes: commands may free lanes that this batch names */
            take_commands(worker);
            run_commands(worker);
        }
        if (rung)
            wc_gates_look(worker);
        wc_local_turn(worker);
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
    char name[16] = "wancoll-";
    name[8] = (char)('0' + worker->index / 10);
    name[9] = (char)('0' + worker->index % 10);
    pthread_setname_np(worker->thread, name);
    return 0;
}

int wc_worker_start(wc_worker *worker, wc_engine *engine, uint32_t index)
{
    worker->engine = engine;
    worker->index = index;
    worker->epoll = epoll_create1(EPOLL_CLOEXEC);
    worker->wake = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    worker->read_buffer = aligned_alloc(4096, WC_READ_BYTES + 4096);
    worker->decoded = aligned_alloc(4096, WC_DIGEST_BLOCK);
    pthread_mutex_init(&worker->mutex, NULL);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (worker->epoll >= 0 && worker->wake >= 0 && worker->read_buffer && worker->decoded &&
        epoll_ctl(worker->epoll, EPOLL_CTL_ADD, worker->wake, &event) == 0 && start_thread(worker) == 0) {
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
    drop_all(worker->engine, worker->todo);
    drop_all(worker->engine, worker->in_head);
    if (worker->epoll >= 0)
        close(worker->epoll);
    if (worker->wake >= 0)
        close(worker->wake);
    free(worker->read_buffer);
    free(worker->decoded);
    pthread_mutex_destroy(&worker->mutex);
}

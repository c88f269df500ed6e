/* The engine's public calls: each checks its arguments, reserves what it needs, and queues commands for the workers. */
#include "shared.h"
#include "streams/pipe.h"
#include "streams/tls.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

enum { LINKS_AT_ONCE = 32 };

static int fail(int error)
{
    errno = error;
    return -1;
}

static bool config_valid(const wc_config *config)
{
    return config->workers >= 1 && config->workers <= WC_MAX_WORKERS && config->segment >= WC_DIGEST_BLOCK &&
           config->segment <= WC_MAX_SEGMENT && config->segment % WC_DIGEST_BLOCK == 0 && config->stripe >= 1;
}

wc_engine *wc_engine_new(const wc_config *config)
{
    if (!config_valid(config)) {
        errno = EINVAL;
        return NULL;
    }
    const wc_kernels *kernels = wc_kernels_default();
    if (!kernels) {
        errno = ENOSYS;
        return NULL;
    }
    wc_engine *engine = calloc(1, sizeof *engine + config->workers * sizeof engine->workers[0]);
    if (!engine)
        return NULL;
    engine->config = *config;
    wc_uplink_init(&engine->uplink, config->uplink);
    engine->kernels = kernels;
    pthread_mutex_init(&engine->mutex, NULL);
    pthread_mutex_init(&engine->scratch_mutex, NULL);
    engine->notes = epoll_create1(EPOLL_CLOEXEC);
    bool made = wc_events_init(&engine->events) == 0 && engine->notes >= 0;
    for (uint32_t i = 0; made && i < config->workers; i++)
        made = wc_worker_start(&engine->workers[i], engine, i) == 0;
    if (made)
        return engine;
    int error = errno;
    wc_engine_free(engine);
    errno = error;
    return NULL;
}

void wc_engine_free(wc_engine *engine)
{
    if (!engine)
        return;
    atomic_store(&engine->stopping, true);
    for (uint32_t i = 0; i < engine->config.workers; i++) {
        if (engine->workers[i].started) {
            wc_inbox_wake(&engine->workers[i].inbox);
            pthread_join(engine->workers[i].thread, NULL);
        }
    }
    for (uint32_t i = 0; i < engine->config.workers; i++)
        if (engine->workers[i].started)
            wc_worker_destroy(&engine->workers[i]);
    for (size_t b = 0; b < WC_BUCKETS; b++) {
        for (wc_link *link = engine->links[b], *next; link; link = next) {
            next = link->next;
            wc_link_free(link);
        }
        for (wc_work *work = engine->works[b], *next; work; work = next) {
            next = work->next;
            wc_work_unref(work);
        }
    }
    wc_scratch_free_all(engine);
    if (engine->notes >= 0)
        close(engine->notes);
    wc_events_destroy(&engine->events);
    pthread_mutex_destroy(&engine->mutex);
    pthread_mutex_destroy(&engine->scratch_mutex);
    free(engine);
}

int wc_engine_fd(const wc_engine *engine)
{
    return engine->events.fd;
}

int wc_engine_events(wc_engine *engine, wc_event *out, int cap)
{
    return wc_events_take(&engine->events, out, cap);
}

static wc_work *work_find(const wc_engine *engine, uint64_t id)
{
    wc_work *work = engine->works[wc_bucket(id)];
    while (work && work->op.id != id)
        work = work->next;
    return work;
}

int wc_link_open(wc_engine *engine, uint64_t id, uint32_t lanes, uint32_t lane_groups, uint64_t epoch)
{
    if (lanes < 1 || lanes > WC_MAX_LANES || lane_groups < 1 || lane_groups > lanes)
        return fail(EINVAL);
    wc_link *link = wc_link_new(engine, id, lanes, lane_groups, epoch);
    if (!link)
        return fail(ENOMEM);
    pthread_mutex_lock(&engine->mutex);
    int error = wc_link_find(engine, id) ? EINVAL : 0;
    if (!error) {
        link->next = engine->links[wc_bucket(id)];
        engine->links[wc_bucket(id)] = link;
    }
    pthread_mutex_unlock(&engine->mutex);
    if (!error)
        return 0;
    wc_link_free(link);
    return fail(error);
}

static uint64_t *given(wc_link *link, uint32_t lane)
{
    return lane < link->lanes_count ? &link->lanes[lane].given : &link->notes.given;
}

static int attach(wc_engine *engine, uint64_t id, uint32_t lane, uint64_t connection, wc_stream stream, uint32_t checksums)
{
    int error = 0;
    pthread_mutex_lock(&engine->mutex);
    wc_link *link = wc_link_find(engine, id);
    const bool notes = link && lane == link->lanes_count;
    wc_command *command = notes ? wc_commands_new(engine, WC_CMD_NOTES, NULL) : calloc(1, sizeof *command);
    if (!command)
        error = ENOMEM;
    else if (!link || lane > link->lanes_count || stream.fd < 0 || *given(link, lane) >= connection)
        error = EINVAL;
    else if (wc_events_reserve(&engine->events, 1) < 0) /* for LANE_DOWN */
        error = ENOMEM;
    if (!error)
        *given(link, lane) = connection;
    if (!error && notes) {
        atomic_fetch_add(&link->refs, 1);
    } else if (!error) {
        *command = (wc_command){.worker = link->lanes[lane].worker,
                                .type = WC_CMD_ATTACH,
                                .stream = stream,
                                .lane = lane,
                                .number = connection,
                                .checksums = checksums != 0,
                                .link = link};
        wc_command_send(command);
    }
    pthread_mutex_unlock(&engine->mutex);
    if (!error && notes) {
        wc_notes_attach(&link->notes, connection, stream);
        pthread_mutex_lock(&engine->mutex);
        if (wc_link_find(engine, id) == link)
            wc_commands_send(command, 0, link, NULL);
        else
            wc_commands_free(command);
        pthread_mutex_unlock(&engine->mutex);
        wc_link_unref(link);
    }
    if (!error)
        return 0;
    wc_commands_free(command);
    if (stream.fd >= 0)
        wc_stream_close(&stream, true);
    return fail(error);
}

int wc_lane_attach(wc_engine *engine, uint64_t id, uint32_t lane, uint64_t connection, int fd, uint32_t checksums)
{
    return attach(engine, id, lane, connection, (wc_stream){.fd = fd}, checksums);
}

int wc_lane_attach_tls(wc_engine *engine, uint64_t id, uint32_t lane, uint64_t connection, wc_tls *tls,
                       uint32_t checksums)
{
    return attach(engine, id, lane, connection, (wc_stream){.fd = wc_tls_take(tls), .tls = tls}, checksums);
}

int wc_lane_attach_pipe(wc_engine *engine, uint64_t id, uint32_t lane, uint64_t connection, int fd, int memory, int first,
                        uint32_t checksums)
{
    wc_stream stream = {.fd = fd, .pipe = wc_pipe_new(memory, fd, first != 0)};
    if (stream.pipe)
        return attach(engine, id, lane, connection, stream, checksums);
    int error = errno;
    close(fd);
    return fail(error);
}

int wc_link_epoch(wc_engine *engine, uint64_t id, uint64_t epoch)
{
    int error = 0;
    pthread_mutex_lock(&engine->mutex);
    wc_link *link = wc_link_find(engine, id);
    if (!link || epoch < link->epoch) {
        error = EINVAL;
    } else if (epoch > link->epoch) {
        wc_command *commands = wc_commands_new(engine, WC_CMD_EPOCH, NULL);
        if (commands) {
            link->epoch = epoch;
            link->next_seq = 0;
            wc_commands_send(commands, epoch, link, NULL);
        } else {
            error = ENOMEM;
        }
    }
    pthread_mutex_unlock(&engine->mutex);
    return error ? fail(error) : 0;
}

int wc_link_pace(wc_engine *engine, uint64_t id, uint64_t rate)
{
    pthread_mutex_lock(&engine->mutex);
    wc_link *link = wc_link_find(engine, id);
    wc_command *commands = link ? wc_commands_new(engine, WC_CMD_PACE, NULL) : NULL;
    if (commands)
        wc_commands_send(commands, rate, link, NULL);
    pthread_mutex_unlock(&engine->mutex);
    return commands ? 0 : fail(link ? ENOMEM : EINVAL);
}

int wc_link_close(wc_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->mutex);
    wc_link *link = wc_link_find(engine, id);
    if (link) {
        wc_link **at = &engine->links[wc_bucket(id)];
        while (*at != link)
            at = &(*at)->next;
        *at = link->next;
    }
    pthread_mutex_unlock(&engine->mutex);
    if (!link)
        return fail(EINVAL);
    /* First: the first worker may be about to read notes. When it comes to the command it has nothing of them left. */
    wc_notes_close(&link->notes);
    wc_command *commands = link->closing;
    link->closing = NULL;
    pthread_mutex_lock(&engine->mutex);
    wc_commands_send(commands, 0, link, NULL);
    pthread_mutex_unlock(&engine->mutex);
    return 0;
}

/* Nothing has changed since the op was made, and it comes after those that were posted; engine->mutex held. */
static bool still_fits(const wc_engine *engine, const wc_work *work)
{
    const wc_op *op = &work->op;
    for (uint32_t i = 0; i < work->links_count; i++) {
        const wc_link *link = work->links[i].link;
        if (wc_link_find(engine, link->id) != link || link->epoch != op->epoch || link->next_seq > op->seq)
            return false;
    }
    return !work_find(engine, op->id);
}

int wc_post_for(wc_engine *engine, const wc_op *op, wc_owner *owner, uint64_t turn)
{
    wc_work *work = wc_work_new(engine, op);
    if (!work)
        return -1;
    int error = 0;
    wc_command *commands = wc_commands_new(engine, WC_CMD_POST, work);
    pthread_mutex_lock(&engine->mutex);
    if (!commands || wc_events_reserve(&engine->events, WC_OP_EVENTS) < 0)
        error = ENOMEM;
    else if (!still_fits(engine, work)) {
        wc_events_release(&engine->events, WC_OP_EVENTS);
        error = EINVAL;
    } else {
        for (uint32_t i = 0; i < work->links_count; i++)
            work->links[i].link->next_seq = op->seq + 1;
        work->owner = owner; /* from here on nothing fails */
        work->turn = turn;
        work->next = engine->works[wc_bucket(op->id)];
        engine->works[wc_bucket(op->id)] = work;
        atomic_fetch_add(&work->refs, 1); /* this call's, for what follows */
        wc_commands_send(commands, engine->cancels, NULL, work);
    }
    pthread_mutex_unlock(&engine->mutex);
    wc_work_leave_links(work);
    if (!error) {
        wc_work_unref(work);
        return 0;
    }
    wc_commands_free(commands);
    wc_work_free(work);
    return fail(error);
}

int wc_post(wc_engine *engine, const wc_op *op)
{
    return wc_post_for(engine, op, NULL, 0);
}

int wc_cancel(wc_engine *engine, uint64_t id)
{
    int error = 0;
    pthread_mutex_lock(&engine->mutex);
    wc_work *work = work_find(engine, id), *ended = NULL;
    if (work && work->settled) {
        ended = work;
        wc_work_retire(work);
        work = NULL;
    }
    if (work && work->cancelling) {
        wc_command *commands = work->cancelling;
        work->cancelling = NULL;
        work->speaks = false;
        atomic_fetch_add(&work->refs, engine->config.workers);
        wc_commands_send(commands, ++engine->cancels, NULL, work);
    } else if (!work && wc_events_reserve(&engine->events, 1) < 0) {
        error = ENOMEM;
    } else if (!work) {
        wc_event event = {.type = WC_EV_CANCELLED, .op = id};
        wc_events_push(&engine->events, &event);
    }
    pthread_mutex_unlock(&engine->mutex);
    if (ended)
        wc_work_unref(ended);
    return error ? fail(error) : 0;
}

int wc_release(wc_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->mutex);
    wc_work *work = work_find(engine, id);
    const bool ends = work && work->settled, resent = work && atomic_load(&work->resent);
    if (ends)
        wc_work_retire(work);
    else if (work)
        work->released = true;
    pthread_mutex_unlock(&engine->mutex);
    if (ends)
        wc_work_unref(work);
    return resent;
}

int wc_fence(wc_engine *engine)
{
    wc_fenced fence = {.left = engine->config.workers};
    wc_command *commands = wc_commands_new(engine, WC_CMD_FENCE, NULL);
    if (!commands)
        return fail(ENOMEM);
    pthread_mutex_init(&fence.mutex, NULL);
    pthread_cond_init(&fence.through, NULL);
    for (wc_command *command = commands; command; command = command->next)
        command->fence = &fence;
    pthread_mutex_lock(&engine->mutex);
    wc_commands_send(commands, 0, NULL, NULL);
    pthread_mutex_unlock(&engine->mutex);
    pthread_mutex_lock(&fence.mutex);
    while (fence.left)
        pthread_cond_wait(&fence.through, &fence.mutex);
    pthread_mutex_unlock(&fence.mutex);
    pthread_cond_destroy(&fence.through);
    pthread_mutex_destroy(&fence.mutex);
    return 0;
}

void wc_trace(wc_engine *engine, int on)
{
    atomic_store(&engine->tracing, on != 0);
}

void wc_vote_withhold(wc_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->mutex);
    wc_work *work = work_find(engine, id);
    if (work)
        work->speaks = false;
    pthread_mutex_unlock(&engine->mutex);
}

int wc_op_lacks_input(wc_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->mutex);
    const wc_work *work = work_find(engine, id);
    int lacks = work && atomic_load(&work->unready) > 0;
    pthread_mutex_unlock(&engine->mutex);
    return lacks;
}

/* ---- notes ----------------------------------------------------------------------------------------------- */

int wc_note_send(wc_engine *engine, uint64_t id, const void *bytes, uint32_t length)
{
    wc_link *link = length >= 1 && length <= WC_NOTE_BYTES ? wc_link_hold(engine, id) : NULL;
    if (!link)
        return fail(EINVAL);
    int error = wc_notes_put(&link->notes, bytes, length);
    wc_link_unref(link);
    return error ? fail(error) : 0;
}

int wc_notes_fd(const wc_engine *engine)
{
    return engine->notes;
}

int wc_notes_take(wc_engine *engine, wc_note *out, int cap)
{
    struct epoll_event ready[LINKS_AT_ONCE];
    int taken = 0, links = epoll_wait(engine->notes, ready, cap < LINKS_AT_ONCE ? cap : LINKS_AT_ONCE, 0);
    for (int i = 0; i < links; i++) {
        wc_link *link = wc_link_hold(engine, ready[i].data.u64);
        if (!link)
            continue; /* closed meanwhile */
        taken += wc_notes_serve(&link->notes, ready[i].events, out + taken, (cap - taken) / (links - i));
        wc_link_unref(link);
    }
    return taken;
}

/* ---- what is counted ------------------------------------------------------------------------------------- */

static uint64_t counter(const atomic_ullong *value)
{
    return atomic_load_explicit(value, memory_order_relaxed);
}

int wc_lane_statistics(wc_engine *engine, uint64_t id, uint32_t lane, wc_lane_stats *out)
{
    pthread_mutex_lock(&engine->mutex);
    wc_link *link = wc_link_find(engine, id);
    bool notes = link && lane == link->lanes_count && link->notes.given;
    bool found = notes || (link && lane < link->lanes_count);
    if (link)
        atomic_fetch_add(&link->refs, 1);
    pthread_mutex_unlock(&engine->mutex);
    if (notes) {
        wc_notes_statistics(&link->notes, out);
    } else if (found) {
        const wc_lane_counters *c = &link->lanes[lane].counters;
        *out = (wc_lane_stats){
            .bytes_sent = counter(&c->bytes_sent),
            .bytes_received = counter(&c->bytes_received),
            .frames_sent = counter(&c->frames_sent),
            .frames_received = counter(&c->frames_received),
            .frames_dropped = counter(&c->frames_dropped),
            .checksum_failures = counter(&c->checksum_failures),
            .parked = atomic_load_explicit(&c->parked, memory_order_relaxed),
            .attached = atomic_load_explicit(&c->attached, memory_order_relaxed),
        };
    }
    if (link)
        wc_link_unref(link);
    return found ? 0 : fail(ENOENT);
}

int wc_lane_tcp_info(wc_engine *engine, uint64_t id, uint32_t lane, void *out, uint32_t size)
{
    pthread_mutex_lock(&engine->mutex);
    wc_link *link = wc_link_find(engine, id);
    int copied = -1;
    if (link && lane == link->lanes_count && link->notes.given) {
        copied = 0;
    } else if (link && lane < link->lanes_count) {
        wc_lane *found = &link->lanes[lane];
        pthread_mutex_lock(&found->info_mutex);
        copied = (int)(found->info_bytes < size ? found->info_bytes : size);
        memcpy(out, found->info, (size_t)copied);
        pthread_mutex_unlock(&found->info_mutex);
    }
    pthread_mutex_unlock(&engine->mutex);
    return copied < 0 ? fail(ENOENT) : copied;
}

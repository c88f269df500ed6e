/* One attempt of an op: made, kept alive, settled when every worker has let go of it. */
#include "shared.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* An array of zeros that lives as long as the op. */
static void *room(wc_work *work, size_t count, size_t size)
{
    void *array = calloc(count + 1, size);
    work->lacks_memory |= !array;
    return work->rooms[work->rooms_count++] = array;
}

void wc_work_free(wc_work *work)
{
    for (size_t i = 0; i < work->parts_count && work->parts; i++)
        free(work->parts[i].partial);
    wc_commands_free(work->cancelling);
    if (work->owner)
        work->owner->unref(work->owner);
    wc_scratch_give(work->engine, work->scratch);
    wc_hashes_free(&work->hashes);
    for (uint32_t i = 0; i < work->rooms_count; i++)
        free(work->rooms[i]);
    free(work);
}

void wc_work_leave_links(wc_work *work)
{
    for (uint32_t i = 0; i < work->links_count; i++)
        wc_link_unref(work->links[i].link);
    work->links_count = 0;
}

/* Finds the op's links, and keeps them until wc_work_leave_links. False: one is not as the op says. */
static bool find_links(wc_work *work)
{
    wc_engine *engine = work->engine;
    const wc_op *op = &work->op;
    bool found = true;
    pthread_mutex_lock(&engine->mutex);
    engine->posts++;
    for (uint32_t i = 0; i < op->steps_count && found; i++) {
        if (op->steps[i].direction == WC_LOCAL)
            continue;
        wc_link *link = wc_link_find(engine, op->steps[i].link);
        found = link && link->lanes_count == op->lanes && link->groups_count == op->lane_groups &&
                link->epoch == op->epoch;
        if (!found)
            break;
        if (link->post != engine->posts) {
            atomic_fetch_add(&link->refs, 1);
            link->post = engine->posts;
            link->post_index = work->links_count;
            work->links[work->links_count++] = (wc_op_link){.link = link};
        }
        work->link_of[i] = link->post_index;
    }
    pthread_mutex_unlock(&engine->mutex);
    return found;
}

/* What it says at its end. */
static void copy_note(wc_work *work)
{
    const wc_op *op = &work->op;
    if (op->vote_bytes == 0)
        return;
    memcpy(work->vote, op->vote, op->vote_bytes);
    work->hearers = room(work, op->vote_links_count, sizeof *work->hearers);
    for (uint32_t i = 0; i < op->vote_links_count && work->hearers; i++)
        work->hearers[i].id = op->vote_links[i];
    work->speaks = true;
}

/* Its memory and its parts. Returns 0 or an errno. */
static int make(wc_work *work)
{
    const wc_op *op = &work->op;
    wc_engine *engine = work->engine;
    work->links = room(work, op->steps_count, sizeof *work->links);
    work->link_of = room(work, op->steps_count, sizeof *work->link_of);
    if (work->lacks_memory)
        return ENOMEM;
    if (!find_links(work))
        return EINVAL;
    wc_cut_count(work);
    work->tasks = room(work, engine->config.workers, sizeof *work->tasks);
    work->parts = room(work, work->parts_count, sizeof *work->parts);
    work->cuts = room(work, op->steps_count, sizeof *work->cuts);
    work->queues = room(work, work->queues_count, sizeof *work->queues);
    work->numbers = room(work, work->numbers_count, sizeof *work->numbers);
    work->cancelling = wc_commands_new(engine, WC_CMD_CANCEL, NULL);
    copy_note(work);
    if (op->bytes[WC_SCRATCH])
        work->scratch = wc_scratch_take(engine, op->bytes[WC_SCRATCH]);
    if (work->lacks_memory || !work->cancelling || (op->bytes[WC_SCRATCH] && !work->scratch))
        return ENOMEM;
    const bool within = wc_result_coded(op) && !(op->coded >> WC_RESULT & 1) && work->scratch; /* its encoded form */
    const void *result = within ? work->scratch->memory : op->result;
    if (op->digest && !wc_hashes_init(&work->hashes, engine->kernels, result, op->bytes[WC_RESULT]))
        return ENOMEM;
    if (wc_result_coded(op)) {
        work->hashes.block_raw = work->block_raw;
        work->hashes.block_wire = work->block_wire;
    }
    for (uint32_t w = 0; w < engine->config.workers; w++)
        work->tasks[w] = (wc_task){.work = work, .worker = &engine->workers[w]};
    work->hashes.shown = op->shown;
    work->hashes.attempt = op->attempt;
    return wc_cut(work) ? 0 : EINVAL;
}

wc_work *wc_work_new(wc_engine *engine, const wc_op *op)
{
    if (!wc_op_valid(engine, op)) {
        errno = EINVAL;
        return NULL;
    }
    wc_work *work = calloc(1, sizeof *work);
    if (!work) {
        errno = ENOMEM;
        return NULL;
    }
    work->op = *op;
    work->engine = engine;
    work->block_raw = wc_block_raw(op);
    work->block_wire = wc_codec_shape((int)op->codec).bytes;
    work->itemsize = wc_dtype_size((int)op->dtype);
    work->reduce = engine->kernels->reduce[op->dtype][op->op];
    work->average = op->op == WC_AVG ? engine->kernels->average[op->dtype] : NULL;
    int error = make(work);
    if (error) {
        wc_work_leave_links(work);
        wc_work_free(work);
        errno = error;
        return NULL;
    }
    work->op.steps = NULL;
    work->op.vote = work->op.vote_links = NULL;
    if (op->steps_count == 0)
        work->tasks[0].remaining = 1; /* a worker has to say that there is nothing to do */
    unsigned involved = 0;
    for (uint32_t w = 0; w < engine->config.workers; w++)
        involved += work->tasks[w].remaining > 0;
    atomic_init(&work->unfinished, involved);
    atomic_init(&work->refs, 1 + involved); /* settle, and the commands */
    return work;
}

void wc_work_unref(wc_work *work)
{
    if (atomic_fetch_sub(&work->refs, 1) == 1)
        wc_work_free(work);
}

static void table_remove(wc_engine *engine, wc_work *work)
{
    wc_work **at = &engine->works[wc_bucket(work->op.id)];
    while (*at != work)
        at = &(*at)->next;
    *at = work->next;
}

/* The links over which its vote goes, each kept until wc_link_unref; engine->mutex held. */
static void find_hearers(wc_work *work)
{
    for (uint32_t i = 0; i < work->op.vote_links_count; i++) {
        wc_hearer *hearer = &work->hearers[i];
        if ((hearer->link = wc_link_find(work->engine, hearer->id))) /* else it was closed meanwhile */
            atomic_fetch_add(&hearer->link->refs, 1);
    }
}

static void tell(wc_work *work, uint64_t digest)
{
    if (work->op.vote_digest)
        memcpy(work->vote + work->op.vote_digest, &digest, sizeof digest);
    for (uint32_t i = 0; i < work->op.vote_links_count; i++) {
        wc_link *link = work->hearers[i].link;
        if (!link)
            continue;
        wc_notes_tell(&link->notes, work->vote, work->op.vote_bytes);
        wc_link_unref(link);
    }
}

void wc_work_retire(wc_work *work)
{
    wc_command *commands = work->cancelling;
    work->cancelling = NULL;
    work->released = true;
    table_remove(work->engine, work);
    for (wc_command *command = commands; command; command = command->next)
        command->type = WC_CMD_RELEASE;
    atomic_fetch_add(&work->refs, work->engine->config.workers);
    if (!atomic_load(&work->resent)) { /* nobody reads it any more: the next op may have it at once */
        wc_scratch_give(work->engine, work->scratch);
        work->scratch = NULL;
    }
    wc_commands_send(commands, 0, NULL, work);
}

/* The last worker has let go: DONE unless it was given up, and an answer to a cancel. Who withholds the vote, or
   cancels, and then takes all events knows whether it goes out: that is decided together with the event. */
static void settle(wc_work *work)
{
    wc_engine *engine = work->engine;
    bool aborted = atomic_load(&work->aborted);
    wc_event event = {.type = WC_EV_DONE, .op = work->op.id};
    if (!aborted) {
        event.value = work->op.digest ? wc_hashes_digest(&work->hashes) : 0;
        event.in_memory = atomic_load(&work->in_memory);
        event.extra = atomic_load(&work->bytes_sent) + event.in_memory;
        const int64_t saved = (int64_t)atomic_load(&work->saved); /* the padded block of a few elements is longer */
        event.saved = saved > 0 ? (uint64_t)saved : 0;
        for (uint32_t w = 0; w < engine->config.workers; w++) {
            event.error_squares += work->tasks[w].squares[0];
            event.norm_squares += work->tasks[w].squares[1];
        }
    }
    const uint64_t digest = event.value, first = atomic_load(&work->first), last = atomic_load(&work->last);
    event.first = first;
    event.last = last;
    bool signal = false, speaks = true;
    const bool taken = !aborted && work->owner && work->owner->finished(work, &event, &speaks);
    pthread_mutex_lock(&engine->mutex);
    work->settled = true;
    const bool tells = work->speaks && speaks && !aborted;
    event.voted = tells;
    if (tells)
        find_hearers(work);
    if (aborted || taken)
        wc_events_release(&engine->events, 1);
    else
        signal = wc_events_put(&engine->events, &event);
    if (!atomic_load(&work->mismatched))
        wc_events_release(&engine->events, 1);
    event = (wc_event){.type = WC_EV_CANCELLED, .op = work->op.id, .first = first, .last = last};
    bool stays = false;
    if (!work->cancelling) {
        signal |= wc_events_put(&engine->events, &event);
        table_remove(engine, work);
    } else {
        wc_events_release(&engine->events, 1);
        stays = work->queues_count && !work->released;
        if (!stays)
            wc_work_retire(work);
    }
    pthread_mutex_unlock(&engine->mutex);
    if (tells) /* first: others wait for it */
        tell(work, digest);
    if (signal)
        wc_events_signal(&engine->events);
    if (!stays)
        wc_work_unref(work);
}

void wc_work_let_go(wc_work *work, bool aborted)
{
    if (aborted)
        atomic_store(&work->aborted, true);
    if (atomic_fetch_sub(&work->unfinished, 1) == 1)
        settle(work);
}

/* One attempt of an op: made, kept alive, settled when every worker has let go of it. */
#include "shared.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void wc_work_free(wc_work *work)
{
    wc_commands_free(work->cancelling);
    wc_scratch_give(work->engine, work->scratch);
    free(work->tasks);
    wc_hashes_free(&work->hashes);
    free(work->parts);
    free(work->cuts);
    free(work->links);
    free(work->link_of);
    free(work->shares);
    free(work->numbers);
    free(work->note_links);
    free(work->hearers);
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
        found = link && link->lanes_count == op->lanes && link->tracks_count == op->tracks && link->epoch == op->epoch;
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

/* What it says at its end. False: no memory. */
static bool copy_note(wc_work *work)
{
    const wc_op *op = &work->op;
    if (op->note_bytes == 0)
        return true;
    memcpy(work->note, op->note, op->note_bytes);
    work->note_links = calloc((size_t)op->note_links_count + 1, sizeof *work->note_links);
    work->hearers = calloc((size_t)op->note_links_count + 1, sizeof(wc_link *));
    if (!work->note_links || !work->hearers)
        return false;
    if (op->note_links_count)
        memcpy(work->note_links, op->note_links, op->note_links_count * sizeof *work->note_links);
    work->speaks = true;
    return true;
}

/* Its memory and its parts. False with errno. */
static bool make(wc_work *work)
{
    const wc_op *op = &work->op;
    wc_engine *engine = work->engine;
    errno = ENOMEM;
    work->links = calloc((size_t)op->steps_count + 1, sizeof *work->links);
    work->link_of = calloc((size_t)op->steps_count + 1, sizeof *work->link_of);
    if (!work->links || !work->link_of)
        return false;
    errno = EINVAL;
    if (!find_links(work))
        return false;
    const wc_cut_sizes sizes = wc_cut_sizes_of(work);
    errno = ENOMEM;
    work->parts_count = sizes.parts;
    work->shares_count = sizes.shares;
    work->tasks = calloc(engine->config.workers, sizeof *work->tasks);
    work->parts = calloc(sizes.parts + 1, sizeof *work->parts);
    work->cuts = calloc((size_t)op->steps_count + 1, sizeof *work->cuts);
    work->shares = calloc(sizes.shares + 1, sizeof *work->shares);
    work->numbers = calloc(sizes.numbers + 1, sizeof *work->numbers);
    work->cancelling = wc_commands_new(engine, WC_CMD_CANCEL, NULL);
    if (op->bytes[WC_SCRATCH])
        work->scratch = wc_scratch_take(engine, op->bytes[WC_SCRATCH]);
    bool hashes = !op->digest || wc_hashes_init(&work->hashes, engine->kernels, op->back, op->bytes[WC_BACK]);
    if (!work->tasks || !work->parts || !work->cuts || !work->shares || !work->numbers || !work->cancelling ||
        !hashes || (op->bytes[WC_SCRATCH] && !work->scratch) || !copy_note(work))
        return false;
    for (uint32_t w = 0; w < engine->config.workers; w++)
        work->tasks[w] = (wc_task){.work = work, .worker = &engine->workers[w]};
    work->hashes.shown = op->shown;
    work->hashes.attempt = op->attempt;
    errno = EINVAL;
    return wc_cut(work);
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
    if (!make(work)) {
        int error = errno;
        wc_work_leave_links(work);
        wc_work_free(work);
        errno = error;
        return NULL;
    }
    work->op.steps = NULL;
    work->op.note = work->op.note_links = NULL;
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

/* The links over which its note goes, each kept until wc_link_unref; engine->mutex held. */
static uint32_t find_hearers(wc_engine *engine, wc_work *work)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < work->op.note_links_count; i++) {
        wc_link *link = wc_link_find(engine, work->note_links[i]);
        if (!link)
            continue; /* closed meanwhile */
        atomic_fetch_add(&link->refs, 1);
        work->hearers[count++] = link;
    }
    return count;
}

static void tell(wc_work *work, uint32_t hearers, uint64_t digest)
{
    if (work->op.note_digest)
        memcpy(work->note + work->op.note_digest, &digest, sizeof digest);
    for (uint32_t i = 0; i < hearers; i++) {
        wc_notes_tell(&work->hearers[i]->notes, work->note, work->op.note_bytes);
        wc_link_unref(work->hearers[i]);
    }
}

/* The last worker has let go: DONE unless it was given up, and an answer to a cancel. Who withholds the note, or
   cancels, and then takes all events knows whether it goes out: that is decided together with the event. */
static void settle(wc_work *work)
{
    wc_engine *engine = work->engine;
    bool aborted = atomic_load(&work->aborted);
    wc_event event = {.type = WC_EV_DONE, .op = work->op.id};
    if (!aborted) {
        event.value = work->op.digest ? wc_hashes_digest(&work->hashes) : 0;
        event.extra = atomic_load(&work->bytes_sent);
        event.saved = atomic_load(&work->saved);
        for (uint32_t w = 0; w < engine->config.workers; w++) {
            event.error_squares += work->tasks[w].squares[0];
            event.norm_squares += work->tasks[w].squares[1];
        }
    }
    const uint64_t digest = event.value, first = atomic_load(&work->first), last = atomic_load(&work->last);
    event.first = first;
    event.last = last;
    uint32_t hearers = 0;
    bool signal = false;
    pthread_mutex_lock(&engine->mutex);
    table_remove(engine, work);
    event.told = work->speaks && !aborted;
    if (event.told)
        hearers = find_hearers(engine, work);
    if (aborted)
        wc_events_release(&engine->events, 1);
    else
        signal = wc_events_put(&engine->events, &event);
    if (!atomic_load(&work->mismatched))
        wc_events_release(&engine->events, 1);
    event = (wc_event){.type = WC_EV_CANCELLED, .op = work->op.id, .first = first, .last = last};
    if (work->cancelling)
        wc_events_release(&engine->events, 1);
    else
        signal |= wc_events_put(&engine->events, &event);
    pthread_mutex_unlock(&engine->mutex);
    tell(work, hearers, digest); /* first: others wait for it */
    if (signal)
        wc_events_signal(&engine->events);
    wc_work_unref(work);
}

void wc_work_let_go(wc_work *work, bool aborted)
{
    if (aborted)
        atomic_store(&work->aborted, true);
    if (atomic_fetch_sub(&work->unfinished, 1) == 1)
        settle(work);
}

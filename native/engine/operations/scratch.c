/* Scratch memory of ops: taken for one attempt, kept warm for the next one, since fresh pages cost more than the bytes
   in them. */
#include "shared.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { SMALL = 65536, GRAIN = 2 << 20 };

static void release(wc_scratch *scratch)
{
    if (scratch->memory)
        munmap(scratch->memory, scratch->bytes);
    free(scratch);
}

static wc_scratch *fresh(size_t bytes)
{
    wc_scratch *scratch = calloc(1, sizeof *scratch);
    if (!scratch)
        return NULL;
    scratch->bytes = bytes;
    scratch->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (scratch->memory == MAP_FAILED) {
        free(scratch);
        errno = ENOMEM;
        return NULL;
    }
    if (bytes >= GRAIN)
        madvise(scratch->memory, bytes, MADV_HUGEPAGE); /* fewer page faults, where the system has huge pages */
    return scratch;
}

wc_scratch *wc_scratch_take(wc_engine *engine, size_t bytes)
{
    size_t wanted = bytes <= SMALL ? SMALL : bytes + (GRAIN - 1) - (bytes + GRAIN - 1) % GRAIN;
    pthread_mutex_lock(&engine->scratch_mutex);
    wc_scratch **best = NULL;
    for (wc_scratch **at = &engine->idle_scratch; *at; at = &(*at)->next)
        if ((*at)->bytes >= wanted && (*at)->bytes / 2 <= wanted && (!best || (*at)->bytes < (*best)->bytes))
            best = at;
    wc_scratch *found = best ? *best : NULL;
    if (found)
        *best = found->next;
    pthread_mutex_unlock(&engine->scratch_mutex);
    return found ? found : fresh(wanted);
}

void wc_scratch_give(wc_engine *engine, wc_scratch *scratch)
{
    if (!scratch)
        return;
    wc_scratch *surplus = NULL;
    pthread_mutex_lock(&engine->scratch_mutex);
    scratch->next = engine->idle_scratch;
    engine->idle_scratch = scratch;
    size_t kept = 0;
    for (wc_scratch **at = &engine->idle_scratch; *at;) {
        if (kept + (*at)->bytes <= WC_IDLE_SCRATCH) {
            kept += (*at)->bytes;
            at = &(*at)->next;
        } else {
            wc_scratch *cold = *at;
            *at = cold->next;
            cold->next = surplus;
            surplus = cold;
        }
    }
    pthread_mutex_unlock(&engine->scratch_mutex);
    for (wc_scratch *next; surplus; surplus = next) {
        next = surplus->next;
        release(surplus);
    }
}

void wc_scratch_free_all(wc_engine *engine)
{
    for (wc_scratch *next; engine->idle_scratch; engine->idle_scratch = next) {
        next = engine->idle_scratch->next;
        release(engine->idle_scratch);
    }
}

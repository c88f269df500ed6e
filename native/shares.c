/* Threads for one piece of work: they are made for it, and are gone when it is done. */
#define _GNU_SOURCE
#include "shares.h"

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>

#define CORES_A_THREAD 2

enum { MAX_THREADS = 8 };

typedef struct {
    wc_share_act act;
    void *work;
    uint64_t begin, end;
    pthread_t thread;
    bool own; /* the caller's: the last one, and those for which no thread can be made */
} wc_share;

static void *run(void *argument)
{
    wc_share *share = argument;
    share->act(share->work, share->begin, share->end);
    return NULL;
}

unsigned wc_cores(void)
{
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) ? 1 : (unsigned)CPU_COUNT(&cores);
}

void wc_in_shares(wc_share_act act, void *work, uint64_t count, uint64_t grain, unsigned threads)
{
    wc_share shares[MAX_THREADS];
    unsigned n = threads ? threads : wc_cores() / CORES_A_THREAD;
    if (n > count / grain)
        n = (unsigned)(count / grain);
    n = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
    uint64_t each = count / n / grain * grain;
    for (unsigned i = 0; i < n; i++) {
        wc_share *share = &shares[i];
        *share = (wc_share){.act = act, .work = work, .begin = i * each, .end = i + 1 == n ? count : (i + 1) * each};
        share->own = i + 1 == n || pthread_create(&share->thread, NULL, run, share);
    }
    for (unsigned i = n; i-- > 0;)
        if (shares[i].own)
            run(&shares[i]);
        else
            pthread_join(shares[i].thread, NULL);
}

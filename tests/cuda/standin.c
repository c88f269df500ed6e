/* A stand-in for NVIDIA's driver, for tests: libcuda.so.1 as far as wancoll calls it. It proves order, not speed.

   Device memory is host memory behind addresses that nobody may touch. A stream is a thread that does what it was given
   as late as the order allows: an item waits for its seeded delay, or until somebody waits for it. Copies go in two
   halves. Registered memory is reached by a second mapping of the pages that lay there when it was registered, as DMA
   would reach it. What a real device would do silently wrong is counted and told (standin_violations). */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
       NOT_SUPPORTED = 801 };
enum { DEVICE, HOST, MANAGED, REGISTERED, POOLED };
enum { COPY, WAIT, HOLD, VALUE, CALL, BIRTH, DEATH };
enum { DEVICES = 2, MANY = 4096, LATE_US = 400000, CALL_US = 5000 };

typedef struct { bool alive; int device, retained; struct stream *legacy; } context;
/* early: of a pool, and its stream has not come to it. Of what a pool gives back the addresses stay, and nobody may use them. */
typedef struct { bool alive; uint64_t at, bytes; char *alias; int kind; context *ctx; unsigned flags; bool early; uint64_t number; } memory;
/* tests/cuda/warps.c's `launch`, which runs a kernel on the host. */
typedef int runner(const char *name, unsigned grid, unsigned block, void *dst, const void *src, uint64_t n, const void *third);
typedef struct { const char *name; unsigned grid, block; uint64_t n; const void *third; } kernel;
typedef struct item { struct item *next; int kind; uint64_t seq, due; char *to, *from, *host; uint64_t bytes; bool to_host;
                      struct stream *other; uint64_t other_seq; void (*told)(void *); void *with;
                      const volatile uint32_t *word; uint32_t value; kernel *kernel; memory *used[3]; uint64_t number[3]; } item;
typedef struct stream { bool alive, blocking; int to_call; context *ctx; item *first, *last; uint64_t given, done, urgent;
                        pthread_t thread; struct stream *next; } stream;
typedef struct { bool alive; context *ctx; stream *on; uint64_t seq; int asked; } event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static pid_t owner;
static context primary[DEVICES];
static memory memories[MANY];
static stream *streams;
static __thread context *stack[16];
static __thread int depth;
static uint64_t state = 1, seed, calls, fail_at, items;
static int fail_code, sticky, streams_alive, events_alive, violations, holds, no_words;
static uint64_t most_registered = UINT64_MAX, most_pooled = UINT64_MAX, numbered;
static int pools;
static char said[256];
static const char *failed_call = "";
static runner *run_kernel;

/* ---- what tests set and read ---------------------------------------------------------------------------- */

/* Seed 0: everything as late as can be; 1: at once; others: mixed. */
void standin_seed(uint64_t value) { seed = value; state = value * 0x9E3779B97F4A7C15u | 1; }
/* The call of that number, counted from now (1: the next), returns `code`; 0: none. */
void standin_fail(uint64_t number, int code) { fail_at = number ? calls + number : 0; fail_code = code; }
/* From now on every call returns `code`, as after a fault of the device; 0: none. */
void standin_break(int code) { sticky = code; }
/* How many bytes may be registered. */
void standin_most_registered(uint64_t bytes) { most_registered = bytes; }
/* How many bytes may come from pools; 0: there are none. */
void standin_most_pooled(uint64_t bytes) { most_pooled = bytes; }
/* Whether streams cannot wait on memory, as with some devices and drivers. */
void standin_no_words(int value) { no_words = value; }
/* What runs kernels; NULL: none can be loaded. */
void standin_kernels(runner *run) { run_kernel = run; }
uint64_t standin_calls(void) { return calls; }
/* The name of the call that was let fail. */
const char *standin_failed_call(void) { return failed_call; }
int standin_violations(char *text) { if (text) strcpy(text, said); int n = violations; violations = 0; return n; }
static uint64_t total(int kind) { uint64_t n = 0; for (int i = 0; i < MANY; i++) if (memories[i].alive && memories[i].kind == kind) n += memories[i].bytes; return n; }
/* contexts retained, streams, events, bytes of device memory, bytes registered, items that wait */
void standin_count(uint64_t out[6]) {
    pthread_mutex_lock(&lock);
    out[0] = 0;
    for (int i = 0; i < DEVICES; i++) out[0] += (uint64_t)primary[i].retained;
    out[1] = (uint64_t)streams_alive; out[2] = (uint64_t)events_alive;
    out[3] = total(DEVICE) + total(MANAGED) + total(POOLED) + (uint64_t)pools; out[4] = total(REGISTERED); out[5] = items;
    pthread_mutex_unlock(&lock);
}

/* ---- ground --------------------------------------------------------------------------------------------- */

static void violation(const char *format, ...) {
    va_list args; va_start(args, format); vsnprintf(said, sizeof said, format, args); va_end(args);
    violations++;
}
static uint64_t chance(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state * 0x2545F4914F6CDD1Du >> 20; }
static uint64_t now_us(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000; }
static void nap(uint64_t until) {
    struct timespec t = { (time_t)(until / 1000000), (long)(until % 1000000 * 1000) };
    pthread_cond_timedwait(&changed, &lock, &t);
}
static context *current(void) { return depth ? stack[depth - 1] : NULL; }
static memory *find(uint64_t at, uint64_t bytes) {
    for (int i = 0; i < MANY; i++) {
        memory *m = &memories[i];
        if (m->alive && m->at <= at && at < m->at + m->bytes && at + bytes <= m->at + m->bytes) return m;
    }
    return NULL;
}
static memory *room(void) { for (int i = 0; i < MANY; i++) if (!memories[i].alive) return &memories[i]; return NULL; }

static int enter(const char *name, bool needs_context) {
    if (!owner || owner != getpid()) return NOT_INITIALIZED;
    pthread_mutex_lock(&lock);
    if (++calls == fail_at) failed_call = name;
    int error = calls == fail_at ? fail_code : sticky ? sticky : needs_context && !current() ? INVALID_CONTEXT : OK;
    if (error) pthread_mutex_unlock(&lock);
    return error;
}
static int leave(int error) { pthread_mutex_unlock(&lock); return error; }
#define ENTER(needs) do { int wrong_ = enter(__func__, needs); if (wrong_) return wrong_; } while (0)

/* ---- streams -------------------------------------------------------------------------------------------- */

static void force(stream *s, uint64_t seq) {
    if (s->urgent >= seq) return;
    s->urgent = seq;
    for (item *i = s->first; i && i->seq <= seq; i = i->next)
        if (i->kind == WAIT) force(i->other, i->other_seq);
}

static void execute(item *i) {
    for (int k = 0; k < 3; k++)
        if (i->used[k] && (!i->used[k]->alive || i->used[k]->early || i->used[k]->number != i->number[k])) {
            violation("a copy or a kernel ran on memory of a pool that was not there yet, or had been given back");
            return;
        }
    if (i->kernel) {
        kernel *k = i->kernel;
        if (!run_kernel || run_kernel(k->name, k->grid, k->block, i->to, i->from, k->n, k->third))
            violation("kernel %s does not run", k->name);
        free(k);
        return;
    }
    if (i->host && msync((void *)((uintptr_t)i->host & ~(uintptr_t)4095), i->bytes, MS_ASYNC))
        violation("host memory of a copy was unmapped before it ran");
    uint64_t half = i->bytes / 2;
    memcpy(i->to, i->from, half);
    if (seed > 1 && chance() % 4 == 0) { pthread_mutex_unlock(&lock); usleep(50); pthread_mutex_lock(&lock); }
    memcpy(i->to + half, i->from + half, i->bytes - half);
    if (i->host && memcmp(i->host, i->to_host ? i->to : i->from, i->bytes))
        violation("registered pages were exchanged or discarded: the copy went to or came from the old ones");
}

static void drop(memory *m) { munmap((void *)(uintptr_t)m->at, m->bytes); munmap(m->alias, m->bytes); m->alive = false; }

static void *work(void *argument) {
    stream *s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        item *i = s->first;
        if (!i) {
            if (!s->alive) break;
            pthread_cond_wait(&changed, &lock);
        } else if (i->kind == WAIT && i->other->done < i->other_seq && s->to_call) { /* somebody waits to be called */
            if (now_us() < i->due) nap(i->due);
            else if (i->other->urgent < i->other_seq) { force(i->other, i->other_seq); pthread_cond_broadcast(&changed); }
            else pthread_cond_wait(&changed, &lock);
        } else if (i->kind == WAIT ? i->other->done < i->other_seq : i->kind == HOLD && holds) {
            pthread_cond_wait(&changed, &lock);
        } else if (i->kind == VALUE && (int32_t)(*i->word - i->value) < 0) {
            nap(now_us() + 100);
        } else if (i->kind == COPY && s->urgent < i->seq && now_us() < i->due) {
            nap(i->due);
        } else {
            if (i->kind == COPY) execute(i);
            if (i->kind == BIRTH) i->used[0]->early = false;
            if (i->kind == DEATH) drop(i->used[0]);
            if (i->kind == CALL) { s->to_call--; pthread_mutex_unlock(&lock); i->told(i->with); pthread_mutex_lock(&lock); }
            s->first = i->next;
            if (!s->first) s->last = NULL;
            s->done = i->seq;
            items--;
            free(i);
            pthread_cond_broadcast(&changed);
        }
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static item *give(stream *s, int kind) {
    static const uint64_t delays[] = { 0, 200, 2000, LATE_US };
    item *i = calloc(1, sizeof *i);
    i->kind = kind;
    i->seq = ++s->given;
    i->due = now_us() + (seed == 0 ? LATE_US : seed == 1 ? 0 : delays[chance() % 4]);
    if (s->last) s->last->next = i; else s->first = i;
    s->last = i;
    items++;
    pthread_cond_broadcast(&changed);
    return i;
}
static void wait_for(stream *s, stream *other, uint64_t seq) {
    if (other == s || other->done >= seq) return;
    item *i = give(s, WAIT);
    i->other = other; i->other_seq = seq;
}
/* The legacy stream and blocking streams of its context wait for each other. */
static item *add(stream *s, int kind) {
    if (s == s->ctx->legacy) {
        for (stream *o = streams; o; o = o->next) if (o->ctx == s->ctx && o->blocking && o != s) wait_for(s, o, o->given);
    } else if (s->blocking && s->ctx->legacy) wait_for(s, s->ctx->legacy, s->ctx->legacy->given);
    return give(s, kind);
}
static stream *new_stream(context *c, bool blocking) {
    stream *s = calloc(1, sizeof *s);
    s->alive = true; s->blocking = blocking; s->ctx = c; s->next = streams;
    streams = s;
    pthread_create(&s->thread, NULL, work, s);
    pthread_detach(s->thread);
    return s;
}
static stream *stream_of(uint64_t handle) { /* the per-thread stream is taken for the legacy one's like */
    if (handle <= 2) {
        context *c = current();
        if (!c) return NULL;
        if (!c->legacy) c->legacy = new_stream(c, true);
        return c->legacy;
    }
    for (stream *s = streams; s; s = s->next) if ((uint64_t)(uintptr_t)s == handle) return s->alive ? s : NULL;
    return NULL;
}
static void drain(stream *s, uint64_t seq) {
    force(s, seq);
    pthread_cond_broadcast(&changed);
    while (s->done < seq) pthread_cond_wait(&changed, &lock);
}
/* A kernel that does not end before standin_release(). */
int standin_hold(uint64_t handle) {
    pthread_mutex_lock(&lock);
    stream *s = stream_of(handle);
    if (s) { holds = 1; give(s, HOLD); }
    return leave(s ? 0 : 1);
}
void standin_release(void) { pthread_mutex_lock(&lock); holds = 0; pthread_cond_broadcast(&changed); pthread_mutex_unlock(&lock); }
/* How many streams wait on memory; those before them in their streams do not count. */
int standin_waiting(void) {
    pthread_mutex_lock(&lock);
    int n = 0;
    for (stream *s = streams; s; s = s->next) n += s->first && s->first->kind == VALUE;
    pthread_mutex_unlock(&lock);
    return n;
}
void standin_drain(void) {
    pthread_mutex_lock(&lock);
    for (stream *s = streams; s; s = s->next)
        for (item *i = s->first; i; i = i->next)
            if (i->kind == VALUE && (int32_t)(*i->word - i->value) < 0) {
                violation("a stream waits on memory that nobody is going to write");
                i->value = *i->word;
            }
    for (stream *s = streams; s; s = s->next) drain(s, s->given);
    pthread_mutex_unlock(&lock);
}

/* ---- the driver's calls ---------------------------------------------------------------------------------- */

int cuInit(unsigned flags) {
    (void)flags;
    if (sticky) return sticky;
    if (owner && owner != getpid()) return NOT_INITIALIZED;
    if (!owner) {
        pthread_condattr_t how; pthread_condattr_init(&how); pthread_condattr_setclock(&how, CLOCK_MONOTONIC);
        pthread_cond_init(&changed, &how);
        owner = getpid();
        for (int i = 0; i < DEVICES; i++) primary[i] = (context){ .alive = true, .device = i };
    }
    ENTER(false);
    return leave(OK);
}
int cuDriverGetVersion(int *version) { *version = 13000; return OK; }
int cuGetErrorName(int error, const char **name) {
    *name = error == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : error == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED"
          : error == INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : error == 719 ? "CUDA_ERROR_LAUNCH_FAILED" : "CUDA_ERROR_OTHER";
    return OK;
}
int cuGetErrorString(int error, const char **text) { (void)error; *text = "told by the stand-in"; return OK; }
int cuDeviceGetCount(int *count) { ENTER(false); *count = DEVICES; return leave(OK); }
int cuDeviceGet(int *device, int ordinal) {
    ENTER(false);
    *device = ordinal;
    return leave(ordinal >= 0 && ordinal < DEVICES ? OK : INVALID_DEVICE);
}
int cuDeviceGetName(char *name, int len, int device) { ENTER(false); snprintf(name, (size_t)len, "stand-in %d", device); return leave(OK); }
int cuDevicePrimaryCtxRetain(context **out, int device) {
    ENTER(false);
    if (device < 0 || device >= DEVICES) return leave(INVALID_DEVICE);
    primary[device].retained++;
    *out = &primary[device];
    return leave(OK);
}
int cuDevicePrimaryCtxRelease_v2(int device) { ENTER(false); primary[device].retained--; return leave(OK); }
int cuCtxCreate_v4(context **out, void *params, unsigned flags, int device) {
    (void)params; (void)flags;
    ENTER(false);
    context *c = calloc(1, sizeof *c);
    c->alive = true; c->device = device;
    *out = stack[depth++] = c;
    return leave(OK);
}
int cuCtxPushCurrent_v2(context *c) {
    ENTER(false);
    if (!c || !c->alive || depth == 16) return leave(INVALID_CONTEXT);
    stack[depth++] = c;
    return leave(OK);
}
int cuCtxPopCurrent_v2(context **out) {
    if (depth) depth--; /* also where a fault is asked for */
    if (out) *out = depth >= 0 ? stack[depth] : NULL;
    ENTER(false);
    return leave(OK);
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { ENTER(true); *least = 0; *greatest = -5; return leave(OK); }

static int allocate(uint64_t *out, uint64_t bytes, int kind, unsigned flags) {
    memory *m = room();
    if (!m || !bytes) return m ? INVALID_VALUE : OUT_OF_MEMORY;
    int fd = memfd_create("standin", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)bytes)) abort();
    char *alias = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *shown = kind == DEVICE || kind == POOLED ? mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0) : alias;
    close(fd);
    if (alias == MAP_FAILED || shown == MAP_FAILED) return OUT_OF_MEMORY;
    memset(alias, 0xA5, bytes);
    *m = (memory){ true, (uint64_t)(uintptr_t)shown, bytes, alias, kind, current(), flags, false, ++numbered };
    *out = m->at;
    return OK;
}
static bool in_use(memory *m) {
    for (stream *s = streams; s; s = s->next)
        for (item *i = s->first; i; i = i->next)
            if (i->kind == COPY && ((i->to >= m->alias && i->to < m->alias + m->bytes) || (i->from >= m->alias && i->from < m->alias + m->bytes)))
                return true;
    return false;
}
static int release(uint64_t at, int kind) {
    memory *m = find(at, 0);
    if (!m || m->at != at || (m->kind == DEVICE ? DEVICE : m->kind) != kind) return INVALID_VALUE;
    for (stream *s = streams; s; s = s->next)
        for (item *i = s->first; i; i = i->next)
            if (i->kind == VALUE && (char *)i->word >= m->alias && (char *)i->word < m->alias + m->bytes) {
                violation("memory was freed that a stream waits on");
                i->word = &i->value;
            }
    for (stream *s = streams; s; s = s->next) if (!holds) drain(s, s->given); /* as the real ones do */
    if ((char *)(uintptr_t)m->at != m->alias) munmap((void *)(uintptr_t)m->at, m->bytes);
    munmap(m->alias, m->bytes);
    m->alive = false;
    return OK;
}
int cuMemAlloc_v2(uint64_t *out, size_t bytes) { ENTER(true); return leave(allocate(out, bytes, DEVICE, 0)); }
int cuMemAllocManaged(uint64_t *out, size_t bytes, unsigned flags) { ENTER(true); return leave(allocate(out, bytes, MANAGED, flags)); }
int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) { ENTER(true); return leave(allocate((uint64_t *)out, bytes, HOST, flags)); }
int cuMemFree_v2(uint64_t at) { ENTER(true); memory *m = find(at, 0); return leave(release(at, m && m->kind == MANAGED ? MANAGED : DEVICE)); }
int cuMemFreeHost(void *at) { ENTER(true); return leave(release((uint64_t)(uintptr_t)at, HOST)); }
int cuMemHostRegister_v2(void *at, size_t bytes, unsigned flags) {
    ENTER(true);
    memory *m = room();
    if (!m || total(REGISTERED) + bytes > most_registered) return leave(OUT_OF_MEMORY);
    for (int i = 0; i < MANY; i++)
        if (memories[i].alive && (uint64_t)(uintptr_t)at < memories[i].at + memories[i].bytes && memories[i].at < (uint64_t)(uintptr_t)at + bytes)
            return leave(ALREADY_REGISTERED);
    /* Of shared memory an old size of nothing makes another mapping of the very same pages. */
    char *alias = mremap(at, 0, bytes, MREMAP_MAYMOVE);
    if (alias == MAP_FAILED) return leave(INVALID_VALUE);
    *m = (memory){ true, (uint64_t)(uintptr_t)at, bytes, alias, REGISTERED, current(), flags, false, ++numbered };
    return leave(OK);
}
int cuMemHostUnregister(void *at) {
    ENTER(true);
    memory *m = find((uint64_t)(uintptr_t)at, 0);
    if (!m || m->kind != REGISTERED || m->at != (uint64_t)(uintptr_t)at) return leave(NOT_REGISTERED);
    if (in_use(m)) violation("memory was unregistered under a copy");
    munmap(m->alias, m->bytes);
    m->alive = false;
    return leave(OK);
}
int cuMemHostGetDevicePointer_v2(uint64_t *out, void *at, unsigned flags) {
    (void)flags;
    ENTER(true);
    memory *m = find((uint64_t)(uintptr_t)at, 1);
    if (!m || !(m->flags & 2)) return leave(INVALID_VALUE); /* only what was asked to be mapped */
    *out = (uint64_t)(uintptr_t)at;
    return leave(OK);
}
int cuPointerGetAttributes(unsigned count, int *attributes, void **data, uint64_t at) {
    ENTER(false);
    memory *m = find(at, 0);
    for (unsigned i = 0; i < count; i++)
        switch (attributes[i]) {
        case 1: *(context **)data[i] = m ? m->ctx : NULL; break;
        case 2: *(unsigned *)data[i] = !m ? 0 : m->kind == DEVICE || m->kind == MANAGED ? 2 : 1; break;
        case 8: *(unsigned *)data[i] = m && m->kind == MANAGED; break;
        case 9: *(int *)data[i] = m ? m->ctx->device : -2; break;
        case 11: *(uint64_t *)data[i] = m ? m->at : 0; break;
        case 12: *(uint64_t *)data[i] = m ? m->bytes : 0; break;
        default: return leave(INVALID_VALUE);
        }
    return leave(OK);
}

static void use(item *i, int k, memory *m) { if (m && m->kind == POOLED) { i->used[k] = m; i->number[k] = m->number; } }
static int copy(stream *s, uint64_t to, uint64_t from, uint64_t bytes, bool to_host, bool from_host, bool at_once) {
    if (!s || s->ctx != current()) return leave(INVALID_HANDLE);
    if (!bytes) return leave(OK);
    memory *a = find(to, bytes), *b = find(from, bytes);
    if ((!a && !to_host) || (!b && !from_host)) return leave(INVALID_VALUE);
    if (!at_once && (!a || !b)) {
        violation("an asynchronous copy of %llu bytes to or from host memory that is not registered", (unsigned long long)bytes);
        return leave(INVALID_VALUE);
    }
    char *host = to_host && a && a->kind == REGISTERED ? (char *)(uintptr_t)to : from_host && b && b->kind == REGISTERED ? (char *)(uintptr_t)from : NULL;
    item *i = add(s, COPY);
    i->bytes = bytes; i->host = host; i->to_host = to_host;
    i->to = a ? a->alias + (to - a->at) : (char *)(uintptr_t)to;
    i->from = b ? b->alias + (from - b->at) : (char *)(uintptr_t)from;
    use(i, 0, a);
    use(i, 1, b);
    if (at_once) drain(s, s->given);
    return leave(OK);
}
#define P(x) ((uint64_t)(uintptr_t)(x))
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t n) { ENTER(true); return copy(stream_of(0), to, P(from), n, false, true, true); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { ENTER(true); return copy(stream_of(0), P(to), from, n, true, false, true); }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t n, uint64_t s) { ENTER(true); return copy(stream_of(s), to, P(from), n, false, true, false); }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, uint64_t s) { ENTER(true); return copy(stream_of(s), P(to), from, n, true, false, false); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, uint64_t s) { ENTER(true); return copy(stream_of(s), to, from, n, false, false, false); }

int cuMemPoolCreate(void **out, const int *props) { /* allocation type, handle types, location's type and id */
    ENTER(true);
    if (!most_pooled) return leave(NOT_SUPPORTED);
    if (props[0] != 1 || props[1] || props[2] != 1 || props[3] < 0 || props[3] >= DEVICES) return leave(INVALID_VALUE);
    *out = &primary[props[3]];
    pools++;
    return leave(OK);
}
int cuMemPoolSetAttribute(void *pool, int attribute, int *value) {
    ENTER(true);
    return leave(pool && attribute == 3 && !*value ? OK : INVALID_VALUE); /* reuse: no internal dependencies */
}
int cuMemPoolDestroy(void *pool) { (void)pool; ENTER(false); pools--; return leave(OK); }
int cuMemAllocFromPoolAsync(uint64_t *out, size_t bytes, void *pool, uint64_t handle) {
    ENTER(true);
    stream *s = stream_of(handle);
    if (!s || s->ctx != current() || pool != s->ctx) return leave(INVALID_HANDLE);
    if (total(POOLED) + bytes > most_pooled) return leave(OUT_OF_MEMORY);
    int error = allocate(out, bytes, POOLED, 0);
    if (error) return leave(error);
    item *i = add(s, BIRTH);
    i->used[0] = find(*out, 0);
    i->used[0]->early = true;
    return leave(OK);
}
int cuMemFreeAsync(uint64_t at, uint64_t handle) {
    ENTER(true);
    stream *s = stream_of(handle);
    memory *m = find(at, 0);
    if (!s || s->ctx != current()) return leave(INVALID_HANDLE);
    if (!m || m->kind != POOLED || m->at != at) return leave(INVALID_VALUE);
    item *i = add(s, DEATH);
    i->used[0] = m;
    return leave(OK);
}

int cuDeviceGetAttribute(int *out, int attribute, int device) {
    (void)device;
    ENTER(false);
    *out = attribute == 75 ? 9 : 0; /* compute capability 9.0 */
    return leave(OK);
}
int cuModuleLoadData(void **out, const void *image) { (void)image; ENTER(true); *out = &run_kernel; return leave(run_kernel ? OK : NOT_SUPPORTED); }
int cuModuleUnload(void *module) { ENTER(true); return leave(module == &run_kernel ? OK : INVALID_HANDLE); }
/* A function is its name. */
int cuModuleGetFunction(const char **out, void *module, const char *name) {
    static const char *names[64];
    ENTER(true);
    for (size_t i = 0; module == &run_kernel && i < sizeof names / sizeof *names; i++) {
        if (!names[i]) names[i] = strdup(name);
        if (!strcmp(names[i], name)) { *out = names[i]; return leave(OK); }
    }
    return leave(NOT_FOUND);
}
int cuLaunchKernel(const char *name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   uint64_t handle, void **given, void **extra) {
    ENTER(true);
    stream *s = stream_of(handle);
    memory *to = find(*(uint64_t *)given[0], 1), *from = find(*(uint64_t *)given[1], 1);
    if (!s || s->ctx != current()) return leave(INVALID_HANDLE);
    if (!to || !from || !gx || !bx || bx > 1024 || gy != 1 || gz != 1 || by != 1 || bz != 1 || shared || extra) return leave(INVALID_VALUE);
    item *i = add(s, COPY);
    use(i, 0, to);
    use(i, 1, from);
    i->kernel = calloc(1, sizeof *i->kernel);
    *i->kernel = (kernel){ .name = name, .grid = gx, .block = bx, .n = *(uint64_t *)given[2] };
    if (!strncmp(name, "feed", 4) || !strncmp(name, "lost", 4)) {
        uint64_t third = *(uint64_t *)given[3];
        memory *also = third ? find(third, 1) : NULL;
        if (third && !also) return leave(INVALID_VALUE);
        use(i, 2, also);
        i->kernel->third = third ? also->alias + (third - also->at) : NULL;
    }
    i->to = to->alias + (*(uint64_t *)given[0] - to->at); i->from = from->alias + (*(uint64_t *)given[1] - from->at);
    return leave(OK);
}

int cuStreamCreateWithPriority(stream **out, unsigned flags, int priority) {
    (void)priority;
    ENTER(true);
    *out = new_stream(current(), !(flags & 1));
    streams_alive++;
    return leave(OK);
}
int cuStreamCreate(stream **out, unsigned flags) { return cuStreamCreateWithPriority(out, flags, 0); }
int cuStreamDestroy_v2(uint64_t handle) {
    ENTER(false);
    stream *s = stream_of(handle);
    if (!s || handle <= 2) return leave(INVALID_HANDLE);
    s->alive = false;
    streams_alive--;
    pthread_cond_broadcast(&changed);
    return leave(OK);
}
int cuStreamSynchronize(uint64_t handle) {
    ENTER(true);
    stream *s = stream_of(handle);
    if (!s) return leave(INVALID_HANDLE);
    drain(s, s->given);
    return leave(OK);
}
int cuStreamWaitEvent(uint64_t handle, event *e, unsigned flags) {
    (void)flags;
    ENTER(true);
    stream *s = stream_of(handle);
    if (!s || !e->alive) return leave(INVALID_HANDLE);
    if (e->on) wait_for(s, e->on, e->seq);
    return leave(OK);
}
int cuStreamWaitValue32_v2(uint64_t handle, uint64_t at, uint32_t value, unsigned flags) {
    ENTER(true);
    stream *s = stream_of(handle);
    memory *m = find(at, 4);
    if (no_words) return leave(NOT_SUPPORTED);
    if (!s || s->ctx != current()) return leave(INVALID_HANDLE);
    if (!m || m->kind == MANAGED || at % 4 || flags) return leave(INVALID_VALUE);
    item *i = add(s, VALUE);
    i->word = (uint32_t *)(m->alias + (at - m->at)); i->value = value;
    return leave(OK);
}
int cuLaunchHostFunc(uint64_t handle, void (*told)(void *), void *with) {
    ENTER(true);
    stream *s = stream_of(handle);
    if (!s) return leave(INVALID_HANDLE);
    item *call = add(s, CALL);
    call->told = told; call->with = with;
    s->to_call++;
    for (item *i = s->first; i; i = i->next) if (i->due > now_us() + CALL_US) i->due = now_us() + CALL_US;
    return leave(OK);
}
int cuEventCreate(event **out, unsigned flags) {
    (void)flags;
    ENTER(true);
    *out = calloc(1, sizeof **out);
    **out = (event){ .alive = true, .ctx = current() };
    events_alive++;
    return leave(OK);
}
int cuEventDestroy_v2(event *e) { ENTER(false); if (!e->alive) return leave(INVALID_HANDLE); e->alive = false; events_alive--; return leave(OK); }
int cuEventRecord(event *e, uint64_t handle) {
    ENTER(true);
    stream *s = stream_of(handle);
    if (!s || !e->alive || e->ctx != s->ctx) return leave(INVALID_HANDLE);
    e->on = s; e->seq = s->given; e->asked = 0;
    return leave(OK);
}
int cuEventQuery(event *e) {
    ENTER(false);
    if (!e->alive) return leave(INVALID_HANDLE);
    if (!e->on || e->on->done >= e->seq) return leave(OK);
    if (++e->asked > 3) { /* not only a look: somebody is waiting for it */
        force(e->on, e->seq);
        pthread_cond_broadcast(&changed);
    }
    return leave(NOT_READY);
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);
#define HAS(name, symbol) { name, (void *)(symbol) }
static const struct { const char *name; void *symbol; } table[] = {
    HAS("cuGetProcAddress", cuGetProcAddress_v2), HAS("cuInit", cuInit), HAS("cuDriverGetVersion", cuDriverGetVersion),
    HAS("cuGetErrorName", cuGetErrorName), HAS("cuGetErrorString", cuGetErrorString), HAS("cuDeviceGetCount", cuDeviceGetCount),
    HAS("cuDeviceGet", cuDeviceGet), HAS("cuDeviceGetName", cuDeviceGetName), HAS("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain),
    HAS("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2), HAS("cuCtxCreate", cuCtxCreate_v4),
    HAS("cuCtxPushCurrent", cuCtxPushCurrent_v2), HAS("cuCtxPopCurrent", cuCtxPopCurrent_v2),
    HAS("cuCtxGetStreamPriorityRange", cuCtxGetStreamPriorityRange), HAS("cuMemAlloc", cuMemAlloc_v2), HAS("cuMemFree", cuMemFree_v2),
    HAS("cuMemAllocManaged", cuMemAllocManaged), HAS("cuMemHostAlloc", cuMemHostAlloc), HAS("cuMemFreeHost", cuMemFreeHost),
    HAS("cuMemHostGetDevicePointer", cuMemHostGetDevicePointer_v2), HAS("cuStreamWaitValue32", cuStreamWaitValue32_v2),
    HAS("cuMemHostRegister", cuMemHostRegister_v2), HAS("cuMemHostUnregister", cuMemHostUnregister),
    HAS("cuPointerGetAttributes", cuPointerGetAttributes), HAS("cuMemcpyHtoD", cuMemcpyHtoD_v2), HAS("cuMemcpyDtoH", cuMemcpyDtoH_v2),
    HAS("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2), HAS("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2),
    HAS("cuMemcpyDtoDAsync", cuMemcpyDtoDAsync_v2), HAS("cuStreamCreate", cuStreamCreate),
    HAS("cuStreamCreateWithPriority", cuStreamCreateWithPriority), HAS("cuStreamDestroy", cuStreamDestroy_v2),
    HAS("cuStreamSynchronize", cuStreamSynchronize), HAS("cuStreamWaitEvent", cuStreamWaitEvent), HAS("cuEventCreate", cuEventCreate),
    HAS("cuEventDestroy", cuEventDestroy_v2), HAS("cuEventRecord", cuEventRecord), HAS("cuEventQuery", cuEventQuery),
    HAS("cuDeviceGetAttribute", cuDeviceGetAttribute),
    HAS("cuModuleLoadData", cuModuleLoadData), HAS("cuModuleUnload", cuModuleUnload), HAS("cuModuleGetFunction", cuModuleGetFunction),
    HAS("cuMemPoolCreate", cuMemPoolCreate), HAS("cuMemPoolSetAttribute", cuMemPoolSetAttribute), HAS("cuMemPoolDestroy", cuMemPoolDestroy),
    HAS("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync), HAS("cuMemFreeAsync", cuMemFreeAsync),
    HAS("cuLaunchKernel", cuLaunchKernel), HAS("cuLaunchHostFunc", cuLaunchHostFunc),
};
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status) {
    (void)version; (void)flags;
    *out = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(name, table[i].name)) *out = table[i].symbol;
    if (status) *status = *out ? 0 : 1;
    return *out ? OK : NOT_FOUND;
}

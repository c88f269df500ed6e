/* The delay line: carries IPv4 packets between the TUN devices of network namespaces as a wide area network would.

   A packet from host s to host d passes s's uplink (a rate and a finite queue), the path s -> d (a rate and a queue of its own, loss, delay
   with jitter) and d's downlink (a rate and a queue). Queues are drop-tail and virtual: a place in one is a time, so nothing is moved until
   it is due at d's device. Rates, queues and loss count packets as they are on the wire: a segmentation-offload super-packet is the run of
   MTU-sized segments that it stands for, and each gets its own place in the queues and its own loss. What stays together is delivered
   together, at most `quantum` of link time, as a network card's interrupt coalescing and GRO would; what was torn apart by loss, or is
   longer, becomes shorter super-packets, and what is due at the same time is merged again.

   Arguments: CONTROL SEED QUANTUM_NS LIMIT_BYTES TUN:NAMESPACE..., file descriptors and numbers. CONTROL is a SOCK_SEQPACKET socket; each
   message is a command that is answered by one message ("ok", "not understood", or the counters). When CONTROL or the parent ends, all
   processes that live in the namespaces are killed, and this one ends. It sleeps until the next packet is due: it does not spin. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "links.h"
#include "packets.h"

enum {
    MAX_HOSTS = 64,
    READ_BATCH = 32, /* packets from one device before due ones are looked at again */
    DELIVER_BATCH = 64, /* writes before devices are looked at again */
    SWEEPS = 200,
    CONTROL_READY = MAX_HOSTS,
    PARENT_ENDED,
};
#define WINDOW_NS 5000.0 /* what is due within this time is delivered now rather than after another sleep */

typedef struct {
    int tun, namespace;
    shaper up, down;
    block *current;
} host;

typedef struct {
    double at;
    uint64_t order; /* of equals, the older one first */
    run *what;
} event;

typedef struct {
    uint64_t unroutable, overflow, failed, deliveries, late_ns, late_max_ns;
} line_counters;

static host hosts[MAX_HOSTS];
static path paths[MAX_HOSTS][MAX_HOSTS];
static unsigned host_count;
static line_counters count;
static double quantum;
static event *events; /* a binary heap */
static size_t event_count, event_room;
static uint64_t event_order;
static struct timespec start;

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "delayline: %s: %s\n", what, strerror(errno));
    exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)(t.tv_sec - start.tv_sec) + (double)(t.tv_nsec - start.tv_nsec);
}

/* ---- what is due when --------------------------------------------------------------------------------- */

static int before(const event *a, const event *b)
{
    return a->at < b->at || (a->at == b->at && a->order < b->order);
}

static void schedule(run *r, double at)
{
    if (event_count == event_room) {
        event_room = event_room ? 2 * event_room : 1024;
        events = realloc(events, event_room * sizeof *events);
        if (!events)
            die("memory");
    }
    event e = {at, event_order++, r};
    size_t i = event_count++;
    for (; i && before(&e, &events[(i - 1) / 2]); i = (i - 1) / 2)
        events[i] = events[(i - 1) / 2];
    events[i] = e;
}

static run *take_first(void)
{
    run *first = events[0].what;
    event e = events[--event_count];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < event_count; i = child) {
        if (child + 1 < event_count && before(&events[child + 1], &events[child]))
            child++;
        if (!before(&events[child], &e))
            break;
        events[i] = events[child];
    }
    events[i] = e;
    return first;
}

/* ---- the way of a packet ------------------------------------------------------------------------------ */

static void schedule_run(run *r)
{
    r->past_downlink |= hosts[r->to].down.ns_per_byte == 0;
    schedule(r, r->past_downlink ? r->last : r->first);
}

/* Adds a segment that arrives at `at` to the run that is being made, or begins another one. */
static run *extend(run *r, packet *p, unsigned segment, double at, unsigned from, unsigned to)
{
    if (r && (paths[from][to].reorder || at - r->first > quantum)) {
        schedule_run(r);
        r = NULL;
    }
    if (!r) {
        r = new_run(p, segment, from, to);
        r->first = at;
    }
    r->end = segment + 1;
    r->last = at;
    return r;
}

/* A packet leaves its host: its segments pass the uplink and the path. */
static void enter(packet *p, unsigned from, unsigned to, double at)
{
    path *way = &paths[from][to];
    run *r = NULL;
    way->count.offered += p->segments;
    for (unsigned i = 0; i < p->segments; i++) {
        unsigned bytes = segment_bytes(p, i);
        uint64_t *gone = NULL;
        double left = send_through(&hosts[from].up, at, bytes);
        if (left < 0) {
            gone = &way->count.dropped_up;
        } else {
            way->count.sent_bytes += bytes;
            left = send_through(&way->link, left, bytes);
            if (left < 0)
                gone = &way->count.dropped_path;
            else if (is_lost(way))
                gone = &way->count.lost;
        }
        if (!gone) {
            r = extend(r, p, i, propagate(way, left), from, to);
            continue;
        }
        ++*gone;
        if (r)
            schedule_run(r);
        r = NULL;
    }
    if (r)
        schedule_run(r);
}

/* A run begins to arrive at its host's downlink: its segments queue up there, and leave as one run or several. */
static void enter_downlink(run *in)
{
    run *r = NULL;
    unsigned segments = in->end - in->begin;
    for (unsigned i = 0; i < segments; i++) {
        double at = segments == 1 ? in->first : in->first + (in->last - in->first) * i / (segments - 1);
        double left = send_through(&hosts[in->to].down, at, segment_bytes(in->of, in->begin + i));
        if (left >= 0) {
            r = extend(r, in->of, in->begin + i, left, in->from, in->to);
            r->past_downlink = 1;
            continue;
        }
        paths[in->from][in->to].count.dropped_down++;
        if (r)
            schedule_run(r);
        r = NULL;
    }
    if (r)
        schedule_run(r);
    end_run(in);
}

/* ---- to and from the devices -------------------------------------------------------------------------- */

/* Takes the first run that is due, and those after it that can be merged with it. */
static void collect(merged *m, double until)
{
    merge(m, take_first());
    const run *first = m->runs[0];
    while (event_count && events[0].at <= until) {
        run *r = events[0].what;
        if (!r->past_downlink || r->from != first->from || r->to != first->to || !merge(m, r))
            return;
        take_first();
    }
}

static void deliver(merged *m)
{
    unsigned from = m->runs[0]->from, to = m->runs[0]->to;
    path_counters *c = &paths[from][to].count;
    if (write_merged(hosts[to].tun, m) < 0)
        count.failed++;
    for (unsigned i = 0; i < m->count; i++) {
        run *r = m->runs[i];
        c->delivered += r->end - r->begin;
        for (unsigned k = r->begin; k < r->end; k++)
            c->delivered_bytes += segment_bytes(r->of, k);
        end_run(r);
    }
}

/* Delivers what is due, at most a batch. Returns when the next one is, 0 if nothing is on its way. */
static double deliver_due(void)
{
    double time = now();
    for (int i = 0; event_count && i < DELIVER_BATCH; i++) {
        double due = events[0].at;
        if (due > time + WINDOW_NS) {
            time = now();
            if (due > time + WINDOW_NS)
                return due;
        }
        if (!events[0].what->past_downlink) {
            enter_downlink(take_first());
            continue;
        }
        merged m;
        m.count = m.payload = 0;
        collect(&m, time + WINDOW_NS);
        uint64_t late = time > due ? (uint64_t)(time - due) : 0;
        count.deliveries++;
        count.late_ns += late;
        if (late > count.late_max_ns)
            count.late_max_ns = late;
        deliver(&m);
        time = now();
    }
    return event_count ? events[0].at : 0;
}

/* Reads what a host has sent, at most a batch. */
static void read_from(unsigned from)
{
    for (int i = 0; i < READ_BATCH; i++) {
        packet *p;
        ssize_t n = read_packet(hosts[from].tun, &hosts[from].current, &p);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return;
        if (n < 0)
            die("read from a device");
        if (n == 0) {
            count.overflow++;
            continue;
        }
        unsigned to = (inspect(p) & 0xff) - 1;
        if (to < host_count && to != from)
            enter(p, from, to, now());
        else
            count.unroutable++;
        release(p);
    }
}

/* ---- commands ----------------------------------------------------------------------------------------- */

static const char *obey(const char *command)
{
    unsigned from, to;
    double up, up_queue, down, down_queue;
    path new = {0};
    if (sscanf(command, "port %u %lf %lf %lf %lf", &from, &up, &up_queue, &down, &down_queue) == 5 && from < host_count) {
        set_shaper(&hosts[from].up, up, up_queue);
        set_shaper(&hosts[from].down, down, down_queue);
        return "ok";
    }
    if (sscanf(command, "path %u %u %lf %lf %d %lf %lf %lf %lf %lf %lf", &from, &to, &new.delay, &new.jitter, &new.reorder, &up, &up_queue,
               &new.loss_good, &new.loss_bad, &new.to_bad, &new.to_good) == 11 && from < host_count && to < host_count) {
        path *p = &paths[from][to];
        new.link.busy = p->link.busy;
        set_shaper(&new.link, up, up_queue);
        new.random = p->random;
        new.last = p->last;
        new.count = p->count;
        new.knot = -1e18; /* the jitter begins anew */
        *p = new;
        return "ok";
    }
    return "not understood";
}

static int send_counters(int control)
{
    static path_counters all[MAX_HOSTS * MAX_HOSTS];
    size_t n = 0;
    for (unsigned i = 0; i < host_count; i++)
        for (unsigned j = 0; j < host_count; j++)
            all[n++] = paths[i][j].count;
    struct iovec parts[2] = {{&count, sizeof count}, {all, n * sizeof *all}};
    return writev(control, parts, 2) >= 0;
}

/* Returns 0 when the other end has closed. */
static int serve(int control)
{
    char command[512];
    ssize_t n = recv(control, command, sizeof command - 1, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 1;
    if (n <= 0)
        return 0;
    command[n] = 0;
    if (!strcmp(command, "counters"))
        return send_counters(control);
    const char *answer = obey(command);
    return send(control, answer, strlen(answer), 0) >= 0;
}

/* ---- the end ------------------------------------------------------------------------------------------ */

/* Kills every process whose first thread lives in one of the namespaces, but not the parent. Returns how many there were. */
static int kill_inhabitants(pid_t parent)
{
    int found = 0;
    DIR *all = opendir("/proc");
    if (!all)
        die("/proc");
    for (struct dirent *entry; (entry = readdir(all));) {
        char name[300];
        struct stat its, ours;
        pid_t pid = atoi(entry->d_name);
        if (!isdigit((unsigned char)*entry->d_name) || pid == parent || pid == getpid())
            continue;
        snprintf(name, sizeof name, "/proc/%s/ns/net", entry->d_name);
        if (stat(name, &its))
            continue;
        for (unsigned i = 0; i < host_count; i++)
            if (!fstat(hosts[i].namespace, &ours) && ours.st_ino == its.st_ino && ours.st_dev == its.st_dev)
                found += !kill(pid, SIGKILL);
    }
    closedir(all);
    return found;
}

static int watched(int poller, int fd, uint32_t id)
{
    struct epoll_event e = {.events = EPOLLIN, .data.u32 = id};
    return epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
}

/* Sleeps until a device has a packet or it is `due` (0: no time). Returns how many of `ready` are. */
static int sleep_until(int poller, double due, struct epoll_event *ready)
{
    struct timespec wait = {0};
    double ns = due - now();
    if (due > 0 && ns > 0)
        wait = (struct timespec){.tv_sec = (time_t)(ns / 1e9), .tv_nsec = (long)ns % 1000000000};
    long got = syscall(SYS_epoll_pwait2, poller, ready, MAX_HOSTS, due > 0 ? &wait : NULL, NULL, 8);
    if (got < 0 && errno != EINTR)
        die("epoll_pwait2");
    return (int)got;
}

/* Returns when the parent has ended, or does not want this any more. */
static void carry(int poller, int control)
{
    struct epoll_event ready[MAX_HOSTS];
    for (;;) {
        int got = sleep_until(poller, deliver_due(), ready);
        for (int i = 0; i < got; i++) {
            uint32_t id = ready[i].data.u32;
            if (id == PARENT_ENDED || (id == CONTROL_READY && !serve(control)))
                return;
            if (id < host_count)
                read_from(id);
        }
    }
}

static void set_up_hosts(char **pairs, int poller, uint64_t seed)
{
    for (unsigned i = 0; i < host_count; i++) {
        if (sscanf(pairs[i], "%d:%d", &hosts[i].tun, &hosts[i].namespace) != 2 || fcntl(hosts[i].tun, F_SETFL, O_RDWR | O_NONBLOCK) ||
            watched(poller, hosts[i].tun, i))
            die(pairs[i]);
        for (unsigned j = 0; j < host_count; j++)
            paths[i][j].random = seed * 0x2545f4914f6cdd1d + i * MAX_HOSTS + j;
    }
}

int main(int argc, char **argv)
{
    pid_t parent = getppid();
    if (argc < 6 || argc - 5 > MAX_HOSTS) {
        fprintf(stderr, "delayline: expected CONTROL SEED QUANTUM_NS LIMIT_BYTES TUN:NAMESPACE..., up to %d pairs\n", MAX_HOSTS);
        return 2;
    }
    int control = atoi(argv[1]), poller = epoll_create1(EPOLL_CLOEXEC), ended = (int)syscall(SYS_pidfd_open, parent, 0);
    if (poller < 0 || ended < 0 || watched(poller, control, CONTROL_READY) || watched(poller, ended, PARENT_ENDED))
        die("control");
    quantum = atof(argv[3]);
    limit_memory(strtoull(argv[4], NULL, 10));
    host_count = (unsigned)argc - 5;
    clock_gettime(CLOCK_MONOTONIC, &start);
    set_up_hosts(argv + 5, poller, strtoull(argv[2], NULL, 10));
    signal(SIGINT, SIG_IGN); /* a Ctrl-C is for the parent */
    signal(SIGPIPE, SIG_IGN);
    prctl(PR_SET_TIMERSLACK, 1);
    /* A network does not wait for a time slice. Where this is not allowed, packets are later than asked on a loaded machine. */
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 1});
    carry(poller, control);
    for (int i = 0; i < SWEEPS && kill_inhabitants(parent); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return 0;
}

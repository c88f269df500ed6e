/* The delay line: carries IPv4 packets between the TUN devices of network namespaces as a wide area network would.

   A packet from host s to host d passes s's uplink (a rate and a finite queue), the path s -> d (a rate and a queue of its own, loss, delay
   with jitter) and d's downlink (a rate and a queue). A queue is drop-tail and virtual: a packet's place in it is a time, so nothing is
   moved until the packet is due at d's device. Rates, queues and loss count packets as they are on the wire: a segmentation-offload
   super-packet is taken as the run of MTU-sized segments that it stands for; each gets its own place in the queues and its own loss. What
   stays together is delivered together, at most `quantum` of link time, as a network card's interrupt coalescing and GRO would; where
   segments were lost, or the run is longer, it is cut into shorter super-packets. Payloads are never copied here: packets are read into
   blocks with a count of users, and written from there.

   Arguments: CONTROL SEED QUANTUM_NS LIMIT_BYTES TUN:NAMESPACE..., file descriptors and numbers. CONTROL is a SOCK_SEQPACKET socket; each
   message is a command that is answered by one message ("ok", "what is wrong", or the counters). When CONTROL or the parent ends, all
   processes that live in the namespaces are killed, and this one ends. It sleeps until the next packet is due: it does not spin. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/virtio_net.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
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

enum {
    MAX_HOSTS = 64,
    BLOCK = 1 << 20,
    LARGEST = 65535, /* bytes of an IPv4 packet */
    READ_BATCH = 32, /* packets from one device before due ones are looked at again */
    DELIVER_BATCH = 64, /* deliveries before devices are looked at again */
    SWEEPS = 200,
};
typedef struct virtio_net_hdr vnet;
#define WINDOW_NS 1000.0 /* what is due within this time is delivered now rather than after another sleep */

/* Times are nanoseconds since the start, as double: exact to far below one of them for months. */

typedef struct block {
    struct block *next; /* in the list of free ones */
    unsigned users, used; /* packets' runs that point here (and the reader), bytes */
    unsigned char bytes[];
} block;

typedef struct {
    block *home;
    unsigned length; /* of the IP packet */
    unsigned headers, mss, segments; /* bytes of IP and TCP headers, of payload in a segment; 0, 0, 1 if not a super-packet */
    unsigned char wire[]; /* as in what is read and written: the offload header, then the IP packet */
} packet;

/* Consecutive segments of a packet that travel together. */
typedef struct run {
    struct run *next; /* in the list of free ones */
    packet *of;
    unsigned begin, end; /* segments */
    double first, last; /* when the first and the last of them arrive */
    uint8_t from, to, past_downlink;
} run;

typedef struct {
    double at;
    uint64_t order; /* of equals, the older one first */
    run *what;
} event;

typedef struct {
    double ns_per_byte, queue_ns, busy; /* 0: without limit; the queue's length; until when it sends what it has */
} shaper;

typedef struct {
    uint64_t offered, lost, dropped_up, dropped_path, dropped_down, delivered, sent_bytes, delivered_bytes; /* sent: past the uplink */
} path_counters;

typedef struct {
    shaper link;
    double delay, jitter; /* ns */
    int reorder;
    double loss_good, loss_bad, to_bad, to_good; /* probabilities for each packet (Gilbert and Elliott) */
    int bad;
    double knot, value, next_value; /* jitter: since when, from what, to what it goes */
    double last; /* arrival */
    uint64_t random;
    path_counters count;
} path;

typedef struct {
    int tun, namespace;
    shaper up, down;
    block *current;
} host;

typedef struct {
    uint64_t unroutable, overflow, failed, deliveries, late_ns, late_max_ns;
} line_counters;

static host hosts[MAX_HOSTS];
static path paths[MAX_HOSTS][MAX_HOSTS];
static unsigned host_count;
static line_counters count;
static double quantum;
static size_t blocks_left;
static block *free_blocks;
static run *free_runs;
static event *events;
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

/* In [0, 1): splitmix64. */
static double draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* ---- memory ------------------------------------------------------------------------------------------- */

static void *allocate(size_t size)
{
    void *made = malloc(size);
    if (!made)
        die("memory");
    return made;
}

static void release(block *b)
{
    if (--b->users)
        return;
    b->next = free_blocks;
    free_blocks = b;
}

/* A place for the next packet of a host, NULL if all memory is in use. */
static packet *reserve(host *h)
{
    block *b = h->current;
    size_t need = sizeof(packet) + sizeof(vnet) + LARGEST;
    if (b && b->users == 1)
        b->used = 0; /* only the reader: what it held is still in the cache */
    if (b && BLOCK - b->used >= need)
        return (packet *)(void *)(b->bytes + b->used);
    if (!free_blocks) {
        if (!blocks_left)
            return NULL;
        blocks_left--;
        free_blocks = allocate(sizeof(block) + BLOCK);
    }
    if (b)
        release(b);
    h->current = b = free_blocks;
    free_blocks = b->next;
    b->users = 1;
    b->used = 0;
    return (packet *)(void *)b->bytes;
}

static void keep(host *h, packet *p)
{
    p->home = h->current;
    h->current->used += (unsigned)((sizeof(packet) + sizeof(vnet) + p->length + 63) & ~(size_t)63);
}

static run *new_run(packet *of, unsigned begin, unsigned from, unsigned to)
{
    run *r = free_runs;
    if (r)
        free_runs = r->next;
    else
        r = allocate(sizeof *r);
    *r = (run){.of = of, .begin = begin, .end = begin + 1, .from = (uint8_t)from, .to = (uint8_t)to};
    of->home->users++;
    return r;
}

static void end_run(run *r)
{
    release(r->of->home);
    r->next = free_runs;
    free_runs = r;
}

/* ---- what is due when: a binary heap ------------------------------------------------------------------ */

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

/* When the last byte of what comes at `at` has left, negative if the queue has no room for it. */
static double send_through(shaper *s, double at, unsigned bytes)
{
    if (s->ns_per_byte == 0)
        return at;
    double begin = at > s->busy ? at : s->busy, end = begin + bytes * s->ns_per_byte;
    if (end - at > s->queue_ns)
        return -1;
    return s->busy = end;
}

static int is_lost(path *p)
{
    if (p->to_bad > 0 && draw(&p->random) < (p->bad ? p->to_good : p->to_bad))
        p->bad = !p->bad;
    double chance = p->bad ? p->loss_bad : p->loss_good;
    return chance > 0 && draw(&p->random) < chance;
}

static double jitter_draw(path *p)
{
    return p->jitter * (2 * draw(&p->random) - 1);
}

/* When what enters the propagation at `at` arrives. Jitter that keeps the order wanders: straight lines between values drawn every
   2 x jitter, whose slope is never below -1, so that what left later arrives later. */
static double propagate(path *p, double at)
{
    double arrival = at + p->delay;
    if (p->reorder)
        return arrival + (p->jitter > 0 ? jitter_draw(p) : 0);
    if (p->jitter > 0) {
        double period = 2 * p->jitter;
        if (at - p->knot > 2 * period) {
            p->knot = at;
            p->value = jitter_draw(p);
            p->next_value = jitter_draw(p);
        } else {
            for (; at - p->knot > period; p->knot += period) {
                p->value = p->next_value;
                p->next_value = jitter_draw(p);
            }
        }
        arrival += p->value + (p->next_value - p->value) * (at - p->knot) / period;
    }
    return p->last = arrival > p->last ? arrival : p->last; /* also where the delay was just made shorter */
}

static unsigned segment_bytes(const packet *p, unsigned segment)
{
    if (p->segments == 1)
        return p->length;
    return segment + 1 < p->segments ? p->headers + p->mss : p->length - segment * p->mss;
}

static void schedule_run(run *r)
{
    int whole = r->past_downlink || hosts[r->to].down.ns_per_byte == 0;
    r->past_downlink = (uint8_t)whole;
    schedule(r, whole ? r->last : r->first);
}

/* Adds a segment that arrives at `at` to the run that is being made, or begins another one. */
static run *extend(run *r, packet *p, unsigned segment, double at, const path *way, unsigned from, unsigned to)
{
    if (r && (way->reorder || at - r->first > quantum)) {
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

static void enter(packet *p, unsigned from, unsigned to, double at)
{
    path *way = &paths[from][to];
    run *r = NULL;
    p->home->users++;
    way->count.offered += p->segments;
    for (unsigned i = 0; i < p->segments; i++) {
        unsigned bytes = segment_bytes(p, i);
        uint64_t *gone = NULL;
        double left;
        if ((left = send_through(&hosts[from].up, at, bytes)) < 0)
            gone = &way->count.dropped_up;
        else if (way->count.sent_bytes += bytes, (left = send_through(&way->link, left, bytes)) < 0)
            gone = &way->count.dropped_path;
        else if (is_lost(way))
            gone = &way->count.lost;
        if (!gone) {
            r = extend(r, p, i, propagate(way, left), way, from, to);
            continue;
        }
        ++*gone;
        if (r)
            schedule_run(r);
        r = NULL;
    }
    if (r)
        schedule_run(r);
    release(p->home);
}

/* A run begins to arrive at its host's downlink: its segments queue up there, and leave as one run or several. */
static void enter_downlink(run *in)
{
    path *way = &paths[in->from][in->to];
    run *r = NULL;
    unsigned segments = in->end - in->begin;
    for (unsigned i = 0; i < segments; i++) {
        double at = segments == 1 ? in->first : in->first + (in->last - in->first) * i / (segments - 1);
        double left = send_through(&hosts[in->to].down, at, segment_bytes(in->of, in->begin + i));
        if (left >= 0) {
            run *same = r = extend(r, in->of, in->begin + i, left, way, in->from, in->to);
            same->past_downlink = 1;
            continue;
        }
        way->count.dropped_down++;
        if (r)
            schedule_run(r);
        r = NULL;
    }
    if (r)
        schedule_run(r);
    end_run(in);
}

/* ---- to and from the devices -------------------------------------------------------------------------- */

static uint16_t folded(uint32_t sum)
{
    sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)((sum & 0xffff) + (sum >> 16));
}

static uint32_t sum16(const void *data, unsigned bytes)
{
    uint32_t sum = 0;
    for (unsigned i = 0; i < bytes; i += 2) {
        uint16_t word;
        memcpy(&word, (const char *)data + i, 2);
        sum += word;
    }
    return sum;
}

/* The headers of segments [begin, end) of a super-packet, as the sender's card would have made them. Returns the payload's bytes. */
static unsigned write_headers(const run *r, unsigned char *to)
{
    const packet *p = r->of;
    memcpy(to, p->wire, sizeof(vnet) + p->headers);
    vnet *offload = (vnet *)(void *)to;
    struct iphdr ip;
    struct tcphdr tcp;
    memcpy(&ip, to + sizeof(vnet), sizeof ip);
    unsigned ip_bytes = ip.ihl * 4u, at = r->begin * p->mss, payload = p->length - p->headers - at;
    if (r->end < p->segments)
        payload = (r->end - r->begin) * p->mss;
    if (r->end - r->begin == 1)
        offload->gso_type = offload->gso_size = 0;
    ip.tot_len = htons((uint16_t)(p->headers + payload));
    ip.id = htons((uint16_t)(ntohs(ip.id) + r->begin));
    ip.check = 0;
    memcpy(to + sizeof(vnet), &ip, sizeof ip);
    ip.check = (uint16_t)~folded(sum16(to + sizeof(vnet), ip_bytes));
    memcpy(to + sizeof(vnet), &ip, sizeof ip);
    unsigned char *tcp_at = to + sizeof(vnet) + ip_bytes;
    memcpy(&tcp, tcp_at, sizeof tcp);
    tcp.seq = htonl(ntohl(tcp.seq) + at);
    if (r->end < p->segments)
        tcp.fin = tcp.psh = 0;
    if (r->begin)
        tcp.res2 &= 1; /* CWR is the upper one of the two */
    /* The pseudo-header's sum, which whoever completes the checksum starts from. */
    tcp.check = folded(sum16(&ip.saddr, 8) + htons(IPPROTO_TCP) + htons((uint16_t)(p->headers - ip_bytes + payload)));
    memcpy(tcp_at, &tcp, sizeof tcp);
    return payload;
}

static void deliver(run *r)
{
    packet *p = r->of;
    path_counters *c = &paths[r->from][r->to].count;
    unsigned char headers[sizeof(vnet) + 60 + 60];
    struct iovec parts[2] = {{p->wire, sizeof(vnet) + p->length}};
    int used = 1;
    if (r->end - r->begin < p->segments) {
        unsigned payload = write_headers(r, headers);
        parts[0] = (struct iovec){headers, sizeof(vnet) + p->headers};
        parts[1] = (struct iovec){p->wire + sizeof(vnet) + p->headers + r->begin * p->mss, payload};
        used = 2;
    }
    if (writev(hosts[r->to].tun, parts, used) < 0)
        count.failed += r->end - r->begin;
    c->delivered += r->end - r->begin;
    for (unsigned i = r->begin; i < r->end; i++)
        c->delivered_bytes += segment_bytes(p, i);
    end_run(r);
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
        run *r = take_first();
        if (!r->past_downlink) {
            enter_downlink(r);
            continue;
        }
        uint64_t late = time > due ? (uint64_t)(time - due) : 0;
        count.deliveries++;
        count.late_ns += late;
        if (late > count.late_max_ns)
            count.late_max_ns = late;
        deliver(r);
        time = now();
    }
    return event_count ? events[0].at : 0;
}

/* Fills in what the packet is; the index of the host that it is for, or -1. */
static int inspect(packet *p)
{
    const unsigned char *at = p->wire + sizeof(vnet);
    vnet offload;
    struct iphdr ip;
    if (p->length < sizeof ip)
        return -1;
    memcpy(&offload, p->wire, sizeof offload);
    memcpy(&ip, at, sizeof ip);
    unsigned to = (ntohl(ip.daddr) & 0xff) - 1;
    if (ip.version != 4 || ntohs(ip.tot_len) != p->length || to >= host_count)
        return -1;
    p->headers = p->mss = 0;
    p->segments = 1;
    if (offload.gso_type != VIRTIO_NET_HDR_GSO_TCPV4 || !offload.gso_size)
        return (int)to;
    struct tcphdr tcp;
    unsigned ip_bytes = ip.ihl * 4u;
    if (p->length < ip_bytes + sizeof tcp)
        return -1;
    memcpy(&tcp, at + ip_bytes, sizeof tcp);
    unsigned headers = ip_bytes + tcp.doff * 4u;
    if (p->length <= headers + offload.gso_size)
        return (int)to;
    p->headers = headers;
    p->mss = offload.gso_size;
    p->segments = (p->length - headers + p->mss - 1) / p->mss;
    return (int)to;
}

/* Reads what a host has sent, at most a batch. Returns whether there may be more. */
static int read_from(unsigned from)
{
    host *h = &hosts[from];
    for (int i = 0; i < READ_BATCH; i++) {
        packet *p = reserve(h);
        char dropped[sizeof(vnet)];
        ssize_t n = p ? read(h->tun, p->wire, sizeof(vnet) + LARGEST) : read(h->tun, dropped, sizeof dropped);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            return 0;
        if (n < (ssize_t)sizeof(vnet))
            die("read from a device");
        if (!p) {
            count.overflow++;
            continue;
        }
        p->length = (unsigned)n - (unsigned)sizeof(vnet);
        int to = inspect(p);
        if (to < 0 || (unsigned)to == from) {
            count.unroutable++;
            continue;
        }
        keep(h, p);
        enter(p, from, (unsigned)to, now());
    }
    return 1;
}

/* ---- commands ----------------------------------------------------------------------------------------- */

static void set_shaper(shaper *s, double bits_per_second, double queue)
{
    s->ns_per_byte = bits_per_second > 0 ? 8e9 / bits_per_second : 0;
    s->queue_ns = queue * s->ns_per_byte;
}

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
        set_shaper(&p->link, up, up_queue);
        p->delay = new.delay;
        p->jitter = new.jitter;
        p->reorder = new.reorder;
        p->loss_good = new.loss_good;
        p->loss_bad = new.loss_bad;
        p->to_bad = new.to_bad;
        p->to_good = new.to_good;
        p->bad = 0;
        p->knot = -1e18; /* the jitter begins anew */
        return "ok";
    }
    return "not understood";
}

static void send_counters(int control)
{
    static path_counters all[MAX_HOSTS * MAX_HOSTS];
    size_t n = 0;
    for (unsigned i = 0; i < host_count; i++)
        for (unsigned j = 0; j < host_count; j++)
            all[n++] = paths[i][j].count;
    struct iovec parts[2] = {{&count, sizeof count}, {all, n * sizeof *all}};
    if (writev(control, parts, 2) < 0)
        die("answer");
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
    if (!strcmp(command, "counters")) {
        send_counters(control);
        return 1;
    }
    const char *answer = obey(command);
    return send(control, answer, strlen(answer), MSG_NOSIGNAL) >= 0;
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

static void sleep_until(int poller, double due, struct epoll_event *ready, int *got)
{
    struct timespec wait = {0};
    if (due > 0) {
        double ns = due - now();
        if (ns > 0)
            wait = (struct timespec){.tv_sec = (time_t)(ns / 1e9), .tv_nsec = (long)ns % 1000000000};
    }
    *got = (int)syscall(SYS_epoll_pwait2, poller, ready, MAX_HOSTS, due > 0 ? &wait : NULL, NULL, 8);
    if (*got < 0 && errno != EINTR)
        die("epoll_pwait2");
}

static void carry(int poller, int control)
{
    struct epoll_event ready[MAX_HOSTS];
    for (;;) {
        int got;
        sleep_until(poller, deliver_due(), ready, &got);
        for (int i = 0; i < got; i++) {
            uint32_t id = ready[i].data.u32;
            if (id < host_count)
                read_from(id);
            else if (id == MAX_HOSTS + 1 || !serve(control))
                return; /* the parent has ended, or does not want this any more */
            deliver_due();
        }
    }
}

int main(int argc, char **argv)
{
    pid_t parent = getppid();
    if (argc < 6 || argc - 5 > MAX_HOSTS) {
        fprintf(stderr, "delayline: expected CONTROL SEED QUANTUM_NS LIMIT_BYTES TUN:NAMESPACE... (1 to %d), got %d arguments\n", MAX_HOSTS,
                argc - 1);
        return 2;
    }
    int control = atoi(argv[1]), poller = epoll_create1(EPOLL_CLOEXEC), ended = (int)syscall(SYS_pidfd_open, parent, 0);
    uint64_t seed = strtoull(argv[2], NULL, 10);
    quantum = atof(argv[3]);
    blocks_left = strtoull(argv[4], NULL, 10) / BLOCK;
    host_count = (unsigned)argc - 5;
    clock_gettime(CLOCK_MONOTONIC, &start);
    if (poller < 0 || ended < 0 || watched(poller, control, MAX_HOSTS) || watched(poller, ended, MAX_HOSTS + 1))
        die("control");
    for (unsigned i = 0; i < host_count; i++) {
        if (sscanf(argv[5 + i], "%d:%d", &hosts[i].tun, &hosts[i].namespace) != 2 || fcntl(hosts[i].tun, F_SETFL, O_RDWR | O_NONBLOCK) ||
            watched(poller, hosts[i].tun, i))
            die(argv[5 + i]);
        for (unsigned j = 0; j < host_count; j++)
            paths[i][j].random = seed * 0x2545f4914f6cdd1d + i * MAX_HOSTS + j;
    }
    signal(SIGINT, SIG_IGN); /* a Ctrl-C is for the parent */
    prctl(PR_SET_TIMERSLACK, 1);
    /* A network does not wait for a time slice; where this is not allowed, a loaded machine delays packets more than asked. */
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 1});
    carry(poller, control);
    for (int i = 0; i < SWEEPS && kill_inhabitants(parent); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return 0;
}

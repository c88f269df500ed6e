/* A bare ring all-reduce (float32 sum) over TCP: the ceiling that `make bench` compares with. No framing, checksum,
   daemon or commit.

   Ranks are processes of one thread each. A rank reads from its left neighbour and writes to its right one; connection
   i carries part i of every chunk. There is no step barrier: a byte may leave for the right as soon as it has been
   reduced from the left (the ring of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
   workstations", 2009, pipelined within the chunk). The first reduction of an element computes result = input +
   received, so the input is never written; after an operation the two change places ("in place").

   Commands come on standard input, so that several programs can be measured in turn while the others sleep: each line
   "BYTES ITERATIONS" is answered with one line of JSON; the end of the input ends the program.

   With --host ADDRESS@NAMESPACE, once for each rank, the ranks are in network namespaces, at those addresses, instead
   of on loopback. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MAX_RANKS = 16, MAX_CONNECTIONS = 64, MAX_ITERATIONS = 100000, STALL_MS = 20000 };

typedef struct {
    int ranks, connections;
    size_t sndbuf, rcvbuf; /* bytes; 0: the system's autotuning */
    size_t read_size, write_size; /* largest system call, bytes */
    size_t max_bytes; /* of the tensor */
    const char *congestion; /* "": the system's */
    struct in_addr addresses[MAX_RANKS];
    int namespaces[MAX_RANKS], hosts; /* of the first ranks; others are where the program was started */
} options;

typedef struct {
    size_t bytes;
    uint32_t iterations;
} command;

typedef struct {
    double median, low, high; /* seconds per operation, of this rank */
    uint64_t wrong; /* elements */
} answer;

/* A position in one connection's stream: the parts of the chunks of steps 0, 1, ... one after the other. */
typedef struct {
    int step;
    size_t at; /* bytes within the step */
    size_t done, total; /* bytes of the operation */
} cursor;

typedef struct {
    int in, out;
    cursor received, sent;
    size_t first; /* bytes of step 0's send: they need nothing received */
    size_t tail; /* bytes of an element that was split between two reads, at the start of scratch */
    char *scratch;
    int blocked; /* the socket took less than it was offered */
} connection;

typedef struct {
    const options *opt;
    int rank;
    size_t count; /* elements */
    float *input, *result;
    connection connections[MAX_CONNECTIONS];
} ring;

static _Noreturn void die(const char *what)
{
    fprintf(stderr, "ring: %s: %s\n", what, strerror(errno));
    _exit(1);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#if defined(__x86_64__)
__attribute__((target("avx2")))
#endif
static void add(float *restrict to, const float *restrict a, const float *restrict b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        to[i] = a[i] + b[i];
}

/* The bytes that this rank sends (receiving = 0) or receives (1) on connection `part` in `step`, and where in the
   tensor they begin. */
static size_t span(const ring *r, int part, int step, int receiving, size_t *offset)
{
    size_t ranks = (size_t)r->opt->ranks, parts = (size_t)r->opt->connections;
    size_t chunk = (size_t)(r->rank - step - receiving + 2 * r->opt->ranks) % ranks;
    size_t low = r->count * chunk / ranks, size = r->count * (chunk + 1) / ranks - low;
    size_t begin = low + size * (size_t)part / parts, end = low + size * ((size_t)part + 1) / parts;
    *offset = begin * sizeof(float);
    return (end - begin) * sizeof(float);
}

static int steps(const ring *r)
{
    return 2 * (r->opt->ranks - 1);
}

static cursor start(const ring *r, int part, int receiving)
{
    cursor c = {0};
    size_t offset;
    for (int step = 0; step < steps(r); step++)
        c.total += span(r, part, step, receiving, &offset);
    return c;
}

/* Bytes left in the cursor's step (steps without bytes are passed over), and where they lie in the tensor. */
static size_t rest(const ring *r, int part, cursor *c, int receiving, size_t *offset)
{
    size_t length;
    while ((length = span(r, part, c->step, receiving, offset)) == c->at) {
        c->step++;
        c->at = 0;
    }
    *offset += c->at;
    return length - c->at;
}

static void advance(cursor *c, size_t n)
{
    c->at += n;
    c->done += n;
}

/* Reads once and reduces what came. Returns the bytes read, 0 if there were none. */
static size_t pull(ring *r, int part)
{
    connection *c = &r->connections[part];
    size_t offset, want = rest(r, part, &c->received, 1, &offset);
    int reduce = c->received.step < r->opt->ranks - 1;
    if (want > r->opt->read_size)
        want = r->opt->read_size;
    char *to = reduce ? c->scratch + c->tail : (char *)r->result + offset;
    ssize_t n = recv(c->in, to, want - c->tail, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return 0;
    if (n == 0)
        errno = ECONNRESET;
    if (n <= 0)
        die("recv");
    if (!reduce) {
        advance(&c->received, (size_t)n);
        return (size_t)n;
    }
    size_t have = c->tail + (size_t)n, whole = have / sizeof(float), at = offset / sizeof(float);
    add(r->result + at, r->input + at, (const float *)(const void *)c->scratch, whole);
    c->tail = have - whole * sizeof(float);
    memmove(c->scratch, c->scratch + whole * sizeof(float), c->tail);
    advance(&c->received, whole * sizeof(float));
    return (size_t)n;
}

/* Writes once, at most up to what has been reduced. Returns the bytes written, 0 if none could go. */
static size_t push(ring *r, int part)
{
    connection *c = &r->connections[part];
    size_t ready = c->first + c->received.done - c->sent.done, offset;
    if (!ready)
        return 0;
    size_t n = rest(r, part, &c->sent, 0, &offset);
    if (n > ready)
        n = ready;
    if (n > r->opt->write_size)
        n = r->opt->write_size;
    const char *from = (const char *)(c->sent.step == 0 ? r->input : r->result) + offset;
    ssize_t sent = send(c->out, from, n, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno != EAGAIN && errno != EINTR)
        die("send");
    size_t done = sent < 0 ? 0 : (size_t)sent;
    c->blocked = done < n;
    advance(&c->sent, done);
    return done;
}

static void await(ring *r)
{
    struct pollfd fds[2 * MAX_CONNECTIONS];
    nfds_t count = 0;
    for (int i = 0; i < r->opt->connections; i++) {
        connection *c = &r->connections[i];
        if (c->received.done < c->received.total)
            fds[count++] = (struct pollfd){.fd = c->in, .events = POLLIN};
        if (c->blocked)
            fds[count++] = (struct pollfd){.fd = c->out, .events = POLLOUT};
    }
    if (poll(fds, count, STALL_MS) == 0) {
        errno = ETIMEDOUT;
        die("a neighbour");
    }
}

static void all_reduce(ring *r)
{
    size_t offset;
    for (int i = 0; i < r->opt->connections; i++) {
        connection *c = &r->connections[i];
        c->received = start(r, i, 1);
        c->sent = start(r, i, 0);
        c->first = span(r, i, 0, 0, &offset);
        c->tail = 0;
        c->blocked = 0;
    }
    for (int busy = 1; busy;) {
        size_t moved = 0;
        busy = 0;
        for (int i = 0; i < r->opt->connections; i++) {
            connection *c = &r->connections[i];
            if (c->sent.done < c->sent.total)
                moved += push(r, i);
            if (c->received.done < c->received.total)
                moved += pull(r, i);
            busy |= c->sent.done < c->sent.total || c->received.done < c->received.total;
        }
        if (busy && !moved)
            await(r);
    }
    float *result = r->result;
    r->result = r->input;
    r->input = result;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* One operation whose values are checked, one to warm up, then the timed ones, back to back. */
static answer measure(ring *r, const command *cmd, double *times)
{
    enum { PERIOD = 8191 }; /* small whole numbers: their sums are exact */
    answer result = {0};
    r->count = cmd->bytes / sizeof(float);
    for (size_t i = 0; i < r->count; i++)
        r->input[i] = (float)((size_t)(r->rank + 1) * (i % PERIOD));
    all_reduce(r);
    float factor = (float)(r->opt->ranks * (r->opt->ranks + 1) / 2);
    for (size_t i = 0; i < r->count; i++)
        result.wrong += r->input[i] != factor * (float)(i % PERIOD);
    memset(r->input, 0, cmd->bytes);
    all_reduce(r);
    for (uint32_t i = 0; i < cmd->iterations; i++) {
        double begin = now();
        all_reduce(r);
        times[i] = now() - begin;
    }
    qsort(times, cmd->iterations, sizeof *times, by_value);
    size_t middle = cmd->iterations / 2;
    result.median = cmd->iterations % 2 ? times[middle] : (times[middle - 1] + times[middle]) / 2;
    result.low = times[0];
    result.high = times[cmd->iterations - 1];
    return result;
}

/* Reads or writes all of it; 0 where the other end has closed. */
static int transfer(int fd, void *data, size_t size, int writing)
{
    for (size_t at = 0; at < size;) {
        ssize_t n = writing ? write(fd, (char *)data + at, size - at) : read(fd, (char *)data + at, size - at);
        if (n == 0)
            return 0;
        if (n < 0)
            die("a control connection");
        at += (size_t)n;
    }
    return 1;
}

static void tune(const options *o, int fd)
{
    int on = 1, sndbuf = (int)o->sndbuf, rcvbuf = (int)o->rcvbuf;
    if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on))
        die("TCP_NODELAY");
    if (sndbuf && setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &sndbuf, sizeof sndbuf))
        die("SO_SNDBUF");
    if (rcvbuf && setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof rcvbuf))
        die("SO_RCVBUF");
    if (*o->congestion && setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, o->congestion, (socklen_t)strlen(o->congestion)))
        die(o->congestion);
}

static float *tensor(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        die("memory for the tensor");
    return memory;
}

/* Goes where the rank is. */
static void enter_host(const options *o, int rank)
{
    if (rank < o->hosts && setns(o->namespaces[rank], CLONE_NEWNET))
        die("setns");
}

static _Noreturn void rank_main(const options *o, int rank, int listener, struct sockaddr_in right, int control)
{
    static ring r;
    enter_host(o, rank);
    r.opt = o;
    r.rank = rank;
    r.input = tensor(o->max_bytes);
    r.result = tensor(o->max_bytes);
    for (int i = 0; i < o->connections; i++) {
        int out = socket(AF_INET, SOCK_STREAM, 0);
        if (out < 0)
            die("socket");
        tune(o, out);
        if (connect(out, (struct sockaddr *)&right, sizeof right))
            die("connect");
        r.connections[i].out = out;
    }
    for (int i = 0; i < o->connections; i++) {
        /* The neighbour dialled one after the other, so they are accepted in that order. */
        r.connections[i].in = accept(listener, NULL, NULL);
        if (r.connections[i].in < 0)
            die("accept");
        tune(o, r.connections[i].in);
        r.connections[i].scratch = aligned_alloc(64, (o->read_size + 63) / 64 * 64);
        if (!r.connections[i].scratch)
            die("memory for a connection");
    }
    double *times = malloc(MAX_ITERATIONS * sizeof *times);
    if (!times)
        die("memory for the times");
    for (command cmd; transfer(control, &cmd, sizeof cmd, 0);) {
        answer a = measure(&r, &cmd, times);
        transfer(control, &a, sizeof a, 1);
    }
    _exit(0);
}

static size_t size_option(const char *name, const char *text)
{
    char *end;
    size_t n = strtoull(text, &end, 10);
    if (*end == 'K')
        n <<= 10, end++;
    else if (*end == 'M')
        n <<= 20, end++;
    if (*end || end == text || n > 1u << 30) {
        fprintf(stderr, "ring: --%s: expected a size up to 1024M such as 4096, 64K or 1M, got %s\n", name, text);
        exit(2);
    }
    return n;
}

static void add_host(options *o, const char *text)
{
    char address[INET_ADDRSTRLEN];
    const char *at = strchr(text, '@');
    size_t length = at ? (size_t)(at - text) : sizeof address;
    if (length < sizeof address && o->hosts < MAX_RANKS) {
        memcpy(address, text, length);
        address[length] = 0;
        o->namespaces[o->hosts] = open(at + 1, O_RDONLY | O_CLOEXEC);
        if (o->namespaces[o->hosts] < 0)
            die(at + 1);
        if (inet_pton(AF_INET, address, &o->addresses[o->hosts++]) == 1)
            return;
    }
    fprintf(stderr, "ring: --host: expected ADDRESS@NAMESPACE, at most %d, got %s\n", MAX_RANKS, text);
    exit(2);
}

static options parse(int argc, char **argv)
{
    options o = {.ranks = 2, .connections = 1, .read_size = 1 << 19, .write_size = 1 << 19, .max_bytes = 64 << 20, .congestion = ""};
    static const struct option names[] = {
        {"ranks", 1, 0, 'n'}, {"connections", 1, 0, 'c'}, {"max-bytes", 1, 0, 'b'}, {"read", 1, 0, 'R'}, {"write", 1, 0, 'W'},
        {"sndbuf", 1, 0, 's'}, {"rcvbuf", 1, 0, 'r'}, {"congestion", 1, 0, 'g'}, {"host", 1, 0, 'h'}, {0, 0, 0, 0},
    };
    for (int k; (k = getopt_long(argc, argv, "", names, NULL)) != -1;)
        switch (k) {
        case 'n': o.ranks = atoi(optarg); break;
        case 'c': o.connections = atoi(optarg); break;
        case 'b': o.max_bytes = size_option("max-bytes", optarg); break;
        case 'R': o.read_size = size_option("read", optarg); break;
        case 'W': o.write_size = size_option("write", optarg); break;
        case 's': o.sndbuf = size_option("sndbuf", optarg); break;
        case 'r': o.rcvbuf = size_option("rcvbuf", optarg); break;
        case 'g': o.congestion = optarg; break;
        case 'h': add_host(&o, optarg); break;
        default: exit(2);
        }
    if (o.ranks < 2 || o.ranks > MAX_RANKS || o.connections < 1 || o.connections > MAX_CONNECTIONS || o.read_size < 64 || o.write_size < 64 ||
        o.max_bytes < sizeof(float) || optind < argc) {
        fprintf(stderr, "ring: expected 2 to %d ranks, 1 to %d connections, read and write sizes from 64 bytes, tensors from 4 bytes\n",
                MAX_RANKS, MAX_CONNECTIONS);
        exit(2);
    }
    return o;
}

static void listen_for(const options *o, int rank, int *listener, struct sockaddr_in *address)
{
    socklen_t size = sizeof *address;
    enter_host(o, rank);
    *address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (rank < o->hosts)
        address->sin_addr = o->addresses[rank];
    *listener = socket(AF_INET, SOCK_STREAM, 0);
    if (*listener < 0)
        die("socket");
    tune(o, *listener);
    if (bind(*listener, (struct sockaddr *)address, size) || listen(*listener, MAX_CONNECTIONS) ||
        getsockname(*listener, (struct sockaddr *)address, &size))
        die("listen");
}

/* Forks the ranks; controls[i] is this end of rank i's control connection. */
static void launch(const options *o, int *controls)
{
    int listeners[MAX_RANKS];
    struct sockaddr_in addresses[MAX_RANKS];
    for (int i = 0; i < o->ranks; i++)
        listen_for(o, i, &listeners[i], &addresses[i]);
    for (int i = 0; i < o->ranks; i++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
            die("socketpair");
        pid_t pid = fork();
        if (pid < 0)
            die("fork");
        if (pid == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            setsid(); /* the scheduler shares a core between sessions; a daemon has its own, too */
            close(pair[0]);
            for (int k = 0; k < i; k++)
                close(controls[k]);
            for (int k = i + 1; k < o->ranks; k++)
                close(listeners[k]);
            rank_main(o, i, listeners[i], addresses[(i + 1) % o->ranks], pair[1]);
        }
        close(pair[1]);
        close(listeners[i]);
        controls[i] = pair[0];
    }
}

/* Has all ranks run the command; the times are rank 0's. */
static answer ask(const options *o, const int *controls, command cmd)
{
    answer result = {0};
    for (int i = 0; i < o->ranks; i++)
        transfer(controls[i], &cmd, sizeof cmd, 1);
    for (int i = 0; i < o->ranks; i++) {
        answer a;
        if (!transfer(controls[i], &a, sizeof a, 0))
            exit(1); /* the rank has said why */
        a.wrong += result.wrong;
        result.wrong = a.wrong;
        if (i == 0)
            result = a;
    }
    return result;
}

int main(int argc, char **argv)
{
    options o = parse(argc, argv);
    int controls[MAX_RANKS];
    signal(SIGPIPE, SIG_IGN);
    launch(&o, controls);
    for (char line[128]; fgets(line, sizeof line, stdin);) {
        command cmd = {0};
        if (sscanf(line, "%zu %u", &cmd.bytes, &cmd.iterations) != 2 || cmd.bytes < sizeof(float) || cmd.bytes > o.max_bytes ||
            cmd.iterations < 1 || cmd.iterations > MAX_ITERATIONS) {
            fprintf(stderr, "ring: expected BYTES ITERATIONS, 4 to %zu bytes and 1 to %d iterations, got %s", o.max_bytes, MAX_ITERATIONS, line);
            return 2;
        }
        answer a = ask(&o, controls, cmd);
        double busbw = 2.0 * (o.ranks - 1) / o.ranks * (double)cmd.bytes / a.median / 1e9;
        printf("{\"bytes\": %zu, \"seconds\": %.9f, \"min\": %.9f, \"max\": %.9f, \"busbw\": %.4f, \"wrong\": %llu}\n", cmd.bytes, a.median,
               a.low, a.high, busbw, (unsigned long long)a.wrong);
        fflush(stdout);
    }
    for (int i = 0; i < o.ranks; i++)
        close(controls[i]);
    while (wait(NULL) > 0) {
    }
    return 0;
}

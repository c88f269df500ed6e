/* Packets as the devices give and take them, and runs of the segments that a super-packet stands for.

   Payloads are never copied here: packets are read into blocks with a count of users, and written from there. */
#define _GNU_SOURCE
#include "packets.h"

#include <arpa/inet.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { BLOCK = 1 << 20, ALIGNMENT = 64, MAX_HEADERS = 60 + 60 };

struct block {
    block *next; /* in the list of free ones */
    unsigned users, used; /* packets, runs and the device that fills it; bytes */
    unsigned char bytes[];
};

static size_t blocks_left;
static block *free_blocks;
static run *free_runs;

/* ---- memory ------------------------------------------------------------------------------------------- */

void limit_memory(size_t bytes)
{
    blocks_left = bytes / BLOCK;
}

void *allocate(size_t size)
{
    void *made = malloc(size);
    if (!made) {
        fprintf(stderr, "delayline: no memory\n");
        exit(1);
    }
    return made;
}

static void let_go(block *b)
{
    if (--b->users)
        return;
    b->next = free_blocks;
    free_blocks = b;
}

void release(packet *p)
{
    let_go(p->home);
}

/* A place for the next packet, NULL if all memory is in use. */
static packet *reserve(block **current)
{
    block *b = *current;
    if (b && b->users == 1)
        b->used = 0; /* nothing in it is needed, and it is still in the cache */
    if (!b || BLOCK - b->used < sizeof(packet) + sizeof(offload_header) + LARGEST) {
        if (!free_blocks && !blocks_left)
            return NULL;
        if (!free_blocks) {
            blocks_left--;
            free_blocks = allocate(sizeof(block) + BLOCK);
            free_blocks->next = NULL;
        }
        if (b)
            let_go(b);
        *current = b = free_blocks;
        free_blocks = b->next;
        b->users = 1;
        b->used = 0;
    }
    packet *p = (packet *)(void *)(b->bytes + b->used);
    p->home = b;
    return p;
}

ssize_t read_packet(int device, block **current, packet **got)
{
    packet *p = reserve(current);
    char dropped[sizeof(offload_header)];
    if (!p) {
        ssize_t n = read(device, dropped, sizeof dropped);
        return n < 0 ? n : 0;
    }
    ssize_t n = read(device, p->wire, sizeof(offload_header) + LARGEST);
    if (n <= 0)
        return n;
    p->length = (unsigned)n - (unsigned)sizeof(offload_header);
    p->home->used += (unsigned)((sizeof(packet) + (size_t)n + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    p->home->users++;
    *got = p;
    return n;
}

run *new_run(packet *of, unsigned begin, unsigned from, unsigned to)
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

void end_run(run *r)
{
    release(r->of);
    r->next = free_runs;
    free_runs = r;
}

/* ---- headers ------------------------------------------------------------------------------------------ */

uint32_t inspect(packet *p)
{
    const unsigned char *at = p->wire + sizeof(offload_header);
    offload_header offload;
    struct iphdr ip;
    struct tcphdr tcp;
    p->headers = p->mss = 0;
    p->segments = 1;
    if (p->length < sizeof ip)
        return 0;
    memcpy(&offload, p->wire, sizeof offload);
    memcpy(&ip, at, sizeof ip);
    unsigned ip_bytes = ip.ihl * 4u;
    if (ip.version != 4 || ip_bytes < sizeof ip || ntohs(ip.tot_len) != p->length)
        return 0;
    if (ip.protocol != IPPROTO_TCP || p->length < ip_bytes + sizeof tcp || !(offload.flags & VIRTIO_NET_HDR_F_NEEDS_CSUM))
        return ntohl(ip.daddr);
    memcpy(&tcp, at + ip_bytes, sizeof tcp);
    unsigned headers = ip_bytes + tcp.doff * 4u;
    if (p->length <= headers)
        return ntohl(ip.daddr);
    p->headers = headers;
    p->mss = p->length - headers;
    if (offload.gso_type == VIRTIO_NET_HDR_GSO_TCPV4 && offload.gso_size && offload.gso_size < p->mss) {
        p->segments = (p->mss + offload.gso_size - 1) / offload.gso_size;
        p->mss = offload.gso_size;
    }
    return ntohl(ip.daddr);
}

unsigned segment_bytes(const packet *p, unsigned segment)
{
    if (p->segments == 1)
        return p->length;
    return segment + 1 < p->segments ? p->headers + p->mss : p->length - segment * p->mss;
}

static unsigned payload_bytes(const run *r)
{
    const packet *p = r->of;
    return (r->end < p->segments ? r->end * p->mss : p->length - p->headers) - r->begin * p->mss;
}

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

/* The headers of the runs as one super-packet, as the sender's card would have made them for each. */
static void write_headers(const merged *m, unsigned char *to)
{
    const run *first = m->runs[0], *last = m->runs[m->count - 1];
    const packet *p = first->of;
    unsigned char *ip_at = to + sizeof(offload_header);
    offload_header offload;
    struct iphdr ip;
    struct tcphdr tcp, last_tcp;
    memcpy(to, p->wire, sizeof offload + p->headers);
    memcpy(&offload, to, sizeof offload);
    int one = m->payload <= p->mss;
    offload.gso_type = one ? VIRTIO_NET_HDR_GSO_NONE : VIRTIO_NET_HDR_GSO_TCPV4;
    offload.gso_size = one ? 0 : (uint16_t)p->mss;
    offload.hdr_len = (uint16_t)p->headers;
    memcpy(to, &offload, sizeof offload);

    memcpy(&ip, ip_at, sizeof ip);
    unsigned ip_bytes = ip.ihl * 4u;
    ip.tot_len = htons((uint16_t)(p->headers + m->payload));
    ip.id = htons((uint16_t)(ntohs(ip.id) + first->begin));
    ip.check = 0;
    memcpy(ip_at, &ip, sizeof ip);
    ip.check = (uint16_t)~folded(sum16(ip_at, ip_bytes));
    memcpy(ip_at, &ip, sizeof ip);

    memcpy(&tcp, ip_at + ip_bytes, sizeof tcp);
    memcpy(&last_tcp, last->of->wire + sizeof offload + ip_bytes, sizeof last_tcp);
    int whole = last->end == last->of->segments;
    tcp.seq = htonl(ntohl(tcp.seq) + first->begin * p->mss);
    tcp.fin = whole && last_tcp.fin;
    tcp.psh = whole && last_tcp.psh;
    if (first->begin)
        tcp.res2 &= 1; /* CWR is the upper one of the two */
    /* The pseudo-header's sum, which whoever completes the checksum starts from. */
    tcp.check = folded(sum16(&ip.saddr, 8) + htons(IPPROTO_TCP) + htons((uint16_t)(p->headers - ip_bytes + m->payload)));
    memcpy(ip_at + ip_bytes, &tcp, sizeof tcp);
}

ssize_t write_merged(int device, const merged *m)
{
    const run *first = m->runs[0];
    packet *p = first->of;
    if (m->count == 1 && first->end - first->begin == p->segments)
        return write(device, p->wire, sizeof(offload_header) + p->length);
    unsigned char headers[sizeof(offload_header) + MAX_HEADERS];
    struct iovec parts[MAX_MERGED + 1] = {{headers, sizeof(offload_header) + p->headers}};
    write_headers(m, headers);
    for (unsigned i = 0; i < m->count; i++) {
        const run *r = m->runs[i];
        parts[i + 1].iov_base = r->of->wire + sizeof(offload_header) + r->of->headers + r->begin * r->of->mss;
        parts[i + 1].iov_len = payload_bytes(r);
    }
    return writev(device, parts, (int)m->count + 1);
}

/* ---- merging ------------------------------------------------------------------------------------------ */

/* Copies the headers without what may differ between packets that are merged. Returns their TCP flags, and where the run's bytes begin. */
static unsigned comparable(const run *r, unsigned char *headers, uint32_t *sequence)
{
    struct iphdr *ip = (struct iphdr *)(void *)headers;
    memcpy(headers, r->of->wire + sizeof(offload_header), r->of->headers);
    struct tcphdr *tcp = (struct tcphdr *)(void *)(headers + ip->ihl * 4u);
    unsigned flags = tcp->th_flags;
    *sequence = ntohl(tcp->seq) + r->begin * r->of->mss;
    tcp->th_flags = TH_ACK;
    tcp->seq = tcp->check = ip->tot_len = ip->id = ip->check = 0;
    return flags;
}

int merge(merged *m, run *r)
{
    const packet *p = r->of;
    unsigned payload = payload_bytes(r);
    if (m->count) {
        _Alignas(8) unsigned char ours[MAX_HEADERS], theirs[MAX_HEADERS];
        const packet *q = m->runs[0]->of;
        uint32_t expected, sequence;
        if (m->closed || !p->headers || !q->headers || p->headers != q->headers || m->count == MAX_MERGED ||
            q->headers + m->payload + payload > LARGEST)
            return 0;
        if (p->mss != q->mss && (p->mss > q->mss || p->segments > 1))
            return 0;
        unsigned flags = comparable(m->runs[0], ours, &expected) | comparable(r, theirs, &sequence);
        if ((flags & ~(unsigned)TH_PUSH) != TH_ACK || sequence != expected + m->payload || memcmp(ours, theirs, p->headers))
            return 0;
    }
    m->runs[m->count++] = r;
    m->payload += payload;
    m->closed = !p->headers || payload % m->runs[0]->of->mss != 0;
    return 1;
}

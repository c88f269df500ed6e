/* Packets as the devices give and take them, and runs of the segments that a super-packet stands for. */
#ifndef PACKETS_H
#define PACKETS_H
#include <linux/virtio_net.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum {
    LARGEST = 65535, /* bytes of an IPv4 packet */
    MAX_MERGED = 64, /* runs in one write */
};

typedef struct virtio_net_hdr offload_header;
typedef struct block block;

typedef struct {
    block *home;
    unsigned length; /* of the IP packet */
    unsigned headers, mss, segments; /* TCP: bytes of IP and TCP headers, of payload in a segment; anything else: 0, 0, 1 */
    unsigned char wire[]; /* as it is read and written: the offload header, then the IP packet */
} packet;

/* Consecutive segments of a packet that travel together. */
typedef struct run {
    struct run *next; /* in the list of free ones */
    packet *of;
    unsigned begin, end; /* segments */
    double first, last; /* when the first and the last of them arrive, ns */
    uint8_t from, to, past_downlink;
} run;

/* Runs that a device gets in one write: together they are one super-packet. */
typedef struct {
    run *runs[MAX_MERGED];
    unsigned count, payload, closed;
} merged;

/* All packets together may take this many bytes. */
void limit_memory(size_t bytes);

/* Reads a packet from a device into memory; `*current` is the block that this device fills. Returns read()'s result, or 0 if all memory is
   in use and the packet is lost. The packet lasts until release() or its last run's end. */
ssize_t read_packet(int device, block **current, packet **read);

/* Says what the packet is. Returns the destination address in host byte order, 0 if it is no IPv4 packet. */
uint32_t inspect(packet *p);

/* The segment's bytes on the wire. */
unsigned segment_bytes(const packet *p, unsigned segment);

void release(packet *p);
run *new_run(packet *of, unsigned begin, unsigned from, unsigned to);
void end_run(run *r);

/* Adds the run if the receiver's card could have merged it with those before (TCP, the next bytes, equal headers). Returns whether it did. */
int merge(merged *m, run *r);

/* Writes the runs to a device as one packet. Returns writev()'s result. */
ssize_t write_merged(int device, const merged *m);

/* malloc that does not return NULL. */
void *allocate(size_t size);

#endif

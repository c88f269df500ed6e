/* The client's side of an arena: reserve, bind, exchange, discard and copy pages. */
#define _GNU_SOURCE
#include "pages.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "shares.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define HUGE_PAGE ((uint64_t)2 << 20) /* page tables of aligned ranges move as a whole */
#define FILL_BYTES ((uint64_t)4 << 20) /* at once: the system's locks on the file stay short */
#define LARGE_BYTES ((uint64_t)4 << 20) /* copies from here on are worth threads */
#define CACHE_SHARE 8 /* of the last cache: more than this part does not stay there, where members have three of each */
#define AHEAD 1024 /* bytes; about 1.1 times as fast as what the processor fetches ahead by itself */
#define SHARE_GRAIN ((uint64_t)64 << 10)

static void *at(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

int wc_pages_reserve(uint64_t bytes, uint64_t *address)
{
    uint64_t room = bytes + HUGE_PAGE;
    void *start = mmap(NULL, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED)
        return -errno;
    uint64_t first = (uint64_t)(uintptr_t)start;
    uint64_t aligned = (first + HUGE_PAGE - 1) & ~(HUGE_PAGE - 1);
    if (aligned > first)
        munmap(start, aligned - first);
    if (first + room > aligned + bytes)
        munmap(at(aligned + bytes), first + room - aligned - bytes);
    *address = aligned;
    return 0;
}

int wc_pages_release(uint64_t address, uint64_t bytes)
{
    return munmap(at(address), bytes) ? -errno : 0;
}

static int show(const wc_block *block, int fd, int how)
{
    void *got = mmap(at(block->address), block->bytes, PROT_READ | PROT_WRITE, how | MAP_FIXED | MAP_NORESERVE, fd,
                     (off_t)block->offset);
    return got == MAP_FAILED ? -errno : 0;
}

int wc_pages_bind(const wc_block *block, int fd)
{
    return show(block, fd, MAP_SHARED);
}

int wc_pages_disown(const wc_block *block, int fd)
{
    return show(block, fd, MAP_PRIVATE);
}

int wc_pages_discard(const wc_block *block, int fd)
{
    int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
    return fallocate(fd, mode, (off_t)block->offset, (off_t)block->bytes) ? -errno : 0;
}

/* Huge pages where [start, end) has none yet. A hole needs one small page first; of 6.1 or later. */
static int collapse(const wc_block *block, uint64_t start, uint64_t end, int fd)
{
    for (uint64_t i = start; i < end; i += HUGE_PAGE)
        if (fallocate(fd, 0, (off_t)(block->offset + i), 1))
            return -errno;
    return madvise(at(block->address + start), end - start, MADV_COLLAPSE) ? -errno : 0;
}

static int fill(const wc_block *block, uint64_t start, uint64_t bytes, int fd)
{
    int huge = !((block->address | block->offset | block->bytes | start) % HUGE_PAGE);
    for (uint64_t last = start + bytes; start < last; start += FILL_BYTES) {
        uint64_t end = last - start < FILL_BYTES ? last : start + FILL_BYTES;
        uint64_t whole = huge ? (end + HUGE_PAGE / 2) & ~(HUGE_PAGE - 1) : start;
        if (whole > start && collapse(block, start, whole, fd)) {
            huge = 0; /* asking again takes long where memory is in pieces */
            whole = start;
        }
        if (whole < end && fallocate(fd, 0, (off_t)(block->offset + whole), (off_t)(end - whole)))
            return -errno;
    }
    return 0;
}

typedef struct {
    const wc_block *block;
    uint64_t start;
    int fd;
    atomic_int error;
} wc_filling;

static void fill_share(void *work, uint64_t begin, uint64_t end)
{
    wc_filling *all = work;
    int error = fill(all->block, all->start + begin, end - begin, all->fd);
    if (error)
        atomic_store(&all->error, error);
}

int wc_pages_fill(const wc_block *block, uint64_t start, uint64_t bytes, int fd)
{
    wc_filling all = {.block = block, .start = start, .fd = fd};
    wc_in_shares(fill_share, &all, bytes, FILL_BYTES, 0);
    return atomic_load(&all.error);
}

/* Moves what `from` shows, with its page tables, to `to`. `from` goes on to show the same part of the file. */
static int move(uint64_t from, uint64_t to, uint64_t bytes)
{
    int how = MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP;
    return mremap(at(from), bytes, bytes, how, at(to)) == MAP_FAILED ? -errno : 0;
}

/* After a move to it that failed. False: the system has not unmapped it, or somebody else has it by now. */
static bool reserve_again(uint64_t address, uint64_t bytes)
{
    int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    return mmap(at(address), bytes, PROT_NONE, how, -1, 0) == at(address);
}

int wc_pages_exchange(wc_block *a, wc_block *b, uint64_t wanted, uint64_t spare, int fd)
{
    if (a->offset == wanted)
        return 0;
    if (b->offset != wanted || a->bytes != b->bytes)
        return -EINVAL;
    int error = move(a->address, spare, a->bytes); /* the system may have unmapped the target before it gave up */
    if (error)
        return error == -EINVAL || reserve_again(spare, a->bytes) ? error : 3; /* EINVAL: it has not begun */
    error = move(b->address, a->address, a->bytes);
    if (error)
        return wc_pages_bind(a, fd) && move(spare, a->address, a->bytes) ? 2 : error;
    b->offset = a->offset;
    a->offset = wanted;
    if (move(spare, b->address, b->bytes) && wc_pages_bind(b, fd))
        return 1;
    return 0;
}

#ifdef __SSE2__
/* What does not stay in the cache is stored around it, which spares reading the target first. */
static void copy_streaming(uint8_t *to, const uint8_t *from, size_t bytes)
{
    size_t head = (size_t)(-(uintptr_t)to & 63);
    memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= 64; bytes -= 64, to += 64, from += 64) {
        _mm_prefetch((const char *)from + AHEAD, _MM_HINT_NTA); /* beyond the end, too: it never faults */
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2);
        __m128i d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
    _mm_sfence();
    memcpy(to, from, bytes);
}
#endif

typedef struct {
    uint8_t *to;
    const uint8_t *from;
    bool streams;
} wc_copy;

static void copy_share(void *work, uint64_t begin, uint64_t end)
{
    const wc_copy *copy = work;
#ifdef __SSE2__
    if (copy->streams) {
        copy_streaming(copy->to + begin, copy->from + begin, end - begin);
        return;
    }
#endif
    memcpy(copy->to + begin, copy->from + begin, end - begin);
}

/* The size of the last cache by Linux, 0 if not known; glibc says ten times as much on some machines, and then memcpy
   never stores around it. To ask takes a tenth of the shortest large copy. */
static uint64_t cache_bytes;
static pthread_once_t cache_asked = PTHREAD_ONCE_INIT;

static void ask_cache(void)
{
    char text[16] = "";
    int fd = open("/sys/devices/system/cpu/cpu0/cache/index3/size", O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (n > 0)
        cache_bytes = strtoull(text, NULL, 10) << 10; /* "32768K" */
}

void wc_pages_copy(uint64_t to, uint64_t from, uint64_t bytes, unsigned threads)
{
    wc_copy copy = {.to = at(to), .from = at(from)};
    pthread_once(&cache_asked, ask_cache);
    copy.streams = bytes >= LARGE_BYTES && bytes >= cache_bytes / CACHE_SHARE;
    if (threads == 0 && bytes < LARGE_BYTES)
        threads = 1;
    wc_in_shares(copy_share, &copy, bytes, SHARE_GRAIN, threads);
}

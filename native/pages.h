/* The client's side of an arena: address space whose pages can be exchanged, so that a commit copies nothing. */
#ifndef WC_PAGES_H
#define WC_PAGES_H

#include <stddef.h>
#include <stdint.h>

/* Part of an arena as the client sees it: `bytes` bytes at `address` show the arena's file from `offset` on. */
typedef struct {
    uint64_t address;
    uint64_t offset;
    uint64_t bytes;
} wc_block;

/* All return 0, or a negative errno. */

/* Address space that nothing can be read from yet; *address is a multiple of 2 MiB. */
int wc_pages_reserve(uint64_t bytes, uint64_t *address);
/* Gives address space back, whatever it shows. */
int wc_pages_release(uint64_t address, uint64_t bytes);
/* Lets the block's addresses show its part of the file. They must lie in reserved space. */
int wc_pages_bind(const wc_block *block, int fd);
/* The same in a forked child, which shares the parent's file: what it writes from now on is its own. */
int wc_pages_disown(const wc_block *block, int fd);
/* Gives the memory behind the block's part of the file back; it reads as zeros from then on. */
int wc_pages_discard(const wc_block *block, int fd);
/* Gets memory for `bytes` bytes of the block from `start` on, so that who writes there first need not: in huge pages where
   the system gives them and `start` is a multiple of 2 MiB, which cost a tenth of small ones. Changes no byte; what is
   there already is copied. */
int wc_pages_fill(const wc_block *block, uint64_t start, uint64_t bytes, int fd);
/* Exchanges what two blocks of equal size show, and their offsets with it. Page tables move along, so warm pages stay
   warm, and the addresses are mapped at every instant. `spare` is reserved space of the same size. Does nothing if `a`
   shows offset `wanted` already: a caller who does not know how far it came can call again. Negative errno: nothing
   changed. 1: `a` shows `wanted`, but `b` shows it too (its own part could not be mapped) and must not be used again.
   2: nothing could be mapped at `a` any more, and its addresses must not be touched. 3: nothing changed, but `spare` is
   not reserved any more. After 1, 2 and 3 somebody else's memory may lie in the reserved space: never exchange again, and
   never release it. */
int wc_pages_exchange(wc_block *a, wc_block *b, uint64_t wanted, uint64_t spare, int fd);
/* Memcpy by so many threads; 0: as many as the size is worth and cores are there for. It returns when all is copied, and
   a call into C lets other Python threads run. */
void wc_pages_copy(uint64_t to, uint64_t from, uint64_t bytes, unsigned threads);

#endif

/* Work on memory that threads of the caller's share. */
#ifndef WC_SHARES_H
#define WC_SHARES_H

#include <stdint.h>

/* Does [begin, end) of the work. */
typedef void (*wc_share_act)(void *work, uint64_t begin, uint64_t end);

/* Does [0, count) in shares that are cut at multiples of `grain`, one for each thread; 0 threads: one for each two cores
   that the process may use, 8 at most: other processes of the machine do the same at the time. It returns when all is
   done. */
void wc_in_shares(wc_share_act act, void *work, uint64_t count, uint64_t grain, unsigned threads);

/* Cores that the process may run on; 1 where the system does not say. */
unsigned wc_cores(void);

#endif

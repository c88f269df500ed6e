/* What the kernel files share among themselves: the tables of the instruction sets. */
#ifndef WC_TABLES_H
#define WC_TABLES_H

#include "crc32c.h"
#include "kernels.h"

/* As compiled. The crc in a table is one that every CPU with that instruction set has; the dispatcher may exchange it
   for a faster one. */
extern const wc_kernels wc_kernels_generic;
#if defined(__x86_64__)
extern const wc_kernels wc_kernels_avx2, wc_kernels_avx512;
#elif defined(__aarch64__)
extern const wc_kernels wc_kernels_neon;
#endif

#endif

/* What the kernel files share among themselves: the tables of the instruction sets. */
#ifndef WC_TABLES_H
#define WC_TABLES_H

#include "kernels.h"

extern const wc_kernels wc_kernels_generic;
#if defined(__x86_64__)
extern const wc_kernels wc_kernels_avx2, wc_kernels_avx512;
#elif defined(__aarch64__)
extern const wc_kernels wc_kernels_neon;
#endif

#endif

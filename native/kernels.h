/* Reduction kernels, checksum and hash: one table per instruction set, chosen once, all bit-equal. */
#ifndef WC_KERNELS_H
#define WC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Codes as in wancoll.collective.DType and ReduceOp. */
enum { WC_F32, WC_F64, WC_F16, WC_BF16, WC_I8, WC_I16, WC_I32, WC_I64, WC_U8, WC_DTYPES };
enum { WC_SUM, WC_AVG, WC_MIN, WC_MAX, WC_PROD, WC_OPS };

/* dst[i] = a[i] op b[i] for n elements. dst may be a or b themselves, but not overlap them otherwise. No alignment is needed. */
typedef void (*wc_reduce_fn)(void *dst, const void *a, const void *b, size_t n);
/* dst[i] = (a[i] + b[i]) / divisor: the last step of avg. divisor is at least 1. */
typedef void (*wc_average_fn)(void *dst, const void *a, const void *b, size_t n, uint32_t divisor);

typedef struct {
    const char *name; /* "generic", "avx2", "avx512", "neon" */
    wc_reduce_fn reduce[WC_DTYPES][WC_OPS]; /* WC_AVG: same as WC_SUM (the steps before the last) */
    wc_average_fn average[WC_DTYPES];
    uint32_t (*crc32c)(uint32_t crc, const void *data, size_t n); /* crc of a||b is crc32c(crc32c(0, a), b) */
    uint64_t (*hash64)(const void *data, size_t n); /* XXH3_64bits */
} wc_kernels;

/* The table for this CPU, or the one WANCOLL_CPU=generic|avx2|avx512|neon names if this CPU has it (else NULL). */
const wc_kernels *wc_kernels_default(void);
/* By name; NULL where it was not compiled or this CPU cannot run it. */
const wc_kernels *wc_kernels_named(const char *name);
size_t wc_dtype_size(int dtype);

/* Floating-point control: kernels need round-to-nearest, no flush-to-zero, whatever other libraries did to this thread. */
uint64_t wc_fpenv_enter(void); /* returns what to give to leave */
void wc_fpenv_leave(uint64_t saved);

#endif

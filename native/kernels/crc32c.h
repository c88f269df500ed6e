/* CRC-32C (Castagnoli, RFC 3720): the portable truth and the hardware versions, all equal. Internal to the kernels. */
#ifndef WC_CRC32C_H
#define WC_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* All: the crc of a||b is f(f(0, a), b). Call wc_crc32c_init() before any of them; call it once. */
void wc_crc32c_init(void);
/* x^n mod P, bit-reflected: bit 31 is the coefficient of x^0. */
uint32_t wc_crc32c_power(uint64_t n);

uint32_t wc_crc32c_generic(uint32_t crc, const void *data, size_t n);

/* Blocks of the three-way hardware versions, bytes: three of one size are read side by side, then joined. */
#define WC_CRC_LONG 2048
#define WC_CRC_SHORT 256
/* Tables that move a crc over one block of zeros. */
extern uint32_t wc_crc32c_over_long[4][256], wc_crc32c_over_short[4][256];

#if defined(__x86_64__)
uint32_t wc_crc32c_sse42(uint32_t crc, const void *data, size_t n);
/* Needs AVX-512F and VPCLMULQDQ. */
void wc_crc32c_vpclmul_init(void);
uint32_t wc_crc32c_vpclmul(uint32_t crc, const void *data, size_t n);
#elif defined(__aarch64__)
uint32_t wc_crc32c_armv8(uint32_t crc, const void *data, size_t n);
#endif

#endif

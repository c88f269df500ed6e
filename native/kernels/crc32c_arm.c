/* CRC-32C on AArch64: the ARMv8 crc instructions. */
#include "crc32c.h"

#if defined(__aarch64__)
#include <string.h>

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("crc"))), apply_to = function)
#define CRC8(crc, byte) __builtin_arm_crc32cb(crc, byte)
#define CRC64(crc, word) __builtin_arm_crc32cd(crc, word)
#else
#pragma GCC push_options
#pragma GCC target("+crc")
#include <arm_acle.h>
#define CRC8(crc, byte) __crc32cb(crc, byte)
#define CRC64(crc, word) __crc32cd(crc, word)
#endif
#include "crc32c_body.h"

uint32_t wc_crc32c_armv8(uint32_t crc, const void *data, size_t n) { return three_way(crc, data, n); }

#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

/* CRC-32C, portable: slicing by 8, and the tables that all versions share. */
#include "crc32c.h"

#define POLYNOMIAL 0x82f63b78u /* reflected; the term x^32 is left out */

static uint32_t slices[8][256]; /* slices[k][v]: crc of byte v and k zero bytes behind it */
uint32_t wc_crc32c_over_long[4][256], wc_crc32c_over_short[4][256];

static uint32_t times_x(uint32_t a) { return (a >> 1) ^ (-(a & 1u) & POLYNOMIAL); }

static uint32_t times(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
    for (int bit = 31; bit >= 0; bit--) {
        product ^= -((b >> bit) & 1u) & a;
        a = times_x(a);
    }
    return product;
}

uint32_t wc_crc32c_power(uint64_t n)
{
    uint32_t power = 0x80000000u, square = 0x40000000u; /* x^0, x^1 */
    for (; n != 0; n >>= 1) {
        if (n & 1)
            power = times(power, square);
        square = times(square, square);
    }
    return power;
}

static void fill_over(uint32_t table[4][256], uint64_t zero_bytes)
{
    uint32_t factor = wc_crc32c_power(8 * zero_bytes);
    for (int k = 0; k < 4; k++)
        for (uint32_t v = 0; v < 256; v++)
            table[k][v] = times(factor, v << (8 * k));
}

void wc_crc32c_init(void)
{
    for (uint32_t v = 0; v < 256; v++) {
        uint32_t crc = v;
        for (int bit = 0; bit < 8; bit++)
            crc = times_x(crc);
        slices[0][v] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t v = 0; v < 256; v++)
            slices[k][v] = (slices[k - 1][v] >> 8) ^ slices[0][slices[k - 1][v] & 0xff];
    fill_over(wc_crc32c_over_long, WC_CRC_LONG);
    fill_over(wc_crc32c_over_short, WC_CRC_SHORT);
}

/* After Kounavis and Berry, 2005, "A systematic approach to building high performance software-based CRC
   generators". */
uint32_t wc_crc32c_generic(uint32_t crc, const void *data, size_t n)
{
    const uint8_t *p = data;
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        crc ^= (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
        crc = slices[7][crc & 0xff] ^ slices[6][crc >> 8 & 0xff] ^ slices[5][crc >> 16 & 0xff] ^ slices[4][crc >> 24] ^
              slices[3][p[4]] ^ slices[2][p[5]] ^ slices[1][p[6]] ^ slices[0][p[7]];
    }
    for (; n != 0; n--)
        crc = (crc >> 8) ^ slices[0][(crc ^ *p++) & 0xff];
    return ~crc;
}

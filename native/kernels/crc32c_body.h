/* CRC-32C with a crc instruction, three blocks side by side to hide its latency (after Gopal et al., Intel, 2011, "Fast
   CRC computation for iSCSI polynomial using CRC32 instruction"). The file that includes this defines CRC8(crc, byte)
   and CRC64(crc, word); words are read in memory order. */

static inline uint64_t word_at(const uint8_t *p)
{
    uint64_t word;
    memcpy(&word, p, 8);
    return word;
}

static inline uint32_t over(const uint32_t table[4][256], uint32_t crc)
{
    return table[0][crc & 0xff] ^ table[1][crc >> 8 & 0xff] ^ table[2][crc >> 16 & 0xff] ^ table[3][crc >> 24];
}

static inline uint32_t three_blocks(uint32_t crc, const uint8_t *p, size_t block, const uint32_t table[4][256])
{
    uint32_t second = 0, third = 0;
    for (const uint8_t *end = p + block; p != end; p += 8) {
        crc = CRC64(crc, word_at(p));
        second = CRC64(second, word_at(p + block));
        third = CRC64(third, word_at(p + 2 * block));
    }
    return over(table, over(table, crc) ^ second) ^ third;
}

static inline uint32_t three_way(uint32_t crc, const uint8_t *p, size_t n)
{
    crc = ~crc;
    for (; n >= 3 * WC_CRC_LONG; n -= 3 * WC_CRC_LONG, p += 3 * WC_CRC_LONG)
        crc = three_blocks(crc, p, WC_CRC_LONG, wc_crc32c_over_long);
    for (; n >= 3 * WC_CRC_SHORT; n -= 3 * WC_CRC_SHORT, p += 3 * WC_CRC_SHORT)
        crc = three_blocks(crc, p, WC_CRC_SHORT, wc_crc32c_over_short);
    for (; n >= 8; n -= 8, p += 8)
        crc = CRC64(crc, word_at(p));
    for (; n != 0; n--)
        crc = CRC8(crc, *p++);
    return ~crc;
}

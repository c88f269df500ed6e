/* The sparse codecs' blocks: how they are laid out, and which bytes are one. Their numbers are in sparse_body.h. */
#include "sparse.h"

#include <string.h>

wc_sparse wc_sparse_of(uint32_t codec)
{
    const uint32_t share = codec >> 8, bits = codec & (WC_SPARSE_TWICE - 1);
    if (share < 1 || share > WC_SPARSE_WHOLE || (bits != 2 && bits != 8))
        return (wc_sparse){0};
    const uint32_t part = WC_SPARSE_BLOCK * share / WC_SPARSE_WHOLE, kept = part ? part : 1;
    uint32_t low = 0;
    while (kept << (low + 1) <= WC_SPARSE_BLOCK)
        low++;
    wc_sparse form = {.kept = kept, .bits = bits, .low = low, .highs = kept + ((WC_SPARSE_BLOCK - 1) >> low)};
    form.fields = (kept * (low + bits) + 7) / 8;
    form.bytes = 4 + form.fields + (form.highs + 7) / 8;
    return form;
}

/* Fields are at most 20 bits wide: with what lies before them in their first byte they fit into 32. */
void wc_sparse_write(const wc_sparse *form, uint8_t *coded, const uint16_t *places, const uint8_t *codes)
{
    uint8_t room[WC_SPARSE_MOST] = {0}, *highs = room + form->fields;
    const uint32_t width = form->low + form->bits, mask = (1u << form->low) - 1;
    for (uint32_t i = 0; i < form->kept; i++) {
        const uint32_t bit = i * width, high = i + (places[i] >> form->low);
        uint32_t word;
        memcpy(&word, room + bit / 8, sizeof word);
        word |= (codes[i] | (places[i] & mask) << form->bits) << bit % 8;
        memcpy(room + bit / 8, &word, sizeof word);
        highs[high / 8] |= (uint8_t)(1u << high % 8);
    }
    memcpy(coded + 4, room, form->bytes - 4);
}

bool wc_sparse_read(const wc_sparse *form, const uint8_t *coded, size_t n, uint16_t *places, uint8_t *codes)
{
    uint8_t room[WC_SPARSE_MOST] = {0};
    const uint32_t width = form->low + form->bits, used = form->kept * width % 8;
    const uint32_t end = n > form->kept ? (uint32_t)n : form->kept; /* a shorter block has all, and zeros after them */
    uint16_t level[2];
    memcpy(room, coded + 4, form->bytes - 4);
    memcpy(level, coded, sizeof level);
    if (form->bits == 2 && (level[0] >= 0x7f80 || (level[1] > 0x7f80 && level[1] != 0x7fc0)))
        return false;
    if (used && room[form->fields - 1] >> used)
        return false;
    uint32_t found = 0, next = 0;
    for (uint32_t at = 0; at < form->highs; at += 64) {
        uint64_t word;
        memcpy(&word, room + form->fields + at / 8, sizeof word);
        for (; word; word &= word - 1, found++) {
            const uint32_t high = at + (uint32_t)__builtin_ctzll(word), bit = found * width;
            uint32_t field;
            if (found == form->kept)
                return false;
            memcpy(&field, room + bit / 8, sizeof field);
            field = field >> bit % 8 & ((1u << width) - 1);
            const uint32_t place = (high - found) << form->low | field >> form->bits;
            if (place < next || place >= end)
                return false;
            places[found] = (uint16_t)place;
            codes[found] = (uint8_t)(field & ((1u << form->bits) - 1));
            next = place + 1;
        }
    }
    return found == form->kept;
}

bool wc_codec_valid(uint32_t codec, const void *coded, size_t n)
{
    const wc_sparse form = wc_sparse_of(codec);
    if (!form.kept)
        return true;
    uint16_t places[WC_SPARSE_BLOCK];
    uint8_t codes[WC_SPARSE_BLOCK];
    for (const uint8_t *block = coded; n; block += form.bytes) {
        const size_t count = n < WC_SPARSE_BLOCK ? n : WC_SPARSE_BLOCK;
        if (!wc_sparse_read(&form, block, count, places, codes))
            return false;
        n -= count;
    }
    return true;
}

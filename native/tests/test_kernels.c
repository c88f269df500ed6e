/* Compares every table that this CPU can run with the generic one, bit for bit. Exit
   code 0 if all is equal. The generic table itself is checked against numpy in tests/engine/test_kernels.py and
   test_codec.py. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../kernels.h"
#include "draw.h"

static long passed, failed;

bool wc_test_no_memory(void);
bool wc_test_no_memory(void)
{
    return false;
}

void wc_test_gap(void);
void wc_test_gap(void) {}

static void check(int ok, const char *table, const char *what, int dtype, int op, size_t n)
{
    if (ok) {
        passed++;
    } else if (failed++ < 20) {
        fprintf(stderr, "FAILED %s: %s, dtype %d, op %d, %zu elements or bytes\n", table, what, dtype, op, n);
    }
}

static void fill(uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(draw() >> 56);
}

/* Zeros, denormals, the edges of the exponents, infinities, NaNs quiet and signalling with payloads; the edges of the
   integers. */
static const uint32_t special32[] = {0,          1,          0x007fffff, 0x00800000, 0x3f7fffff, 0x3f800000, 0x40000000, 0x477fefff, 0x477ff000, 0x33000000,
                                     0x33000001, 0x387fffff, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fbfffff, 0x7fc00000, 0x7fc12345, 0x7fffffff, 0x3f808000,
                                     0x3f818000, 0x00000fff, 0x00001000, 0x7f7f8000, 0x4f000000, 0x4b800001};
static const uint64_t special64[] = {0,
                                     1,
                                     0x000fffffffffffffu,
                                     0x0010000000000000u,
                                     0x3ff0000000000000u,
                                     0x3fefffffffffffffu,
                                     0x4340000000000001u,
                                     0x7fefffffffffffffu,
                                     0x7ff0000000000000u,
                                     0x7ff0000000000001u,
                                     0x7ff7ffffffffffffu,
                                     0x7ff8000000000000u,
                                     0x7ff8000012345678u,
                                     0x7fffffffffffffffu};
static const uint16_t special16[] = {0,      1,      2,      0x03ff, 0x0400, 0x0401, 0x3bff, 0x3c00, 0x3c01, 0x4000, 0x7bff, 0x7c00, 0x7c01, 0x7dff, 0x7e00, 0x7fff,
                                     0x007f, 0x0080, 0x3f7f, 0x3f80, 0x3f81, 0x7f7f, 0x7f80, 0x7f81, 0x7fbf, 0x7fc0, 0x7fc1, 0x1234, 0x5555, 0x6bcd};
#define COUNT(array) (sizeof(array) / sizeof(array)[0])

/* Bits of special value k, negative ones included, for elements of `size` bytes. */
static void put_special(uint8_t *p, size_t size, size_t k)
{
    if (size == 8) {
        uint64_t v = special64[k / 2 % COUNT(special64)] | (uint64_t)(k & 1) << 63;
        memcpy(p, &v, 8);
    } else if (size == 4) {
        uint32_t v = special32[k / 2 % COUNT(special32)] | (uint32_t)(k & 1) << 31;
        memcpy(p, &v, 4);
    } else if (size == 2) {
        uint16_t v = (uint16_t)(special16[k / 2 % COUNT(special16)] | (k & 1) << 15);
        memcpy(p, &v, 2);
    } else {
        p[0] = (uint8_t)k;
    }
}

static const uint32_t divisors[] = {1, 2, 3, 5, 7, 64, 127, 128, 1000, 32768, 65536, 65537, 0x7fffffff, 0xffffffff};

/* All ops of one dtype on n elements. */
static void compare(const wc_kernels *table, int dtype, const uint8_t *a, const uint8_t *b, size_t n, uint8_t *want, uint8_t *got)
{
    const wc_kernels *truth = wc_kernels_named("generic");
    const size_t bytes = n * wc_dtype_size(dtype);
    for (int op = 0; op < WC_OPS; op++) {
        truth->reduce[dtype][op](want, a, b, n);
        table->reduce[dtype][op](got, a, b, n);
        check(memcmp(want, got, bytes) == 0, table->name, "reduce", dtype, op, n);
    }
    const uint32_t divisor = divisors[draw() % COUNT(divisors)];
    truth->average[dtype](want, a, b, n, divisor);
    table->average[dtype](got, a, b, n, divisor);
    check(memcmp(want, got, bytes) == 0, table->name, "average", dtype, (int)divisor, n);
}

enum { PAIRS = 60 * 60, HALVES = 65536, ROOM = HALVES * 8 + 64 };
static uint8_t a[ROOM], b[ROOM], want[ROOM], got[ROOM];

static void special_values(const wc_kernels *table)
{
    for (int dtype = 0; dtype < WC_DTYPES; dtype++) {
        const size_t size = wc_dtype_size(dtype);
        for (size_t k = 0; k < PAIRS; k++) {
            put_special(a + k * size, size, k % 60);
            put_special(b + k * size, size, k / 60);
        }
        compare(table, dtype, a, b, PAIRS, want, got);
        for (int round = 0; round < 20; round++) {
            fill(a, HALVES);
            fill(b, HALVES);
            compare(table, dtype, a, b, HALVES / size, want, got);
        }
    }
    for (uint32_t h = 0; h < HALVES; h++)
        memcpy(a + 2 * h, &(uint16_t){(uint16_t)h}, 2);
    for (size_t k = 0; k < 2 * COUNT(special16); k++) {
        for (size_t h = 0; h < HALVES; h++)
            put_special(b + 2 * h, 2, k);
        compare(table, WC_F16, a, b, HALVES, want, got);
        compare(table, WC_BF16, a, b, HALVES, want, got);
        compare(table, WC_I16, a, b, HALVES, want, got);
    }
}

/* Odd lengths, odd addresses, results over an operand, and nothing written beside them. */
static void shapes(const wc_kernels *table)
{
    for (int dtype = 0; dtype < WC_DTYPES; dtype++) {
        const size_t size = wc_dtype_size(dtype);
        for (size_t n = 0; n <= 130; n++) {
            const size_t bytes = n * size, oa = draw() % 17, ob = draw() % 17, od = draw() % 17;
            fill(a, bytes + 32);
            fill(b, bytes + 32);
            compare(table, dtype, a + oa, b + ob, n, want, got + od);
            for (int op = 0; op < WC_OPS; op++) {
                wc_kernels_named("generic")->reduce[dtype][op](want, a + oa, b + ob, n);
                memset(got, 0x5a, bytes + 64);
                memcpy(got + od, a + oa, bytes);
                table->reduce[dtype][op](got + od, got + od, b + ob, n);
                int ok = memcmp(got + od, want, bytes) == 0;
                memcpy(got + od, b + ob, bytes);
                table->reduce[dtype][op](got + od, a + oa, got + od, n);
                ok = ok && memcmp(got + od, want, bytes) == 0;
                for (size_t i = 0; i < bytes + 64; i++)
                    ok = ok && (got[i] == 0x5a || (i >= od && i < od + bytes));
                check(ok, table->name, "result over an operand", dtype, op, n);
            }
            wc_kernels_named("generic")->average[dtype](want, a + oa, b + ob, n, 3);
            memcpy(got + od, a + oa, bytes);
            table->average[dtype](got + od, got + od, b + ob, n, 3);
            check(memcmp(got + od, want, bytes) == 0, table->name, "average over an operand", dtype, WC_AVG, n);
        }
    }
}

static double sums[4];

/* What a codec does to n elements at src: encoded both ways, decoded, added to others, measured; nothing is written
   beside the results. */
static void compare_codec(const wc_kernels *table, int codec, int dtype, const uint8_t *src, size_t n)
{
    const wc_kernels *truth = wc_kernels_named("generic");
    const wc_codec_block block = wc_codec_shape(codec);
    const size_t bytes = n * wc_dtype_size(dtype), coded = (n + block.elements - 1) / block.elements * block.bytes, at = draw() % 17;
    const wc_noise noise = {draw(), draw() % 1000 * block.elements};
    for (int noisy = 0; noisy < 2; noisy++) {
        memset(got, 0x5a, coded + 64);
        truth->encode[codec][dtype](want, src, n, noisy ? &noise : NULL);
        table->encode[codec][dtype](got + at, src, n, noisy ? &noise : NULL);
        int ok = memcmp(want, got + at, coded) == 0;
        for (size_t i = 0; i < coded + 64; i++)
            ok = ok && (got[i] == 0x5a || (i >= at && i < at + coded));
        check(ok, table->name, noisy ? "stochastic encode" : "encode", dtype, codec, n);
    }
    memcpy(b, want, coded);
    for (int add = 0; add < 2; add++) {
        memset(got, 0x5a, bytes + 64);
        if (add) {
            truth->accumulate[codec][dtype](want, src, b, n);
            memcpy(got + at, src, bytes);
            table->accumulate[codec][dtype](got + at, got + at, b, n);
        } else {
            truth->decode[codec][dtype](want, b, n);
            table->decode[codec][dtype](got + at, b, n);
        }
        int ok = memcmp(want, got + at, bytes) == 0;
        for (size_t i = 0; i < bytes + 64; i++)
            ok = ok && (got[i] == 0x5a || (i >= at && i < at + bytes));
        check(ok, table->name, add ? "accumulate" : "decode", dtype, codec, n);
    }
    memset(sums, 0, sizeof sums);
    truth->decode[codec][dtype](want, b, n);
    truth->error[dtype](src, want, n, &sums[0], &sums[1]);
    table->error[dtype](src, want, n, &sums[2], &sums[3]);
    check(memcmp(&sums[0], &sums[2], 2 * sizeof *sums) == 0, table->name, "error", dtype, codec, n);
}

/* Ordinary numbers, ever larger from block to block. */
static void fill_numbers(uint8_t *p, int dtype, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint32_t bits = ((uint32_t)(i / 32 % 255) << 23) + ((uint32_t)(draw() >> 34) & 0x81ffffffu);
        float value;
        memcpy(&value, &bits, sizeof value);
        const uint16_t upper = (uint16_t)(dtype == WC_F16 ? draw() >> 48 & 0xbfff : bits >> 16);
        const double wide = value;
        memcpy(p + i * wc_dtype_size(dtype), dtype == WC_F64 ? (const void *)&wide : dtype == WC_F32 ? (const void *)&value : (const void *)&upper,
               wc_dtype_size(dtype));
    }
}

static void codecs(const wc_kernels *table)
{
    for (int codec = 0; codec < WC_CODECS; codec++)
        for (int dtype = 0; dtype < WC_DTYPES; dtype++) {
            if (table->encode[codec][dtype] == NULL)
                continue;
            const size_t size = wc_dtype_size(dtype);
            for (size_t n = 0; n <= 1100; n += n < 140 ? 1 : 61) {
                const size_t offset = draw() % 17;
                fill_numbers(a + offset, dtype, n);
                compare_codec(table, codec, dtype, a + offset, n);
                if (n > 0)
                    put_special(a + offset + draw() % n * size, size, draw() % 60);
                compare_codec(table, codec, dtype, a + offset, n);
            }
            fill_numbers(a, dtype, 255 * 32 + 512);
            compare_codec(table, codec, dtype, a, 255 * 32 + 512);
            fill(a, 20000 * size);
            compare_codec(table, codec, dtype, a, 20000);
            const size_t coded = 20480 / wc_codec_shape(codec).elements * wc_codec_shape(codec).bytes;
            fill(a, coded); /* any bits can be decoded */
            wc_kernels_named("generic")->decode[codec][dtype](want, a, 20480);
            table->decode[codec][dtype](got, a, 20480);
            check(memcmp(want, got, 20480 * size) == 0, table->name, "decode of random bits", dtype, codec, 20480);
        }
}

/* Sparse codecs: encoded and decoded alike; blocks with some bits flipped are refused and decoded alike. */
static void sparse(const wc_kernels *table)
{
    static const uint32_t codecs[] = {150 << 8 | 2, 500 << 8 | 8, 1 << 8 | WC_SPARSE_TWICE | 2, 9900 << 8 | 2, WC_SPARSE_WHOLE << 8 | 8};
    const wc_kernels *truth = wc_kernels_named("generic");
    for (size_t c = 0; c < COUNT(codecs); c++)
        for (uint32_t dtype = WC_F32; dtype <= WC_BF16; dtype++)
            for (size_t round = 0; round < 12; round++) {
                const size_t n = round ? draw() % 10000 : 8192, size = wc_dtype_size((int)dtype);
                const size_t coded = (n + WC_SPARSE_BLOCK - 1) / WC_SPARSE_BLOCK * wc_codec_shape((int)codecs[c]).bytes;
                fill_numbers(a, (int)dtype, n);
                if (round % 3 == 1 && n)
                    put_special(a + draw() % n * size, size, draw() % 60);
                memset(got, 0x5a, coded + 16);
                wc_encode(truth, codecs[c], dtype, b, a, n, NULL);
                wc_encode(table, codecs[c], dtype, got, a, n, NULL);
                check(memcmp(b, got, coded) == 0 && got[coded] == 0x5a, table->name, "sparse encode", (int)dtype, (int)codecs[c], n);
                check(wc_codec_valid(codecs[c], b, n), table->name, "sparse valid", (int)dtype, (int)codecs[c], n);
                for (size_t flips = 0; flips < 4; flips++) {
                    wc_decode(truth, codecs[c], dtype, want, b, n);
                    wc_decode(table, codecs[c], dtype, got, b, n);
                    check(memcmp(want, got, n * size) == 0, table->name, "sparse decode", (int)dtype, (int)codecs[c], n);
                    if (coded)
                        b[draw() % coded] ^= (uint8_t)(1u << draw() % 8);
                }
            }
}

static void hashes(const wc_kernels *table)
{
    const wc_kernels *truth = wc_kernels_named("generic");
    fill(a, ROOM);
    check(table->hash64(a, 0) == 0x2d06800538d394c2u, table->name, "hash64 of nothing", -1, -1, 0);
    for (size_t round = 0; round < 2500; round++) {
        const size_t n = round < 1200 ? round : draw() % (round < 2400 ? 16384 : HALVES * 4), offset = draw() % 64;
        const size_t split = n ? draw() % n : 0, second = split + (n > split ? draw() % (n - split) : 0);
        const uint8_t *p = a + offset;
        const uint64_t expected = truth->hash64(p, n);
        check(table->hash64(p, n) == expected, table->name, "hash64", -1, -1, n);
        uint8_t memory[sizeof(wc_hash_state) + 1];
        wc_hash_state *state = (void *)(memory + round % 2); /* any alignment */
        table->hash_begin(state);
        table->hash_add(state, p, split);
        table->hash_add(state, p + split, second - split);
        table->hash_add(state, p + second, n - second);
        check(table->hash_end(state) == expected, table->name, "hash64 in three parts", -1, -1, n);
    }
}

int main(void)
{
    static const char *const names[] = {"generic", "avx2", "avx512", "neon"};
    const uint64_t saved = wc_fpenv_enter();
    for (size_t k = 0; k < COUNT(names); k++) {
        const wc_kernels *table = wc_kernels_named(names[k]);
        if (table == NULL)
            continue;
        printf("%s%s\n", table->name, table == wc_kernels_default() ? " (default)" : "");
        special_values(table);
        shapes(table);
        codecs(table);
        sparse(table);
        hashes(table);
    }
    wc_fpenv_leave(saved);
    check(wc_codec_shape(-1).bytes == 0 && wc_codec_shape(WC_CODECS).bytes == 0 && wc_codec_shape(WC_CODEC_NONE).elements == 0, "", "shapes", -1, -1, 0);
    check(wc_kernels_named("abacus") == NULL, "", "a name that does not exist", -1, -1, 0);
    printf("%ld passed, %ld failed\n", passed, failed);
    return failed == 0 ? 0 : 1;
}

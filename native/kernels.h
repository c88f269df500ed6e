/* Reduction kernels, codecs and hash: one table per instruction set, chosen once, all bit-equal. */
#ifndef WC_KERNELS_H
#define WC_KERNELS_H

#include <stddef.h>
#include <stdint.h>

/* Codes as in wancoll.collective.DType, ReduceOp and Codec. */
enum { WC_F32, WC_F64, WC_F16, WC_BF16, WC_I8, WC_I16, WC_I32, WC_I64, WC_U8, WC_DTYPES };
enum { WC_SUM, WC_AVG, WC_MIN, WC_MAX, WC_PROD, WC_OPS };
enum { WC_CODEC_NONE, WC_CODEC_BF16, WC_CODEC_FP16, WC_CODEC_INT8, WC_CODEC_INT4, WC_CODEC_FP8, WC_CODECS };

/* dst[i] = a[i] op b[i] for n elements. dst may be a or b themselves, but not overlap them otherwise. No alignment is
   needed. */
typedef void (*wc_reduce_fn)(void *dst, const void *a, const void *b, size_t n);
/* dst[i] = (a[i] + b[i]) / divisor: the last step of avg. divisor is at least 1. */
typedef void (*wc_average_fn)(void *dst, const void *a, const void *b, size_t n, uint32_t divisor);

/* Codecs: the formats are in docs/numbers.md. A call begins at a block of the tensor; where n is no multiple of a block
   the last one is padded with zeros. No alignment is needed; coded overlaps nothing. Any bits can be decoded. */
typedef struct {
    uint32_t elements; /* that many elements ... */
    uint32_t bytes;    /* ... become that many bytes on the wire; both 0 for none and for codes that are no codec */
} wc_codec_block;
wc_codec_block wc_codec_shape(int codec);
/* A sparse codec's number: how much of a block it keeps (of WC_SPARSE_WHOLE) << 8 | WC_SPARSE_TWICE if the result is
   encoded again, else 0 | bits of a kept element, 2 or 8. */
enum { WC_SPARSE_BLOCK = 4096, WC_SPARSE_WHOLE = 10000, WC_SPARSE_TWICE = 128 };
/* Whether these are n elements as an encoder writes them, from a block's begin on. Other bytes decode as something, a
   block of a sparse codec as zeros; only of these codecs' blocks there are some that nobody encodes. */
_Bool wc_codec_valid(uint32_t codec, const void *coded, size_t n);
/* Stochastic rounding: the random bits of element i of the tensor depend on key and i only. */
typedef struct {
    uint64_t key;
    uint64_t first; /* index in the tensor of the first element of this call */
} wc_noise;
/* noise NULL: to nearest even. */
typedef void (*wc_encode_fn)(void *dst, const void *src, size_t n, const wc_noise *noise);
typedef void (*wc_decode_fn)(void *dst, const void *coded, size_t n);
/* dst = a + decoded, as decode and then reduce would have it. dst may be a. */
typedef void (*wc_accumulate_fn)(void *dst, const void *a, const void *coded, size_t n);
/* Adds, over the x that are finite: the sum of (x - decoded)^2 to *error, that of x^2 to *norm. */
typedef void (*wc_error_fn)(const void *src, const void *decoded, size_t n, double *error, double *norm);

/* A hash of bytes that come one after the other; its content is the table's own. */
#define WC_HASH_STATE 576
typedef struct {
    uint8_t bytes[WC_HASH_STATE];
} wc_hash_state;

typedef struct {
    const char *name; /* "generic", "avx2", "avx512", "neon" */
    wc_reduce_fn reduce[WC_DTYPES][WC_OPS]; /* WC_AVG: same as WC_SUM (the steps before the last) */
    wc_average_fn average[WC_DTYPES];
    wc_encode_fn encode[WC_CODECS][WC_DTYPES]; /* this and the next two: NULL where a codec does not take a dtype */
    wc_decode_fn decode[WC_CODECS][WC_DTYPES];
    wc_accumulate_fn accumulate[WC_CODECS][WC_DTYPES];
    wc_error_fn error[WC_DTYPES];
    void (*sparse_encode)(uint32_t codec, int dtype, void *dst, const void *src, size_t n); /* of floating dtypes, to nearest */
    void (*sparse_decode)(uint32_t codec, int dtype, void *dst, const void *coded, size_t n);
    uint64_t (*hash64)(const void *data, size_t n); /* XXH3_64bits */
    void (*hash_begin)(wc_hash_state *state); /* these three: the same, piece by piece */
    void (*hash_add)(wc_hash_state *state, const void *data, size_t n);
    uint64_t (*hash_end)(const wc_hash_state *state);
} wc_kernels;

/* The table for this CPU, or the one WANCOLL_CPU=generic|avx2|avx512|neon names if this CPU has it (else NULL). */
const wc_kernels *wc_kernels_default(void);
/* By name; NULL where it was not compiled or this CPU cannot run it. */
const wc_kernels *wc_kernels_named(const char *name);
size_t wc_dtype_size(int dtype);

/* The table's functions, of whichever codec. */
void wc_encode(const wc_kernels *kernels, uint32_t codec, uint32_t dtype, void *dst, const void *src, size_t n, const wc_noise *noise);
void wc_decode(const wc_kernels *kernels, uint32_t codec, uint32_t dtype, void *dst, const void *coded, size_t n);

/* Floating-point control: kernels need round-to-nearest, no flush-to-zero, whatever other libraries did to this
   thread. */
uint64_t wc_fpenv_enter(void); /* returns what to give to leave */
void wc_fpenv_leave(uint64_t saved);

#endif

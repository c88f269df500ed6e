/* The records of TLS 1.3 (RFC 8446, 5 and 7): sealed from where bytes lie, opened to where they belong. The ciphers and
   the derivation of keys are OpenSSL's, and so is the handshake that the first secrets come from. */
#ifndef WC_RECORDS_H
#define WC_RECORDS_H

#include "openssl.h"

#include <sys/uio.h>

enum {
    WC_RECORD = 16384,           /* bytes that one holds at most */
    WC_RECORD_HEADER = 5,        /* before them */
    WC_RECORD_END = 1 + 16,      /* after them: their type, and the seal */
    WC_RECORD_BYTES = WC_RECORD_HEADER + WC_RECORD + WC_RECORD_END,
    WC_SECRET_BYTES = 48, /* at most */
    WC_NONCE_BYTES = 12,
};

enum { WC_TYPE_ALERT = 21, WC_TYPE_HANDSHAKE = 22, WC_TYPE_DATA = 23 };

/* Keys and counters of one direction. */
typedef struct {
    const wc_openssl *o;
    EVP_CIPHER_CTX *cipher; /* NULL: there are none */
    uint16_t suite;         /* as TLS numbers them */
    bool seals;             /* else it opens */
    uint64_t records;       /* sealed, or opened, with this key */
    uint8_t secret[WC_SECRET_BYTES], nonce[WC_NONCE_BYTES];
} wc_keys;

/* False, of both: there is no memory, or no such suite, and there are no keys now. */
bool wc_keys_begin(wc_keys *keys, const wc_openssl *o, uint16_t suite, const uint8_t *secret, bool seals);
uint32_t wc_secret_bytes(uint16_t suite); /* 0: no such suite */
bool wc_keys_renew(wc_keys *keys); /* the next ones, as both ends derive them */
void wc_keys_end(wc_keys *keys);

/* `content` bytes of the pieces, in order, as one record at `out`, which has room. False: the cipher has failed. */
bool wc_record_seal(wc_keys *keys, uint8_t type, const struct iovec *pieces, size_t content, uint8_t *out);
/* The record's `content` bytes into the pieces, in order, which have room. False: it is not what the other end has
   sealed, and neither are the bytes. Padding, which neither end uses, looks like type 0. */
bool wc_record_open(wc_keys *keys, const uint8_t *record, size_t content, const struct iovec *pieces, uint8_t *type);

#endif

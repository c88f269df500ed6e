/* Records of TLS 1.3: see records.h.

   Not by SSL_write and SSL_read, which copy each byte once more in each direction and leave or come with a system call
   for each record: half of what the cipher itself takes (docs/decisions.md). */
#include "records.h"

#include <string.h>

typedef struct {
    uint16_t suite;
    uint32_t key_bytes, secret_bytes;
    const char *cipher, *digest;
} kind;

static const kind KINDS[] = {
    {0x1301, 16, 32, "AES-128-GCM", "SHA256"},
    {0x1302, 32, 48, "AES-256-GCM", "SHA384"},
    {0x1303, 32, 32, "ChaCha20-Poly1305", "SHA256"},
};

static const kind *kind_of(uint16_t suite)
{
    for (size_t i = 0; i < sizeof KINDS / sizeof *KINDS; i++)
        if (KINDS[i].suite == suite)
            return &KINDS[i];
    return NULL;
}

uint32_t wc_secret_bytes(uint16_t suite)
{
    const kind *found = kind_of(suite);
    return found ? found->secret_bytes : 0;
}

/* HKDF-Expand-Label(secret, label, "", size) */
static bool expand(const wc_keys *keys, const char *label, uint8_t *out, size_t size)
{
    const wc_openssl *o = keys->o;
    const kind *one = kind_of(keys->suite);
    int mode = WC_KDF_EXPAND_ONLY;
    wc_param given[] = {
        o->OSSL_PARAM_construct_int("mode", &mode),
        o->OSSL_PARAM_construct_utf8_string("digest", (char *)one->digest, 0),
        o->OSSL_PARAM_construct_octet_string("key", (void *)keys->secret, one->secret_bytes),
        o->OSSL_PARAM_construct_octet_string("prefix", "tls13 ", 6),
        o->OSSL_PARAM_construct_octet_string("label", (void *)label, strlen(label)),
        o->OSSL_PARAM_construct_end(),
    };
    EVP_KDF *kdf = o->EVP_KDF_fetch(NULL, "TLS13-KDF", NULL);
    EVP_KDF_CTX *context = kdf ? o->EVP_KDF_CTX_new(kdf) : NULL;
    bool done = context && o->EVP_KDF_derive(context, out, size, given) == 1;
    o->EVP_KDF_CTX_free(context);
    o->EVP_KDF_free(kdf);
    return done;
}

/* Key and nonce of the secret. Else the key of before is gone, too: it would count its records from 0 again. */
static bool derive(wc_keys *keys)
{
    const wc_openssl *o = keys->o;
    const kind *one = kind_of(keys->suite);
    uint8_t key[32];
    EVP_CIPHER *cipher = o->EVP_CIPHER_fetch(NULL, one->cipher, NULL);
    bool done = cipher && expand(keys, "key", key, one->key_bytes) && expand(keys, "iv", keys->nonce, sizeof keys->nonce) &&
                o->EVP_CipherInit_ex(keys->cipher, cipher, NULL, key, NULL, keys->seals) == 1;
    o->OPENSSL_cleanse(key, sizeof key);
    o->EVP_CIPHER_free(cipher);
    keys->records = 0;
    if (!done)
        wc_keys_end(keys);
    return done;
}

bool wc_keys_begin(wc_keys *keys, const wc_openssl *o, uint16_t suite, const uint8_t *secret, bool seals)
{
    *keys = (wc_keys){.o = o, .suite = suite, .seals = seals};
    if (!kind_of(suite) || !(keys->cipher = o->EVP_CIPHER_CTX_new()))
        return false;
    memcpy(keys->secret, secret, wc_secret_bytes(suite));
    return derive(keys);
}

bool wc_keys_renew(wc_keys *keys)
{
    const wc_openssl *o = keys->o;
    uint8_t next[WC_SECRET_BYTES];
    uint32_t size = wc_secret_bytes(keys->suite);
    bool done = expand(keys, "traffic upd", next, size);
    if (done)
        memcpy(keys->secret, next, size);
    else
        wc_keys_end(keys);
    o->OPENSSL_cleanse(next, sizeof next);
    return done && derive(keys);
}

void wc_keys_end(wc_keys *keys)
{
    if (!keys->cipher)
        return;
    keys->o->EVP_CIPHER_CTX_free(keys->cipher);
    keys->o->OPENSSL_cleanse(keys, sizeof *keys);
}

/* The cipher is at the beginning of the next record, whose header is bound to it. */
static bool begin(wc_keys *keys, const uint8_t *header)
{
    uint8_t nonce[WC_NONCE_BYTES];
    memcpy(nonce, keys->nonce, sizeof nonce);
    for (int i = 0; i < 8; i++)
        nonce[WC_NONCE_BYTES - 1 - i] ^= (uint8_t)(keys->records >> 8 * i);
    keys->records++;
    int n;
    return keys->cipher && keys->o->EVP_CipherInit_ex(keys->cipher, NULL, NULL, NULL, nonce, -1) == 1 &&
           keys->o->EVP_CipherUpdate(keys->cipher, NULL, &n, header, WC_RECORD_HEADER) == 1;
}

static bool update(wc_keys *keys, uint8_t *out, const uint8_t *in, size_t size)
{
    int n;
    return keys->o->EVP_CipherUpdate(keys->cipher, out, &n, in, (int)size) == 1 && (size_t)n == size;
}

bool wc_record_seal(wc_keys *keys, uint8_t type, const struct iovec *pieces, size_t content, uint8_t *out)
{
    const wc_openssl *o = keys->o;
    size_t sealed = content + WC_RECORD_END;
    const uint8_t header[WC_RECORD_HEADER] = {WC_TYPE_DATA, 3, 3, (uint8_t)(sealed >> 8), (uint8_t)sealed};
    memcpy(out, header, sizeof header);
    bool good = begin(keys, out);
    out += sizeof header;
    for (; content && good; pieces++) {
        size_t n = pieces->iov_len < content ? pieces->iov_len : content;
        good = update(keys, out, pieces->iov_base, n);
        out += n;
        content -= n;
    }
    int n;
    return good && update(keys, out, &type, 1) && o->EVP_CipherFinal_ex(keys->cipher, out + 1, &n) == 1 &&
           o->EVP_CIPHER_CTX_ctrl(keys->cipher, WC_EVP_CTRL_AEAD_GET_TAG, WC_RECORD_END - 1, out + 1) == 1;
}

bool wc_record_open(wc_keys *keys, const uint8_t *record, size_t content, const struct iovec *pieces, uint8_t *type)
{
    const wc_openssl *o = keys->o;
    bool good = begin(keys, record);
    record += WC_RECORD_HEADER;
    for (; content && good; pieces++) {
        size_t n = pieces->iov_len < content ? pieces->iov_len : content;
        good = update(keys, pieces->iov_base, record, n);
        record += n;
        content -= n;
    }
    int n;
    uint8_t none[WC_RECORD_END];
    return good && update(keys, type, record, 1) &&
           o->EVP_CIPHER_CTX_ctrl(keys->cipher, WC_EVP_CTRL_AEAD_SET_TAG, WC_RECORD_END - 1, (void *)(record + 1)) == 1 &&
           o->EVP_CipherFinal_ex(keys->cipher, none, &n) == 1;
}

/* What is used of OpenSSL 3: loaded when encryption is first wanted, so that nothing else needs it to be there. Names,
   numbers and types are those of its public interface. */
#ifndef WC_OPENSSL_H
#define WC_OPENSSL_H

#include "common.h"

typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_method_st SSL_METHOD;
typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
typedef struct x509_st X509;
typedef struct x509_store_ctx_st X509_STORE_CTX;
typedef struct evp_pkey_st EVP_PKEY;
typedef struct ssl_cipher_st SSL_CIPHER;
typedef struct evp_cipher_st EVP_CIPHER;
typedef struct evp_cipher_ctx_st EVP_CIPHER_CTX;
typedef struct evp_kdf_st EVP_KDF;
typedef struct evp_kdf_ctx_st EVP_KDF_CTX;
typedef struct {
    const char *name;
    unsigned type;
    void *data;
    size_t size, returned;
} wc_param; /* OSSL_PARAM */
typedef int wc_judge(int good, X509_STORE_CTX *check);
typedef void wc_secret_line(const SSL *ssl, const char *line);
typedef int wc_password(char *out, int size, int writes, void *given);

enum {
    WC_TLS_1_3 = 0x0304,
    WC_SSL_VERIFY_NONE = 0,
    WC_SSL_ERROR_WANT_READ = 2,
    WC_SSL_CTRL_MODE = 33,
    WC_SSL_CTRL_SET_SESS_CACHE_MODE = 44,
    WC_SSL_CTRL_SET_MAX_CERT_LIST = 51,
    WC_SSL_CTRL_SET_GROUPS_LIST = 92,
    WC_SSL_CTRL_SET_MIN_PROTO_VERSION = 123,
    WC_SSL_CTRL_SET_MAX_PROTO_VERSION = 124,
    WC_SSL_MODE_RELEASE_BUFFERS = 16,
    WC_SSL_OP_NO_TICKET = 1 << 14,
    WC_SSL_OP_CIPHER_SERVER_PREFERENCE = 1 << 22,
    WC_BIO_TYPE_SOURCE_SINK = 0x0400,
    WC_BIO_CTRL_EOF = 2,
    WC_BIO_CTRL_FLUSH = 11,
    WC_BIO_RETRY_READ = 1 | 8,
    WC_OPENSSL_INIT_NO_ATEXIT = 1 << 19,
    WC_EVP_PKEY_ED25519 = 1087,
    WC_EVP_CTRL_AEAD_GET_TAG = 16,
    WC_EVP_CTRL_AEAD_SET_TAG = 17,
    WC_KDF_EXPAND_ONLY = 2,
};

/* SSL_OP_NO_TX_ and NO_RX_CERTIFICATE_COMPRESSION (RFC 8879), of 3.2 or later; older versions cannot compress, and have no
   use for these bits. */
#define WC_SSL_OP_UNCOMPRESSED ((uint64_t)1 << 32 | (uint64_t)1 << 33)

/* result, name, arguments */
#define WC_LIBSSL(F)                                                                                                    \
    F(int, OPENSSL_init_ssl, (uint64_t, const void *))                                                                  \
    F(const SSL_METHOD *, TLS_method, (void))                                                                           \
    F(SSL_CTX *, SSL_CTX_new, (const SSL_METHOD *))                                                                     \
    F(void, SSL_CTX_free, (SSL_CTX *))                                                                                  \
    F(long, SSL_CTX_ctrl, (SSL_CTX *, int, long, void *))                                                               \
    F(uint64_t, SSL_CTX_set_options, (SSL_CTX *, uint64_t))                                                             \
    F(int, SSL_CTX_set_num_tickets, (SSL_CTX *, size_t))                                                                \
    F(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))                                                         \
    F(void, SSL_CTX_set_verify, (SSL_CTX *, int, wc_judge *))                                                           \
    F(int, SSL_CTX_use_certificate, (SSL_CTX *, X509 *))                                                                \
    F(int, SSL_CTX_use_PrivateKey, (SSL_CTX *, EVP_PKEY *))                                                             \
    F(int, SSL_CTX_check_private_key, (const SSL_CTX *))                                                                \
    F(SSL *, SSL_new, (SSL_CTX *))                                                                                      \
    F(void, SSL_free, (SSL *))                                                                                          \
    F(void, SSL_set_bio, (SSL *, BIO *, BIO *))                                                                         \
    F(void, SSL_set_accept_state, (SSL *))                                                                              \
    F(void, SSL_set_connect_state, (SSL *))                                                                             \
    F(int, SSL_do_handshake, (SSL *))                                                                                   \
    F(void, SSL_CTX_set_keylog_callback, (SSL_CTX *, wc_secret_line *))                                                \
    F(int, SSL_set_ex_data, (SSL *, int, void *))                                                                      \
    F(void *, SSL_get_ex_data, (const SSL *, int))                                                                     \
    F(const SSL_CIPHER *, SSL_get_current_cipher, (const SSL *))                                                       \
    F(uint16_t, SSL_CIPHER_get_protocol_id, (const SSL_CIPHER *))                                                      \
    F(const char *, SSL_alert_desc_string_long, (int))                                                                 \
    F(int, SSL_get_error, (const SSL *, int))                                                                           \
    F(X509 *, SSL_get1_peer_certificate, (const SSL *))                                                                 \
    F(const char *, SSL_get_cipher_list, (const SSL *, int))

#define WC_LIBCRYPTO(F)                                                                                                 \
    F(BIO_METHOD *, BIO_meth_new, (int, const char *))                                                                  \
    F(int, BIO_get_new_index, (void))                                                                                   \
    F(int, BIO_meth_set_write, (BIO_METHOD *, int (*)(BIO *, const char *, int)))                                       \
    F(int, BIO_meth_set_read, (BIO_METHOD *, int (*)(BIO *, char *, int)))                                              \
    F(int, BIO_meth_set_ctrl, (BIO_METHOD *, long (*)(BIO *, int, long, void *)))                                       \
    F(BIO *, BIO_new, (const BIO_METHOD *))                                                                             \
    F(int, BIO_free, (BIO *))                                                                                           \
    F(void, BIO_set_data, (BIO *, void *))                                                                              \
    F(void *, BIO_get_data, (BIO *))                                                                                    \
    F(void, BIO_set_init, (BIO *, int))                                                                                 \
    F(void, BIO_set_flags, (BIO *, int))                                                                                \
    F(void, BIO_clear_flags, (BIO *, int))                                                                              \
    F(BIO *, BIO_new_mem_buf, (const void *, int))                                                                      \
    F(EVP_PKEY *, X509_get0_pubkey, (const X509 *))                                                                     \
    F(int, EVP_PKEY_get_id, (const EVP_PKEY *))                                                                        \
    F(int, EVP_PKEY_get_raw_public_key, (const EVP_PKEY *, unsigned char *, size_t *))                                  \
    F(X509 *, PEM_read_bio_X509, (BIO *, X509 **, wc_password *, void *))                                               \
    F(EVP_PKEY *, PEM_read_bio_PrivateKey, (BIO *, EVP_PKEY **, wc_password *, void *))                                 \
    F(void, EVP_PKEY_free, (EVP_PKEY *))                                                                                \
    F(void, X509_free, (X509 *))                                                                                        \
    F(EVP_CIPHER *, EVP_CIPHER_fetch, (void *, const char *, const char *))                                            \
    F(void, EVP_CIPHER_free, (EVP_CIPHER *))                                                                           \
    F(EVP_CIPHER_CTX *, EVP_CIPHER_CTX_new, (void))                                                                    \
    F(void, EVP_CIPHER_CTX_free, (EVP_CIPHER_CTX *))                                                                   \
    F(int, EVP_CIPHER_CTX_ctrl, (EVP_CIPHER_CTX *, int, int, void *))                                                  \
    F(int, EVP_CipherInit_ex, (EVP_CIPHER_CTX *, const EVP_CIPHER *, void *, const uint8_t *, const uint8_t *, int))   \
    F(int, EVP_CipherUpdate, (EVP_CIPHER_CTX *, uint8_t *, int *, const uint8_t *, int))                               \
    F(int, EVP_CipherFinal_ex, (EVP_CIPHER_CTX *, uint8_t *, int *))                                                   \
    F(EVP_KDF *, EVP_KDF_fetch, (void *, const char *, const char *))                                                  \
    F(void, EVP_KDF_free, (EVP_KDF *))                                                                                 \
    F(EVP_KDF_CTX *, EVP_KDF_CTX_new, (EVP_KDF *))                                                                     \
    F(void, EVP_KDF_CTX_free, (EVP_KDF_CTX *))                                                                         \
    F(int, EVP_KDF_derive, (EVP_KDF_CTX *, uint8_t *, size_t, const wc_param *))                                       \
    F(wc_param, OSSL_PARAM_construct_int, (const char *, int *))                                                       \
    F(wc_param, OSSL_PARAM_construct_utf8_string, (const char *, char *, size_t))                                      \
    F(wc_param, OSSL_PARAM_construct_octet_string, (const char *, void *, size_t))                                     \
    F(wc_param, OSSL_PARAM_construct_end, (void))                                                                      \
    F(void, OPENSSL_cleanse, (void *, size_t))                                                                         \
    F(unsigned long, ERR_peek_error, (void))                                                                            \
    F(const char *, ERR_reason_error_string, (unsigned long))                                                           \
    F(void, ERR_clear_error, (void))

typedef struct {
#define WC_MEMBER(result, name, arguments) result(*name) arguments;
    WC_LIBSSL(WC_MEMBER)
    WC_LIBCRYPTO(WC_MEMBER)
#undef WC_MEMBER
    BIO_METHOD *sockets; /* tls.c: how connections reach their sockets */
} wc_openssl;

/* NULL: it is not there, and wc_openssl_missing says what is missing. Any thread may. */
const wc_openssl *wc_openssl_load(void);
const char *wc_openssl_missing(void);

/* Tls.c */
BIO_METHOD *wc_tls_sockets(const wc_openssl *o);

#endif

/* What is used of OpenSSL 3: loaded when encryption is first wanted, so that nothing else needs it to be there. Names,
   numbers and types are those of its public interface: tests/engine/test_openssl.py compares them with its headers. */
#ifndef WC_OPENSSL_H
#define WC_OPENSSL_H

#include "common.h"

#ifndef WC_OPENSSL_HEADERS /* of the system, in that test */
typedef struct ssl_st SSL;
typedef struct ssl_ctx_st SSL_CTX;
typedef struct ssl_method_st SSL_METHOD;
typedef struct bio_st BIO;
typedef struct bio_method_st BIO_METHOD;
typedef struct x509_st X509;
typedef struct x509_store_ctx_st X509_STORE_CTX;
typedef struct evp_pkey_st EVP_PKEY;
typedef struct ossl_init_settings_st OPENSSL_INIT_SETTINGS;
typedef int pem_password_cb(char *out, int size, int writes, void *given);
#endif

enum {
    WC_TLS1_3_VERSION = 0x0304,
    WC_SSL_ERROR_WANT_READ = 2,
    WC_SSL_ERROR_ZERO_RETURN = 6,
    WC_SSL_CTRL_SET_MSG_CALLBACK_ARG = 16,
    WC_SSL_CTRL_SET_SESS_CACHE_MODE = 44,
    WC_SSL_CTRL_SET_MAX_CERT_LIST = 51,
    WC_SSL_CTRL_SET_GROUPS_LIST = 92,
    WC_SSL_CTRL_SET_SIGALGS_LIST = 98,
    WC_SSL_CTRL_SET_MIN_PROTO_VERSION = 123,
    WC_SSL_CTRL_SET_MAX_PROTO_VERSION = 124,
    WC_SSL_OP_NO_TICKET = 1 << 14,
    WC_SSL_OP_CIPHER_SERVER_PREFERENCE = 1 << 22,
    WC_SSL_OP_NO_RENEGOTIATION = 1 << 30,
    WC_SSL3_RT_HANDSHAKE = 22,
    WC_SSL_KEY_UPDATE_NOT_REQUESTED = 0,
    WC_BIO_TYPE_SOURCE_SINK = 0x0400,
    WC_BIO_CTRL_EOF = 2,
    WC_BIO_CTRL_FLUSH = 11,
    WC_BIO_FLAGS_READ = 1,
    WC_BIO_FLAGS_SHOULD_RETRY = 8,
    WC_OPENSSL_INIT_NO_ATEXIT = 1 << 19,
};

/* SSL_OP_NO_TX_ and NO_RX_CERTIFICATE_COMPRESSION (RFC 8879), of 3.2 or later; older versions cannot compress, and know
   no such bits. */
#define WC_SSL_OP_UNCOMPRESSED ((uint64_t)1 << 32 | (uint64_t)1 << 33)

/* result, name, arguments */
#define WC_LIBSSL(F)                                                                                                   \
    F(int, OPENSSL_init_ssl, (uint64_t, const OPENSSL_INIT_SETTINGS *))                                                \
    F(const SSL_METHOD *, TLS_method, (void))                                                                          \
    F(SSL_CTX *, SSL_CTX_new, (const SSL_METHOD *))                                                                    \
    F(void, SSL_CTX_free, (SSL_CTX *))                                                                                 \
    F(long, SSL_CTX_ctrl, (SSL_CTX *, int, long, void *))                                                              \
    F(uint64_t, SSL_CTX_set_options, (SSL_CTX *, uint64_t))                                                            \
    F(int, SSL_CTX_set_num_tickets, (SSL_CTX *, size_t))                                                               \
    F(int, SSL_CTX_set_ciphersuites, (SSL_CTX *, const char *))                                                        \
    F(void, SSL_CTX_set_cert_verify_callback, (SSL_CTX *, int (*)(X509_STORE_CTX *, void *), void *))                  \
    F(void, SSL_CTX_set_msg_callback, (SSL_CTX *, void (*)(int, int, int, const void *, size_t, SSL *, void *)))       \
    F(void, SSL_CTX_set_default_read_buffer_len, (SSL_CTX *, size_t))                                                  \
    F(int, SSL_CTX_use_certificate, (SSL_CTX *, X509 *))                                                               \
    F(int, SSL_CTX_use_PrivateKey, (SSL_CTX *, EVP_PKEY *))                                                            \
    F(int, SSL_CTX_check_private_key, (const SSL_CTX *))                                                               \
    F(SSL *, SSL_new, (SSL_CTX *))                                                                                     \
    F(void, SSL_free, (SSL *))                                                                                         \
    F(long, SSL_ctrl, (SSL *, int, long, void *))                                                                      \
    F(void, SSL_set_bio, (SSL *, BIO *, BIO *))                                                                        \
    F(void, SSL_set_read_ahead, (SSL *, int))                                                                          \
    F(void, SSL_set_accept_state, (SSL *))                                                                             \
    F(void, SSL_set_connect_state, (SSL *))                                                                            \
    F(int, SSL_do_handshake, (SSL *))                                                                                  \
    F(int, SSL_read_ex, (SSL *, void *, size_t, size_t *))                                                             \
    F(int, SSL_write_ex, (SSL *, const void *, size_t, size_t *))                                                      \
    F(int, SSL_has_pending, (const SSL *))                                                                             \
    F(int, SSL_key_update, (SSL *, int))                                                                               \
    F(int, SSL_shutdown, (SSL *))                                                                                      \
    F(int, SSL_get_error, (const SSL *, int))                                                                          \
    F(X509 *, SSL_get1_peer_certificate, (const SSL *))

#define WC_LIBCRYPTO(F)                                                                                                \
    F(BIO_METHOD *, BIO_meth_new, (int, const char *))                                                                 \
    F(int, BIO_get_new_index, (void))                                                                                  \
    F(int, BIO_meth_set_write, (BIO_METHOD *, int (*)(BIO *, const char *, int)))                                      \
    F(int, BIO_meth_set_read, (BIO_METHOD *, int (*)(BIO *, char *, int)))                                             \
    F(int, BIO_meth_set_ctrl, (BIO_METHOD *, long (*)(BIO *, int, long, void *)))                                      \
    F(BIO *, BIO_new, (const BIO_METHOD *))                                                                            \
    F(int, BIO_free, (BIO *))                                                                                          \
    F(void, BIO_set_data, (BIO *, void *))                                                                             \
    F(void *, BIO_get_data, (BIO *))                                                                                   \
    F(void, BIO_set_init, (BIO *, int))                                                                                \
    F(void, BIO_set_flags, (BIO *, int))                                                                               \
    F(void, BIO_clear_flags, (BIO *, int))                                                                             \
    F(BIO *, BIO_new_mem_buf, (const void *, int))                                                                     \
    F(X509 *, PEM_read_bio_X509, (BIO *, X509 **, pem_password_cb *, void *))                                          \
    F(EVP_PKEY *, PEM_read_bio_PrivateKey, (BIO *, EVP_PKEY **, pem_password_cb *, void *))                            \
    F(void, EVP_PKEY_free, (EVP_PKEY *))                                                                               \
    F(int, EVP_PKEY_is_a, (const EVP_PKEY *, const char *))                                                            \
    F(int, EVP_PKEY_get_raw_public_key, (const EVP_PKEY *, unsigned char *, size_t *))                                 \
    F(void, X509_free, (X509 *))                                                                                       \
    F(EVP_PKEY *, X509_get0_pubkey, (const X509 *))                                                                    \
    F(unsigned long, ERR_peek_error, (void))                                                                           \
    F(const char *, ERR_reason_error_string, (unsigned long))                                                          \
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
BIO_METHOD *wc_tls_sockets(const wc_openssl *o); /* tls.c */

#endif

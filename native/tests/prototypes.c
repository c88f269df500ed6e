/* Compiled alone, against OpenSSL's headers where they are (tests/engine/test_openssl.py): what openssl.h says of functions
   and numbers is what they say. */
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#define WC_OPENSSL_HEADERS
#include "../engine/streams/openssl.h"

#define SAME(result, name, arguments)                                                                                   \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&name), result(*) arguments), #name);
WC_LIBSSL(SAME)
WC_LIBCRYPTO(SAME)

#define EQUAL(name) _Static_assert((uint64_t)WC_##name == (uint64_t)name, #name);
EQUAL(TLS1_3_VERSION)
EQUAL(SSL_ERROR_WANT_READ)
EQUAL(SSL_ERROR_ZERO_RETURN)
EQUAL(SSL_CTRL_SET_MSG_CALLBACK_ARG)
EQUAL(SSL_CTRL_SET_SESS_CACHE_MODE)
EQUAL(SSL_CTRL_SET_MAX_CERT_LIST)
EQUAL(SSL_CTRL_SET_GROUPS_LIST)
EQUAL(SSL_CTRL_SET_SIGALGS_LIST)
EQUAL(SSL_CTRL_SET_MIN_PROTO_VERSION)
EQUAL(SSL_CTRL_SET_MAX_PROTO_VERSION)
EQUAL(SSL_OP_NO_TICKET)
EQUAL(SSL_OP_CIPHER_SERVER_PREFERENCE)
EQUAL(SSL_OP_NO_RENEGOTIATION)
EQUAL(SSL3_RT_HANDSHAKE)
EQUAL(SSL_KEY_UPDATE_NOT_REQUESTED)
EQUAL(BIO_TYPE_SOURCE_SINK)
EQUAL(BIO_CTRL_EOF)
EQUAL(BIO_CTRL_FLUSH)
EQUAL(BIO_FLAGS_READ)
EQUAL(BIO_FLAGS_SHOULD_RETRY)
EQUAL(OPENSSL_INIT_NO_ATEXIT)
#ifdef SSL_OP_NO_RX_CERTIFICATE_COMPRESSION
_Static_assert(WC_SSL_OP_UNCOMPRESSED == (SSL_OP_NO_TX_CERTIFICATE_COMPRESSION | SSL_OP_NO_RX_CERTIFICATE_COMPRESSION),
               "uncompressed");
#endif

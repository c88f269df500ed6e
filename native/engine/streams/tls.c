/* TLS 1.3 on a connection: handshake and records are OpenSSL's, the socket under them is read and written here.

   What is given to be sent is sealed at once, and what the socket does not take of a record stays in `out`: OpenSSL
   never waits for room. So nothing has to be told again what to send, and memory that was given belongs to its owner as soon
   as it was taken: a frame that is cancelled in the middle of a record goes on after it, from its private copy, as it
   does after any other byte. A lane that waits for room holds one record.

   OpenSSL takes some records at once from the socket as soon as the engine has it (`holds`). What it has then is not in
   the socket, and epoll says nothing of it. A lane whose turn is over takes what is held and reads no further (`rest`):
   what is held after that is less than a record, whose end epoll announces.

   New keys take far longer to open than to send. So an end that sends little else is put out (`barren`): they count for
   far more bytes than they have: ours renew a key once in millions of records. Until the engine has it an end may
   send none at all: its daemon waits meanwhile, whoever is there. OpenSSL itself bounds records without data. */
#include "tls.h"

#include "openssl.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

enum {
    RECORD = 16384, /* bytes that one holds at most */
    RECORD_HEADER = 5,
    RECORD_BYTES = RECORD_HEADER + RECORD + 17, /* of it when sealed */
    AHEAD = 4 * RECORD_BYTES + 16,      /* that OpenSSL reads at once */
    NOTICES = 256,                      /* room for a few words about the connection, beside a record */
    MOST_BARREN = AHEAD + (32 << 10),   /* bytes from the socket, less twice the data in them */
    MOST_EARLY = RECORD_BYTES + 256,    /* the same until the engine has it: a record's bytes come before its data */
    MOST_SHAKING = 4 << 10,             /* of a handshake */
    SHAKING = 256,                      /* what a record of it counts for, beside what it holds */
    MOST_CERTIFICATE = 1 << 10,         /* bytes of what is shown */
    NO_DATA = 4 << 10,                  /* what new keys count for */
    GOOD_FOR = 1 << 22,                 /* records: a key. AES-GCM is for 2^24.5 (RFC 8446, 5.5); OpenSSL counts none */
};

#ifdef WC_TEST_ALLOCATOR
/* Tests decide how much a socket takes, and for how many records a key is good, where they want to. */
ssize_t wc_test_send(int fd, const void *bytes, size_t n, int flags) __attribute__((weak));
uint32_t wc_test_records(void) __attribute__((weak));
#define send(...) (wc_test_send ? wc_test_send(__VA_ARGS__) : send(__VA_ARGS__))
#define RECORDS (wc_test_records ? wc_test_records() : GOOD_FOR)
#else
#define RECORDS GOOD_FOR
#endif

struct wc_tls {
    const wc_openssl *o;
    SSL *ssl;
    int fd;
    int error;           /* it is of no use any more: errno */
    bool through;        /* the handshake is */
    bool owned;          /* by the engine */
    bool ended;          /* by a close notify, or as barren: nothing more is read */
    bool cut;            /* the socket has ended */
    bool resting;        /* nothing is taken from the socket */
    bool drained;        /* nor is there anything in it: epoll says when there is */
    bool follows;        /* more is sent right after this record */
    uint32_t records;    /* sealed with this key */
    size_t barren;       /* bytes from the socket, less twice the data in them */
    size_t unsent, left; /* bytes: sealed and not taken by the socket; of those, gone since */
    char reason[160];
    uint8_t gathered[RECORD]; /* what one record holds of several pieces */
    uint8_t out[RECORD_BYTES + NOTICES];
};

/* ---- the socket --------------------------------------------------------------------------------------- */

/* Bytes that the socket has taken, perhaps 0; -1: it is broken. */
static ssize_t to_socket(wc_tls *tls, const void *bytes, size_t n)
{
    ssize_t sent;
    do
        sent = send(tls->fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT | (tls->follows ? MSG_MORE : 0));
    while (sent < 0 && errno == EINTR);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
    if (sent < 0)
        tls->error = errno;
    return sent;
}

int wc_tls_flush(wc_tls *tls)
{
    while (tls->unsent && !tls->error) {
        ssize_t sent = to_socket(tls, tls->out + tls->left, tls->unsent - tls->left);
        if (sent == 0)
            return 0;
        if (sent > 0 && (tls->left += (size_t)sent) == tls->unsent)
            tls->unsent = tls->left = 0;
    }
    errno = tls->error;
    return tls->error ? -1 : 1;
}

static int bio_write(BIO *bio, const char *bytes, int n)
{
    wc_tls *tls = wc_openssl_load()->BIO_get_data(bio);
    ssize_t sent = tls->error ? -1 : tls->unsent ? 0 : to_socket(tls, bytes, (size_t)n);
    if (sent < 0)
        return -1;
    size_t rest = (size_t)(n - sent);
    if (rest > sizeof tls->out - tls->unsent)
        tls->error = ENOBUFS;
    if (tls->error)
        return -1;
    memcpy(tls->out + tls->unsent, bytes + sent, rest);
    tls->unsent += rest;
    return n;
}

/* False: far more has come than was wanted. */
static bool fruitful(wc_tls *tls)
{
    if (tls->barren <= (size_t)(tls->owned ? MOST_BARREN : tls->through ? MOST_EARLY : MOST_SHAKING))
        return true;
    tls->error = EPROTO;
    tls->ended = true;
    snprintf(tls->reason, sizeof tls->reason, "TLS: far more records than data (new keys again and again?)");
    return false;
}

static int bio_read(BIO *bio, char *bytes, int n)
{
    const wc_openssl *o = wc_openssl_load();
    wc_tls *tls = o->BIO_get_data(bio);
    ssize_t got = -1;
    o->BIO_clear_flags(bio, WC_BIO_FLAGS_READ | WC_BIO_FLAGS_SHOULD_RETRY);
    if (tls->error || !fruitful(tls))
        return -1;
    if (!tls->resting && !tls->drained) {
        do
            got = recv(tls->fd, bytes, (size_t)n, MSG_DONTWAIT);
        while (got < 0 && errno == EINTR);
        if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
            tls->error = errno;
        tls->cut = got == 0;
        tls->drained = got < n;
    }
    if (got > 0) /* until the engine has it OpenSSL asks for a record's header alone, then for the rest */
        tls->barren += (size_t)got + (n == RECORD_HEADER && !tls->through ? SHAKING : 0);
    else if (!tls->cut && !tls->error)
        o->BIO_set_flags(bio, WC_BIO_FLAGS_READ | WC_BIO_FLAGS_SHOULD_RETRY);
    return (int)got;
}

static long bio_control(BIO *bio, int what, long number, void *pointer)
{
    (void)number, (void)pointer;
    const wc_tls *tls = wc_openssl_load()->BIO_get_data(bio);
    return what == WC_BIO_CTRL_EOF ? tls->cut : what == WC_BIO_CTRL_FLUSH;
}

BIO_METHOD *wc_tls_sockets(const wc_openssl *o)
{
    BIO_METHOD *method = o->BIO_meth_new(o->BIO_get_new_index() | WC_BIO_TYPE_SOURCE_SINK, "wancoll");
    if (!method || !o->BIO_meth_set_write(method, bio_write) || !o->BIO_meth_set_read(method, bio_read) ||
        !o->BIO_meth_set_ctrl(method, bio_control))
        return NULL;
    return method;
}

/* ---- identities --------------------------------------------------------------------------------------- */

static bool fast_aes(void)
{
#if defined __x86_64__
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined __aarch64__
    return getauxval(AT_HWCAP) & HWCAP_AES;
#else
    return false;
#endif
}

static int no_password(char *out, int size, int writes, void *given)
{
    (void)out, (void)size, (void)writes, (void)given;
    return -1;
}

static const char *first_reason(const wc_openssl *o)
{
    unsigned long code = o->ERR_peek_error();
    const char *reason = code ? o->ERR_reason_error_string(code) : NULL;
    return reason ? reason : "no reason given";
}

/* False: one cannot be used, or they are not a pair. */
static bool use(const wc_openssl *o, SSL_CTX *context, const char *certificate, const char *key)
{
    BIO *texts[] = {o->BIO_new_mem_buf(certificate, -1), o->BIO_new_mem_buf(key, -1)};
    X509 *shown = texts[0] ? o->PEM_read_bio_X509(texts[0], NULL, no_password, NULL) : NULL;
    EVP_PKEY *own = texts[1] && shown ? o->PEM_read_bio_PrivateKey(texts[1], NULL, no_password, NULL) : NULL;
    bool used = own && o->SSL_CTX_use_certificate(context, shown) == 1 &&
                o->SSL_CTX_use_PrivateKey(context, own) == 1 && o->SSL_CTX_check_private_key(context) == 1;
    o->EVP_PKEY_free(own);
    o->X509_free(shown);
    o->BIO_free(texts[0]);
    o->BIO_free(texts[1]);
    return used;
}

/* The daemon compares the key in it (wc_tls_key). */
static int pass_any(X509_STORE_CTX *check, void *given)
{
    (void)check, (void)given;
    return 1;
}

/* OpenSSL tells of a message before it reads it. */
static void count_keys(int writes, int version, int type, const void *bytes, size_t n, SSL *ssl, void *given)
{
    (void)version, (void)bytes, (void)n, (void)ssl;
    wc_tls *tls = given;
    if (!writes && type == WC_SSL3_RT_HANDSHAKE && tls->through)
        tls->barren += tls->owned ? NO_DATA : MOST_EARLY + 1;
}

static bool set(const wc_openssl *o, SSL_CTX *context, int what, long number, const char *text)
{
    return o->SSL_CTX_ctrl(context, what, number, (void *)text) == 1;
}

/* What it lacks, or NULL. */
static const char *prepare(const wc_openssl *o, SSL_CTX *context, const char *certificate, const char *key)
{
    const char *aes = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
    const char *chacha = "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384";
    /* other groups and signatures would be dear, and a stranger could ask for them */
    if (!set(o, context, WC_SSL_CTRL_SET_MIN_PROTO_VERSION, WC_TLS1_3_VERSION, NULL) ||
        !set(o, context, WC_SSL_CTRL_SET_MAX_PROTO_VERSION, WC_TLS1_3_VERSION, NULL) ||
        !o->SSL_CTX_set_ciphersuites(context, fast_aes() ? aes : chacha) || !o->SSL_CTX_set_num_tickets(context, 0) ||
        !set(o, context, WC_SSL_CTRL_SET_GROUPS_LIST, 0, "X25519:P-256") ||
        !set(o, context, WC_SSL_CTRL_SET_SIGALGS_LIST, 0, "ed25519"))
        return "TLS 1.3 with Ed25519";
    o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_MAX_CERT_LIST, MOST_CERTIFICATE, NULL);
    o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_SESS_CACHE_MODE, 0, NULL);
    o->SSL_CTX_set_default_read_buffer_len(context, AHEAD);
    o->SSL_CTX_set_options(context, WC_SSL_OP_NO_TICKET | WC_SSL_OP_CIPHER_SERVER_PREFERENCE |
                                        WC_SSL_OP_NO_RENEGOTIATION | WC_SSL_OP_UNCOMPRESSED);
    o->SSL_CTX_set_msg_callback(context, count_keys);
    o->SSL_CTX_set_cert_verify_callback(context, pass_any, NULL);
    return use(o, context, certificate, key) ? NULL : "the certificate and its key";
}

wc_tls_identity *wc_tls_identity_new(const char *certificate, const char *key, char *reason, uint32_t size)
{
    const wc_openssl *o = wc_openssl_load();
    if (!o) {
        snprintf(reason, size, "%s", wc_openssl_missing());
        errno = ENOSYS;
        return NULL;
    }
    o->ERR_clear_error();
    SSL_CTX *context = o->SSL_CTX_new(o->TLS_method());
    const char *lacks = context ? prepare(o, context, certificate, key) : "memory";
    if (!lacks)
        return (wc_tls_identity *)context;
    snprintf(reason, size, "%s: %s", lacks, first_reason(o));
    o->SSL_CTX_free(context);
    o->ERR_clear_error();
    errno = context ? EINVAL : ENOMEM;
    return NULL;
}

void wc_tls_identity_free(wc_tls_identity *identity)
{
    wc_openssl_load()->SSL_CTX_free((SSL_CTX *)identity);
}

/* ---- connections -------------------------------------------------------------------------------------- */

wc_tls *wc_tls_new(const wc_tls_identity *identity, int fd, int accepts)
{
    const wc_openssl *o = wc_openssl_load();
    wc_tls *tls = calloc(1, sizeof *tls);
    SSL *ssl = tls ? o->SSL_new((SSL_CTX *)identity) : NULL;
    BIO *bio = ssl ? o->BIO_new(o->sockets) : NULL;
    if (!bio) {
        o->SSL_free(ssl);
        free(tls);
        errno = ENOMEM;
        return NULL;
    }
    tls->o = o;
    tls->ssl = ssl;
    tls->fd = fd;
    o->BIO_set_data(bio, tls);
    o->BIO_set_init(bio, 1);
    o->SSL_set_bio(ssl, bio, bio); /* takes it */
    o->SSL_ctrl(ssl, WC_SSL_CTRL_SET_MSG_CALLBACK_ARG, 0, tls);
    (accepts ? o->SSL_set_accept_state : o->SSL_set_connect_state)(ssl);
    return tls;
}

int wc_tls_take(wc_tls *tls)
{
    tls->owned = true;
    tls->o->SSL_set_read_ahead(tls->ssl, 1);
    return tls->fd;
}

void wc_tls_free(wc_tls *tls)
{
    if (tls) {
        tls->o->SSL_free(tls->ssl);
        tls->o->ERR_clear_error();
        free(tls);
    }
}

/* A call of OpenSSL has come to nothing. True: it waits for the socket, or this is the end. Else it has failed. */
static bool waits(wc_tls *tls, int result)
{
    const wc_openssl *o = tls->o;
    int why = o->SSL_get_error(tls->ssl, result);
    tls->ended |= why == WC_SSL_ERROR_ZERO_RETURN;
    if (why == WC_SSL_ERROR_WANT_READ || why == WC_SSL_ERROR_ZERO_RETURN)
        return true;
    if (tls->cut) {
        tls->error = ECONNRESET;
        snprintf(tls->reason, sizeof tls->reason, "cut off: the connection ended without a close notify");
    } else if (!tls->error) {
        tls->error = EBADMSG;
        snprintf(tls->reason, sizeof tls->reason, "TLS: %s", first_reason(o));
    }
    o->ERR_clear_error();
    return false;
}

/* For calls that find it as it is. */
static int failed(const wc_tls *tls)
{
    errno = tls->error ? tls->error : ENOTCONN;
    return -1;
}

const char *wc_tls_reason(const wc_tls *tls)
{
    return tls->reason[0] ? tls->reason : strerror(tls->error);
}

int wc_tls_handshake(wc_tls *tls)
{
    if (tls->error)
        return failed(tls);
    tls->o->ERR_clear_error();
    int result = tls->through ? 1 : tls->o->SSL_do_handshake(tls->ssl);
    tls->drained = false;
    if (result != 1 && !waits(tls, result))
        return failed(tls);
    if (result == 1 && !tls->through) {
        tls->through = true;
        tls->barren = 0;
    }
    int flushed = wc_tls_flush(tls);
    return flushed < 0 ? -1 : flushed == 0 ? WC_TLS_WRITES : result != 1 ? WC_TLS_READS : 0;
}

int wc_tls_key(const wc_tls *tls, uint8_t *out)
{
    const wc_openssl *o = tls->o;
    X509 *shown = o->SSL_get1_peer_certificate(tls->ssl);
    EVP_PKEY *key = shown ? o->X509_get0_pubkey(shown) : NULL;
    size_t size = WC_KEY_BYTES;
    bool found = key && o->EVP_PKEY_is_a(key, "ED25519") == 1 &&
                 o->EVP_PKEY_get_raw_public_key(key, out, &size) == 1 && size == WC_KEY_BYTES;
    o->X509_free(shown);
    o->ERR_clear_error();
    return found ? 0 : -1;
}

int wc_tls_read(wc_tls *tls, void *out, uint32_t size)
{
    struct iovec piece = {out, size};
    bool more;
    return (int)wc_tls_receive(tls, &piece, 1, &more);
}

int wc_tls_write(wc_tls *tls, const void *bytes, uint32_t size)
{
    struct iovec piece = {(void *)bytes, size};
    return (int)wc_tls_send(tls, &piece, 1);
}

/* ---- records ------------------------------------------------------------------------------------------ */

/* Where the pieces go on after so many bytes. */
static struct iovec *skip(struct iovec *pieces, const struct iovec *end, size_t bytes)
{
    for (; pieces < end && bytes >= pieces->iov_len; pieces++)
        bytes -= pieces->iov_len;
    if (bytes) {
        pieces->iov_base = (uint8_t *)pieces->iov_base + bytes;
        pieces->iov_len -= bytes;
    }
    return pieces;
}

/* What the next record holds of the pieces: as much as there is, so headers go with the payload after them. */
static const void *gather(wc_tls *tls, struct iovec **pieces, const struct iovec *end, size_t *content)
{
    struct iovec *first = *pieces;
    const void *bytes = first->iov_base;
    *content = 0;
    if (first->iov_len >= RECORD || first + 1 == end) {
        *content = first->iov_len < RECORD ? first->iov_len : RECORD;
    } else {
        bytes = tls->gathered;
        for (struct iovec *one = first; one < end && *content < RECORD; one++) {
            size_t room = RECORD - *content, n = one->iov_len < room ? one->iov_len : room;
            memcpy(tls->gathered + *content, one->iov_base, n);
            *content += n;
        }
    }
    *pieces = skip(first, end, *content);
    return bytes;
}

ssize_t wc_tls_send(wc_tls *tls, struct iovec *pieces, int count)
{
    struct iovec *end = pieces + count;
    size_t taken = 0;
    if (!tls->through)
        return failed(tls);
    if (wc_tls_flush(tls) <= 0) {
        errno = tls->error ? tls->error : EAGAIN;
        return -1;
    }
    tls->o->ERR_clear_error();
    pieces = skip(pieces, end, 0);
    while (pieces < end && !tls->unsent) {
        size_t content, written;
        const void *bytes = gather(tls, &pieces, end, &content);
        tls->follows = pieces < end;
        if (++tls->records > RECORDS) {
            if (!tls->o->SSL_key_update(tls->ssl, WC_SSL_KEY_UPDATE_NOT_REQUESTED)) {
                tls->error = EIO;
                return failed(tls);
            }
            tls->records = 1;
        }
        int result = tls->o->SSL_write_ex(tls->ssl, bytes, content, &written);
        tls->follows = false;
        if (result != 1) {
            waits(tls, result);
            return failed(tls);
        }
        taken += content;
    }
    return (ssize_t)taken;
}

ssize_t wc_tls_receive(wc_tls *tls, struct iovec *pieces, int count, bool *more)
{
    struct iovec *end = pieces + count;
    size_t have = 0;
    int result = 1;
    bool waiting = false;
    if (!tls->through)
        return failed(tls);
    tls->o->ERR_clear_error();
    /* what was opened before it failed can be had */
    while ((pieces = skip(pieces, end, 0)) < end && result == 1 && !tls->ended && (!tls->error || wc_tls_holds(tls))) {
        size_t n = 0;
        result = tls->o->SSL_read_ex(tls->ssl, pieces->iov_base, pieces->iov_len, &n);
        waiting = result != 1 && waits(tls, result) && !tls->ended;
        tls->barren -= tls->barren < 2 * n ? tls->barren : 2 * n;
        result &= fruitful(tls);
        pieces = skip(pieces, end, n);
        have += n;
    }
    *more = have && !waiting; /* an end is told when what came before it was taken */
    tls->drained = tls->drained && *more;
    if (have)
        return (ssize_t)have;
    errno = waiting ? EAGAIN : tls->error;
    return waiting || tls->error ? -1 : 0;
}

bool wc_tls_unsent(const wc_tls *tls)
{
    return tls->unsent && !tls->error;
}

bool wc_tls_holds(const wc_tls *tls)
{
    return tls->o->SSL_has_pending(tls->ssl) == 1;
}

void wc_tls_rest(wc_tls *tls, bool rest)
{
    tls->resting = rest;
}

void wc_tls_end(wc_tls *tls)
{
    if (tls->error || !tls->through)
        return;
    /* what was taken is to leave as if it were the kernel's already: here it would be lost */
    uint32_t any = UINT32_MAX;
    setsockopt(tls->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &any, sizeof any);
    if (wc_tls_flush(tls) == 1)
        tls->o->SSL_shutdown(tls->ssl);
}

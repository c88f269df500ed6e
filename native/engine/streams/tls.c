/* TLS 1.3 on a connection: the handshake is OpenSSL's, the records after it are sealed and opened by records.c with the
   secrets that it has agreed on, as the kernel does where it has TLS.

   Whatever is given to be sent is sealed at once, from where it lies into `out`, some records together, and what the
   socket does not take of them stays there. So nothing has to be told again what to send, and memory that was given
   belongs to its owner as soon as it was taken: a frame that is cancelled in the middle of a record goes on after it,
   from its private copy, as it does after any other byte. No more is sealed before they have left, and no more records
   together than the socket has taken: little is held.

   What the socket has is taken into `in`, some records together, and each is opened to where its bytes are wanted. What
   is in there then is not in the socket, and epoll says nothing of it: `holds`. A lane whose turn is over takes what is
   held and reads no further (`rest`): what is held after that is less than a record, whose end epoll announces. Bytes of
   a record that was changed are where they were wanted, too, but nobody is told that they came.

   Records without data, new keys above all, take far longer to open than to send. So an end that sends little else is
   put out (`barren`), where they count for far more bytes than they have, as all records of a handshake do: ours renew a
   key once in millions of records, and the smallest thing that they send is longer than what a record adds to it. Until
   the engine has it an end may send none at all: its daemon waits meanwhile, whoever is there. */
#include "tls.h"

#include "openssl.h"
#include "records.h"

#include <errno.h>
#include <limits.h>
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
    TOGETHER = 4, /* records that leave, or come, with one system call */
    BATCH = TOGETHER * WC_RECORD_BYTES,
    NOTICES = 128,           /* room for a few words about the connection, after those */
    NOTICE_BYTES = 5,        /* of the longest: new keys */
    MOST_BARREN = 32 << 10,  /* the engine's */
    MOST_SHAKING = 4 << 10,  /* of a handshake, each record counted for more than it has */
    MOST_EARLY = 256,        /* after them, until the engine has it */
    NO_DATA = 4 << 10,       /* what a record counts for that holds none */
    SHAKING = 256,           /* and one of the handshake, beside what it holds */
    MOST_SHOWN = 1 << 10,    /* bytes of a certificate */
};

enum { NEW_KEYS = 24 }; /* messages of a handshake */
enum { CLOSE_NOTIFY = 0, UNEXPECTED = 10, BAD_RECORD = 20, TOO_LONG = 22, INTERNAL = 80 }; /* alerts */

struct wc_tls_identity {
    SSL_CTX *context;
    uint64_t records; /* that one key seals */
};

struct wc_tls {
    const wc_openssl *o;
    SSL *ssl; /* the handshake */
    int fd;
    int error;    /* it is of no use any more: errno */
    bool accepts; /* else it has dialled */
    bool owned;   /* by the engine */
    bool ended;   /* by a close notify */
    bool cut;     /* the socket has ended */
    bool resting; /* nothing is taken from the socket */
    bool drained; /* nor is there anything in it: epoll says when there is */
    bool renews;  /* the other end wants new keys of this one */
    wc_keys sends, receives;
    uint8_t secrets[2][WC_SECRET_BYTES]; /* of the handshake: of who dialled, of who accepted */
    uint64_t records;                    /* that one key seals */
    size_t barren;                       /* bytes from the socket, less twice the plaintext that they gave */
    char reason[160];
    size_t batch;        /* bytes that are sealed before they leave */
    size_t unsent, left; /* bytes: sealed and not taken by the socket; of those, gone since */
    size_t came, opened; /* bytes: from the socket; of those, opened */
    size_t held, taken;  /* bytes: opened, for which there was no room; of those, taken since */
    uint8_t plain[WC_RECORD];
    uint8_t out[BATCH + NOTICES], in[BATCH];
};

#ifdef WC_TEST_ALLOCATOR
/* Tests decide how much a socket takes, where they want to. */
ssize_t wc_test_send(int fd, const void *bytes, size_t n, int flags) __attribute__((weak));
#define send(...) (wc_test_send ? wc_test_send(__VA_ARGS__) : send(__VA_ARGS__))
#endif

/* ---- the socket --------------------------------------------------------------------------------------- */

/* Bytes that the socket has taken, perhaps 0; -1: it is broken. */
static ssize_t to_socket(wc_tls *tls, const void *bytes, size_t n, int flags)
{
    ssize_t sent;
    do
        sent = send(tls->fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT | flags);
    while (sent < 0 && errno == EINTR);
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return 0;
    if (sent < 0)
        tls->error = errno;
    return sent;
}

/* What it has, as far as there is room: after what has come and is not opened. */
static void from_socket(wc_tls *tls)
{
    tls->came -= tls->opened;
    memmove(tls->in, tls->in + tls->opened, tls->came);
    tls->opened = 0;
    size_t room = sizeof tls->in - tls->came;
    ssize_t got;
    do
        got = recv(tls->fd, tls->in + tls->came, room, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    tls->cut = got == 0;
    tls->drained = got < (ssize_t)room;
    if (got > 0)
        tls->came += (size_t)got;
    else if (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK)
        tls->error = errno;
}

/* False: far more than was wanted. */
static bool fruitful(wc_tls *tls, size_t bytes, size_t wanted)
{
    tls->barren += bytes;
    tls->barren -= tls->barren < 2 * wanted ? tls->barren : 2 * wanted;
    if (tls->barren <= (size_t)(tls->owned ? MOST_BARREN : tls->receives.cipher ? MOST_EARLY : MOST_SHAKING))
        return true;
    tls->error = EPROTO;
    snprintf(tls->reason, sizeof tls->reason, "TLS: far more records than data (new keys again and again?)");
    return false;
}

/* Bytes of the handshake go out by this */
static int bio_write(BIO *bio, const char *bytes, int n)
{
    const wc_openssl *o = wc_openssl_load();
    wc_tls *tls = o->BIO_get_data(bio);
    if ((size_t)n > sizeof tls->out - tls->unsent) {
        tls->error = ENOBUFS;
        return -1;
    }
    memcpy(tls->out + tls->unsent, bytes, (size_t)n);
    tls->unsent += (size_t)n;
    return n;
}

static int bio_read(BIO *bio, char *bytes, int n)
{
    const wc_openssl *o = wc_openssl_load();
    wc_tls *tls = o->BIO_get_data(bio);
    o->BIO_clear_flags(bio, WC_BIO_RETRY_READ);
    if (tls->came == tls->opened && !tls->drained)
        from_socket(tls);
    size_t there = tls->came - tls->opened, got = there < (size_t)n ? there : (size_t)n;
    if (got == 0 && !tls->cut && !tls->error)
        o->BIO_set_flags(bio, WC_BIO_RETRY_READ);
    if (got == 0)
        return tls->cut ? 0 : -1;
    memcpy(bytes, tls->in + tls->opened, got);
    tls->opened += got;
    bool begins = n == WC_RECORD_HEADER; /* OpenSSL asks for nothing beyond it */
    return fruitful(tls, got + (begins ? SHAKING : 0), 0) ? (int)got : -1;
}

static long bio_control(BIO *bio, int what, long number, void *pointer)
{
    (void)number;
    (void)pointer;
    if (what == WC_BIO_CTRL_EOF)
        return ((wc_tls *)wc_openssl_load()->BIO_get_data(bio))->cut;
    return what == WC_BIO_CTRL_FLUSH;
}

BIO_METHOD *wc_tls_sockets(const wc_openssl *o)
{
    BIO_METHOD *method = o->BIO_meth_new(o->BIO_get_new_index() | WC_BIO_TYPE_SOURCE_SINK, "wancoll");
    if (!method || !o->BIO_meth_set_write(method, bio_write) || !o->BIO_meth_set_read(method, bio_read) ||
        !o->BIO_meth_set_ctrl(method, bio_control))
        return NULL;
    return method;
}

/* 1: all has left that was sealed. 0: the socket is full. -1 with errno. */
static int flush(wc_tls *tls, int flags)
{
    while (tls->unsent && !tls->error) {
        ssize_t sent = to_socket(tls, tls->out + tls->left, tls->unsent - tls->left, flags);
        if (sent == 0)
            return 0;
        if (sent > 0 && (tls->left += (size_t)sent) == tls->unsent)
            tls->unsent = tls->left = 0;
    }
    errno = tls->error;
    return tls->error ? -1 : 1;
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

static bool show(const wc_openssl *o, SSL_CTX *context, const char *pem)
{
    BIO *text = o->BIO_new_mem_buf(pem, -1);
    X509 *one = text ? o->PEM_read_bio_X509(text, NULL, no_password, NULL) : NULL;
    bool taken = one && o->SSL_CTX_use_certificate(context, one) == 1;
    o->X509_free(one);
    o->BIO_free(text);
    return taken;
}

static bool use_key(const wc_openssl *o, SSL_CTX *context, const char *pem)
{
    BIO *text = o->BIO_new_mem_buf(pem, -1);
    EVP_PKEY *key = text ? o->PEM_read_bio_PrivateKey(text, NULL, no_password, NULL) : NULL;
    bool used = key && o->SSL_CTX_use_PrivateKey(context, key) == 1 && o->SSL_CTX_check_private_key(context) == 1;
    o->EVP_PKEY_free(key);
    o->BIO_free(text);
    return used;
}

static int digit(char one)
{
    static const char DIGITS[] = "0123456789abcdef0123456789ABCDEF";
    const char *found = one ? strchr(DIGITS, one) : NULL;
    return found ? (int)((found - DIGITS) % 16) : -1;
}

/* A line of the file that tools for looking into TLS read: what it is, 32 random bytes, the secret, both as digits. */
static void take_secret(const SSL *ssl, const char *line)
{
    const wc_openssl *o = wc_openssl_load();
    wc_tls *tls = o->SSL_get_ex_data(ssl, 0);
    static const char *const NAMES[] = {"CLIENT_TRAFFIC_SECRET_0 ", "SERVER_TRAFFIC_SECRET_0 "};
    for (int end = 0; end < 2; end++) {
        size_t name = strlen(NAMES[end]);
        if (strncmp(line, NAMES[end], name) != 0)
            continue;
        const char *at = strchr(line + name, ' ');
        for (size_t i = 0; at && i < WC_SECRET_BYTES && digit(at[1]) >= 0 && digit(at[2]) >= 0; i++, at += 2)
            tls->secrets[end][i] = (uint8_t)(digit(at[1]) << 4 | digit(at[2]));
    }
}

/* What it lacks, or NULL. */
static const char *prepare(const wc_openssl *o, SSL_CTX *context, const char *certificate, const char *key)
{
    const char *aes = "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
    const char *chacha = "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384";
    if (!o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_MIN_PROTO_VERSION, WC_TLS_1_3, NULL) ||
        !o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_MAX_PROTO_VERSION, WC_TLS_1_3, NULL) ||
        !o->SSL_CTX_set_ciphersuites(context, fast_aes() ? aes : chacha) || !o->SSL_CTX_set_num_tickets(context, 0))
        return "TLS 1.3";
    /* A stranger's message of ffdhe8192 would take a tenth of a second. Some machines allow no X25519. */
    if (o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_GROUPS_LIST, 0, "X25519:P-256") != 1 &&
        o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_GROUPS_LIST, 0, "P-256") != 1)
        return "X25519 and P-256";
    /* Compressed certificates would go round MOST_SHAKING: 3.5 KB of them took 16 seconds. */
    o->SSL_CTX_set_options(context, WC_SSL_OP_NO_TICKET | WC_SSL_OP_CIPHER_SERVER_PREFERENCE | WC_SSL_OP_UNCOMPRESSED);
    o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_MAX_CERT_LIST, MOST_SHOWN, NULL);
    o->SSL_CTX_ctrl(context, WC_SSL_CTRL_SET_SESS_CACHE_MODE, 0, NULL);
    o->SSL_CTX_ctrl(context, WC_SSL_CTRL_MODE, WC_SSL_MODE_RELEASE_BUFFERS, NULL);
    o->SSL_CTX_set_keylog_callback(context, take_secret);
    o->SSL_CTX_set_verify(context, WC_SSL_VERIFY_NONE, NULL); /* the daemon compares the key */
    if (!show(o, context, certificate))
        return "the certificate";
    return use_key(o, context, key) ? NULL : "the key";
}

wc_tls_identity *wc_tls_identity_new(const char *certificate, const char *key, uint64_t records, char *reason,
                                     uint32_t size)
{
    const wc_openssl *o = wc_openssl_load();
    if (!o) {
        snprintf(reason, size, "%s", wc_openssl_missing());
        errno = ENOSYS;
        return NULL;
    }
    o->ERR_clear_error();
    wc_tls_identity *identity = malloc(sizeof *identity);
    SSL_CTX *context = identity ? o->SSL_CTX_new(o->TLS_method()) : NULL;
    const char *lacks = context ? prepare(o, context, certificate, key) : "memory";
    if (!lacks) {
        *identity = (wc_tls_identity){context, records};
        return identity;
    }
    snprintf(reason, size, "%s: %s", lacks, first_reason(o));
    o->SSL_CTX_free(context);
    free(identity);
    o->ERR_clear_error();
    errno = context ? EINVAL : ENOMEM;
    return NULL;
}

void wc_tls_identity_free(wc_tls_identity *identity)
{
    wc_openssl_load()->SSL_CTX_free(identity->context);
    free(identity);
}

/* ---- connections -------------------------------------------------------------------------------------- */

wc_tls *wc_tls_new(const wc_tls_identity *identity, int fd, int accepts)
{
    const wc_openssl *o = wc_openssl_load();
    wc_tls *tls = calloc(1, sizeof *tls);
    SSL *ssl = tls ? o->SSL_new(identity->context) : NULL;
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
    tls->accepts = accepts;
    tls->records = identity->records;
    tls->batch = WC_RECORD_BYTES;
    o->BIO_set_data(bio, tls);
    o->BIO_set_init(bio, 1);
    o->SSL_set_bio(ssl, bio, bio); /* takes it */
    if (o->SSL_set_ex_data(ssl, 0, tls) != 1) {
        wc_tls_free(tls);
        errno = ENOMEM;
        return NULL;
    }
    if (accepts)
        o->SSL_set_accept_state(ssl);
    else
        o->SSL_set_connect_state(ssl);
    return tls;
}

int wc_tls_take(wc_tls *tls)
{
    tls->owned = true;
    return tls->fd;
}

void wc_tls_free(wc_tls *tls)
{
    if (tls) {
        tls->o->SSL_free(tls->ssl);
        tls->o->ERR_clear_error();
        wc_keys_end(&tls->sends);
        wc_keys_end(&tls->receives);
        tls->o->OPENSSL_cleanse(tls->secrets, sizeof tls->secrets);
        free(tls);
    }
}

static void cut_off(wc_tls *tls)
{
    tls->error = ECONNRESET;
    snprintf(tls->reason, sizeof tls->reason, "cut off: the connection ended without a close notify");
}

/* The handshake has not gone on. True: it waits for more from the socket. Else it has failed, for good. */
static bool waits(wc_tls *tls, int result)
{
    const wc_openssl *o = tls->o;
    if (o->SSL_get_error(tls->ssl, result) == WC_SSL_ERROR_WANT_READ)
        return true;
    if (tls->cut) {
        cut_off(tls);
    } else if (!tls->error) {
        tls->error = EBADMSG;
        snprintf(tls->reason, sizeof tls->reason, "TLS: %s", first_reason(o));
    }
    o->ERR_clear_error();
    return false;
}

/* The handshake is through: its secrets give the keys. */
static bool take_over(wc_tls *tls)
{
    const wc_openssl *o = tls->o;
    uint16_t suite = o->SSL_CIPHER_get_protocol_id(o->SSL_get_current_cipher(tls->ssl));
    bool done = wc_keys_begin(&tls->sends, o, suite, tls->secrets[tls->accepts], true) &&
                wc_keys_begin(&tls->receives, o, suite, tls->secrets[!tls->accepts], false);
    o->OPENSSL_cleanse(tls->secrets, sizeof tls->secrets);
    o->ERR_clear_error();
    tls->barren = 0;
    if (!done) {
        tls->error = ENOMEM;
        snprintf(tls->reason, sizeof tls->reason, "TLS: no keys for suite %04x", suite);
    }
    return done;
}

/* For calls that find it as it is. */
static int failed(const wc_tls *tls)
{
    errno = tls->error;
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
    int result = tls->sends.cipher ? 1 : tls->o->SSL_do_handshake(tls->ssl);
    tls->drained = false;
    bool waiting = result != 1 && waits(tls, result);
    if (result != 1 && !waiting) {
        int error = tls->error;
        tls->error = 0;
        flush(tls, 0); /* the other end is told why */
        tls->error = error;
        return failed(tls);
    }
    if (!waiting && !tls->sends.cipher && !take_over(tls))
        return failed(tls);
    int flushed = flush(tls, 0);
    return flushed < 0 ? -1 : flushed == 0 ? WC_TLS_WRITES : waiting ? WC_TLS_READS : 0;
}

int wc_tls_key(const wc_tls *tls, uint8_t *out)
{
    const wc_openssl *o = tls->o;
    size_t size = WC_KEY_BYTES;
    X509 *found = o->SSL_get1_peer_certificate(tls->ssl);
    EVP_PKEY *key = found ? o->X509_get0_pubkey(found) : NULL;
    bool there = key && o->EVP_PKEY_get_id(key) == WC_EVP_PKEY_ED25519 &&
                 o->EVP_PKEY_get_raw_public_key(key, out, &size) == 1 && size == WC_KEY_BYTES;
    o->X509_free(found);
    o->ERR_clear_error();
    return there ? 0 : -1;
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

int wc_tls_flush(wc_tls *tls)
{
    return flush(tls, 0);
}

/* ---- records ------------------------------------------------------------------------------------------ */

/* ---- out */

/* It is over. */
static void give_up(wc_tls *tls, int error, const char *why)
{
    tls->error = error;
    snprintf(tls->reason, sizeof tls->reason, "TLS: %s", why);
    tls->o->ERR_clear_error();
}

/* One more record of the pieces at the end of `out`, which has room. */
static bool seal(wc_tls *tls, uint8_t type, const struct iovec *pieces, size_t content)
{
    if (!wc_record_seal(&tls->sends, type, pieces, content, tls->out + tls->unsent)) {
        give_up(tls, EIO, "the cipher has failed");
        return false;
    }
    tls->unsent += WC_RECORD_HEADER + content + WC_RECORD_END;
    return true;
}

/* An alert. Where there is no room for it the other end has not read what came before. */
static void notify(wc_tls *tls, uint8_t level, uint8_t what)
{
    uint8_t words[] = {level, what};
    if (sizeof tls->out - tls->unsent >= WC_RECORD_HEADER + sizeof words + WC_RECORD_END &&
        seal(tls, WC_TYPE_ALERT, &(struct iovec){words, sizeof words}, sizeof words))
        flush(tls, 0);
}

/* Keys wear out, and the other end may want new ones. */
static bool renew_key(wc_tls *tls)
{
    if (tls->sends.records < tls->records && !tls->renews)
        return true;
    uint8_t words[NOTICE_BYTES] = {NEW_KEYS, 0, 0, 1, 0};
    tls->renews = false;
    if (!seal(tls, WC_TYPE_HANDSHAKE, &(struct iovec){words, sizeof words}, sizeof words))
        return false;
    if (!wc_keys_renew(&tls->sends)) {
        give_up(tls, EIO, "no new keys");
        return false;
    }
    return true;
}

/* What the next record holds of the pieces: as much as there is, so headers go with the payload after them. */
static size_t content_of(const struct iovec *pieces, const struct iovec *end)
{
    size_t content = 0;
    for (; pieces < end && content < WC_RECORD; pieces++)
        content += pieces->iov_len;
    return content < WC_RECORD ? content : WC_RECORD;
}

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

ssize_t wc_tls_send(wc_tls *tls, struct iovec *pieces, int count)
{
    struct iovec *end = pieces + count;
    size_t taken = 0, content;
    if (!tls->sends.cipher) {
        errno = tls->error ? tls->error : ENOTCONN;
        return -1;
    }
    int flushed = flush(tls, 0);
    if (flushed <= 0) {
        errno = flushed < 0 ? tls->error : EAGAIN;
        return -1;
    }
    while (flushed == 1 && (content = content_of(pieces, end))) {
        for (; content && tls->unsent + WC_RECORD_BYTES <= tls->batch; content = content_of(pieces, end)) {
            if (!renew_key(tls) || !seal(tls, WC_TYPE_DATA, pieces, content))
                return failed(tls);
            pieces = skip(pieces, end, content);
            taken += content;
        }
        flushed = flush(tls, content ? MSG_MORE : 0);
        if (flushed < 0)
            return failed(tls);
        tls->batch = flushed == 0 ? WC_RECORD_BYTES : 2 * tls->batch < BATCH ? 2 * tls->batch : BATCH;
    }
    return (ssize_t)taken;
}

/* ---- in */

/* It is over, and the other end is told why. */
static void refuse(wc_tls *tls, int error, uint8_t alert, const char *why)
{
    notify(tls, 2, alert);
    give_up(tls, error, why);
}

/* What was sealed after the next record's header; 0: it is not all here yet, or there will be none. */
static size_t next_record(wc_tls *tls)
{
    for (;;) {
        const uint8_t *at = tls->in + tls->opened;
        size_t there = tls->came - tls->opened, sealed = 0;
        if (there >= WC_RECORD_HEADER) {
            sealed = (size_t)(at[3] << 8 | at[4]);
            if (at[0] != WC_TYPE_DATA || at[1] != 3 || at[2] != 3) {
                refuse(tls, EBADMSG, UNEXPECTED, "not a record of TLS 1.3 that holds data");
                return 0;
            }
            if (sealed < WC_RECORD_END || sealed > WC_RECORD + WC_RECORD_END) {
                refuse(tls, EBADMSG, TOO_LONG, "a record of an impossible length");
                return 0;
            }
            if (there >= WC_RECORD_HEADER + sealed)
                return sealed;
        }
        if (tls->resting || tls->drained || tls->error)
            return 0;
        from_socket(tls);
        if (tls->cut)
            cut_off(tls);
    }
}

/* What is no data. What is longer than any notice may not be in `words`, and is refused by its size. */
static void take_notice(wc_tls *tls, uint8_t type, const uint8_t *words, size_t size)
{
    const wc_openssl *o = tls->o;
    if (type == WC_TYPE_ALERT && size == 2 && words[1] == CLOSE_NOTIFY) {
        tls->ended = true;
    } else if (type == WC_TYPE_ALERT && size == 2) {
        tls->error = EBADMSG;
        snprintf(tls->reason, sizeof tls->reason, "TLS: the other end says: %s", o->SSL_alert_desc_string_long(words[1]));
    } else if (type == WC_TYPE_HANDSHAKE && size == 5 && words[0] == NEW_KEYS && words[3] == 1 && words[4] <= 1 &&
               !words[1] && !words[2]) {
        tls->renews |= words[4];
        if (!wc_keys_renew(&tls->receives))
            refuse(tls, EIO, INTERNAL, "no new keys");
    } else {
        refuse(tls, EBADMSG, UNEXPECTED, "a record of a kind that has no place here");
    }
}

/* Opens a record: how many bytes of it are in the pieces. What is short may be no data, and goes by `plain`. */
static size_t open_record(wc_tls *tls, size_t sealed, const struct iovec *pieces, const struct iovec *end)
{
    size_t content = sealed - WC_RECORD_END, placed = 0;
    struct iovec to[3];
    int count = 0;
    for (; content > NOTICE_BYTES && pieces < end && placed < content && count < 2; pieces++)
        if (pieces->iov_len) {
            to[count++] = *pieces;
            placed += pieces->iov_len;
        }
    placed = placed < content ? placed : content;
    to[count] = (struct iovec){tls->plain, sizeof tls->plain};
    uint8_t type = 0;
    bool good = wc_record_open(&tls->receives, tls->in + tls->opened, content, to, &type);
    tls->opened += WC_RECORD_HEADER + sealed;
    if (!good)
        refuse(tls, EBADMSG, BAD_RECORD, "bad record mac: the record is not what the other end has sealed");
    else if (!fruitful(tls, WC_RECORD_HEADER + sealed + (type == WC_TYPE_HANDSHAKE || !content ? NO_DATA : 0),
                       type == WC_TYPE_DATA ? content : 0))
        return 0;
    else if (type == WC_TYPE_DATA)
        tls->held = content - placed;
    else
        take_notice(tls, type, tls->plain, content);
    return good && type == WC_TYPE_DATA ? placed : 0;
}

static size_t take_held(wc_tls *tls, const struct iovec *piece)
{
    size_t left = tls->held - tls->taken, n = left < piece->iov_len ? left : piece->iov_len;
    memcpy(piece->iov_base, tls->plain + tls->taken, n);
    tls->taken += n;
    if (tls->taken == tls->held)
        tls->held = tls->taken = 0;
    return n;
}

ssize_t wc_tls_receive(wc_tls *tls, struct iovec *pieces, int count, bool *more)
{
    struct iovec *end = pieces + count;
    size_t have = 0, n, sealed;
    bool waiting = false;
    if (!tls->receives.cipher) {
        errno = tls->error ? tls->error : ENOTCONN;
        return -1;
    }
    while ((pieces = skip(pieces, end, 0)) < end && !waiting && !tls->ended && (tls->held || !tls->error)) {
        if (tls->held) {
            n = take_held(tls, pieces);
        } else {
            sealed = next_record(tls);
            n = sealed ? open_record(tls, sealed, pieces, end) : 0;
            waiting = !sealed && !tls->error;
        }
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

/* ---- */

bool wc_tls_unsent(const wc_tls *tls)
{
    return tls->unsent && !tls->error;
}

bool wc_tls_holds(const wc_tls *tls)
{
    return tls->held || tls->came > tls->opened;
}

void wc_tls_rest(wc_tls *tls, bool rest)
{
    tls->resting = rest;
}

void wc_tls_end(wc_tls *tls)
{
    if (tls->error || !tls->sends.cipher)
        return;
    /* what was taken is to leave as if it were the kernel's already: here it would be lost */
    uint32_t any = UINT32_MAX;
    setsockopt(tls->fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &any, sizeof any);
    if (flush(tls, 0) == 1)
        notify(tls, 1, CLOSE_NOTIFY);
}

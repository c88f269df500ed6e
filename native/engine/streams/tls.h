/* TLS: see the beginning of tls.c. What Python calls of it is in engine.h. */
#ifndef WC_TLS_H
#define WC_TLS_H

#include "stream.h"

/* The engine has it from here on. Returns its socket. */
int wc_tls_take(wc_tls *tls);
/* The calls of a stream */
ssize_t wc_tls_receive(wc_tls *tls, struct iovec *pieces, int count, bool *more);
ssize_t wc_tls_send(wc_tls *tls, struct iovec *pieces, int count);
bool wc_tls_unsent(const wc_tls *tls);
bool wc_tls_holds(const wc_tls *tls);
void wc_tls_rest(wc_tls *tls, bool rest);
void wc_tls_end(wc_tls *tls); /* says that it ends here, as far as the socket takes it */

#endif

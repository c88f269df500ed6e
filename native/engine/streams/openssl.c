/* Loads OpenSSL 3: see openssl.h. */
#include "openssl.h"

#include <dlfcn.h>
#include <stdio.h>

static pthread_once_t once = PTHREAD_ONCE_INIT;
static wc_openssl loaded;
static char missing[200];

static void *library(const char *name)
{
    void *found = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!found && !missing[0])
        snprintf(missing, sizeof missing, "%s", dlerror());
    return found;
}

static void *symbol(void *from, const char *name)
{
    void *found = from ? dlsym(from, name) : NULL;
    if (!found && !missing[0])
        snprintf(missing, sizeof missing, "OpenSSL has no %s", name);
    return found;
}

static void load(void)
{
    void *ssl = library("libssl.so.3"), *crypto = library("libcrypto.so.3");
#define FIND(result, name, arguments) *(void **)&loaded.name = symbol(FROM, #name);
#define FROM ssl
    WC_LIBSSL(FIND)
#undef FROM
#define FROM crypto
    WC_LIBCRYPTO(FIND)
    if (missing[0])
        return;
    /* without its cleanup at exit: a worker may still be at it then */
    if (!loaded.OPENSSL_init_ssl(WC_OPENSSL_INIT_NO_ATEXIT, NULL) || !(loaded.sockets = wc_tls_sockets(&loaded)))
        snprintf(missing, sizeof missing, "OpenSSL does not start");
}

const wc_openssl *wc_openssl_load(void)
{
    pthread_once(&once, load);
    return missing[0] ? NULL : &loaded;
}

const char *wc_openssl_missing(void)
{
    return missing;
}

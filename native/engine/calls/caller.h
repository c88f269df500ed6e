/* Callers: see the beginning of caller.c. */
#ifndef WC_CALLER_H
#define WC_CALLER_H

#include "common.h"
#include "law.h"
#include "owner.h"

/* A call that the engine can start. */
typedef struct {
    uint64_t number; /* 0: none */
    wc_op op;
    uint64_t input, result; /* bytes */
} wc_prepared;

struct wc_caller {
    wc_owner owner; /* first: the one is the other's address */
    wc_engine *engine;
    uint64_t id;
    wc_call *ring;
    const uint8_t *arena;
    uint64_t arena_bytes;
    int wake;
    atomic_uint refs;      /* the daemon's, that of the first worker's epoll, those of works */
    pthread_mutex_t mutex; /* guards all below. Taken after that of notes, before engine->mutex */
    wc_law law;            /* open: the engine takes calls */
    uint64_t turn;         /* counts how often it was lent: works of an older turn are the daemon's */
    uint64_t number, op;   /* of the next call: the client's number; its id */
    uint32_t cursor;       /* slot of the ring that is looked at next */
    bool told;             /* a WC_EV_CALLS is on its way, for which no further room is reserved */
    uint64_t links[WC_VOTERS];
    wc_prepared prepared[WC_PREPARED];
    wc_call_record records[WC_RECORDS]; /* by seq % WC_RECORDS */
    uint64_t told_upto;    /* seq: up to here the daemon has heard of them */
    wc_command *forgetting; /* made beforehand, so that the end cannot fail */
};

#endif

/* Commands: what callers tell the workers, in one order for all of them. */
#ifndef WC_COMMANDS_H
#define WC_COMMANDS_H

#include "common.h"
#include "owner.h"
#include "streams/stream.h"

enum {
    WC_CMD_ATTACH, WC_CMD_LOST, WC_CMD_NOTES, WC_CMD_EPOCH, WC_CMD_PACE, WC_CMD_CLOSE,
    WC_CMD_POST, WC_CMD_CANCEL, WC_CMD_RELEASE, WC_CMD_FENCE, WC_CMD_FORGET,
};

/* Somebody waits until so many workers have come that far. */
typedef struct {
    pthread_mutex_t mutex; /* guards the count */
    pthread_cond_t through;
    uint32_t left;
} wc_fenced;

struct wc_command {
    wc_command *next;
    wc_worker *worker;
    int type;
    wc_stream stream; /* ATTACH */
    uint32_t lane;    /* ATTACH */
    bool checksums;   /* ATTACH */
    wc_lost lost;     /* LOST */
    wc_fenced *fence; /* FENCE */
    /* ATTACH: the connection's; EPOCH: the epoch; PACE: the rate; CANCEL: its number; POST: cancels that must be through
       before */
    uint64_t number;
    wc_link *link;
    wc_work *work;    /* holds a reference */
    wc_owner *owner;  /* FORGET: the same */
};

/* Commands on their way to one worker. */
typedef struct {
    pthread_mutex_t mutex; /* guards the list */
    wc_command *head, *tail;
    bool woken;            /* since the worker has looked */
    int wake;              /* an eventfd */
} wc_inbox;

/* One command for each worker, or for each that has parts of `work`. All or none are made: NULL with errno */
wc_command *wc_commands_new(wc_engine *engine, int type, const wc_work *work);
void wc_commands_free(wc_command *list); /* that were not sent */
/* Sends all of a list. engine->mutex is held, so that all workers see commands in one order */
void wc_commands_send(wc_command *list, uint64_t number, wc_link *link, wc_work *work);
void wc_command_send(wc_command *command);
wc_command *wc_inbox_take(wc_inbox *inbox); /* all that have come, in order */
void wc_inbox_wake(wc_inbox *inbox);

#endif

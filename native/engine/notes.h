/* Notes: see the beginning of notes.c. */
#ifndef WC_NOTES_H
#define WC_NOTES_H

#include "common.h"
#include "owner.h"
#include "streams/stream.h"

enum {
    WC_NOTES_UNSENT = 4096, /* of a link, beyond what its socket has taken: more than all votes that are said again at once */
    WC_MOST_LOSING = 4096, /* of a link's lanes, each of its connections, that its workers have not heard of */
    WC_NOTES_AT_ONCE = 16, /* of a link, before other links have their turn */
};

/* One end of a link's note lane. */
typedef struct {
    wc_engine *engine;
    uint64_t link;
    uint32_t lane;         /* its number: the one after the lanes that carry data */
    uint64_t given;        /* number of the newest connection that was handed over; guarded by engine->mutex */
    atomic_uint losing;    /* lanes of which a worker is about to hear that they are lost */
    pthread_mutex_t mutex; /* guards all below; taken before that of owners, engine->mutex and that of the events */
    wc_stream stream;
    uint64_t connection;   /* its number */
    bool more;             /* the stream holds bytes of which the socket does not tell */
    bool closed;           /* for good */
    uint32_t armed;        /* epoll interest; 0: epoll does not know it yet */
    wc_owner *owner;       /* to which the first worker tells the notes of its voter; NULL: wc_notes_take has them */
    uint32_t voter;
    wc_note_frame *unsent; /* a ring, which grows to WC_NOTES_UNSENT */
    uint32_t room, first, count;
    size_t sent;           /* bytes of the first one that have left */
    wc_note_frame in[WC_NOTES_AT_ONCE];
    size_t have;           /* bytes in there: of a frame that is not here whole */
    wc_lane_stats stats;
} wc_notes;

void wc_notes_init(wc_notes *notes, wc_engine *engine, uint64_t link, uint32_t lane);
void wc_notes_destroy(wc_notes *notes);
void wc_notes_attach(wc_notes *notes, uint64_t connection, wc_stream stream); /* room for a LANE_DOWN is reserved */
void wc_notes_close(wc_notes *notes);          /* for good, silently */
int wc_notes_put(wc_notes *notes, const void *bytes, uint32_t length);   /* 0, or why it was not taken */
void wc_notes_tell(wc_notes *notes, const void *bytes, uint32_t length); /* one that takes no more breaks */
void wc_notes_say_lost(wc_notes *notes, const wc_lost *lost); /* to the other end's lane; as wc_notes_tell */
void wc_notes_refuse(wc_notes *notes, uint32_t lane, uint64_t taken, uint64_t sent); /* the other end cannot have taken it */
/* What epoll tells of it: notes leave, and at most cap come to `out`. Returns how many */
int wc_notes_serve(wc_notes *notes, uint32_t events, wc_note *out, int cap);
/* From now on the voter's notes are the owner's, of the first worker; NULL: of wc_notes_take, in order */
void wc_notes_route(wc_notes *notes, wc_owner *owner, uint32_t voter);
void wc_notes_listen(wc_notes *notes, uint32_t events); /* what epoll has told the first worker */
void wc_notes_statistics(wc_notes *notes, wc_lane_stats *out);

#endif

/* A lane's window, as the kernel keeps it: what is looked at now and then, and how it stays open.

   bbr wants to see the path's delay without a queue: where it has found no smaller one for 10 seconds it sends 4
   packets in each of the next 200 ms and more (PROBE_RTT). The lanes of a link begin together, so all of them do it
   together, which leaves a link empty for a thirtieth of the time; and a ring waits for each of its members'. So a
   lane's bbr is begun anew before that, one lane after the other: it knows the least delay of the last 5 minutes then
   (tcp_min_rtt), keeps its window, and measures the bandwidth again within its pace, which bounds the queue. */
#include "shared.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

enum {
    RENEW_MS = 6000,  /* of an age from which on a lane's bbr is begun anew; it looks for the delay at 10000 */
    SPREAD_MS = 3000, /* within which all lanes of a link have had their turn */
};
static const char BBR[] = "bbr", OTHER[] = "reno"; /* which is always allowed */

static uint64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
    return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

void wc_window_begin(wc_lane *lane)
{
    char name[16] = "";
    socklen_t size = sizeof name - 1;
    lane->bbr = getsockopt(lane->stream.fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0 && strcmp(name, BBR) == 0;
    lane->renewed_at = now_ms();
}

static void renew(wc_lane *lane, uint64_t now)
{
    uint64_t turn = SPREAD_MS / lane->link->lanes_count;
    if (now < lane->renewed_at + RENEW_MS || now < lane->group->renewed_at + turn)
        return;
    lane->renewed_at = lane->group->renewed_at = now;
    if (setsockopt(lane->stream.fd, IPPROTO_TCP, TCP_CONGESTION, OTHER, sizeof OTHER - 1) == 0)
        lane->bbr = setsockopt(lane->stream.fd, IPPROTO_TCP, TCP_CONGESTION, BBR, sizeof BBR - 1) == 0;
}

/* What a slow lane has taken, no other lane can take over: it takes no more than it can send soon. */
static void limit_unsent(wc_lane *lane, const struct tcp_info *info)
{
    uint64_t wanted = (uint64_t)info->tcpi_snd_cwnd * info->tcpi_snd_mss / 2;
    wanted = wanted < WC_LEAST_UNSENT ? WC_LEAST_UNSENT : wanted > WC_MOST_UNSENT ? WC_MOST_UNSENT : wanted;
    uint32_t limit = (uint32_t)wanted;
    if (setsockopt(lane->stream.fd, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &limit, sizeof limit) == 0)
        lane->unsent = limit;
}

void wc_window_look(wc_lane *lane)
{
    uint64_t now = now_ms();
    if (now < lane->info_at + WC_TCP_INFO_MS)
        return;
    lane->info_at = now;
    uint8_t info[WC_TCP_INFO_BYTES];
    socklen_t size = sizeof info;
    if (getsockopt(lane->stream.fd, IPPROTO_TCP, TCP_INFO, info, &size) < 0)
        return;
    pthread_mutex_lock(&lane->info_mutex);
    memcpy(lane->info, info, size);
    lane->info_bytes = size;
    pthread_mutex_unlock(&lane->info_mutex);
    struct tcp_info known;
    memcpy(&known, info, sizeof known);
    if (lane->unsent && size >= sizeof known)
        limit_unsent(lane, &known);
    if (lane->bbr)
        renew(lane, now);
}

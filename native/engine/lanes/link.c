/* Links: made by callers, freed when the last worker has processed the close. */
#include "shared.h"

#include <stdlib.h>

wc_link *wc_link_new(wc_engine *engine, uint64_t id, uint32_t lanes, uint32_t lane_groups, uint64_t epoch)
{
    wc_link *link = calloc(1, sizeof *link + lanes * sizeof link->lanes[0]);
    if (!link)
        return NULL;
    link->groups = calloc(lane_groups, sizeof *link->groups);
    link->closing = wc_commands_new(engine, WC_CMD_CLOSE, NULL);
    if (!link->groups || !link->closing) {
        wc_commands_free(link->closing);
        free(link->groups);
        free(link);
        return NULL;
    }
    link->id = id;
    link->epoch = epoch;
    link->lanes_count = lanes;
    link->groups_count = lane_groups;
    for (uint32_t i = 0; i < lane_groups; i++)
        link->groups[i] = (wc_lane_group){
            .link = link, .index = i, .lanes_count = (lanes - i + lane_groups - 1) / lane_groups, .epoch = epoch};
    atomic_init(&link->refs, engine->config.workers);
    wc_notes_init(&link->notes, engine, id, lanes);
    for (uint32_t i = 0; i < lanes; i++)
        wc_lane_init(&link->lanes[i], link, &engine->workers[i % lane_groups % engine->config.workers], i);
    return link;
}

void wc_link_free(wc_link *link)
{
    for (uint32_t i = 0; i < link->lanes_count; i++)
        wc_lane_destroy(&link->lanes[i]);
    wc_notes_destroy(&link->notes);
    wc_commands_free(link->closing);
    free(link->groups);
    free(link);
}

void wc_link_unref(wc_link *link)
{
    if (atomic_fetch_sub(&link->refs, 1) == 1)
        wc_link_free(link);
}

wc_link *wc_link_find(const wc_engine *engine, uint64_t id)
{
    wc_link *link = engine->links[wc_bucket(id)];
    while (link && link->id != id)
        link = link->next;
    return link;
}

wc_link *wc_link_hold(wc_engine *engine, uint64_t id)
{
    pthread_mutex_lock(&engine->mutex);
    wc_link *link = wc_link_find(engine, id);
    if (link)
        atomic_fetch_add(&link->refs, 1);
    pthread_mutex_unlock(&engine->mutex);
    return link;
}

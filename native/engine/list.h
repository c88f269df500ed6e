/* Lists whose nodes are the first members of what they hold: a node's address is that of the thing. */
#ifndef WC_LIST_H
#define WC_LIST_H

#include <stdbool.h>
#include <stddef.h>

typedef struct wc_node {
    struct wc_node *prev, *next;
    bool listed; /* in one list, or in none */
} wc_node;

typedef struct {
    wc_node *head, *tail;
} wc_list;

static inline void wc_list_append(wc_list *list, wc_node *node)
{
    *node = (wc_node){.prev = list->tail, .listed = true};
    *(list->tail ? &list->tail->next : &list->head) = node;
    list->tail = node;
}

static inline void wc_list_remove(wc_list *list, wc_node *node)
{
    *(node->prev ? &node->prev->next : &list->head) = node->next;
    *(node->next ? &node->next->prev : &list->tail) = node->prev;
    *node = (wc_node){0};
}

/* The first one, which leaves the list; NULL: it is empty. */
static inline void *wc_list_take(wc_list *list)
{
    wc_node *first = list->head;
    if (first)
        wc_list_remove(list, first);
    return first;
}

#endif

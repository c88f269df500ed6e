/* Commands: made, queued for a worker, taken by it. */
#include "shared.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/eventfd.h>

wc_command *wc_commands_new(wc_engine *engine, int type, const wc_work *work)
{
    wc_command *list = NULL;
    for (uint32_t i = 0; i < engine->config.workers; i++) {
        if (work && !work->tasks[i].remaining)
            continue;
        wc_command *command = calloc(1, sizeof *command);
        if (!command) {
            wc_commands_free(list);
            errno = ENOMEM;
            return NULL;
        }
        *command = (wc_command){.next = list, .worker = &engine->workers[i], .type = type, .stream.fd = -1};
        list = command;
    }
    return list;
}

void wc_commands_free(wc_command *list)
{
    for (wc_command *next; list; list = next) {
        next = list->next;
        free(list);
    }
}

void wc_commands_send(wc_command *list, uint64_t number, wc_link *link, wc_work *work)
{
    for (wc_command *command = list, *next; command; command = next) {
        next = command->next;
        command->number = number;
        command->link = link;
        command->work = work;
        wc_command_send(command);
    }
}

void wc_command_send(wc_command *command)
{
    wc_inbox *inbox = &command->worker->inbox;
    command->next = NULL;
    pthread_mutex_lock(&inbox->mutex);
    *(inbox->head ? &inbox->tail->next : &inbox->head) = command;
    inbox->tail = command;
    const bool wakes = !inbox->woken && command->type != WC_CMD_RELEASE; /* that waits for the next thing to do */
    inbox->woken |= wakes;
    pthread_mutex_unlock(&inbox->mutex);
    if (wakes)
        wc_inbox_wake(inbox);
}

wc_command *wc_inbox_take(wc_inbox *inbox)
{
    eventfd_t ignored;
    if (eventfd_read(inbox->wake, &ignored) < 0) {
        /* EAGAIN: somebody's wake came together with one that was read before. */
    }
    pthread_mutex_lock(&inbox->mutex);
    wc_command *list = inbox->head;
    inbox->head = inbox->tail = NULL;
    inbox->woken = false;
    pthread_mutex_unlock(&inbox->mutex);
    return list;
}

void wc_inbox_wake(wc_inbox *inbox)
{
    if (eventfd_write(inbox->wake, 1) < 0) {
        /* Only a counter at its maximum refuses, and then the worker is being woken anyway. */
    }
}

/*-------------------------------------------------------------------------
 *
 * list.c
 *		Lists of messages, in the order in which they were put there.
 *
 *-------------------------------------------------------------------------
 */
#include <string.h>

#include "courier.h"

void
idem_list_add(IdemList *list, IdemMessage *message)
{
	message->prev = list->tail;
	message->next = NULL;
	if (list->tail != NULL)
		list->tail->next = message;
	else
		list->head = message;
	list->tail = message;
}

void
idem_list_remove(IdemList *list, IdemMessage *message)
{
	if (message->prev != NULL)
		message->prev->next = message->next;
	else
		list->head = message->next;
	if (message->next != NULL)
		message->next->prev = message->prev;
	else
		list->tail = message->prev;
	message->prev = message->next = NULL;
}

void
idem_list_return(IdemCourier *courier, IdemList *list, const char *key, const char *why)
{
	IdemMessage *message = list->head;

	while (message != NULL)
	{
		IdemMessage *next = message->next;

		if (key == NULL || (message->key != NULL && strcmp(message->key, key) == 0))
		{
			idem_list_remove(list, message);
			idem_courier_outcome(courier, message, IDEM_RETURNED, 0, 0, "%s", why);
		}
		message = next;
	}
}

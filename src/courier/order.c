/*-------------------------------------------------------------------------
 *
 * order.c
 *		Order of messages with the same key, when some of them fail.
 *
 * Two tables by key.
 *
 * IdemQueue lets out one message of each key at a time; when it fails, those
 * that wait behind it are to be returned.
 *
 * IdemFailed is about messages that were on their way to us, or in our socket's
 * buffer, when one before them failed: the relay did not know, and to send
 * them now would be to overtake.  From the failure of a message on, others
 * with its key are returned, until one comes that the relay cannot have sent
 * in ignorance: one that we reported as failed or returned before.  The relay
 * sends again in order, so that is the failed message itself, or if an
 * operator has settled that one, its successor, at the cost of one round more.
 *
 *-------------------------------------------------------------------------
 */
#include <stdlib.h>
#include <string.h>

#include "order.h"

#define BUCKETS		4096
#define MAX_FAILED	100000		/* messages remembered */

/* Messages linked by next, in order. */
typedef struct Chain
{
	IdemMessage *first;
	IdemMessage *last;
} Chain;

/* A key that is out. */
typedef struct Lane
{
	struct Lane *next;
	Chain		waiting;
	char		key[];
} Lane;

struct IdemQueue
{
	Chain		ready;
	Lane	   *lanes[BUCKETS];
};

static uint32_t
bucket(const char *key)
{
	uint32_t	hash = UINT32_C(2166136261);

	for (; *key != '\0'; key++)
		hash = (hash ^ (unsigned char) *key) * UINT32_C(16777619);
	return (hash ^ hash >> 16) % BUCKETS;
}

static void
append(Chain *chain, IdemMessage *message)
{
	message->next = NULL;
	if (chain->first == NULL)
		chain->first = message;
	else
		chain->last->next = message;
	chain->last = message;
}

static IdemMessage *
shift(Chain *chain)
{
	IdemMessage *message = chain->first;

	if (message != NULL)
	{
		chain->first = message->next;
		message->next = NULL;
	}
	return message;
}

static Lane **
find_lane(IdemQueue *queue, const char *key)
{
	Lane	  **lane = &queue->lanes[bucket(key)];

	while (*lane != NULL && strcmp((*lane)->key, key) != 0)
		lane = &(*lane)->next;
	return lane;
}

IdemQueue *
idem_queue_create(void)
{
	return idem_alloc(sizeof(IdemQueue));
}

void
idem_queue_add(IdemQueue *queue, IdemMessage *message)
{
	if (message->key != NULL)
	{
		Lane	  **lane = find_lane(queue, message->key);

		if (*lane != NULL)
		{
			append(&(*lane)->waiting, message);
			return;
		}
		*lane = idem_alloc(sizeof(Lane) + strlen(message->key) + 1);
		strcpy((*lane)->key, message->key);
	}
	append(&queue->ready, message);
}

/* The next message that may go out, or NULL. */
IdemMessage *
idem_queue_next(IdemQueue *queue)
{
	return shift(&queue->ready);
}

/*
 * idem_queue_done
 *		A message that was out has fared somehow.
 *
 * Call this before the message is reported, hence freed.  If it failed, the
 * result are those behind it, linked by next: they are to be returned.
 */
IdemMessage *
idem_queue_done(IdemQueue *queue, IdemMessage *message, bool failed)
{
	Lane	  **slot;
	Lane	   *lane;
	IdemMessage *behind;

	if (message->key == NULL)
		return NULL;
	slot = find_lane(queue, message->key);
	lane = *slot;
	if (lane == NULL)
		return NULL;
	if (!failed && lane->waiting.first != NULL)
	{
		append(&queue->ready, shift(&lane->waiting));
		return NULL;
	}
	behind = lane->waiting.first;
	*slot = lane->next;
	free(lane);
	return behind;
}

/* All that are not out, linked by next; of one key, in order. */
IdemMessage *
idem_queue_take_all(IdemQueue *queue)
{
	Chain		all = {0};
	IdemMessage *message;

	while ((message = shift(&queue->ready)) != NULL)
	{
		IdemMessage *behind = idem_queue_done(queue, message, true);

		append(&all, message);
		while (behind != NULL)
		{
			IdemMessage *next = behind->next;

			append(&all, behind);
			behind = next;
		}
	}

	/* the rest waits for messages that are out, whose lanes stay */
	for (int i = 0; i < BUCKETS; i++)
		for (Lane *lane = queue->lanes[i]; lane != NULL; lane = lane->next)
			while ((message = shift(&lane->waiting)) != NULL)
				append(&all, message);
	return all.first;
}

/* A key that failed, and the messages that we reported since. */
typedef struct FailedKey
{
	struct FailedKey *next;		/* in the bucket */
	struct FailedKey *older;
	struct FailedKey *newer;
	char	  **ids;
	int			n;
	char		key[];
} FailedKey;

struct IdemFailed
{
	FailedKey  *oldest;
	FailedKey  *newest;
	int			n;				/* messages */
	FailedKey  *keys[BUCKETS];
};

IdemFailed *
idem_failed_create(void)
{
	return idem_alloc(sizeof(IdemFailed));
}

static FailedKey **
find_failed(IdemFailed *failed, const char *key)
{
	FailedKey **entry = &failed->keys[bucket(key)];

	while (*entry != NULL && strcmp((*entry)->key, key) != 0)
		entry = &(*entry)->next;
	return entry;
}

static void
forget(IdemFailed *failed, FailedKey **slot)
{
	FailedKey  *entry = *slot;

	*slot = entry->next;
	if (entry->older != NULL)
		entry->older->newer = entry->newer;
	else
		failed->oldest = entry->newer;
	if (entry->newer != NULL)
		entry->newer->older = entry->older;
	else
		failed->newest = entry->older;
	failed->n -= entry->n;
	for (int i = 0; i < entry->n; i++)
		free(entry->ids[i]);
	free(entry->ids);
	free(entry);
}

/* One message may go to several destinations; the id alone is not enough. */
static bool
same(const char *id, const IdemMessage *message)
{
	size_t		len = strlen(message->msg_id);

	return strncmp(id, message->msg_id, len) == 0 && id[len] == '\n' &&
		strcmp(id + len + 1, message->destination) == 0;
}

/* This message comes back to the relay, which will send it again. */
void
idem_failed_add(IdemFailed *failed, const IdemMessage *message)
{
	FailedKey **slot;
	FailedKey  *entry;
	size_t		len;
	char	   *id;

	if (message->key == NULL)
		return;
	slot = find_failed(failed, message->key);
	entry = *slot;
	if (entry == NULL)
	{
		entry = *slot = idem_alloc(sizeof(FailedKey) + strlen(message->key) + 1);
		strcpy(entry->key, message->key);
		entry->older = failed->newest;
		if (failed->newest != NULL)
			failed->newest->newer = entry;
		else
			failed->oldest = entry;
		failed->newest = entry;
	}
	for (int i = 0; i < entry->n; i++)
		if (same(entry->ids[i], message))
			return;

	/* powers of two */
	if ((entry->n & (entry->n - 1)) == 0)
		entry->ids = idem_realloc(entry->ids,
								  sizeof(char *) * (entry->n == 0 ? 1 : 2 * (size_t) entry->n));
	len = strlen(message->msg_id);
	id = idem_alloc(len + 1 + strlen(message->destination) + 1);
	memcpy(id, message->msg_id, len);
	id[len] = '\n';
	strcpy(id + len + 1, message->destination);
	entry->ids[entry->n++] = id;
	failed->n++;

	/* Keys whose messages never came again; what was in the socket is long in. */
	while (failed->n > MAX_FAILED && failed->oldest != failed->newest)
		forget(failed, find_failed(failed, failed->oldest->key));
}

/* May this new message be sent?  If not, it is to be returned. */
bool
idem_failed_admit(IdemFailed *failed, const IdemMessage *message)
{
	FailedKey **slot;

	if (message->key == NULL)
		return true;
	slot = find_failed(failed, message->key);
	if (*slot == NULL)
		return true;
	for (int i = 0; i < (*slot)->n; i++)
		if (same((*slot)->ids[i], message))
		{
			forget(failed, slot);
			return true;
		}
	return false;
}

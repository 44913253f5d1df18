/*-------------------------------------------------------------------------
 *
 * kafka_record.c
 *		What the courier for Kafka makes of a message: topic and headers.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kafka_parts.h"

#define TOPICS		256			/* buckets */
#define MAX_TOPIC	249			/* bytes of a name */

typedef struct Topic
{
	struct Topic *next;
	rd_kafka_topic_t *handle;
	char		name[];
} Topic;

static Topic *topics[TOPICS];

static bool
good_topic(const char *name)
{
	size_t		len = strlen(name);

	return len > 0 && len <= MAX_TOPIC && strcmp(name, ".") != 0 && strcmp(name, "..") != 0 &&
		strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == len;
}

/* The producer's handle of a topic, or NULL if no topic can have this name. */
rd_kafka_topic_t *
kafka_topic(rd_kafka_t *producer, const char *name)
{
	uint32_t	hash = UINT32_C(2166136261);
	Topic	  **slot;
	Topic	   *topic;

	for (const char *p = name; *p != '\0'; p++)
		hash = (hash ^ (unsigned char) *p) * UINT32_C(16777619);
	slot = &topics[(hash ^ hash >> 16) % TOPICS];
	for (topic = *slot; topic != NULL; topic = topic->next)
		if (strcmp(topic->name, name) == 0)
			return topic->handle;
	if (!good_topic(name))
		return NULL;
	topic = idem_alloc(sizeof(Topic) + strlen(name) + 1);
	strcpy(topic->name, name);
	topic->handle = rd_kafka_topic_new(producer, name, NULL);
	if (topic->handle == NULL)
		abort();
	topic->next = *slot;
	*slot = topic;
	return topic->handle;
}

/* Before a producer ends. */
void
kafka_forget_topics(void)
{
	for (int i = 0; i < TOPICS; i++)
		while (topics[i] != NULL)
		{
			Topic	   *topic = topics[i];

			topics[i] = topic->next;
			rd_kafka_topic_destroy(topic->handle);
			free(topic);
		}
}

static bool
add_header(void *arg, const char *name, const char *value)
{
	static const char *const own[] = {"message-id", "type", "content-type", "enqueued-at"};

	for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
		if (strcmp(name, own[i]) == 0)
			return true;
	return rd_kafka_header_add(arg, name, -1, value, (ssize_t) strlen(value)) ==
		RD_KAFKA_RESP_ERR_NO_ERROR;
}

/* When it was enqueued, in the manner of RFC 3339; there is one such text. */
static const char *
enqueued_at(const IdemMessage *m)
{
	static time_t last = -1;
	static char stamp[64];
	static size_t len;
	time_t		second = (time_t) (m->enqueued_at / 1000000);
	int			rest = (int) (m->enqueued_at % 1000000);
	struct tm	tm;

	if (second != last && gmtime_r(&second, &tm) != NULL)
	{
		len = strftime(stamp, sizeof(stamp) - 9, "%Y-%m-%dT%H:%M:%S", &tm);
		strcpy(stamp + len, ".000000Z");
		last = second;
	}
	for (int i = 6; i > 0; i--, rest /= 10)
		stamp[len + i] = (char) ('0' + rest % 10);
	return stamp;
}

/* Ours and those of the message; NULL if those cannot be read. */
rd_kafka_headers_t *
kafka_headers(const IdemMessage *m)
{
	rd_kafka_headers_t *headers = rd_kafka_headers_new(8);

	rd_kafka_header_add(headers, "message-id", -1, m->msg_id, -1);
	rd_kafka_header_add(headers, "type", -1, m->topic, -1);
	rd_kafka_header_add(headers, "content-type", -1, m->content_type, -1);
	rd_kafka_header_add(headers, "enqueued-at", -1, enqueued_at(m), -1);
	if (idem_headers_each(m->headers, add_header, headers))
		return headers;
	rd_kafka_headers_destroy(headers);
	return NULL;
}

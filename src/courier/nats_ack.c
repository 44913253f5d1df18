/*-------------------------------------------------------------------------
 *
 * nats_ack.c
 *		What JetStream answers, and what it means.
 *
 * The subject of an answer ends in the number of the message it is about.
 * Answers of different streams come in any order.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nats_parts.h"

/* Error codes of the JetStream API, as in the server's errors.json. */
enum
{
	JS_MESSAGE_TOO_LARGE = 10054,
	JS_HEADERS_TOO_LARGE = 10097,
	JS_SEALED = 10109
};

/*
 * Report a message that is in no list any more.  If it failed, whatever waits
 * behind it with the same key must not overtake it.
 */
void
nats_settle(IdemCourier *courier, IdemMessage *m, IdemOutcome outcome,
			uint32_t code, const char *why)
{
	if (outcome == IDEM_DELIVERED)
	{
		idem_courier_delivered(courier, m);
		return;
	}
	if (m->key && outcome != IDEM_PERMANENT)
		idem_list_return(courier, &nats.waiting, m->key,
						 "a message with the same key failed");
	idem_courier_outcome(courier, m, outcome, 0, code, "%s", why);
}

/* What was sent before this was reported fails for the same reason. */
static void
report_trouble(IdemCourier *courier, uint64_t tag, IdemState state, const char *why)
{
	if (!nats.trouble || tag > nats.trouble_tag)
	{
		nats.trouble = true;
		nats.trouble_tag = nats.next_tag - 1;
		idem_courier_state(courier, state, 0, "%s", why);
	}
	idem_list_return(courier, &nats.waiting, NULL, why);
}

static void
blocked(IdemCourier *courier, IdemMessage *m, uint32_t code, const char *why)
{
	report_trouble(courier, m->tag, IDEM_STATE_BLOCKED, why);
	nats_settle(courier, m, IDEM_BLOCKED, code, why);
}

static uint32_t
number_after(const char *text, const char *name)
{
	const char *found = strstr(text, name);

	return found ? (uint32_t) strtoul(found + strlen(name), NULL, 10) : 0;
}

/* The stream refuses the message, with {"error":{"code":...}}. */
static void
refused(IdemCourier *courier, IdemMessage *m, const char *error)
{
	uint32_t	code = number_after(error, "\"code\":");
	uint32_t	js = number_after(error, "\"err_code\":");
	const char *text = strstr(error, "\"description\":\"");
	char		why[512];

	text = text ? text + 15 : "?";
	snprintf(why, sizeof(why), "subject \"%.200s\": %.*s", m->destination,
			 (int) strcspn(text, "\""), text);
	if (js == JS_MESSAGE_TOO_LARGE || js == JS_HEADERS_TOO_LARGE)
		nats_settle(courier, m, IDEM_PERMANENT, js, why);
	else if (js == JS_SEALED || code == 401 || code == 403 || code == 404)
		blocked(courier, m, js, why);
	else if (code == 503)
	{
		/* nobody leads the stream, or there is no room for any message */
		report_trouble(courier, m->tag, IDEM_STATE_DOWN, why);
		nats_settle(courier, m, IDEM_RETURNED, js, why);
	}
	else
		nats_settle(courier, m, IDEM_TRANSIENT, js, why);
}

void
nats_answer(IdemCourier *courier, natsMsg *answer)
{
	const char *subject = natsMsg_GetSubject(answer);
	const char *data = natsMsg_GetData(answer);
	int			len = natsMsg_GetDataLength(answer);
	uint64_t	tag;
	IdemMessage *m;
	char		why[512];

	if (strncmp(subject, nats.reply, nats.reply_len) != 0)
		return;					/* of a connection that was lost */
	tag = strtoull(subject + nats.reply_len, NULL, 10);
	m = SLOT(tag)->message;
	if (!m || m->tag != tag)
		return;					/* has been given up */
	SLOT(tag)->message = NULL;
	idem_list_remove(&nats.sent, m);

	if (natsMsg_IsNoResponders(answer))
	{
		snprintf(why, sizeof(why), "no stream takes subject \"%.300s\"", m->destination);
		blocked(courier, m, 503, why);
		return;
	}
	/* what JetStream says is an object; the library has put a NUL behind it */
	if (len > 11 && memcmp(data, "{\"stream\":\"", 11) == 0)
	{
		if (nats.trouble && tag > nats.trouble_tag)
		{
			nats.trouble = false;
			idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
		}
		nats_settle(courier, m, IDEM_DELIVERED, 0, NULL);
	}
	else if (len > 0 && strstr(data, "\"error\":{"))
		refused(courier, m, data);
	else
	{
		snprintf(why, sizeof(why), "what answers on subject \"%.300s\" is no stream",
				 m->destination);
		blocked(courier, m, 0, why);
	}
}

/*
 * We may not publish to a subject: those messages were not stored.  Or we may
 * not hear the answers, and then nothing can be known.
 */
void
nats_forbidden(IdemCourier *courier, const char *error)
{
	const char *begin = strchr(error, '"');
	const char *end = begin ? strrchr(begin + 1, '"') : NULL;
	size_t		len = end ? (size_t) (end - begin - 1) : 0;

	if (len > 0 && strncasecmp(begin + 1, nats.reply, nats.reply_len) == 0)
	{
		nats_lose(courier, IDEM_STATE_BLOCKED, "%s", error);
		return;
	}
	for (IdemMessage *m = nats.sent.head, *next; m; m = next)
	{
		next = m->next;
		if (len == 0 || strncasecmp(m->destination, begin + 1, len) != 0 ||
			m->destination[len] != '\0')
			continue;
		SLOT(m->tag)->message = NULL;
		idem_list_remove(&nats.sent, m);
		blocked(courier, m, 0, error);
	}
}

/* Give up on messages to which nobody has answered in time. */
void
nats_overdue(IdemCourier *courier)
{
	int64_t		now = idem_courier_now();
	IdemMessage *m;

	while ((m = nats.sent.head) && now >= SLOT(m->tag)->at + nats.timeout)
	{
		if (nats.last_answer < SLOT(m->tag)->at)
		{
			nats_lose(courier, IDEM_STATE_DOWN, "no answer within %d ms", nats.timeout);
			return;
		}
		SLOT(m->tag)->message = NULL;
		idem_list_remove(&nats.sent, m);
		nats_settle(courier, m, IDEM_UNKNOWN, 0, "no answer in time");
	}
}

/*-------------------------------------------------------------------------
 *
 * amqp.c
 *		The courier for RabbitMQ (AMQP 0-9-1).
 *
 * One connection, one channel in confirm mode.  Messages are published
 * mandatory and persistent, in ticket order, as many at once as the relay
 * hands us; delivered means that the broker has confirmed the message and has
 * not returned it before.  amqp.md says what becomes of everything else.
 *
 * librabbitmq encodes and decodes.  Its calls that talk to the network wait
 * without limit while the broker reads nothing, so the socket, TLS, the
 * handshake and heartbeats are ours, and nothing here ever waits (but for the
 * resolution of a name).
 *
 *-------------------------------------------------------------------------
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "amqp_parts.h"

#define DRAIN_MS		1500

Amqp		amqp = {.fd = -1};

static void
queue_append(Queue *q, IdemMessage *m)
{
	m->prev = q->tail;
	m->next = NULL;
	if (q->tail)
		q->tail->next = m;
	else
		q->head = m;
	q->tail = m;
}

void
amqp_queue_remove(Queue *q, IdemMessage *m)
{
	if (m->prev)
		m->prev->next = m->next;
	else
		q->head = m->next;
	if (m->next)
		m->next->prev = m->prev;
	else
		q->tail = m->prev;
	m->prev = m->next = NULL;
}

/* Report a message that is in no queue any more. */
void
amqp_settle(IdemCourier *courier, IdemMessage *m, IdemOutcome outcome,
	   uint32_t code, const char *why)
{
	free(m->data);
	m->data = NULL;
	if (outcome == IDEM_DELIVERED)
		idem_courier_delivered(courier, m);
	else
		idem_courier_outcome(courier, m, outcome, 0, code, "%s", why);
}

void
amqp_return_waiting(IdemCourier *courier, const char *why)
{
	IdemMessage *m;

	while ((m = amqp.waiting.head))
	{
		amqp_queue_remove(&amqp.waiting, m);
		amqp_settle(courier, m, IDEM_RETURNED, 0, why);
	}
}

/*
 * A message, in no queue any more, has failed: whatever waits behind it with
 * the same key must not overtake it.
 */
static void
fail(IdemCourier *courier, IdemMessage *m, IdemOutcome outcome,
	 uint32_t code, const char *why)
{
	IdemMessage *w = m->key ? amqp.waiting.head : NULL;

	while (w)
	{
		IdemMessage *next = w->next;

		if (w->key && strcmp(w->key, m->key) == 0)
		{
			amqp_queue_remove(&amqp.waiting, w);
			amqp_settle(courier, w, IDEM_RETURNED, 0,
				   "a message with the same key failed");
		}
		w = next;
	}
	amqp_settle(courier, m, outcome, code, why);
}

static bool
bytes_are(amqp_bytes_t x, amqp_bytes_t y)
{
	return x.len == y.len && (x.len == 0 || memcmp(x.bytes, y.bytes, x.len) == 0);
}

/* The exchange is what stands before the first slash of the destination. */
static Target
target_of(const IdemMessage *m)
{
	const char *slash = strchr(m->destination, '/');
	Target		t;

	if (slash)
	{
		t.exchange.len = slash - m->destination;
		t.exchange.bytes = (void *) m->destination;
		t.key = amqp_text(slash + 1);
	}
	else
	{
		t.exchange = amqp_text(amqp.exchange);
		t.key = amqp_text(m->destination);
	}
	if (amqp.routing_key)
		t.key = amqp_text(amqp.routing_key);
	return t;
}

typedef struct Headers
{
	amqp_table_t table;
	int			size;
	const char *problem;
} Headers;

static bool
add_header(void *arg, const char *name, const char *value)
{
	Headers    *h = arg;
	amqp_table_entry_t *e;

	if (strlen(name) > SHORTSTR_MAX)
	{
		h->problem = "a header's name is longer than 255 bytes";
		return false;
	}
	if (h->table.num_entries == h->size)
	{
		h->size = h->size * 2 + 8;
		h->table.entries = idem_realloc(h->table.entries,
										h->size * sizeof(amqp_table_entry_t));
	}
	e = &h->table.entries[h->table.num_entries++];
	e->key = amqp_text(idem_strdup(name));
	e->value.kind = AMQP_FIELD_KIND_UTF8;
	e->value.value.bytes = amqp_text(idem_strdup(value));
	return true;
}

/* Encode a message.  Returns NULL, or why it can never be sent. */
static const char *
encode(const IdemMessage *m)
{
	size_t		before = amqp.out_len - amqp.out_off;
	amqp_basic_publish_t publish = {0};
	amqp_basic_properties_t p;
	Headers		h = {{0, NULL}, 0, NULL};
	Target		t = target_of(m);
	const char *problem = NULL;

	if (t.exchange.len > SHORTSTR_MAX)
		return "the exchange's name is longer than 255 bytes";
	if (t.key.len > SHORTSTR_MAX)
		return "the routing key is longer than 255 bytes";
	if (strlen(m->content_type) > SHORTSTR_MAX)
		return "the content type is longer than 255 bytes";
	if (!idem_headers_each(m->headers, add_header, &h))
		problem = h.problem ? h.problem : "the headers cannot be sent";

	memset(&p, 0, sizeof(p));
	p._flags = AMQP_BASIC_CONTENT_TYPE_FLAG | AMQP_BASIC_DELIVERY_MODE_FLAG |
		AMQP_BASIC_MESSAGE_ID_FLAG | AMQP_BASIC_TIMESTAMP_FLAG |
		AMQP_BASIC_APP_ID_FLAG;
	p.content_type = amqp_text(m->content_type);
	p.delivery_mode = 2;		/* persistent */
	p.message_id = amqp_text(m->msg_id);
	p.timestamp = m->enqueued_at / 1000000;
	p.app_id = amqp_text("idem");
	if (strlen(m->topic) <= SHORTSTR_MAX)
	{
		p._flags |= AMQP_BASIC_TYPE_FLAG;
		p.type = amqp_text(m->topic);
	}
	if (h.table.num_entries > 0)
	{
		p._flags |= AMQP_BASIC_HEADERS_FLAG;
		p.headers = h.table;
	}

	publish.exchange = t.exchange;
	publish.routing_key = t.key;
	publish.mandatory = 1;

	if (!problem && !amqp_put_method(CHANNEL, AMQP_BASIC_PUBLISH_METHOD, &publish))
		problem = "the message cannot be encoded";
	if (!problem)
	{
		char	   *f = amqp_reserve(amqp.frame_max);
		amqp_bytes_t space = {amqp.frame_max - 20, f + 19};
		int			size = amqp_encode_properties(AMQP_BASIC_CLASS, &p, space);

		if (size < 0)
			problem = "the headers are too long for a frame";
		else
		{
			amqp_put_uint(f + 7, AMQP_BASIC_CLASS, 2);
			amqp_put_uint(f + 9, 0, 2);
			amqp_put_uint(f + 11, m->body_len, 8);
			amqp_put_frame(f, AMQP_FRAME_HEADER, CHANNEL, size + 12);
		}
	}
	if (!problem)
	{
		size_t		most = amqp.frame_max - 8;
		size_t		done;
		size_t		n;

		amqp_reserve(m->body_len + (m->body_len / most + 1) * 8);
		for (done = 0; done < m->body_len; done += n)
		{
			char	   *f = amqp.out + amqp.out_len;

			n = m->body_len - done < most ? m->body_len - done : most;
			memcpy(f + 7, m->body + done, n);
			amqp_put_frame(f, AMQP_FRAME_BODY, CHANNEL, n);
		}
	}
	else
		amqp.out_len = amqp.out_off + before;

	for (int i = 0; i < h.table.num_entries; i++)
	{
		free(h.table.entries[i].key.bytes);
		free(h.table.entries[i].value.value.bytes.bytes);
	}
	free(h.table.entries);
	return problem;
}

void
amqp_confirmed(IdemCourier *courier, uint64_t tag, bool multiple, bool ok)
{
	IdemMessage *m = amqp.sent.head;

	while (m && m->tag <= tag)
	{
		IdemMessage *next = m->next;
		Sent	   *sent = m->data;

		if (m->tag == tag || multiple)
		{
			amqp_queue_remove(&amqp.sent, m);
			if (amqp.solo > 0)
				amqp.solo--;
			if (sent->returned)
			{
				Target		t = target_of(m);
				char		why[768];

				snprintf(why, sizeof(why),
						 "exchange \"%.*s\" has no queue for routing key \"%.*s\"",
						 (int) t.exchange.len, (char *) t.exchange.bytes,
						 (int) t.key.len, (char *) t.key.bytes);
				if (amqp.unroutable_dead)
					fail(courier, m, IDEM_PERMANENT, sent->returned, why);
				else
				{
					if (!amqp.blocked || m->tag > amqp.blocked_tag)
					{
						amqp.blocked = true;
						amqp.blocked_tag = amqp.next_tag - 1;
						idem_courier_state(courier, IDEM_STATE_BLOCKED, 0, "%s", why);
					}
					amqp_settle(courier, m, IDEM_BLOCKED, sent->returned, why);
					amqp_return_waiting(courier, why);
					/* the list may have changed, but not ahead of us */
				}
			}
			else if (ok)
			{
				if (amqp.blocked && m->tag > amqp.blocked_tag)
				{
					amqp.blocked = false;
					idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
				}
				amqp_settle(courier, m, IDEM_DELIVERED, 0, NULL);
			}
			else
				fail(courier, m, IDEM_TRANSIENT, 0, "refused by the broker (basic.nack)");
		}
		m = next;
	}
}

/*
 * The broker closed the channel because of one message.  Those before it were
 * taken, but will never be confirmed; those behind it were dropped.
 */
void
amqp_channel_closed(IdemCourier *courier, amqp_channel_close_t *close)
{
	char		why[640];
	const char *name;
	unsigned long long size = 0;
	bool		too_large;
	IdemMessage *culprit;
	IdemMessage *m;
	amqp_channel_close_ok_t ok = {0};

	snprintf(why, sizeof(why), "%.*s", (int) close->reply_text.len,
			 (char *) close->reply_text.bytes);
	name = strstr(why, "exchange '");
	too_large = close->reply_code == AMQP_PRECONDITION_FAILED &&
		strstr(why, "message size ") &&
		sscanf(strstr(why, "message size "), "message size %llu", &size) == 1;

	for (culprit = amqp.sent.head; culprit; culprit = culprit->next)
	{
		Target		t = target_of(culprit);

		if (culprit == amqp.sent.tail && culprit == amqp.sent.head)
			break;
		if (too_large ? culprit->body_len == size :
			name && strncmp(name + 10, t.exchange.bytes, t.exchange.len) == 0 &&
			name[10 + t.exchange.len] == '\'')
			break;
	}

	amqp_put_method(CHANNEL, AMQP_CHANNEL_CLOSE_OK_METHOD, &ok);
	amqp.phase = PHASE_IDLE;
	amqp.in_return = false;

	if (culprit)
	{
		/* back to the head of the queue with what was dropped */
		while ((m = amqp.sent.tail) != culprit)
		{
			amqp_queue_remove(&amqp.sent, m);
			free(m->data);
			m->data = NULL;
			m->next = amqp.waiting.head;
			if (amqp.waiting.head)
				amqp.waiting.head->prev = m;
			else
				amqp.waiting.tail = m;
			amqp.waiting.head = m;
		}
		amqp_queue_remove(&amqp.sent, culprit);
	}
	else
		amqp.solo = 1000;			/* find it by sending one by one */

	while ((m = amqp.sent.head))
	{
		amqp_queue_remove(&amqp.sent, m);
		fail(courier, m, IDEM_UNKNOWN, close->reply_code,
			 "the broker closed the channel because of another message");
	}

	if (close->reply_code == AMQP_NOT_FOUND || close->reply_code == AMQP_ACCESS_REFUSED)
	{
		amqp.blocked = true;
		amqp.blocked_tag = 0;
		idem_courier_state(courier, IDEM_STATE_BLOCKED, 0, "%s", why);
		if (culprit)
			amqp_settle(courier, culprit, IDEM_BLOCKED, close->reply_code, why);
		amqp_return_waiting(courier, why);
	}
	else if (culprit)
		fail(courier, culprit,
			 close->reply_code == AMQP_PRECONDITION_FAILED ? IDEM_PERMANENT : IDEM_TRANSIENT,
			 close->reply_code, why);
}

/* The properties of a message that comes back: find out which it is. */
void
amqp_returned(amqp_basic_properties_t *p, uint64_t body_size)
{
	for (IdemMessage *m = amqp.sent.head; m; m = m->next)
	{
		Target		t = target_of(m);
		Sent	   *sent = m->data;

		/* the same message may be on its way to several exchanges */
		if (!sent->returned &&
			bytes_are(p->message_id, amqp_text(m->msg_id)) &&
			bytes_are(amqp.return_exchange, t.exchange) &&
			bytes_are(amqp.return_key, t.key))
		{
			sent->returned = amqp.return_code;
			break;
		}
	}
	amqp.return_left = body_size;
	amqp.in_return = body_size > 0;
}

/* Do whatever can be done now. */
void
amqp_pump(IdemCourier *courier)
{
	if (amqp.phase == PHASE_NONE && amqp.waiting.head)
	{
		if (idem_courier_quitting(courier))
			amqp_return_waiting(courier, "quitting");
		else
			amqp_connect(courier);
	}
	if (amqp.throttled && amqp.waiting.head)
	{
		idem_courier_state(courier, IDEM_STATE_DOWN, BLOCKED_RETRY_MS,
						   "the broker takes no messages");
		amqp_return_waiting(courier, "the broker takes no messages");
	}
	if (amqp.phase == PHASE_IDLE && amqp.waiting.head)
		amqp_open_channel();

	while (amqp.phase > PHASE_TLS)
	{
		while (amqp.phase == PHASE_UP && amqp.waiting.head &&
			   amqp.out_len - amqp.out_off < OUT_ENOUGH && !(amqp.solo > 0 && amqp.sent.head))
		{
			IdemMessage *m = amqp.waiting.head;
			const char *problem;
			Sent	   *sent;

			amqp_queue_remove(&amqp.waiting, m);
			problem = encode(m);
			if (problem)
			{
				fail(courier, m, IDEM_PERMANENT, 0, problem);
				continue;
			}
			sent = idem_alloc(sizeof(Sent));
			sent->end = amqp.written + (amqp.out_len - amqp.out_off);
			m->data = sent;
			m->tag = amqp.next_tag++;
			queue_append(&amqp.sent, m);
		}
		if (amqp.out_off == amqp.out_len)
			break;
		if (!amqp_flush(courier))
			return;
		if (amqp.out_off < amqp.out_len)
			break;				/* the socket is full */
	}
	amqp_watch(courier);
	amqp_set_timer(courier);
}

static void
amqp_message(IdemCourier *courier, IdemMessage *m)
{
	(void) courier;
	queue_append(&amqp.waiting, m);
}

static void
amqp_timer(IdemCourier *courier)
{
	int64_t		now = idem_courier_now();

	if (amqp.drain_deadline && now >= amqp.drain_deadline)
	{
		amqp.drain_deadline = 0;
		amqp_lose(courier, IDEM_STATE_DOWN, "quit before the broker answered");
		return;
	}
	if (amqp.phase != PHASE_NONE && amqp.phase != PHASE_UP && amqp.phase != PHASE_IDLE &&
		now >= amqp.deadline)
	{
		amqp_lose(courier, IDEM_STATE_DOWN, "no answer from \"%s\" port %s within %d ms",
			 amqp.host, amqp.port, amqp.connect_timeout);
		return;
	}
	if (amqp.phase >= PHASE_OPEN && amqp.beat > 0)
	{
		if (now >= amqp.last_read + amqp.beat * 2000)
		{
			amqp_lose(courier, IDEM_STATE_DOWN, "the broker is silent (heartbeat)");
			return;
		}
		/* while something is to be written, that is sign of life enough */
		if (now >= amqp.last_write + amqp.beat * 500)
		{
			if (amqp.out_off == amqp.out_len)
			{
				amqp_put_frame(amqp_reserve(8), AMQP_FRAME_HEARTBEAT, 0, 0);
				if (!amqp_flush(courier))
					return;
			}
			amqp.last_write = now;
		}
	}
	amqp_pump(courier);
}

static void
amqp_drain(IdemCourier *courier)
{
	amqp_return_waiting(courier, "quitting");
	if (!amqp.sent.head)
		return;
	amqp.drain_deadline = idem_courier_now() + DRAIN_MS;
	amqp_set_timer(courier);
}

static void
amqp_stop(IdemCourier *courier)
{
	if (amqp.phase >= PHASE_IDLE && amqp.out_off == amqp.out_len)
	{
		amqp_connection_close_t bye = {AMQP_REPLY_SUCCESS, amqp_text("bye"), 0, 0};

		amqp_put_method(0, AMQP_CONNECTION_CLOSE_METHOD, &bye);
		if (amqp.ssl)
			(void) SSL_write(amqp.ssl, amqp.out + amqp.out_off, (int) (amqp.out_len - amqp.out_off));
		else
			(void) !send(amqp.fd, amqp.out + amqp.out_off, amqp.out_len - amqp.out_off, MSG_NOSIGNAL);
	}
	amqp_close_fd(courier);
}

static const char *
amqp_library(void)
{
	static char name[64];

	snprintf(name, sizeof(name), "librabbitmq/%s", amqp_version());
	return name;
}

static const char *const amqp_options[] = {
	"url", "user", "password", "exchange", "routing_key", "heartbeat",
	"connect_timeout_ms", "on_unroutable", "tls_ca", "tls_cert", "tls_key",
	"public_only", NULL
};

const IdemTransport idem_transport = {
	.program = "idem-courier-amqp",
	.library = amqp_library,
	.options = amqp_options,
	.start = amqp_start,
	.message = amqp_message,
	.round = amqp_pump,
	.timer = amqp_timer,
	.drain = amqp_drain,
	.stop = amqp_stop,
};

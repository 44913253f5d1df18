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
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>

#if __has_include(<rabbitmq-c/amqp.h>)
#include <rabbitmq-c/amqp.h>
#include <rabbitmq-c/framing.h>
#else
#include <amqp.h>
#include <amqp_framing.h>
#endif
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

#include "courier.h"

#define CHANNEL			1
#define FRAME_MAX		131072
#define SHORTSTR_MAX	255
#define OUT_ENOUGH		(256 * 1024)	/* encode no more than about this ahead */
#define DRAIN_MS		1500
#define BLOCKED_RETRY_MS 1000

/* How far the link to the broker is. */
typedef enum Phase
{
	PHASE_NONE,					/* not connected */
	PHASE_TCP,
	PHASE_TLS,
	PHASE_START,				/* header sent, waiting for start */
	PHASE_TUNE,
	PHASE_OPEN,
	PHASE_IDLE,					/* connected, no channel */
	PHASE_CHANNEL,				/* waiting for channel.open-ok */
	PHASE_CONFIRM,				/* waiting for confirm.select-ok */
	PHASE_UP
} Phase;

/* Messages in the order of their tickets. */
typedef struct Queue
{
	IdemMessage *head;
	IdemMessage *tail;
} Queue;

/* What IdemMessage.data points to, once a message has been encoded. */
typedef struct Sent
{
	uint64_t	end;			/* where it ends in the stream of this connection */
	uint16_t	returned;		/* reply code of basic.return, or 0 */
} Sent;

/* Where a message goes; not terminated by NUL. */
typedef struct Target
{
	amqp_bytes_t exchange;
	amqp_bytes_t key;
} Target;

static struct
{
	/* options */
	char	   *host;
	char		port[8];
	char	   *vhost;
	bool		tls;
	const char *user;
	const char *password;
	const char *exchange;
	const char *routing_key;	/* or NULL */
	int			heartbeat;
	int			connect_timeout;
	bool		unroutable_dead;
	bool		public_only;
	SSL_CTX    *ctx;

	/* the link */
	Phase		phase;
	int			fd;
	SSL		   *ssl;
	short		tls_wants;		/* what the handshake waits for */
	struct addrinfo *addresses;
	struct addrinfo *address;	/* the one being tried */
	amqp_connection_state_t codec;
	int			frame_max;
	int			beat;			/* agreed heartbeat in s, or 0 */
	int64_t		deadline;		/* of the handshake */
	int64_t		last_read;
	int64_t		last_write;
	int64_t		drain_deadline; /* or 0 */
	bool		throttled;		/* connection.blocked */
	char		why[512];		/* why the last address did not do */

	/* what is to be written */
	char	   *out;
	size_t		out_len;
	size_t		out_off;
	size_t		out_size;
	uint64_t	written;		/* bytes, since the connection was made */

	/* messages */
	Queue		waiting;		/* not encoded */
	Queue		sent;			/* encoded, not confirmed; in order of tags */
	uint64_t	next_tag;
	uint64_t	blocked_tag;	/* an unroutable message blocked those up to here */
	bool		blocked;
	int			solo;			/* so many are to be sent one by one */
	Sent	   *return_to;		/* basic.return under way, its message */
	bool		in_return;
	size_t		return_left;	/* bytes of its body to come */
	amqp_bytes_t return_exchange;
	amqp_bytes_t return_key;
	uint16_t	return_code;
} a = {.fd = -1};

static void amqp_ready(IdemCourier *courier, int fd, short revents, void *arg);
static void amqp_pump(IdemCourier *courier);

/* ------------------------------------------------------------------
 * Queues
 * ------------------------------------------------------------------ */

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

static void
queue_remove(Queue *q, IdemMessage *m)
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
static void
settle(IdemCourier *courier, IdemMessage *m, IdemOutcome outcome,
	   uint32_t code, const char *why)
{
	free(m->data);
	m->data = NULL;
	if (outcome == IDEM_DELIVERED)
		idem_courier_delivered(courier, m);
	else
		idem_courier_outcome(courier, m, outcome, 0, code, "%s", why);
}

static void
return_waiting(IdemCourier *courier, const char *why)
{
	IdemMessage *m;

	while ((m = a.waiting.head))
	{
		queue_remove(&a.waiting, m);
		settle(courier, m, IDEM_RETURNED, 0, why);
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
	IdemMessage *w = m->key ? a.waiting.head : NULL;

	while (w)
	{
		IdemMessage *next = w->next;

		if (w->key && strcmp(w->key, m->key) == 0)
		{
			queue_remove(&a.waiting, w);
			settle(courier, w, IDEM_RETURNED, 0,
				   "a message with the same key failed");
		}
		w = next;
	}
	settle(courier, m, outcome, code, why);
}

/* ------------------------------------------------------------------
 * The link: closing, time, writing
 * ------------------------------------------------------------------ */

static void
set_timer(IdemCourier *courier)
{
	int64_t		next = INT64_MAX;
	int64_t		now = idem_courier_now();

#define SOONEST(t) do { int64_t t_ = (t); if (t_ < next) next = t_; } while (0)
	if (a.phase != PHASE_NONE && a.phase != PHASE_UP && a.phase != PHASE_IDLE)
		SOONEST(a.deadline);
	if (a.phase >= PHASE_OPEN && a.beat > 0)
	{
		SOONEST(a.last_write + a.beat * 500);
		SOONEST(a.last_read + a.beat * 2000);
	}
	if (a.drain_deadline)
		SOONEST(a.drain_deadline);
#undef SOONEST

	idem_courier_timer(courier, next == INT64_MAX ? -1 :
					   next > now ? next - now : 0);
}

static void
close_fd(IdemCourier *courier)
{
	if (a.ssl)
		SSL_free(a.ssl);
	a.ssl = NULL;
	if (a.fd >= 0)
	{
		idem_courier_watch(courier, a.fd, 0, NULL, NULL);
		close(a.fd);
	}
	a.fd = -1;
}

/* Forget the connection, without a word about messages. */
static void
hang_up(IdemCourier *courier)
{
	close_fd(courier);
	if (a.codec)
		amqp_destroy_connection(a.codec);
	a.codec = NULL;
	if (a.addresses)
		freeaddrinfo(a.addresses);
	a.addresses = a.address = NULL;
	a.phase = PHASE_NONE;
	a.out_len = a.out_off = 0;
	a.in_return = false;
	a.throttled = false;
	set_timer(courier);
}

/*
 * The connection is no more, or never was: say so, and give everything back.
 * A message whose last byte was not written cannot have been stored.
 */
static void
lose(IdemCourier *courier, IdemState state, const char *format,...)
			idem_printf_like(3, 4);

static void
lose(IdemCourier *courier, IdemState state, const char *format,...)
{
	char		why[768];
	va_list		args;
	uint64_t	written = a.written;
	IdemMessage *m;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);

	hang_up(courier);
	a.blocked = false;
	idem_courier_state(courier, state, 0, "%s", why);
	while ((m = a.sent.head))
	{
		bool		complete = ((Sent *) m->data)->end <= written;

		queue_remove(&a.sent, m);
		settle(courier, m, complete ? IDEM_UNKNOWN : IDEM_RETURNED, 0, why);
	}
	return_waiting(courier, why);
}

static void
watch(IdemCourier *courier)
{
	short		events;

	if (a.fd < 0)
		return;
	if (a.phase == PHASE_TCP)
		events = POLLOUT;
	else if (a.phase == PHASE_TLS)
		events = a.tls_wants;
	else
		events = POLLIN | (a.out_off < a.out_len ? POLLOUT : 0);
	idem_courier_watch(courier, a.fd, events, amqp_ready, NULL);
}

static char *
out_reserve(size_t size)
{
	if (a.out_off > 0 && a.out_off == a.out_len)
		a.out_off = a.out_len = 0;
	if (a.out_len + size > a.out_size)
	{
		if (a.out_off > 0)
		{
			memmove(a.out, a.out + a.out_off, a.out_len - a.out_off);
			a.out_len -= a.out_off;
			a.out_off = 0;
		}
		if (a.out_len + size > a.out_size)
		{
			a.out_size = (a.out_len + size) * 3 / 2;
			a.out = idem_realloc(a.out, a.out_size);
		}
	}
	return a.out + a.out_len;
}

/* Write what can be written now.  Returns false if the connection is lost. */
static bool
flush(IdemCourier *courier)
{
	while (a.out_off < a.out_len)
	{
		size_t		n = a.out_len - a.out_off;
		ssize_t		rc;

		if (a.ssl)
		{
			ERR_clear_error();
			rc = SSL_write(a.ssl, a.out + a.out_off,
						   n > (1 << 30) ? 1 << 30 : (int) n);
			if (rc <= 0)
			{
				int			e = SSL_get_error(a.ssl, (int) rc);

				if (e == SSL_ERROR_WANT_WRITE || e == SSL_ERROR_WANT_READ)
					break;
				lose(courier, IDEM_STATE_DOWN, "connection to the broker lost");
				return false;
			}
		}
		else
		{
			rc = send(a.fd, a.out + a.out_off, n, MSG_NOSIGNAL);
			if (rc < 0)
			{
				if (errno == EINTR)
					continue;
				if (errno == EAGAIN || errno == EWOULDBLOCK)
					break;
				/* what the broker said last may still be readable */
				if (a.phase > PHASE_TLS && (errno == EPIPE || errno == ECONNRESET))
				{
					a.out_off = a.out_len;
					break;
				}
				lose(courier, IDEM_STATE_DOWN,
					 "connection to the broker lost: %s", strerror(errno));
				return false;
			}
		}
		a.out_off += rc;
		a.written += rc;
		a.last_write = idem_courier_now();
	}

	/* one large message should not keep its memory for ever */
	if (a.out_off == a.out_len && a.out_size > 4 * OUT_ENOUGH)
	{
		free(a.out);
		a.out = NULL;
		a.out_size = a.out_len = a.out_off = 0;
	}
	return true;
}

static void
put_uint(char *p, uint64_t value, int bytes)
{
	while (bytes-- > 0)
	{
		p[bytes] = (char) (value & 0xff);
		value >>= 8;
	}
}

/* Finish a frame whose payload of this size lies 7 bytes after p. */
static void
put_frame(char *p, int type, int channel, size_t size)
{
	put_uint(p, type, 1);
	put_uint(p + 1, channel, 2);
	put_uint(p + 3, size, 4);
	put_uint(p + 7 + size, AMQP_FRAME_END, 1);
	a.out_len += size + 8;
}

/* Returns false if it does not fit. */
static bool
put_method(int channel, amqp_method_number_t id, void *decoded)
{
	char	   *p = out_reserve(a.frame_max);
	amqp_bytes_t space = {a.frame_max - 12, p + 11};
	int			size = amqp_encode_method(id, decoded, space);

	if (size < 0)
		return false;
	put_uint(p + 7, id, 4);
	put_frame(p, AMQP_FRAME_METHOD, channel, size + 4);
	return true;
}

/* ------------------------------------------------------------------
 * Publishing
 * ------------------------------------------------------------------ */

static amqp_bytes_t
bytes(const char *s)
{
	amqp_bytes_t b = {strlen(s), (void *) s};

	return b;
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
		t.key = bytes(slash + 1);
	}
	else
	{
		t.exchange = bytes(a.exchange);
		t.key = bytes(m->destination);
	}
	if (a.routing_key)
		t.key = bytes(a.routing_key);
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
	e->key = bytes(idem_strdup(name));
	e->value.kind = AMQP_FIELD_KIND_UTF8;
	e->value.value.bytes = bytes(idem_strdup(value));
	return true;
}

/* Encode a message.  Returns NULL, or why it can never be sent. */
static const char *
encode(const IdemMessage *m)
{
	size_t		before = a.out_len - a.out_off;
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
	p.content_type = bytes(m->content_type);
	p.delivery_mode = 2;		/* persistent */
	p.message_id = bytes(m->msg_id);
	p.timestamp = m->enqueued_at / 1000000;
	p.app_id = bytes("idem");
	if (strlen(m->topic) <= SHORTSTR_MAX)
	{
		p._flags |= AMQP_BASIC_TYPE_FLAG;
		p.type = bytes(m->topic);
	}
	if (h.table.num_entries > 0)
	{
		p._flags |= AMQP_BASIC_HEADERS_FLAG;
		p.headers = h.table;
	}

	publish.exchange = t.exchange;
	publish.routing_key = t.key;
	publish.mandatory = 1;

	if (!problem && !put_method(CHANNEL, AMQP_BASIC_PUBLISH_METHOD, &publish))
		problem = "the message cannot be encoded";
	if (!problem)
	{
		char	   *f = out_reserve(a.frame_max);
		amqp_bytes_t space = {a.frame_max - 20, f + 19};
		int			size = amqp_encode_properties(AMQP_BASIC_CLASS, &p, space);

		if (size < 0)
			problem = "the headers are too long for a frame";
		else
		{
			put_uint(f + 7, AMQP_BASIC_CLASS, 2);
			put_uint(f + 9, 0, 2);
			put_uint(f + 11, m->body_len, 8);
			put_frame(f, AMQP_FRAME_HEADER, CHANNEL, size + 12);
		}
	}
	if (!problem)
	{
		size_t		most = a.frame_max - 8;
		size_t		done;
		size_t		n;

		out_reserve(m->body_len + (m->body_len / most + 1) * 8);
		for (done = 0; done < m->body_len; done += n)
		{
			char	   *f = a.out + a.out_len;

			n = m->body_len - done < most ? m->body_len - done : most;
			memcpy(f + 7, m->body + done, n);
			put_frame(f, AMQP_FRAME_BODY, CHANNEL, n);
		}
	}
	else
		a.out_len = a.out_off + before;

	for (int i = 0; i < h.table.num_entries; i++)
	{
		free(h.table.entries[i].key.bytes);
		free(h.table.entries[i].value.value.bytes.bytes);
	}
	free(h.table.entries);
	return problem;
}

static void
open_channel(void)
{
	amqp_channel_open_t open = {amqp_empty_bytes};

	put_method(CHANNEL, AMQP_CHANNEL_OPEN_METHOD, &open);
	a.phase = PHASE_CHANNEL;
	a.deadline = idem_courier_now() + a.connect_timeout;
}

/* ------------------------------------------------------------------
 * What the broker says
 * ------------------------------------------------------------------ */

static void
confirmed(IdemCourier *courier, uint64_t tag, bool multiple, bool ok)
{
	IdemMessage *m = a.sent.head;

	while (m && m->tag <= tag)
	{
		IdemMessage *next = m->next;
		Sent	   *sent = m->data;

		if (m->tag == tag || multiple)
		{
			queue_remove(&a.sent, m);
			if (a.solo > 0)
				a.solo--;
			if (sent->returned)
			{
				Target		t = target_of(m);
				char		why[768];

				snprintf(why, sizeof(why),
						 "exchange \"%.*s\" has no queue for routing key \"%.*s\"",
						 (int) t.exchange.len, (char *) t.exchange.bytes,
						 (int) t.key.len, (char *) t.key.bytes);
				if (a.unroutable_dead)
					fail(courier, m, IDEM_PERMANENT, sent->returned, why);
				else
				{
					if (!a.blocked || m->tag > a.blocked_tag)
					{
						a.blocked = true;
						a.blocked_tag = a.next_tag - 1;
						idem_courier_state(courier, IDEM_STATE_BLOCKED, 0, "%s", why);
					}
					settle(courier, m, IDEM_BLOCKED, sent->returned, why);
					return_waiting(courier, why);
					/* the list may have changed, but not ahead of us */
				}
			}
			else if (ok)
			{
				if (a.blocked && m->tag > a.blocked_tag)
				{
					a.blocked = false;
					idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
				}
				settle(courier, m, IDEM_DELIVERED, 0, NULL);
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
static void
channel_closed(IdemCourier *courier, amqp_channel_close_t *close)
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

	for (culprit = a.sent.head; culprit; culprit = culprit->next)
	{
		Target		t = target_of(culprit);

		if (culprit == a.sent.tail && culprit == a.sent.head)
			break;
		if (too_large ? culprit->body_len == size :
			name && strncmp(name + 10, t.exchange.bytes, t.exchange.len) == 0 &&
			name[10 + t.exchange.len] == '\'')
			break;
	}

	put_method(CHANNEL, AMQP_CHANNEL_CLOSE_OK_METHOD, &ok);
	a.phase = PHASE_IDLE;
	a.in_return = false;

	if (culprit)
	{
		/* back to the head of the queue with what was dropped */
		while ((m = a.sent.tail) != culprit)
		{
			queue_remove(&a.sent, m);
			free(m->data);
			m->data = NULL;
			m->next = a.waiting.head;
			if (a.waiting.head)
				a.waiting.head->prev = m;
			else
				a.waiting.tail = m;
			a.waiting.head = m;
		}
		queue_remove(&a.sent, culprit);
	}
	else
		a.solo = 1000;			/* find it by sending one by one */

	while ((m = a.sent.head))
	{
		queue_remove(&a.sent, m);
		fail(courier, m, IDEM_UNKNOWN, close->reply_code,
			 "the broker closed the channel because of another message");
	}

	if (close->reply_code == AMQP_NOT_FOUND || close->reply_code == AMQP_ACCESS_REFUSED)
	{
		a.blocked = true;
		a.blocked_tag = 0;
		idem_courier_state(courier, IDEM_STATE_BLOCKED, 0, "%s", why);
		if (culprit)
			settle(courier, culprit, IDEM_BLOCKED, close->reply_code, why);
		return_waiting(courier, why);
	}
	else if (culprit)
		fail(courier, culprit,
			 close->reply_code == AMQP_PRECONDITION_FAILED ? IDEM_PERMANENT : IDEM_TRANSIENT,
			 close->reply_code, why);
}

static void
connection_closed(IdemCourier *courier, amqp_connection_close_t *close)
{
	bool		refused = close->reply_code == AMQP_ACCESS_REFUSED ||
		close->reply_code == AMQP_NOT_ALLOWED;
	char		why[300];
	amqp_connection_close_ok_t ok = {0};

	snprintf(why, sizeof(why), "%.*s", (int) close->reply_text.len,
			 (char *) close->reply_text.bytes);
	put_method(0, AMQP_CONNECTION_CLOSE_OK_METHOD, &ok);
	if (!a.ssl)
		(void) !send(a.fd, a.out + a.out_off, a.out_len - a.out_off, MSG_NOSIGNAL);
	lose(courier, refused ? IDEM_STATE_BLOCKED : IDEM_STATE_DOWN,
		 "the broker closed the connection: %s", why);
}

/* Our answer to connection.start. */
static void
log_in(void)
{
	static const char *const able[] = {
		"publisher_confirms", "basic.nack", "connection.blocked",
		"authentication_failure_close"
	};
	amqp_table_entry_t can[4];
	amqp_table_entry_t about[2];
	amqp_connection_start_ok_t ok;
	size_t		user_len = strlen(a.user);
	size_t		password_len = strlen(a.password);
	char	   *response = idem_alloc(user_len + password_len + 2);

	for (int i = 0; i < 4; i++)
	{
		can[i].key = bytes(able[i]);
		can[i].value.kind = AMQP_FIELD_KIND_BOOLEAN;
		can[i].value.value.boolean = 1;
	}
	about[0].key = bytes("product");
	about[0].value.kind = AMQP_FIELD_KIND_UTF8;
	about[0].value.value.bytes = bytes("idem-courier-amqp " IDEM_COURIER_VERSION);
	about[1].key = bytes("capabilities");
	about[1].value.kind = AMQP_FIELD_KIND_TABLE;
	about[1].value.value.table.num_entries = 4;
	about[1].value.value.table.entries = can;

	memcpy(response + 1, a.user, user_len);
	memcpy(response + user_len + 2, a.password, password_len);
	ok.client_properties.num_entries = 2;
	ok.client_properties.entries = about;
	ok.mechanism = bytes("PLAIN");
	ok.response.len = user_len + password_len + 2;
	ok.response.bytes = response;
	ok.locale = bytes("en_US");
	put_method(0, AMQP_CONNECTION_START_OK_METHOD, &ok);
	explicit_bzero(response, user_len + password_len + 2);
	free(response);
}

/* A method.  Returns false if the connection is no more. */
static bool
method(IdemCourier *courier, amqp_method_number_t id, void *decoded)
{
	switch (id)
	{
		case AMQP_CONNECTION_START_METHOD:
			if (a.phase != PHASE_START)
				break;
			log_in();
			a.phase = PHASE_TUNE;
			return true;

		case AMQP_CONNECTION_TUNE_METHOD:
			{
				amqp_connection_tune_t *tune = decoded;
				amqp_connection_tune_ok_t ok;
				amqp_connection_open_t open = {bytes(a.vhost), amqp_empty_bytes, 1};

				if (a.phase != PHASE_TUNE)
					break;
				a.frame_max = FRAME_MAX;
				if (tune->frame_max >= AMQP_FRAME_MIN_SIZE && tune->frame_max < FRAME_MAX)
					a.frame_max = tune->frame_max;
				a.beat = a.heartbeat;
				ok.channel_max = 1;
				ok.frame_max = a.frame_max;
				ok.heartbeat = a.beat;
				amqp_tune_connection(a.codec, 1, a.frame_max, 0);
				put_method(0, AMQP_CONNECTION_TUNE_OK_METHOD, &ok);
				put_method(0, AMQP_CONNECTION_OPEN_METHOD, &open);
				a.phase = PHASE_OPEN;
				return true;
			}

		case AMQP_CONNECTION_OPEN_OK_METHOD:
			if (a.phase != PHASE_OPEN)
				break;
			open_channel();
			return true;

		case AMQP_CHANNEL_OPEN_OK_METHOD:
			{
				amqp_confirm_select_t select = {0};

				if (a.phase != PHASE_CHANNEL)
					break;
				put_method(CHANNEL, AMQP_CONFIRM_SELECT_METHOD, &select);
				a.phase = PHASE_CONFIRM;
				return true;
			}

		case AMQP_CONFIRM_SELECT_OK_METHOD:
			if (a.phase != PHASE_CONFIRM)
				break;
			a.phase = PHASE_UP;
			a.next_tag = 1;
			/* after "blocked", only a delivered message proves the contrary */
			if (!a.blocked)
				idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
			return true;

		case AMQP_BASIC_ACK_METHOD:
			{
				amqp_basic_ack_t *ack = decoded;

				confirmed(courier, ack->delivery_tag, ack->multiple, true);
				return true;
			}

		case AMQP_BASIC_NACK_METHOD:
			{
				amqp_basic_nack_t *nack = decoded;

				confirmed(courier, nack->delivery_tag, nack->multiple, false);
				return true;
			}

		case AMQP_BASIC_RETURN_METHOD:
			{
				amqp_basic_return_t *back = decoded;

				/* copied: the decoder's memory may go before the next frame */
				amqp_bytes_free(a.return_exchange);
				amqp_bytes_free(a.return_key);
				a.return_exchange = amqp_bytes_malloc_dup(back->exchange);
				a.return_key = amqp_bytes_malloc_dup(back->routing_key);
				a.return_code = back->reply_code;
				a.in_return = true;
				return true;
			}

		case AMQP_CHANNEL_CLOSE_METHOD:
			channel_closed(courier, decoded);
			return true;

		case AMQP_CONNECTION_CLOSE_METHOD:
			connection_closed(courier, decoded);
			return false;

		case AMQP_CONNECTION_BLOCKED_METHOD:
			{
				amqp_connection_blocked_t *blocked = decoded;
				char		why[300];

				snprintf(why, sizeof(why), "the broker takes no messages: %.*s",
						 (int) blocked->reason.len, (char *) blocked->reason.bytes);
				a.throttled = true;
				idem_courier_state(courier, IDEM_STATE_DOWN, BLOCKED_RETRY_MS, "%s", why);
				return_waiting(courier, why);
				return true;
			}

		case AMQP_CONNECTION_UNBLOCKED_METHOD:
			a.throttled = false;
			if (a.phase == PHASE_UP)
				idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
			return true;

		case AMQP_CHANNEL_CLOSE_OK_METHOD:
		case AMQP_CONNECTION_CLOSE_OK_METHOD:
			return true;
	}
	lose(courier, IDEM_STATE_DOWN, "the broker sent a method out of place: %s",
		 amqp_method_name(id) ? amqp_method_name(id) : "?");
	return false;
}

/* The properties of a message that comes back: find out which it is. */
static void
returned(amqp_basic_properties_t *p, uint64_t body_size)
{
	for (IdemMessage *m = a.sent.head; m; m = m->next)
	{
		Target		t = target_of(m);
		Sent	   *sent = m->data;

		/* the same message may be on its way to several exchanges */
		if (!sent->returned &&
			bytes_are(p->message_id, bytes(m->msg_id)) &&
			bytes_are(a.return_exchange, t.exchange) &&
			bytes_are(a.return_key, t.key))
		{
			sent->returned = a.return_code;
			break;
		}
	}
	a.return_left = body_size;
	a.in_return = body_size > 0;
}

/* A frame.  Returns false if the connection is no more. */
static bool
frame(IdemCourier *courier, amqp_frame_t *f)
{
	switch (f->frame_type)
	{
		case 'A':			/* the broker answers with a header of its own */
			lose(courier, IDEM_STATE_BLOCKED, "the broker does not speak AMQP 0-9-1");
			return false;
		case AMQP_FRAME_METHOD:
			return method(courier, f->payload.method.id, f->payload.method.decoded);
		case AMQP_FRAME_HEADER:
			if (a.in_return)
				returned(f->payload.properties.decoded, f->payload.properties.body_size);
			return true;
		default:
			return true;		/* heartbeats, and the bodies of what comes back */
	}
}

/* Read all there is.  Returns false if the connection is no more. */
static bool
drink(IdemCourier *courier)
{
	static char buffer[65536];

	for (;;)
	{
		ssize_t		n;
		amqp_bytes_t in;

		if (a.ssl)
		{
			ERR_clear_error();
			n = SSL_read(a.ssl, buffer, sizeof(buffer));
			if (n <= 0)
			{
				int			e = SSL_get_error(a.ssl, (int) n);

				if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE)
					return true;
				n = 0;
			}
		}
		else
		{
			n = recv(a.fd, buffer, sizeof(buffer), 0);
			if (n < 0 && errno == EINTR)
				continue;
			if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
				return true;
		}
		if (n <= 0)
		{
			lose(courier, IDEM_STATE_DOWN, a.phase < PHASE_OPEN ?
				 "the broker closed the connection during the handshake" :
				 "connection to the broker lost");
			return false;
		}

		a.last_read = idem_courier_now();
		in.bytes = buffer;
		in.len = n;
		while (in.len > 0)
		{
			amqp_frame_t f;
			int			used = amqp_handle_input(a.codec, in, &f);

			if (used < 0)
			{
				lose(courier, IDEM_STATE_DOWN, "the broker sent what is not AMQP: %s",
					 amqp_error_string2(used));
				return false;
			}
			in.bytes = (char *) in.bytes + used;
			in.len -= used;
			if (f.frame_type != 0 && !frame(courier, &f))
				return false;
			amqp_maybe_release_buffers(a.codec);
		}
	}
}

/* ------------------------------------------------------------------
 * Connecting
 * ------------------------------------------------------------------ */

static void
start_amqp(void)
{
	char	   *p;

	a.codec = amqp_new_connection();
	if (!a.codec)
		abort();
	a.frame_max = FRAME_MAX;
	amqp_bytes_free(a.return_exchange);
	amqp_bytes_free(a.return_key);
	a.return_exchange = a.return_key = amqp_empty_bytes;
	p = out_reserve(8);
	memcpy(p, "AMQP\0\0\x09\x01", 8);
	a.out_len += 8;
	a.phase = PHASE_START;
	a.last_read = a.last_write = idem_courier_now();
}

static void
go_on_tls(IdemCourier *courier)
{
	int			rc;
	int			e;
	long		verdict;

	ERR_clear_error();
	rc = SSL_connect(a.ssl);
	if (rc == 1)
	{
		start_amqp();
		return;
	}
	e = SSL_get_error(a.ssl, rc);
	if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE)
	{
		a.tls_wants = e == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
		return;
	}
	verdict = SSL_get_verify_result(a.ssl);
	if (verdict != X509_V_OK)
		lose(courier, IDEM_STATE_BLOCKED, "the broker's certificate is not accepted: %s",
			 X509_verify_cert_error_string(verdict));
	else
	{
		const char *reason = ERR_reason_error_string(ERR_peek_error());

		lose(courier, IDEM_STATE_DOWN, "the TLS handshake failed: %s",
			 reason ? reason : "connection closed");
	}
}

static void
connected(IdemCourier *courier)
{
	struct in6_addr ip;

	if (!a.tls)
	{
		start_amqp();
		return;
	}
	a.ssl = SSL_new(a.ctx);
	if (!a.ssl || SSL_set_fd(a.ssl, a.fd) != 1)
		abort();
	if (inet_pton(AF_INET, a.host, &ip) == 1 || inet_pton(AF_INET6, a.host, &ip) == 1)
	{
		if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(a.ssl), a.host) != 1)
			abort();
	}
	else
	{
		SSL_set_hostflags(a.ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
		if (SSL_set1_host(a.ssl, a.host) != 1 ||
			SSL_set_tlsext_host_name(a.ssl, a.host) != 1)
			abort();
	}
	a.phase = PHASE_TLS;
	go_on_tls(courier);
}

/* Try addresses from a.address on, until one does or needs waiting for. */
static void
try_address(IdemCourier *courier)
{
	for (; a.address; a.address = a.address->ai_next)
	{
		const char *no = idem_address_refused(a.address->ai_addr, a.public_only);
		int			one = 1;

		if (no)
		{
			/* one bad address is enough: names must not lead there at all */
			lose(courier, IDEM_STATE_BLOCKED, "host \"%s\": %s", a.host, no);
			return;
		}
		a.fd = socket(a.address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		if (a.fd < 0)
		{
			snprintf(a.why, sizeof(a.why), "%s", strerror(errno));
			continue;
		}
		setsockopt(a.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		setsockopt(a.fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
		if (connect(a.fd, a.address->ai_addr, a.address->ai_addrlen) == 0)
		{
			connected(courier);
			return;
		}
		if (errno == EINPROGRESS)
		{
			a.phase = PHASE_TCP;
			return;
		}
		snprintf(a.why, sizeof(a.why), "%s", strerror(errno));
		close(a.fd);
		a.fd = -1;
	}
	lose(courier, IDEM_STATE_DOWN, "could not connect to \"%s\" port %s: %s",
		 a.host, a.port, a.why);
}

static void
begin_connect(IdemCourier *courier)
{
	struct addrinfo hints = {0};
	int			rc;

	idem_courier_state(courier, IDEM_STATE_CONNECTING, 0, "connecting");
	hints.ai_socktype = SOCK_STREAM;
	a.written = 0;
	a.beat = 0;
	a.blocked = false;
	snprintf(a.why, sizeof(a.why), "no address");
	rc = getaddrinfo(a.host, a.port, &hints, &a.addresses);
	if (rc != 0)
	{
		a.addresses = NULL;
		lose(courier, IDEM_STATE_DOWN, "could not resolve \"%s\": %s",
			 a.host, gai_strerror(rc));
		return;
	}
	a.address = a.addresses;
	a.deadline = idem_courier_now() + a.connect_timeout;
	a.phase = PHASE_TCP;
	try_address(courier);
}

/* Do whatever can be done now. */
static void
amqp_pump(IdemCourier *courier)
{
	if (a.phase == PHASE_NONE && a.waiting.head)
	{
		if (idem_courier_quitting(courier))
			return_waiting(courier, "quitting");
		else
			begin_connect(courier);
	}
	if (a.throttled && a.waiting.head)
	{
		idem_courier_state(courier, IDEM_STATE_DOWN, BLOCKED_RETRY_MS,
						   "the broker takes no messages");
		return_waiting(courier, "the broker takes no messages");
	}
	if (a.phase == PHASE_IDLE && a.waiting.head)
		open_channel();

	while (a.phase > PHASE_TLS)
	{
		while (a.phase == PHASE_UP && a.waiting.head &&
			   a.out_len - a.out_off < OUT_ENOUGH && !(a.solo > 0 && a.sent.head))
		{
			IdemMessage *m = a.waiting.head;
			const char *problem;
			Sent	   *sent;

			queue_remove(&a.waiting, m);
			problem = encode(m);
			if (problem)
			{
				fail(courier, m, IDEM_PERMANENT, 0, problem);
				continue;
			}
			sent = idem_alloc(sizeof(Sent));
			sent->end = a.written + (a.out_len - a.out_off);
			m->data = sent;
			m->tag = a.next_tag++;
			queue_append(&a.sent, m);
		}
		if (a.out_off == a.out_len)
			break;
		if (!flush(courier))
			return;
		if (a.out_off < a.out_len)
			break;				/* the socket is full */
	}
	watch(courier);
	set_timer(courier);
}

static void
amqp_ready(IdemCourier *courier, int fd, short revents, void *arg)
{
	(void) fd;
	(void) revents;
	(void) arg;

	if (a.phase == PHASE_TCP)
	{
		int			error = 0;
		socklen_t	size = sizeof(error);

		getsockopt(a.fd, SOL_SOCKET, SO_ERROR, &error, &size);
		if (error == 0)
			connected(courier);
		else
		{
			snprintf(a.why, sizeof(a.why), "%s", strerror(error));
			close_fd(courier);
			a.address = a.address->ai_next;
			try_address(courier);
		}
	}
	else if (a.phase == PHASE_TLS)
		go_on_tls(courier);
	else if (a.phase > PHASE_TLS && !drink(courier))
		return;
	amqp_pump(courier);
}

/* ------------------------------------------------------------------
 * Callbacks
 * ------------------------------------------------------------------ */

static void
amqp_message(IdemCourier *courier, IdemMessage *m)
{
	(void) courier;
	queue_append(&a.waiting, m);
}

static void
amqp_timer(IdemCourier *courier)
{
	int64_t		now = idem_courier_now();

	if (a.drain_deadline && now >= a.drain_deadline)
	{
		a.drain_deadline = 0;
		lose(courier, IDEM_STATE_DOWN, "quit before the broker answered");
		return;
	}
	if (a.phase != PHASE_NONE && a.phase != PHASE_UP && a.phase != PHASE_IDLE &&
		now >= a.deadline)
	{
		lose(courier, IDEM_STATE_DOWN, "no answer from \"%s\" port %s within %d ms",
			 a.host, a.port, a.connect_timeout);
		return;
	}
	if (a.phase >= PHASE_OPEN && a.beat > 0)
	{
		if (now >= a.last_read + a.beat * 2000)
		{
			lose(courier, IDEM_STATE_DOWN, "the broker is silent (heartbeat)");
			return;
		}
		/* while something is to be written, that is sign of life enough */
		if (now >= a.last_write + a.beat * 500)
		{
			if (a.out_off == a.out_len)
			{
				put_frame(out_reserve(8), AMQP_FRAME_HEARTBEAT, 0, 0);
				if (!flush(courier))
					return;
			}
			a.last_write = now;
		}
	}
	amqp_pump(courier);
}

static void
amqp_drain(IdemCourier *courier)
{
	return_waiting(courier, "quitting");
	if (!a.sent.head)
		return;
	a.drain_deadline = idem_courier_now() + DRAIN_MS;
	set_timer(courier);
}

static void
amqp_stop(IdemCourier *courier)
{
	if (a.phase >= PHASE_IDLE && a.out_off == a.out_len)
	{
		amqp_connection_close_t bye = {AMQP_REPLY_SUCCESS, bytes("bye"), 0, 0};

		put_method(0, AMQP_CONNECTION_CLOSE_METHOD, &bye);
		if (a.ssl)
			(void) SSL_write(a.ssl, a.out + a.out_off, (int) (a.out_len - a.out_off));
		else
			(void) !send(a.fd, a.out + a.out_off, a.out_len - a.out_off, MSG_NOSIGNAL);
	}
	close_fd(courier);
}

/* Keys with a passphrase are refused: nobody is there to be asked. */
static int
no_passphrase(char *buf, int size, int rwflag, void *arg)
{
	(void) buf;
	(void) size;
	(void) rwflag;
	(void) arg;
	return 0;
}

static bool
load_ca(const char *pem)
{
	BIO		   *bio = BIO_new_mem_buf(pem, -1);
	X509_STORE *store = SSL_CTX_get_cert_store(a.ctx);
	X509	   *cert;
	int			n = 0;

	while ((cert = PEM_read_bio_X509(bio, NULL, no_passphrase, NULL)))
	{
		n += X509_STORE_add_cert(store, cert);
		X509_free(cert);
	}
	BIO_free(bio);
	ERR_clear_error();
	return n > 0;
}

/* A certificate, and those that lead from it to the root. */
static bool
load_cert(const char *pem)
{
	BIO		   *bio = BIO_new_mem_buf(pem, -1);
	X509	   *cert = PEM_read_bio_X509_AUX(bio, NULL, no_passphrase, NULL);
	bool		ok = cert && SSL_CTX_use_certificate(a.ctx, cert) == 1;

	X509_free(cert);
	while (ok && (cert = PEM_read_bio_X509(bio, NULL, no_passphrase, NULL)))
		ok = SSL_CTX_add0_chain_cert(a.ctx, cert) == 1;
	BIO_free(bio);
	ERR_clear_error();
	return ok;
}

static bool
load_key(const char *pem)
{
	BIO		   *bio = BIO_new_mem_buf(pem, -1);
	EVP_PKEY   *key = PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL);
	bool		ok = key && SSL_CTX_use_PrivateKey(a.ctx, key) == 1 &&
		SSL_CTX_check_private_key(a.ctx) == 1;

	EVP_PKEY_free(key);
	BIO_free(bio);
	ERR_clear_error();
	return ok;
}

static void
start_tls(IdemCourier *courier)
{
	const char *ca = idem_option(courier, "tls_ca");
	const char *cert = idem_option(courier, "tls_cert");
	const char *key = idem_option(courier, "tls_key");

	if (!a.tls)
	{
		if (ca || cert || key)
			idem_courier_refuse(courier, "tls_ca, tls_cert and tls_key need an amqps url");
		return;
	}
	a.ctx = SSL_CTX_new(TLS_client_method());
	if (!a.ctx)
		abort();
	SSL_CTX_set_min_proto_version(a.ctx, TLS1_2_VERSION);
	SSL_CTX_set_verify(a.ctx, SSL_VERIFY_PEER, NULL);
	SSL_CTX_set_mode(a.ctx, SSL_MODE_ENABLE_PARTIAL_WRITE |
					 SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
	SSL_CTX_set_default_passwd_cb(a.ctx, no_passphrase);
	if (ca ? !load_ca(ca) : SSL_CTX_set_default_verify_paths(a.ctx) != 1)
		idem_courier_refuse(courier, "option \"tls_ca\" holds no certificate");
	else if (!cert != !key)
		idem_courier_refuse(courier, "options \"tls_cert\" and \"tls_key\" go together");
	else if (cert && !load_cert(cert))
		idem_courier_refuse(courier, "option \"tls_cert\" holds no certificate");
	else if (key && !load_key(key))
		idem_courier_refuse(courier,
							"option \"tls_key\" holds no key without passphrase that fits tls_cert");
}

static void
start_url(IdemCourier *courier)
{
	const char *url = idem_option_required(courier, "url");
	const char *rest;
	struct amqp_connection_info info;
	char	   *copy;

	if (!url)
		return;
	rest = strstr(url, "://");
	if (!rest || (strncmp(url, "amqp:", 5) != 0 && strncmp(url, "amqps:", 6) != 0))
	{
		idem_courier_refuse(courier, "the url must begin with amqp:// or amqps://");
		return;
	}
	/* the url is shown to everybody, so not a word of it in errors here */
	rest += 3;
	if (memchr(rest, '@', strcspn(rest, "/")))
	{
		idem_courier_refuse(courier,
							"the url must not hold credentials: use options user and password");
		return;
	}
	copy = idem_strdup(url);
	if (strpbrk(rest, "?#@") ||
		amqp_parse_url(copy, &info) != AMQP_STATUS_OK || !info.host[0])
	{
		idem_courier_refuse(courier, "the url must look like amqp://host:port/vhost");
		free(copy);
		return;
	}
	a.tls = info.ssl;
	a.host = idem_strdup(info.host);
	a.vhost = idem_strdup(info.vhost[0] ? info.vhost : "/");
	snprintf(a.port, sizeof(a.port), "%d", info.port);
	free(copy);
	if (strlen(a.vhost) > SHORTSTR_MAX)
		idem_courier_refuse(courier, "the name of the virtual host is longer than 255 bytes");
}

static void
amqp_start(IdemCourier *courier)
{
	const char *unroutable = idem_option(courier, "on_unroutable");

	signal(SIGPIPE, SIG_IGN);	/* OpenSSL writes without MSG_NOSIGNAL */

	a.user = idem_option(courier, "user");
	a.password = idem_option(courier, "password");
	if (!a.user && !a.password)
		a.user = a.password = "guest";
	else if (!a.user || !a.password)
	{
		idem_courier_refuse(courier, "options \"user\" and \"password\" go together");
		return;
	}
	a.exchange = idem_option(courier, "exchange");
	if (!a.exchange)
		a.exchange = "";
	a.routing_key = idem_option(courier, "routing_key");
	if (strlen(a.exchange) > SHORTSTR_MAX ||
		(a.routing_key && strlen(a.routing_key) > SHORTSTR_MAX))
		idem_courier_refuse(courier,
							"options \"exchange\" and \"routing_key\" have at most 255 bytes");
	a.heartbeat = idem_option_int(courier, "heartbeat", 30, 0, 3600);
	a.connect_timeout = idem_option_int(courier, "connect_timeout_ms", 5000, 1, 600000);
	a.public_only = idem_option_bool(courier, "public_only", false);
	if (unroutable && strcmp(unroutable, "dead") == 0)
		a.unroutable_dead = true;
	else if (unroutable && strcmp(unroutable, "block") != 0)
		idem_courier_refuse(courier, "option \"on_unroutable\" must be block or dead");
	start_url(courier);
	start_tls(courier);
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

/*-------------------------------------------------------------------------
 *
 * nats.c
 *		The courier for NATS JetStream.
 *
 * One connection.  Each message is published to its subject with an answer
 * asked for, in ticket order, as many at once as the relay hands us; delivered
 * means that a stream has answered that it has stored the message, or has it
 * already.  nats.md says what becomes of everything else.
 *
 * The library's own asynchronous publishing does not tell which message was
 * acknowledged in all its versions and waits when the connection is slow, so
 * the subscription to the answers is ours; it is the same on the wire.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nats_parts.h"

#define DRAIN_MS		1500

Nats		nats = {.fd = -1};

/* Can this stand in a header? */
static bool
is_value(const char *s)
{
	return strpbrk(s, "\r\n") == NULL;
}

static bool
is_name(const char *s)
{
	if (*s == '\0')
		return false;
	for (; *s != '\0'; s++)
		if (*s <= ' ' || *s >= 0x7f || *s == ':')
			return false;
	return true;
}

/*
 * Why this is no subject to publish to, or NULL.  Where topics come from
 * whoever may enqueue, they must not reach the server's own interfaces.
 */
static const char *
bad_subject(const char *s)
{
	size_t		len = strlen(s);

	if (len == 0)
		return "the subject is empty";
	if (s[0] == '.' || s[len - 1] == '.' || strstr(s, ".."))
		return "the subject has an empty part";
	for (const char *p = s; *p != '\0'; p++)
		if ((unsigned char) *p <= ' ' || *p == 0x7f)
			return "the subject has blanks or control characters";
	if (strpbrk(s, "*>"))
		return "the subject has wildcards";
	if (strncmp(s, "$JS.", 4) == 0 || strncmp(s, "$SYS.", 5) == 0 ||
		strncmp(s, "_INBOX.", 7) == 0)
		return "the subject is one of the server's own";
	return NULL;
}

typedef struct Headers
{
	natsMsg    *msg;
	const char *problem;
} Headers;

static bool
add_header(void *arg, const char *name, const char *value)
{
	Headers    *h = arg;

	/* those that would speak for us, to JetStream or to consumers */
	if (strncasecmp(name, "Nats-", 5) == 0 || strncasecmp(name, "Idem-", 5) == 0 ||
		strcasecmp(name, "Content-Type") == 0)
		return true;
	if (!is_name(name))
		h->problem = "a header has a name that NATS does not allow";
	else if (!is_value(value))
		h->problem = "a header has line breaks";
	else if (natsMsgHeader_Set(h->msg, name, value) == NATS_OK)
		return true;
	return false;
}

/*
 * What JetStream knows duplicates by.  A stream may take several subjects, and
 * a message may be for more than one of them: the second is no duplicate.
 */
static const char *
dedup_id(const IdemMessage *m, char **buffer)
{
	size_t		size;

	*buffer = NULL;
	if (strcmp(m->destination, m->topic) == 0)
		return m->msg_id;
	size = strlen(m->msg_id) + strlen(m->destination) + 2;
	*buffer = idem_alloc(size);
	snprintf(*buffer, size, "%s:%s", m->msg_id, m->destination);
	return *buffer;
}

/* Make the library's message.  Returns NULL, or why it can never be sent. */
static const char *
encode(const IdemMessage *m, const char *reply, natsMsg **msg)
{
	const char *problem = bad_subject(m->destination);
	Headers		h = {0};
	char	   *buffer = NULL;
	const char *dedup;
	natsStatus	s;

	*msg = NULL;
	if (problem)
		return problem;
	if ((int64_t) m->body_len > natsConnection_GetMaxPayload(nats.connection))
		return "the message is larger than the server's max_payload";
	s = natsMsg_Create(&h.msg, m->destination, reply, m->body, (int) m->body_len);

	/* each header costs, here and in the stream: say nothing twice */
	dedup = dedup_id(m, &buffer);
	if (s == NATS_OK)
		s = natsMsgHeader_Set(h.msg, "Nats-Msg-Id", dedup);
	if (s == NATS_OK && dedup != m->msg_id)
		s = natsMsgHeader_Set(h.msg, "Idem-Id", m->msg_id);
	if (s == NATS_OK && dedup != m->msg_id && is_value(m->topic))
		s = natsMsgHeader_Set(h.msg, "Idem-Topic", m->topic);
	if (s == NATS_OK && m->key && is_value(m->key))
		s = natsMsgHeader_Set(h.msg, "Idem-Key", m->key);
	if (s == NATS_OK && is_value(m->content_type))
		s = natsMsgHeader_Set(h.msg, "Content-Type", m->content_type);
	free(buffer);
	if (s != NATS_OK)
		problem = "the message cannot be encoded";
	else if (m->headers && !idem_headers_each(m->headers, add_header, &h))
		problem = h.problem ? h.problem : "the headers cannot be sent";
	if (problem)
	{
		natsMsg_Destroy(h.msg);
		return problem;
	}
	*msg = h.msg;
	return NULL;
}

/* The subject for answers, up to the number, and the number. */
static const char *
reply_to(uint64_t tag)
{
	static char reply[sizeof(nats.reply) + 24];
	char		digits[24];
	int			n = 0;
	char	   *p = reply + nats.reply_len;

	memcpy(reply, nats.reply, nats.reply_len);
	do
		digits[n++] = (char) ('0' + tag % 10);
	while ((tag /= 10) > 0);
	while (n > 0)
		*p++ = digits[--n];
	*p = '\0';
	return reply;
}

/* Give a message to the library.  Returns false if the connection is no more. */
static bool
publish(IdemCourier *courier, IdemMessage *m, int64_t now, uint64_t begin)
{
	natsMsg    *msg;
	natsStatus	s;
	const char *problem = encode(m, reply_to(nats.next_tag), &msg);

	if (problem)
	{
		nats_settle(courier, m, IDEM_PERMANENT, 0, problem);
		return true;
	}
	s = natsConnection_PublishMsg(nats.connection, msg);
	natsMsg_Destroy(msg);
	switch (s)
	{
		case NATS_OK:
			break;
		case NATS_MAX_PAYLOAD:
			nats_settle(courier, m, IDEM_PERMANENT, 0,
						"message and headers are larger than the server's max_payload");
			return true;
		case NATS_INVALID_SUBJECT:
		case NATS_INVALID_ARG:
			nats_settle(courier, m, IDEM_PERMANENT, 0, "the message cannot be encoded");
			return true;
		case NATS_NO_SERVER_SUPPORT:
			nats_lose(courier, IDEM_STATE_BLOCKED, "the server does not know headers");
			nats_settle(courier, m, IDEM_RETURNED, 0, "the server does not know headers");
			return false;
		default:
			nats_lose(courier, IDEM_STATE_DOWN, "connection to the server lost: %s",
					  natsStatus_GetText(s));
			nats_settle(courier, m, IDEM_RETURNED, 0, "connection to the server lost");
			return false;
	}
	m->tag = nats.next_tag++;
	idem_list_add(&nats.sent, m);
	*SLOT(m->tag) = (Sent) {.message = m, .at = now, .begin = begin};
	return true;
}

/* Do whatever can be done now. */
void
nats_pump(IdemCourier *courier)
{
	if (nats.phase == PHASE_NONE && nats.waiting.head)
	{
		if (idem_courier_quitting(courier))
			idem_list_return(courier, &nats.waiting, NULL, "quitting");
		else
			nats_connect(courier);
	}
	nats.waiting_bytes = 0;
	while (nats.phase == PHASE_UP)
	{
		int			before = natsConnection_Buffered(nats.connection);
		int64_t		now = idem_courier_now();
		size_t		size = before > 0 ? (size_t) before : 0;

		while (nats.waiting.head && size < OUT_ENOUGH && !SLOT(nats.next_tag)->message)
		{
			IdemMessage *m = nats.waiting.head;

			/* headers come to less than that, for most */
			size += m->body_len + 200;
			idem_list_remove(&nats.waiting, m);
			if (!publish(courier, m, now, nats.written + (before > 0 ? (size_t) before : 0)))
				return;
		}
		if (natsConnection_Buffered(nats.connection) <= 0)
			break;
		if (!nats_flush(courier))
			return;
		if (natsConnection_Buffered(nats.connection) > 0)
			break;				/* the socket is full */
	}
	nats_watch(courier);
	nats_set_timer(courier);
}

void
nats_set_timer(IdemCourier *courier)
{
	int64_t		next = INT64_MAX;
	int64_t		now = idem_courier_now();

	if (nats.sent.head)
		next = SLOT(nats.sent.head->tag)->at + nats.timeout;
	if (nats.drain_deadline && nats.drain_deadline < next)
		next = nats.drain_deadline;
	idem_courier_timer(courier, next == INT64_MAX ? -1 :
					   next > now ? next - now : 0);
}

/* What has come in is sent while more comes in. */
static void
nats_message(IdemCourier *courier, IdemMessage *m)
{
	idem_list_add(&nats.waiting, m);
	nats.waiting_bytes += m->body_len + 200;
	if (nats.waiting_bytes >= SEND_ENOUGH && nats.phase == PHASE_UP)
		nats_pump(courier);
}

static void
nats_timer(IdemCourier *courier)
{
	if (nats.drain_deadline && idem_courier_now() >= nats.drain_deadline)
	{
		nats.drain_deadline = 0;
		nats_lose(courier, IDEM_STATE_DOWN, "quit before the server answered");
		return;
	}
	nats_overdue(courier);
	nats_pump(courier);
}

static void
nats_drain(IdemCourier *courier)
{
	idem_list_return(courier, &nats.waiting, NULL, "quitting");
	if (!nats.sent.head)
		return;
	nats.drain_deadline = idem_courier_now() + DRAIN_MS;
	nats_set_timer(courier);
}

static void
nats_start(IdemCourier *courier)
{
	if (!idem_url_read(courier, "nats", "natss", 4222, &nats.url))
		return;
	if (*nats.url.path != '\0')
		idem_courier_refuse(courier, "the url must look like nats://host:port");
	nats.user = idem_option(courier, "user");
	nats.password = idem_option(courier, "password");
	nats.token = idem_option(courier, "token");
	nats.creds = idem_option(courier, "creds");
	if (!nats.user != !nats.password)
		idem_courier_refuse(courier, "options \"user\" and \"password\" go together");
	if ((nats.user != NULL) + (nats.token != NULL) + (nats.creds != NULL) > 1)
		idem_courier_refuse(courier, "options \"user\", \"token\" and \"creds\" exclude each other");
	if (nats.creds && (!strstr(nats.creds, "BEGIN NATS USER JWT") ||
					   !strstr(nats.creds, "BEGIN USER NKEY SEED")))
		idem_courier_refuse(courier, "option \"creds\" holds no credentials");
	nats.tls_ca = idem_option(courier, "tls_ca");
	nats.tls_cert = idem_option(courier, "tls_cert");
	nats.tls_key = idem_option(courier, "tls_key");
	if (!nats.url.tls && (nats.tls_ca || nats.tls_cert || nats.tls_key))
		idem_courier_refuse(courier, "tls_ca, tls_cert and tls_key need a natss url");
	if (!nats.tls_cert != !nats.tls_key)
		idem_courier_refuse(courier, "options \"tls_cert\" and \"tls_key\" go together");
	nats.inbox = idem_option(courier, "inbox_prefix");
	if (nats.inbox && (bad_subject(nats.inbox) || strlen(nats.inbox) > 32))
		idem_courier_refuse(courier, "option \"inbox_prefix\" must be a subject of at most 32 bytes");
	nats.timeout = idem_option_int(courier, "timeout_ms", 10000, 1, 24 * 3600 * 1000);
	nats.heartbeat = idem_option_int(courier, "heartbeat", 30, 0, 3600);
	nats.connect_timeout = idem_option_int(courier, "connect_timeout_ms", 5000, 1, 3600 * 1000);
	nats.public_only = idem_option_bool(courier, "public_only", false);
	nats_link_start();
}

static const char *
nats_library(void)
{
	static char name[64];

	snprintf(name, sizeof(name), "cnats/%s", nats_GetVersion());
	return name;
}

static const char *const nats_options[] = {
	"url", "user", "password", "token", "creds", "timeout_ms", "heartbeat",
	"connect_timeout_ms", "inbox_prefix", "tls_ca", "tls_cert", "tls_key",
	"public_only", NULL
};

const IdemTransport idem_transport = {
	.program = "idem-courier-nats",
	.library = nats_library,
	.options = nats_options,
	.start = nats_start,
	.message = nats_message,
	.round = nats_pump,
	.timer = nats_timer,
	.drain = nats_drain,
	.stop = nats_close,
};

/*-------------------------------------------------------------------------
 *
 * redis.c
 *		The courier for Redis Streams.
 *
 * One connection, one XADD for each message, in ticket order, as many at once
 * as the relay hands us; delivered means that Redis has answered with the id of
 * the entry.  redis.md says what becomes of everything else, and why entries
 * do not get ids of ours.
 *
 * hiredis reads and writes; connecting is ours (redis_link.c), so nothing here
 * ever waits, but for the resolution of a name.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "redis_parts.h"

#define DRAIN_MS		1500
#define REGISTER		"idem:" /* what the names of registers begin with */

Redis		redis = {.fd = -1};

/*
 * An entry, and the note that it is there, or neither: a script is one step
 * for Redis, for its replicas and for its files.  XADD comes first, since what
 * a script has done before it fails stays done.
 */
const char *const redis_script =
	"if redis.call('EXISTS', KEYS[2]) == 1 then return 0 end\n"
	"local id = redis.call('XADD', KEYS[1], unpack(ARGV, 2))\n"
	"redis.call('SET', KEYS[2], id, 'EX', ARGV[1])\n"
	"return id";

static char script_sha[64];

void
redis_script_known(const char *sha)
{
	snprintf(script_sha, sizeof(script_sha), "%s", sha);
}

/*
 * Commands: arrays of strings with their lengths, written one after another,
 * so that no message is copied more often than needed.
 */

static char *
reserve(size_t size)
{
	if (redis.out_len + size > redis.out_size)
	{
		redis.out_size = (redis.out_len + size) * 3 / 2;
		redis.out = idem_realloc(redis.out, redis.out_size);
	}
	return redis.out + redis.out_len;
}

/* Write a number; returns what follows it. */
static char *
decimal(char *p, uint64_t number)
{
	char		digits[24];
	int			n = 0;

	do
		digits[n++] = (char) ('0' + number % 10);
	while ((number /= 10) > 0);
	while (n > 0)
		*p++ = digits[--n];
	return p;
}

/* A letter, a number, the end of the line. */
static void
put_number(char letter, size_t number)
{
	char	   *p = reserve(32);
	char	   *begin = p;

	*p++ = letter;
	p = decimal(p, number);
	*p++ = '\r';
	*p++ = '\n';
	redis.out_len += (size_t) (p - begin);
}

static void
put_bytes(const char *bytes, size_t len)
{
	char	   *p;

	put_number('$', len);
	p = reserve(len + 2);
	memcpy(p, bytes, len);
	p[len] = '\r';
	p[len + 1] = '\n';
	redis.out_len += len + 2;
}

void
redis_put_arg(const char *arg)
{
	put_bytes(arg, strlen(arg));
}

/* Begin a command with so many arguments behind its name. */
void
redis_put_command(int nargs, const char *command)
{
	put_number('*', (size_t) nargs + 1);
	redis_put_arg(command);
}

static bool
count_header(void *arg, const char *name, const char *value)
{
	(void) name;
	(void) value;
	++*(int *) arg;
	return true;
}

static bool
put_header(void *arg, const char *name, const char *value)
{
	size_t		len = strlen(name);
	char	   *p;

	(void) arg;
	put_number('$', len + 7);
	p = reserve(len + 9);
	memcpy(p, "header.", 7);
	memcpy(p + 7, name, len);
	p[len + 7] = '\r';
	p[len + 8] = '\n';
	redis.out_len += len + 9;
	redis_put_arg(value);
	return true;
}

/* Encode a message.  Returns NULL, or why it can never be sent. */
static const char *
encode(const IdemMessage *m)
{
	char		time[24];
	int			headers = 0;
	int			nargs;

	if (*m->destination == '\0')
		return "the name of the stream is empty";
	if (!idem_headers_each(m->headers, count_header, &headers))
		return "the headers cannot be sent";

	/* the stream, its limit, the id, and pairs of fields */
	nargs = 2 + (*redis.maxlen ? 3 : 0) + 2 * (5 + (m->key != NULL) + headers);
	if (*redis.dedup)
	{
		size_t		stream = strlen(m->destination);
		size_t		id = strlen(m->msg_id);
		size_t		len = strlen(REGISTER) + stream + 1 + id;
		char	   *p;

		redis_put_command(nargs + 4, "EVALSHA");
		redis_put_arg(script_sha);
		redis_put_arg("2");
		redis_put_arg(m->destination);
		put_number('$', len);
		p = reserve(len + 3);
		sprintf(p, REGISTER "%s:%s\r\n", m->destination, m->msg_id);
		redis.out_len += len + 2;
		redis_put_arg(redis.dedup);
	}
	else
	{
		redis_put_command(nargs, "XADD");
		redis_put_arg(m->destination);
	}
	if (*redis.maxlen)
	{
		redis_put_arg("MAXLEN");
		redis_put_arg(redis.maxlen_exact ? "=" : "~");
		redis_put_arg(redis.maxlen);
	}
	redis_put_arg("*");
	redis_put_arg("id");
	redis_put_arg(m->msg_id);
	redis_put_arg("topic");
	redis_put_arg(m->topic);
	if (m->key)
	{
		redis_put_arg("key");
		redis_put_arg(m->key);
	}
	redis_put_arg("enqueued_at");
	put_bytes(time, (size_t) (decimal(time, (uint64_t) m->enqueued_at) - time));
	redis_put_arg("content_type");
	redis_put_arg(m->content_type);
	if (headers > 0)
		idem_headers_each(m->headers, put_header, NULL);
	redis_put_arg("body");
	put_bytes(m->body, m->body_len);
	return NULL;
}

/* Do whatever can be done now. */
void
redis_pump(IdemCourier *courier)
{
	if (redis.phase == PHASE_NONE && redis.waiting.head)
	{
		if (idem_courier_quitting(courier))
			idem_list_return(courier, &redis.waiting, NULL, "quitting");
		else
			redis_connect(courier);
	}
	if (redis.dying && !redis.sent.head)
	{
		redis_lose(courier, IDEM_STATE_DOWN, "connecting again: %s", redis.why);
		return;
	}

	redis.waiting_bytes = 0;
	while (redis.phase >= PHASE_LOGIN)
	{
		while (redis.phase == PHASE_UP && !redis.dying && !redis.unwritten &&
			   redis.waiting.head && redis.out_len < OUT_ENOUGH)
		{
			IdemMessage *m = redis.waiting.head;
			const char *problem = encode(m);

			idem_list_remove(&redis.waiting, m);
			if (problem)
			{
				idem_courier_outcome(courier, m, IDEM_PERMANENT, 0, 0, "%s", problem);
				continue;
			}
			if (!redis.sent.head)
				redis.last_answer = idem_courier_now();
			m->tag = redis.next_tag++;
			idem_list_add(&redis.sent, m);
		}
		redis_hand_over();
		if (!redis.unwritten)
			break;
		if (!redis_flush(courier))
			return;
		if (redis.unwritten)
			break;				/* the socket is full */
	}
	redis_watch(courier);
	redis_set_timer(courier);
}

/*
 * What has come in is sent while more comes in: the server is another process,
 * and so is the relay.  All three have something to do then.
 */
static void
redis_message(IdemCourier *courier, IdemMessage *m)
{
	idem_list_add(&redis.waiting, m);
	redis.waiting_bytes += m->body_len + 128;
	if (redis.waiting_bytes >= OUT_ENOUGH && redis.phase == PHASE_UP && !redis.unwritten)
		redis_pump(courier);
}

static void
redis_timer(IdemCourier *courier)
{
	int64_t		now = idem_courier_now();

	if (redis.drain_deadline && now >= redis.drain_deadline)
	{
		redis.drain_deadline = 0;
		redis_lose(courier, IDEM_STATE_DOWN, "quit before the server answered");
		return;
	}
	if ((redis.phase == PHASE_TCP || redis.phase == PHASE_LOGIN) && now >= redis.deadline)
	{
		redis_lose(courier, IDEM_STATE_DOWN, "no answer from \"%s\" port %s within %d ms",
				   redis.url.host, redis.url.port, redis.connect_timeout);
		return;
	}
	if (redis.sent.head && now >= redis.last_answer + redis.timeout)
	{
		redis_lose(courier, IDEM_STATE_DOWN, "no answer within %d ms", redis.timeout);
		return;
	}
	redis_pump(courier);
}

static void
redis_drain(IdemCourier *courier)
{
	idem_list_return(courier, &redis.waiting, NULL, "quitting");
	if (!redis.sent.head)
		return;
	redis.drain_deadline = idem_courier_now() + DRAIN_MS;
	redis_set_timer(courier);
}

static void
redis_start(IdemCourier *courier)
{
	int			number;

	if (!idem_url_read(courier, "redis", "rediss", 6379, &redis.url))
		return;
	if (*redis.url.path != '\0')
	{
		char	   *end;
		long		database = strtol(redis.url.path, &end, 10);

		if (*end != '\0' || database < 0 || database > 1000000 || *redis.url.path < '0' ||
			*redis.url.path > '9')
			idem_courier_refuse(courier, "what follows the host in the url must be "
								"the number of a database");
		redis.database = (int) database;
	}
	redis.user = idem_option(courier, "user");
	redis.password = idem_option(courier, "password");
	if (redis.user && !redis.password)
		idem_courier_refuse(courier, "option \"user\" needs option \"password_file\"");
	number = idem_option_int(courier, "maxlen", 0, 0, INT32_MAX);
	if (number > 0)
		snprintf(redis.maxlen, sizeof(redis.maxlen), "%d", number);
	redis.maxlen_exact = idem_option_bool(courier, "maxlen_exact", false);
	if (redis.maxlen_exact && number == 0)
		idem_courier_refuse(courier, "option \"maxlen_exact\" needs option \"maxlen\"");
	number = idem_option_int(courier, "dedup_seconds", 0, 0, INT32_MAX);
	if (number > 0)
		snprintf(redis.dedup, sizeof(redis.dedup), "%d", number);
	redis.timeout = idem_option_int(courier, "timeout_ms", 10000, 1, 24 * 3600 * 1000);
	redis.connect_timeout = idem_option_int(courier, "connect_timeout_ms", 5000, 1, 3600 * 1000);
	redis.public_only = idem_option_bool(courier, "public_only", false);
	redis_tls_options(courier);
}

static const char *
redis_library(void)
{
	static char name[32];

	snprintf(name, sizeof(name), "hiredis/%d.%d.%d",
			 HIREDIS_MAJOR, HIREDIS_MINOR, HIREDIS_PATCH);
	return name;
}

static const char *const redis_options[] = {
	"url", "user", "password", "maxlen", "maxlen_exact", "dedup_seconds",
	"timeout_ms", "connect_timeout_ms", "tls_ca", "tls_cert", "tls_key",
	"public_only", NULL
};

const IdemTransport idem_transport = {
	.program = "idem-courier-redis",
	.library = redis_library,
	.options = redis_options,
	.start = redis_start,
	.message = redis_message,
	.round = redis_pump,
	.timer = redis_timer,
	.drain = redis_drain,
	.stop = redis_close,
};

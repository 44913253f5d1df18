/*-------------------------------------------------------------------------
 *
 * redis_link.c
 *		The connection of the courier for Redis.
 *
 * Name resolution and connecting are ours: addresses are checked before a word
 * is said, and nothing waits, but for the resolution of a name.  From then on
 * hiredis reads and writes.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "redis_parts.h"

static void redis_ready(IdemCourier *courier, int fd, short revents, void *arg);

void
redis_set_timer(IdemCourier *courier)
{
	int64_t		next = INT64_MAX;
	int64_t		now = idem_courier_now();

	if (redis.phase == PHASE_TCP || redis.phase == PHASE_LOGIN)
		next = redis.deadline;
	else if (redis.sent.head)
		next = redis.last_answer + redis.timeout;
	if (redis.drain_deadline && redis.drain_deadline < next)
		next = redis.drain_deadline;
	idem_courier_timer(courier, next == INT64_MAX ? -1 :
					   next > now ? next - now : 0);
}

/* Forget the connection, without a word about messages. */
void
redis_close(IdemCourier *courier)
{
	if (redis.fd >= 0)
		idem_courier_watch(courier, redis.fd, 0, NULL, NULL);
	if (redis.context)
		redisFree(redis.context);	/* closes the descriptor, too */
	else if (redis.fd >= 0)
		close(redis.fd);
	redis.context = NULL;
	redis.fd = -1;
	redis_tls_end();
	if (redis.addresses)
		freeaddrinfo(redis.addresses);
	redis.addresses = redis.address = NULL;
	redis.phase = PHASE_NONE;
	redis.asked = 0;
	redis.unwritten = redis.dying = false;
	redis.out_len = 0;
}

void
redis_lose(IdemCourier *courier, IdemState state, const char *format,...)
{
	char		why[768];
	va_list		args;
	IdemMessage *m;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);

	redis_close(courier);
	redis_set_timer(courier);
	redis.trouble = false;
	idem_courier_state(courier, state, 0, "%s", why);
	while ((m = redis.sent.head))
	{
		idem_list_remove(&redis.sent, m);
		idem_courier_outcome(courier, m, IDEM_UNKNOWN, 0, 0, "%s", why);
	}
	idem_list_return(courier, &redis.waiting, NULL, why);
}

void
redis_watch(IdemCourier *courier)
{
	if (redis.fd < 0)
		return;
	idem_courier_watch(courier, redis.fd,
					   redis.phase == PHASE_TCP ? POLLOUT :
					   POLLIN | (redis.unwritten ? POLLOUT : 0), redis_ready, NULL);
}

/* Give hiredis what has been encoded. */
void
redis_hand_over(void)
{
	if (redis.out_len == 0)
		return;
	if (redisAppendFormattedCommand(redis.context, redis.out, redis.out_len) != REDIS_OK)
		abort();
	redis.out_len = 0;
	redis.unwritten = true;

	/* one large message should not keep its memory for ever */
	if (redis.out_size > 32 * OUT_ENOUGH)
	{
		free(redis.out);
		redis.out = NULL;
		redis.out_size = 0;
	}
}

/* hiredis reports a failure of the connection. */
static void
broken(IdemCourier *courier)
{
	const char *refusal = redis_tls_refusal();

	if (refusal)
		redis_lose(courier, IDEM_STATE_BLOCKED,
				   "the server's certificate is not accepted: %s", refusal);
	else
	{
		char		why[160];

		snprintf(why, sizeof(why), "%s", redis.context->errstr);
		redis_lose(courier, IDEM_STATE_DOWN, "connection to the server lost: %s", why);
	}
}

/* Write what can be written now.  Returns false if the connection is lost. */
bool
redis_flush(IdemCourier *courier)
{
	int			done = 0;

	if (redisBufferWrite(redis.context, &done) != REDIS_OK)
	{
		/* what the server said last may still be readable */
		if (redis.context->err == REDIS_ERR_IO && !redis.url.tls &&
			(errno == EPIPE || errno == ECONNRESET))
		{
			redis.context->err = 0;
			redis.unwritten = false;
			return true;
		}
		broken(courier);
		return false;
	}
	redis.unwritten = !done;
	return true;
}

/* Read what there is.  Returns false if the connection is no more. */
static bool
drink(IdemCourier *courier)
{
	if (redisBufferRead(redis.context) != REDIS_OK)
	{
		broken(courier);
		return false;
	}
	redis.last_answer = idem_courier_now();
	for (;;)
	{
		void	   *reply = NULL;
		bool		up;

		if (redisGetReplyFromReader(redis.context, &reply) != REDIS_OK)
		{
			redis_lose(courier, IDEM_STATE_DOWN, "the server does not speak Redis's protocol");
			return false;
		}
		if (!reply)
			return true;
		up = redis.phase == PHASE_LOGIN ? redis_login_answer(courier, reply) :
			redis_answer(courier, reply);
		freeReplyObject(reply);
		if (!up)
			return false;
	}
}

static void
log_in(IdemCourier *courier)
{
	redis.context = redisConnectFd(redis.fd);
	if (!redis.context)
		abort();
	redis.context->flags &= ~REDIS_BLOCK;
	if (redis.url.tls && !redis_tls_begin())
	{
		broken(courier);
		return;
	}
	redis.phase = PHASE_LOGIN;
	redis.next_tag = 1;
	redis.trouble = false;
	if (redis.password)
	{
		redis.asked |= ASK_AUTH;
		redis_put_command(redis.user ? 2 : 1, "AUTH");
		if (redis.user)
			redis_put_arg(redis.user);
		redis_put_arg(redis.password);
	}
	if (redis.database > 0)
	{
		char		number[16];

		redis.asked |= ASK_SELECT;
		snprintf(number, sizeof(number), "%d", redis.database);
		redis_put_command(1, "SELECT");
		redis_put_arg(number);
	}
	if (*redis.dedup)
	{
		redis.asked |= ASK_SCRIPT;
		redis_put_command(2, "SCRIPT");
		redis_put_arg("LOAD");
		redis_put_arg(redis_script);
	}
	redis.asked |= ASK_NAME;
	redis_put_command(2, "CLIENT");
	redis_put_arg("SETNAME");
	redis_put_arg("idem-courier-redis");
	redis_hand_over();
}

/* Try addresses from redis.address on, until one does or needs waiting for. */
static void
try_address(IdemCourier *courier)
{
	for (; redis.address; redis.address = redis.address->ai_next)
	{
		const char *no = idem_address_refused(redis.address->ai_addr, redis.public_only);
		int			one = 1;

		if (no)
		{
			/* one bad address is enough: names must not lead there at all */
			redis_lose(courier, IDEM_STATE_BLOCKED, "host \"%s\": %s", redis.url.host, no);
			return;
		}
		redis.fd = socket(redis.address->ai_family,
						  SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		if (redis.fd < 0)
		{
			snprintf(redis.why, sizeof(redis.why), "%s", strerror(errno));
			continue;
		}
		setsockopt(redis.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		setsockopt(redis.fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
		if (connect(redis.fd, redis.address->ai_addr, redis.address->ai_addrlen) == 0)
		{
			log_in(courier);
			return;
		}
		if (errno == EINPROGRESS)
		{
			redis.phase = PHASE_TCP;
			return;
		}
		snprintf(redis.why, sizeof(redis.why), "%s", strerror(errno));
		close(redis.fd);
		redis.fd = -1;
	}
	redis_lose(courier, IDEM_STATE_DOWN, "could not connect to \"%s\" port %s: %s",
			   redis.url.host, redis.url.port, redis.why);
}

void
redis_connect(IdemCourier *courier)
{
	struct addrinfo hints = {0};
	int			rc;

	idem_courier_state(courier, IDEM_STATE_CONNECTING, 0, "connecting");
	hints.ai_socktype = SOCK_STREAM;
	snprintf(redis.why, sizeof(redis.why), "no address");
	rc = getaddrinfo(redis.url.host, redis.url.port, &hints, &redis.addresses);
	if (rc != 0)
	{
		redis.addresses = NULL;
		redis_lose(courier, IDEM_STATE_DOWN, "could not resolve \"%s\": %s",
				   redis.url.host, gai_strerror(rc));
		return;
	}
	redis.address = redis.addresses;
	redis.deadline = idem_courier_now() + redis.connect_timeout;
	redis.phase = PHASE_TCP;
	try_address(courier);
}

static void
redis_ready(IdemCourier *courier, int fd, short revents, void *arg)
{
	(void) arg;

	if (redis.phase == PHASE_TCP)
	{
		int			error = 0;
		socklen_t	size = sizeof(error);

		getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
		if (error == 0)
			log_in(courier);
		else
		{
			snprintf(redis.why, sizeof(redis.why), "%s", strerror(error));
			idem_courier_watch(courier, fd, 0, NULL, NULL);
			close(fd);
			redis.fd = -1;
			redis.address = redis.address->ai_next;
			try_address(courier);
		}
	}
	else if (redis.phase > PHASE_TCP && (revents & (POLLIN | POLLHUP | POLLERR)) &&
			 !drink(courier))
		return;
	redis_pump(courier);
}

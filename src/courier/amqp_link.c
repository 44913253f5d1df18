/*-------------------------------------------------------------------------
 *
 * amqp_link.c
 *		The connection of the courier for RabbitMQ.
 *
 * Name resolution, TCP, TLS, reading, writing, deadlines and heartbeats.
 * Nothing here waits, but for the resolution of a name.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>

#include <openssl/err.h>
#include <openssl/x509v3.h>

#include "amqp_parts.h"

static void amqp_ready(IdemCourier *courier, int fd, short revents, void *arg);

void
amqp_set_timer(IdemCourier *courier)
{
	int64_t		next = INT64_MAX;
	int64_t		now = idem_courier_now();

#define SOONEST(t) do { int64_t t_ = (t); if (t_ < next) next = t_; } while (0)
	if (amqp.phase != PHASE_NONE && amqp.phase != PHASE_UP && amqp.phase != PHASE_IDLE)
		SOONEST(amqp.deadline);
	if (amqp.phase >= PHASE_OPEN && amqp.beat > 0)
	{
		SOONEST(amqp.last_write + amqp.beat * 500);
		SOONEST(amqp.last_read + amqp.beat * 2000);
	}
	if (amqp.drain_deadline)
		SOONEST(amqp.drain_deadline);
#undef SOONEST

	idem_courier_timer(courier, next == INT64_MAX ? -1 :
					   next > now ? next - now : 0);
}

void
amqp_close_fd(IdemCourier *courier)
{
	if (amqp.ssl)
		SSL_free(amqp.ssl);
	amqp.ssl = NULL;
	if (amqp.fd >= 0)
	{
		idem_courier_watch(courier, amqp.fd, 0, NULL, NULL);
		close(amqp.fd);
	}
	amqp.fd = -1;
}

/* Forget the connection, without a word about messages. */
static void
hang_up(IdemCourier *courier)
{
	amqp_close_fd(courier);
	if (amqp.codec)
		amqp_destroy_connection(amqp.codec);
	amqp.codec = NULL;
	if (amqp.addresses)
		freeaddrinfo(amqp.addresses);
	amqp.addresses = amqp.address = NULL;
	amqp.phase = PHASE_NONE;
	amqp.out_len = amqp.out_off = 0;
	amqp.in_return = false;
	amqp.throttled = false;
	amqp_set_timer(courier);
}

void
amqp_lose(IdemCourier *courier, IdemState state, const char *format,...)
{
	char		why[768];
	va_list		args;
	uint64_t	written = amqp.written;
	IdemMessage *m;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);

	hang_up(courier);
	amqp.blocked = false;
	idem_courier_state(courier, state, 0, "%s", why);
	while ((m = amqp.sent.head))
	{
		bool		complete = ((Sent *) m->data)->end <= written;

		amqp_queue_remove(&amqp.sent, m);
		amqp_settle(courier, m, complete ? IDEM_UNKNOWN : IDEM_RETURNED, 0, why);
	}
	amqp_return_waiting(courier, why);
}

void
amqp_watch(IdemCourier *courier)
{
	short		events;

	if (amqp.fd < 0)
		return;
	if (amqp.phase == PHASE_TCP)
		events = POLLOUT;
	else if (amqp.phase == PHASE_TLS)
		events = amqp.tls_wants;
	else
		events = POLLIN | (amqp.out_off < amqp.out_len ? POLLOUT : 0);
	idem_courier_watch(courier, amqp.fd, events, amqp_ready, NULL);
}

char *
amqp_reserve(size_t size)
{
	if (amqp.out_off > 0 && amqp.out_off == amqp.out_len)
		amqp.out_off = amqp.out_len = 0;
	if (amqp.out_len + size > amqp.out_size)
	{
		if (amqp.out_off > 0)
		{
			memmove(amqp.out, amqp.out + amqp.out_off, amqp.out_len - amqp.out_off);
			amqp.out_len -= amqp.out_off;
			amqp.out_off = 0;
		}
		if (amqp.out_len + size > amqp.out_size)
		{
			amqp.out_size = (amqp.out_len + size) * 3 / 2;
			amqp.out = idem_realloc(amqp.out, amqp.out_size);
		}
	}
	return amqp.out + amqp.out_len;
}

/* Write what can be written now.  Returns false if the connection is lost. */
bool
amqp_flush(IdemCourier *courier)
{
	while (amqp.out_off < amqp.out_len)
	{
		size_t		n = amqp.out_len - amqp.out_off;
		ssize_t		rc;

		if (amqp.ssl)
		{
			ERR_clear_error();
			rc = SSL_write(amqp.ssl, amqp.out + amqp.out_off,
						   n > (1 << 30) ? 1 << 30 : (int) n);
			if (rc <= 0)
			{
				int			e = SSL_get_error(amqp.ssl, (int) rc);

				if (e == SSL_ERROR_WANT_WRITE || e == SSL_ERROR_WANT_READ)
					break;
				amqp_lose(courier, IDEM_STATE_DOWN, "connection to the broker lost");
				return false;
			}
		}
		else
		{
			rc = send(amqp.fd, amqp.out + amqp.out_off, n, MSG_NOSIGNAL);
			if (rc < 0)
			{
				if (errno == EINTR)
					continue;
				if (errno == EAGAIN || errno == EWOULDBLOCK)
					break;
				/* what the broker said last may still be readable */
				if (amqp.phase > PHASE_TLS && (errno == EPIPE || errno == ECONNRESET))
				{
					amqp.out_off = amqp.out_len;
					break;
				}
				amqp_lose(courier, IDEM_STATE_DOWN,
					 "connection to the broker lost: %s", strerror(errno));
				return false;
			}
		}
		amqp.out_off += rc;
		amqp.written += rc;
		amqp.last_write = idem_courier_now();
	}

	/* one large message should not keep its memory for ever */
	if (amqp.out_off == amqp.out_len && amqp.out_size > 4 * OUT_ENOUGH)
	{
		free(amqp.out);
		amqp.out = NULL;
		amqp.out_size = amqp.out_len = amqp.out_off = 0;
	}
	return true;
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

		if (amqp.ssl)
		{
			ERR_clear_error();
			n = SSL_read(amqp.ssl, buffer, sizeof(buffer));
			if (n <= 0)
			{
				int			e = SSL_get_error(amqp.ssl, (int) n);

				if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE)
					return true;
				n = 0;
			}
		}
		else
		{
			n = recv(amqp.fd, buffer, sizeof(buffer), 0);
			if (n < 0 && errno == EINTR)
				continue;
			if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
				return true;
		}
		if (n <= 0)
		{
			amqp_lose(courier, IDEM_STATE_DOWN, amqp.phase < PHASE_OPEN ?
				 "the broker closed the connection during the handshake" :
				 "connection to the broker lost");
			return false;
		}

		amqp.last_read = idem_courier_now();
		in.bytes = buffer;
		in.len = n;
		while (in.len > 0)
		{
			amqp_frame_t f;
			int			used = amqp_handle_input(amqp.codec, in, &f);

			if (used < 0)
			{
				amqp_lose(courier, IDEM_STATE_DOWN, "the broker sent what is not AMQP: %s",
					 amqp_error_string2(used));
				return false;
			}
			in.bytes = (char *) in.bytes + used;
			in.len -= used;
			if (f.frame_type != 0 && !amqp_take_frame(courier, &f))
				return false;
			amqp_maybe_release_buffers(amqp.codec);
		}
	}
}

static void
start_amqp(void)
{
	char	   *p;

	amqp.codec = amqp_new_connection();
	if (!amqp.codec)
		abort();
	amqp.frame_max = FRAME_MAX;
	amqp_bytes_free(amqp.return_exchange);
	amqp_bytes_free(amqp.return_key);
	amqp.return_exchange = amqp.return_key = amqp_empty_bytes;
	p = amqp_reserve(8);
	memcpy(p, "AMQP\0\0\x09\x01", 8);
	amqp.out_len += 8;
	amqp.phase = PHASE_START;
	amqp.last_read = amqp.last_write = idem_courier_now();
}

static void
go_on_tls(IdemCourier *courier)
{
	int			rc;
	int			e;
	long		verdict;

	ERR_clear_error();
	rc = SSL_connect(amqp.ssl);
	if (rc == 1)
	{
		start_amqp();
		return;
	}
	e = SSL_get_error(amqp.ssl, rc);
	if (e == SSL_ERROR_WANT_READ || e == SSL_ERROR_WANT_WRITE)
	{
		amqp.tls_wants = e == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
		return;
	}
	verdict = SSL_get_verify_result(amqp.ssl);
	if (verdict != X509_V_OK)
		amqp_lose(courier, IDEM_STATE_BLOCKED, "the broker's certificate is not accepted: %s",
			 X509_verify_cert_error_string(verdict));
	else
	{
		const char *reason = ERR_reason_error_string(ERR_peek_error());

		amqp_lose(courier, IDEM_STATE_DOWN, "the TLS handshake failed: %s",
			 reason ? reason : "connection closed");
	}
}

static void
connected(IdemCourier *courier)
{
	struct in6_addr ip;

	if (!amqp.tls)
	{
		start_amqp();
		return;
	}
	amqp.ssl = SSL_new(amqp.ctx);
	if (!amqp.ssl || SSL_set_fd(amqp.ssl, amqp.fd) != 1)
		abort();
	if (inet_pton(AF_INET, amqp.host, &ip) == 1 || inet_pton(AF_INET6, amqp.host, &ip) == 1)
	{
		if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(amqp.ssl), amqp.host) != 1)
			abort();
	}
	else
	{
		SSL_set_hostflags(amqp.ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
		if (SSL_set1_host(amqp.ssl, amqp.host) != 1 ||
			SSL_set_tlsext_host_name(amqp.ssl, amqp.host) != 1)
			abort();
	}
	amqp.phase = PHASE_TLS;
	go_on_tls(courier);
}

/* Try addresses from amqp.address on, until one does or needs waiting for. */
static void
try_address(IdemCourier *courier)
{
	for (; amqp.address; amqp.address = amqp.address->ai_next)
	{
		const char *no = idem_address_refused(amqp.address->ai_addr, amqp.public_only);
		int			one = 1;

		if (no)
		{
			/* one bad address is enough: names must not lead there at all */
			amqp_lose(courier, IDEM_STATE_BLOCKED, "host \"%s\": %s", amqp.host, no);
			return;
		}
		amqp.fd = socket(amqp.address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
		if (amqp.fd < 0)
		{
			snprintf(amqp.why, sizeof(amqp.why), "%s", strerror(errno));
			continue;
		}
		setsockopt(amqp.fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		setsockopt(amqp.fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
		if (connect(amqp.fd, amqp.address->ai_addr, amqp.address->ai_addrlen) == 0)
		{
			connected(courier);
			return;
		}
		if (errno == EINPROGRESS)
		{
			amqp.phase = PHASE_TCP;
			return;
		}
		snprintf(amqp.why, sizeof(amqp.why), "%s", strerror(errno));
		close(amqp.fd);
		amqp.fd = -1;
	}
	amqp_lose(courier, IDEM_STATE_DOWN, "could not connect to \"%s\" port %s: %s",
		 amqp.host, amqp.port, amqp.why);
}

void
amqp_connect(IdemCourier *courier)
{
	struct addrinfo hints = {0};
	int			rc;

	idem_courier_state(courier, IDEM_STATE_CONNECTING, 0, "connecting");
	hints.ai_socktype = SOCK_STREAM;
	amqp.written = 0;
	amqp.beat = 0;
	amqp.blocked = false;
	snprintf(amqp.why, sizeof(amqp.why), "no address");
	rc = getaddrinfo(amqp.host, amqp.port, &hints, &amqp.addresses);
	if (rc != 0)
	{
		amqp.addresses = NULL;
		amqp_lose(courier, IDEM_STATE_DOWN, "could not resolve \"%s\": %s",
			 amqp.host, gai_strerror(rc));
		return;
	}
	amqp.address = amqp.addresses;
	amqp.deadline = idem_courier_now() + amqp.connect_timeout;
	amqp.phase = PHASE_TCP;
	try_address(courier);
}

static void
amqp_ready(IdemCourier *courier, int fd, short revents, void *arg)
{
	(void) fd;
	(void) revents;
	(void) arg;

	if (amqp.phase == PHASE_TCP)
	{
		int			error = 0;
		socklen_t	size = sizeof(error);

		getsockopt(amqp.fd, SOL_SOCKET, SO_ERROR, &error, &size);
		if (error == 0)
			connected(courier);
		else
		{
			snprintf(amqp.why, sizeof(amqp.why), "%s", strerror(error));
			amqp_close_fd(courier);
			amqp.address = amqp.address->ai_next;
			try_address(courier);
		}
	}
	else if (amqp.phase == PHASE_TLS)
		go_on_tls(courier);
	else if (amqp.phase > PHASE_TLS && !drink(courier))
		return;
	amqp_pump(courier);
}

/*-------------------------------------------------------------------------
 *
 * nats_link.c
 *		The connection of the courier for NATS.
 *
 * The library waits while it connects, so a thread does that, after a look at
 * the addresses; it connects to addresses, not to names, which may have
 * changed meanwhile.  Once connected, the library reads and writes when we
 * tell it to.  What it has to say from its own threads (the connection is
 * closed, an error came in, it wants to write a ping) is left in a box, with a
 * mutex, and an eventfd has us look there.
 *
 * It never reconnects by itself: that is the relay's decision.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>
#include <arpa/inet.h>

#include "nats_parts.h"

/* How connecting went. */
typedef struct Attempt
{
	natsConnection *connection; /* NULL: it failed */
	natsSubscription *answers;
	char		reply[64];
	int			fd;
	IdemState	state;			/* if it failed */
	char		why[512];
} Attempt;

static struct
{
	pthread_mutex_t lock;
	Attempt    *attempt;		/* has ended */
	bool		closed;
	char		error[512];		/* of permissions; or empty */
	natsMsg   **answers;
	size_t		n_answers;
	size_t		max_answers;
}			box = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int	wake_fd = -1;
static pthread_t main_thread;

static void nats_ready(IdemCourier *courier, int fd, short revents, void *arg);
static void take_answers(IdemCourier *courier);
static void look_into_box(IdemCourier *courier, int fd, short revents, void *arg);

static void
wake(void)
{
	uint64_t	one = 1;

	(void) !write(wake_fd, &one, sizeof(one));
}

/*
 * Called by the library, from any thread.
 */

static natsStatus
on_attach(void **user, void *loop, natsConnection *nc, natsSock fd)
{
	Attempt    *attempt = loop;

	(void) nc;
	attempt->fd = fd;
	*user = NULL;
	return NATS_OK;
}

static natsStatus
on_read(void *user, bool add)
{
	(void) user;
	(void) add;
	return NATS_OK;
}

static natsStatus
on_write(void *user, bool add)
{
	(void) user;
	if (add && !pthread_equal(pthread_self(), main_thread))
		wake();
	return NATS_OK;
}

static natsStatus
on_detach(void *user)
{
	(void) user;
	return NATS_OK;
}

static void
on_closed(natsConnection *nc, void *arg)
{
	(void) nc;
	(void) arg;
	pthread_mutex_lock(&box.lock);
	box.closed = true;
	pthread_mutex_unlock(&box.lock);
	wake();
}

static void
on_error(natsConnection *nc, natsSubscription *sub, natsStatus err, void *arg)
{
	const char *text = NULL;

	(void) sub;
	(void) arg;
	if (err != NATS_NOT_PERMITTED)
		return;
	natsConnection_GetLastError(nc, &text);
	pthread_mutex_lock(&box.lock);
	snprintf(box.error, sizeof(box.error), "%s", text ? text : natsStatus_GetText(err));
	pthread_mutex_unlock(&box.lock);
	wake();
}

/*
 * An answer.  The library would let us fetch answers by ourselves, too, but
 * then does not say of which message it is that nobody took it.
 */
static void
on_answer(natsConnection *nc, natsSubscription *sub, natsMsg *msg, void *arg)
{
	bool		first;

	(void) nc;
	(void) sub;
	(void) arg;
	pthread_mutex_lock(&box.lock);
	first = box.n_answers == 0;
	if (box.n_answers == box.max_answers)
	{
		box.max_answers = box.max_answers * 2 + 64;
		box.answers = idem_realloc(box.answers, sizeof(natsMsg *) * box.max_answers);
	}
	box.answers[box.n_answers++] = msg;
	pthread_mutex_unlock(&box.lock);
	if (first)
		wake();
}

/*
 * Connecting, in a thread of its own.  The options do not change.
 */

/*
 * What stands below the line with this name in the contents of a .creds file.
 */
static char *
credential(const char *name)
{
	const char *p = strstr(nats.creds, name);

	p = p ? strchr(p, '\n') : NULL;
	if (!p)
		return NULL;
	p += strspn(p, "\r\n \t");
	return idem_strndup(p, strcspn(p, "\r\n \t"));
}

static natsStatus
give_jwt(char **jwt, char **error, void *arg)
{
	(void) arg;
	*jwt = credential("BEGIN NATS USER JWT");
	if (*jwt)
		return NATS_OK;
	*error = idem_strdup("option \"creds\" holds no credentials");
	return NATS_ERR;
}

static natsStatus
sign(char **error, unsigned char **signature, int *len, const char *nonce, void *arg)
{
	char	   *seed = credential("BEGIN USER NKEY SEED");
	natsStatus	s = NATS_ERR;

	(void) arg;
	if (seed)
	{
		s = nats_Sign(seed, nonce, signature, len);
		explicit_bzero(seed, strlen(seed));
	}
	free(seed);
	if (s != NATS_OK)
		*error = idem_strdup("option \"creds\" holds no key");
	return s;
}

static natsStatus
set_options(natsOptions *o, Attempt *attempt, const char *address)
{
	natsStatus	s = natsOptions_SetURL(o, address);

#define SET(call) do { if (s == NATS_OK) s = (call); } while (0)
	SET(natsOptions_SetName(o, "idem-courier-nats"));
	SET(natsOptions_SetTimeout(o, nats.connect_timeout));
	SET(natsOptions_SetAllowReconnect(o, false));
	SET(natsOptions_SetIgnoreDiscoveredServers(o, true));
	SET(natsOptions_SetPingInterval(o, (int64_t) nats.heartbeat * 1000));
	SET(natsOptions_SetMaxPingsOut(o, 1));
	SET(natsOptions_SetIOBufSize(o, 64 * 1024));
	SET(natsOptions_SetClosedCB(o, on_closed, NULL));
	SET(natsOptions_SetErrorHandler(o, on_error, NULL));
	SET(natsOptions_SetEventLoop(o, attempt, on_attach, on_read, on_write, on_detach));
	if (nats.user)
		SET(natsOptions_SetUserInfo(o, nats.user, nats.password));
	if (nats.token)
		SET(natsOptions_SetToken(o, nats.token));
	if (nats.creds)
		SET(natsOptions_SetUserCredentialsCallbacks(o, give_jwt, NULL, sign, NULL));
	if (nats.url.tls)
	{
		SET(natsOptions_SetSecure(o, true));
		SET(natsOptions_SetExpectedHostname(o, nats.url.host));
		if (nats.tls_ca)
			SET(natsOptions_SetCATrustedCertificates(o, nats.tls_ca));
		if (nats.tls_cert)
			SET(natsOptions_SetCertificatesChain(o, nats.tls_cert, nats.tls_key));
	}
#undef SET
	return s;
}

/* What a failure to connect means. */
static void
explain(Attempt *attempt, natsStatus s)
{
	natsStatus	last;
	const char *text = nats_GetLastError(&last);

	if (!text || *text == '\0')
		text = natsStatus_GetText(s);
	else if (*text == '(' && strstr(text, "): "))
		text = strstr(text, "): ") + 3; /* where in the library */
	attempt->state = IDEM_STATE_DOWN;
	switch (s)
	{
		case NATS_CONNECTION_AUTH_FAILED:
		case NATS_NOT_PERMITTED:
			attempt->state = IDEM_STATE_BLOCKED;
			snprintf(attempt->why, sizeof(attempt->why), "the server refuses to let us in: %s", text);
			break;
		case NATS_SECURE_CONNECTION_WANTED:
			attempt->state = IDEM_STATE_BLOCKED;
			snprintf(attempt->why, sizeof(attempt->why), "the server does not offer TLS");
			break;
		case NATS_SECURE_CONNECTION_REQUIRED:
			attempt->state = IDEM_STATE_BLOCKED;
			snprintf(attempt->why, sizeof(attempt->why), "the server wants TLS: use natss in the url");
			break;
		case NATS_SSL_ERROR:
			if (strstr(text, "certificate") || strstr(text, ":depth="))
				attempt->state = IDEM_STATE_BLOCKED;
			snprintf(attempt->why, sizeof(attempt->why), "%s: %s",
					 attempt->state == IDEM_STATE_BLOCKED ?
					 "the server's certificate is not accepted" : "the TLS handshake failed", text);
			break;
		case NATS_INVALID_ARG:
		case NATS_ERR:
			/* from options, keys and credentials: whatever is wrong stays wrong */
			attempt->state = IDEM_STATE_BLOCKED;
			snprintf(attempt->why, sizeof(attempt->why), "the options cannot be used: %s", text);
			break;
		default:
			snprintf(attempt->why, sizeof(attempt->why), "could not connect to \"%s\" port %s: %s",
					 nats.url.host, nats.url.port, text);
	}
}

static bool
try_address(Attempt *attempt, const struct sockaddr *address, socklen_t len)
{
	char		host[NI_MAXHOST];
	char		url[NI_MAXHOST + 32];
	natsOptions *o = NULL;
	natsInbox  *inbox = NULL;
	natsStatus	s;

	if (getnameinfo(address, len, host, sizeof(host), NULL, 0, NI_NUMERICHOST) != 0)
		return false;
	snprintf(url, sizeof(url), strchr(host, ':') ? "nats://[%s]:%s" : "nats://%s:%s",
			 host, nats.url.port);
	s = natsOptions_Create(&o);
	if (s == NATS_OK)
	{
		s = set_options(o, attempt, url);
		if (s != NATS_OK)
		{
			explain(attempt, NATS_INVALID_ARG);
			natsOptions_Destroy(o);
			return false;
		}
		s = natsConnection_Connect(&attempt->connection, o);
	}
	natsOptions_Destroy(o);
	if (s == NATS_OK)
	{
		char		subject[96];

		s = natsInbox_Create(&inbox);
		if (s == NATS_OK)
		{
			/* "_INBOX." and what is unique */
			snprintf(attempt->reply, sizeof(attempt->reply), "%s%s.",
					 nats.inbox ? nats.inbox : "_INBOX", strchr(inbox, '.'));
			snprintf(subject, sizeof(subject), "%s*", attempt->reply);
			s = natsConnection_Subscribe(&attempt->answers, attempt->connection, subject,
										 on_answer, NULL);
		}
		if (s == NATS_OK)
			s = natsSubscription_SetPendingLimits(attempt->answers, -1, -1);
		natsInbox_Destroy(inbox);
	}
	if (s == NATS_OK)
		return true;
	explain(attempt, s);
	natsSubscription_Destroy(attempt->answers);
	natsConnection_Destroy(attempt->connection);
	attempt->answers = NULL;
	attempt->connection = NULL;
	return false;
}

static void *
connect_thread(void *arg)
{
	Attempt    *attempt = arg;
	struct addrinfo hints = {0};
	struct addrinfo *addresses = NULL;
	int			rc;

	attempt->state = IDEM_STATE_DOWN;
	hints.ai_socktype = SOCK_STREAM;
	rc = getaddrinfo(nats.url.host, nats.url.port, &hints, &addresses);
	if (rc != 0)
		snprintf(attempt->why, sizeof(attempt->why), "could not resolve \"%s\": %s",
				 nats.url.host, gai_strerror(rc));
	else
		for (struct addrinfo *a = addresses; a; a = a->ai_next)
		{
			const char *no = idem_address_refused(a->ai_addr, nats.public_only);

			if (no)
			{
				/* one bad address is enough: names must not lead there at all */
				attempt->state = IDEM_STATE_BLOCKED;
				snprintf(attempt->why, sizeof(attempt->why), "host \"%s\": %s",
						 nats.url.host, no);
				break;
			}
			if (try_address(attempt, a->ai_addr, a->ai_addrlen) ||
				attempt->state == IDEM_STATE_BLOCKED)
				break;
		}
	if (addresses)
		freeaddrinfo(addresses);

	pthread_mutex_lock(&box.lock);
	box.attempt = attempt;
	pthread_mutex_unlock(&box.lock);
	wake();
	return NULL;
}

void
nats_link_start(void)
{
	main_thread = pthread_self();
	wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (wake_fd < 0)
		abort();
}

void
nats_connect(IdemCourier *courier)
{
	pthread_t	thread;
	pthread_attr_t detached;
	Attempt    *attempt = idem_alloc(sizeof(Attempt));

	idem_courier_watch(courier, wake_fd, POLLIN, look_into_box, NULL);
	idem_courier_state(courier, IDEM_STATE_CONNECTING, 0, "connecting");
	nats.phase = PHASE_CONNECTING;
	pthread_attr_init(&detached);
	pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
	if (pthread_create(&thread, &detached, connect_thread, attempt) != 0)
		abort();
	pthread_attr_destroy(&detached);
}

void
nats_lose(IdemCourier *courier, IdemState state, const char *format,...)
{
	char		why[768];
	va_list		args;
	IdemMessage *m;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);

	if (nats.fd >= 0)
		idem_courier_watch(courier, nats.fd, 0, NULL, NULL);
	nats.fd = -1;
	/* what has been answered in time counts */
	take_answers(courier);
	natsSubscription_Destroy(nats.answers);
	natsConnection_Destroy(nats.connection);
	nats.answers = NULL;
	nats.connection = NULL;
	nats.phase = PHASE_NONE;
	nats.trouble = false;
	idem_courier_state(courier, state, 0, "%s", why);
	while ((m = nats.sent.head))
	{
		Sent	   *sent = SLOT(m->tag);

		sent->message = NULL;
		idem_list_remove(&nats.sent, m);
		idem_courier_outcome(courier, m, sent->begin < nats.written ? IDEM_UNKNOWN : IDEM_RETURNED,
							 0, 0, "%s", why);
	}
	idem_list_return(courier, &nats.waiting, NULL, why);
	nats_set_timer(courier);
}

/* The connection is closed: why? */
static void
lose_closed(IdemCourier *courier)
{
	const char *text = NULL;
	char		why[256];

	natsConnection_GetLastError(nats.connection, &text);
	snprintf(why, sizeof(why), "%s", text && *text ? text : "closed");
	nats_lose(courier, IDEM_STATE_DOWN, "connection to the server lost: %s", why);
}

/* Write what can be written now.  Returns false if the connection is lost. */
bool
nats_flush(IdemCourier *courier)
{
	int			before = natsConnection_Buffered(nats.connection);
	int			after;

	natsConnection_ProcessWriteEvent(nats.connection);
	if (natsConnection_IsClosed(nats.connection))
	{
		lose_closed(courier);
		return false;
	}
	after = natsConnection_Buffered(nats.connection);
	if (after >= 0 && before > after)
		nats.written += (uint64_t) (before - after);
	return true;
}

void
nats_watch(IdemCourier *courier)
{
	if (nats.phase == PHASE_UP)
		idem_courier_watch(courier, nats.fd, POLLIN |
						   (natsConnection_Buffered(nats.connection) > 0 ? POLLOUT : 0),
						   nats_ready, NULL);
}

static void
nats_ready(IdemCourier *courier, int fd, short revents, void *arg)
{
	(void) fd;
	(void) arg;
	if (revents & (POLLIN | POLLHUP | POLLERR | POLLNVAL))
	{
		natsConnection_ProcessReadEvent(nats.connection);
		if (natsConnection_IsClosed(nats.connection))
		{
			lose_closed(courier);
			return;
		}
	}
	nats_pump(courier);
}

/*
 * Take the answers that have come in.  The library's thread may be about to
 * put more there: of a connection that was lost, they are nobody's.
 */
static void
take_answers(IdemCourier *courier)
{
	static natsMsg **answers;
	static size_t max;
	size_t		n;

	pthread_mutex_lock(&box.lock);
	n = box.n_answers;
	if (n > 0)
	{
		natsMsg   **spare = answers;
		size_t		max_spare = max;

		answers = box.answers;
		max = box.max_answers;
		box.answers = spare;
		box.max_answers = max_spare;
		box.n_answers = 0;
	}
	pthread_mutex_unlock(&box.lock);
	if (n > 0)
		nats.last_answer = idem_courier_now();
	for (size_t i = 0; i < n; i++)
	{
		if (nats.phase == PHASE_UP)
			nats_answer(courier, answers[i]);
		natsMsg_Destroy(answers[i]);
	}
}

static void
look_into_box(IdemCourier *courier, int fd, short revents, void *arg)
{
	uint64_t	count;
	Attempt    *attempt;
	bool		closed;
	char		error[sizeof(box.error)];

	(void) revents;
	(void) arg;
	(void) !read(fd, &count, sizeof(count));
	take_answers(courier);
	pthread_mutex_lock(&box.lock);
	attempt = box.attempt;
	closed = box.closed;
	strcpy(error, box.error);
	box.attempt = NULL;
	box.closed = false;
	box.error[0] = '\0';
	pthread_mutex_unlock(&box.lock);

	if (attempt && attempt->connection)
	{
		nats.connection = attempt->connection;
		nats.answers = attempt->answers;
		nats.fd = attempt->fd;
		snprintf(nats.reply, sizeof(nats.reply), "%s", attempt->reply);
		nats.reply_len = strlen(nats.reply);
		nats.written = 0;
		nats.phase = PHASE_UP;
		idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
	}
	else if (attempt)
		nats_lose(courier, attempt->state, "%s", attempt->why);
	free(attempt);

	/* it may be the one before the last that says so */
	if (closed && nats.phase == PHASE_UP && natsConnection_IsClosed(nats.connection))
	{
		lose_closed(courier);
		return;
	}
	if (*error && nats.phase == PHASE_UP)
		nats_forbidden(courier, error);
	nats_pump(courier);
}

/* The end.  The library's threads are not waited for. */
void
nats_close(IdemCourier *courier)
{
	(void) courier;
	if (nats.connection)
		natsConnection_Close(nats.connection);
	_exit(0);
}

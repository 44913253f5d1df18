/*-------------------------------------------------------------------------
 *
 * courier.h
 *		What a courier is made of: one transport, and the runtime around it.
 *
 * A courier is a program that the relay starts, one for each server.  It gets
 * messages over one socket, hands them to a broker, and says how each of them
 * fared.  The runtime speaks the protocol (README.md) and owns main(); a
 * transport is a struct of callbacks in one C file:
 *
 *		static const char *const options[] = {"url", "timeout_ms", NULL};
 *
 *		const IdemTransport idem_transport = {
 *			.program = "idem-courier-x",
 *			.options = options,
 *			.start = x_start,
 *			.message = x_message,
 *		};
 *
 * There is one thread.  Callbacks are called one at a time, and should not
 * wait; while one does, nothing else happens, the answer to "quit" included.
 *
 * Every message that a transport is given ends with exactly one of
 * idem_courier_delivered() and idem_courier_outcome(), which free it.  Both may
 * be called from any callback, message() included, in any order of tickets.
 *
 * Not to be included together with the server's headers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_COURIER_H
#define IDEM_COURIER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <poll.h>
#include <sys/socket.h>

#define IDEM_COURIER_VERSION "0.1.0"

#if defined(__GNUC__)
#define idem_printf_like(f, a) __attribute__((format(printf, f, a)))
#else
#define idem_printf_like(f, a)
#endif

typedef struct IdemCourier IdemCourier;

/*
 * A message to send.  All text is UTF-8 and ends with a NUL byte, as does the
 * body (which may contain others).
 */
typedef struct IdemMessage
{
	uint64_t	ticket;
	const char *msg_id;			/* canonical uuid */
	const char *destination;
	const char *topic;
	const char *key;			/* or NULL */
	const char *content_type;
	const char *headers;		/* JSON object, or NULL */
	int64_t		enqueued_at;	/* microseconds since 1970 */
	uint32_t	attempt;		/* 1: first */
	const char *body;
	size_t		body_len;

	/* The rest is the transport's, zero at first. */
	struct IdemMessage *prev;
	struct IdemMessage *next;
	void	   *data;
	uint64_t	tag;
} IdemMessage;

typedef enum IdemOutcome
{
	IDEM_DELIVERED = 0,			/* with an answer to keep */
	IDEM_TRANSIENT = 1,			/* surely not stored, try again later */
	IDEM_PERMANENT = 2,			/* this message is refused for ever */
	IDEM_BLOCKED = 3,			/* we are refused, or misconfigured; not stored */
	IDEM_UNKNOWN = 4,			/* sent, no answer */
	IDEM_RETURNED = 5			/* never sent */
} IdemOutcome;

typedef enum IdemState
{
	IDEM_STATE_CONNECTING = 0,
	IDEM_STATE_UP = 1,
	IDEM_STATE_DOWN = 2,
	IDEM_STATE_BLOCKED = 3
} IdemState;

typedef enum IdemLogLevel
{
	IDEM_LOG_DEBUG = 0,
	IDEM_LOG_LOG = 1,
	IDEM_LOG_WARNING = 2
} IdemLogLevel;

typedef struct IdemTransport
{
	const char *program;		/* "idem-courier-http" */

	/* "libcurl/7.88.1", for the ready frame; may be NULL */
	const char *(*library) (void);

	/*
	 * Names of the options this transport knows, NULL at the end; "header."
	 * stands for all that begin so.  Any other option, unless it is one of
	 * the relay's own (order, window_messages, ...), blocks the server.
	 */
	const char *const *options;

	/*
	 * Read and check the options.  Does not connect yet.  A bad one is
	 * reported with idem_courier_refuse() or by the idem_option_ functions;
	 * the runtime then says "blocked" and ends.
	 */
	void		(*start) (IdemCourier *courier);

	/* Send this message, or queue it; the transport owns it from here on. */
	void		(*message) (IdemCourier *courier, IdemMessage *message);

	/* All others may be NULL. */

	/* Once after each round of reading messages: time to send a batch. */
	void		(*round) (IdemCourier *courier);

	/* What idem_courier_timer() asked for. */
	void		(*timer) (IdemCourier *courier);

	/*
	 * Quit: return what is not yet sent, wait for what is.  The runtime goes
	 * on for at most 2 seconds, or until no message is held.
	 */
	void		(*drain) (IdemCourier *courier);

	/*
	 * At the end, no more messages may be reported.  Say goodbye to the
	 * broker, if that can be done without waiting.
	 */
	void		(*stop) (IdemCourier *courier);
} IdemTransport;

/* Each courier has one. */
extern const IdemTransport idem_transport;

/*
 * Options, as given in CREATE SERVER; in place of option x_file comes x, with
 * the contents of the file.  Pointers stay valid.  A value that does not
 * fit is refused; the return value then does not matter.
 */
extern const char *idem_option(IdemCourier *courier, const char *name);
extern const char *idem_option_required(IdemCourier *courier, const char *name);
extern int	idem_option_int(IdemCourier *courier, const char *name,
							int value_if_none, int min, int max);
extern bool idem_option_bool(IdemCourier *courier, const char *name,
							 bool value_if_none);

/* Calls back for each option whose name begins so, with the rest of the name. */
extern void idem_option_each(IdemCourier *courier, const char *prefix,
							 void (*each) (IdemCourier *courier,
										   const char *rest, const char *value));

/* In start(): why this courier cannot work.  The first reason counts. */
extern void idem_courier_refuse(IdemCourier *courier, const char *format,...)
			idem_printf_like(2, 3);
extern const char *idem_courier_server(IdemCourier *courier);

/*
 * How a message fared.  Frees it.  Delivered messages are reported in batches,
 * before anything else that is reported later.
 */
extern void idem_courier_delivered(IdemCourier *courier, IdemMessage *message);
extern void idem_courier_outcome(IdemCourier *courier, IdemMessage *message,
								 IdemOutcome outcome, uint32_t retry_after_ms,
								 uint32_t code, const char *format,...)
			idem_printf_like(6, 7);

/* Like idem_courier_outcome(), with text that need not end with NUL nor be valid UTF-8. */
extern void idem_courier_answer(IdemCourier *courier, IdemMessage *message,
								IdemOutcome outcome, uint32_t retry_after_ms,
								uint32_t code, const char *text, size_t len);

/*
 * The state of the connection.  Sent each time it is called, except if the
 * state is what it was and neither down nor blocked.  After down or blocked
 * the transport returns what it holds, and takes new messages.
 */
extern void idem_courier_state(IdemCourier *courier, IdemState state,
							   uint32_t retry_after_ms, const char *format,...)
			idem_printf_like(4, 5);

/* Never a secret, never a payload. */
extern void idem_courier_log(IdemCourier *courier, IdemLogLevel level,
							 const char *format,...) idem_printf_like(3, 4);

/*
 * Waiting.  watch: call back when the descriptor has any of these poll(2)
 * events (or an error); events 0 ends that, and must be said before the
 * descriptor is closed.  timer: call transport->timer once, in so many
 * milliseconds; a negative number takes that back.  now: a monotonic clock in
 * milliseconds.
 */
typedef void (*IdemWatch) (IdemCourier *courier, int fd, short revents, void *arg);

extern void idem_courier_watch(IdemCourier *courier, int fd, short events,
							   IdemWatch watch, void *arg);
extern void idem_courier_timer(IdemCourier *courier, int64_t ms);
extern int64_t idem_courier_now(void);

/* Quit was asked for: do not connect again, do not start anything new. */
extern bool idem_courier_quitting(IdemCourier *courier);

/*
 * Addresses (address.c).  refused: why we do not talk to this address, or NULL.
 * Link-local ones, where clouds keep their metadata, are always refused; with
 * public_only also loopback, private, shared, unspecified and multicast ones.
 * dial: resolve, check, connect within timeout_ms; returns a non-blocking,
 * close-on-exec descriptor, or one of the errors below with the reason in "why".
 * peer_refused: the same check, for a socket that a library has connected.
 */
#define IDEM_DIAL_DOWN		(-1)	/* may succeed later */
#define IDEM_DIAL_REFUSED	(-2)	/* never will: an address we refuse */

extern const char *idem_address_refused(const struct sockaddr *address,
										bool public_only);
extern const char *idem_address_peer_refused(int fd, bool public_only);
extern int	idem_address_dial(const char *host, const char *port,
							  bool public_only, int timeout_ms,
							  char *why, size_t why_size);

/*
 * Lists (list.c), by way of prev and next.  return: those with this key, or all
 * if it is NULL, were never sent: after the failure of one before them, say.
 */
typedef struct IdemList
{
	IdemMessage *head;
	IdemMessage *tail;
} IdemList;

extern void idem_list_add(IdemList *list, IdemMessage *message);
extern void idem_list_remove(IdemList *list, IdemMessage *message);
extern void idem_list_return(IdemCourier *courier, IdemList *list,
							 const char *key, const char *why);

/*
 * Urls (url.c).  Reads option "url": one of two schemes, a host, a port or the
 * one given, a path without its first slash.  Returns false if it has refused it.
 */
typedef struct IdemUrl
{
	bool		tls;			/* the second scheme */
	char	   *host;
	char		port[8];
	char	   *path;
} IdemUrl;

extern bool idem_url_read(IdemCourier *courier, const char *plain,
						  const char *secure, int port, IdemUrl *url);

/*
 * Headers (header.c).  Calls back for each member of a JSON object (NULL is an
 * empty one), until the callback returns false.  Strings come unescaped;
 * numbers, true, false, arrays and objects as the text they are; null is
 * left out.  Returns false if the text is not a JSON object, or a string has
 * a NUL character, or the callback returned false.
 */
typedef bool (*IdemHeader) (void *arg, const char *name, const char *value);

extern bool idem_headers_each(const char *json, IdemHeader each, void *arg);

/* malloc and friends that end the program if there is no memory. */
extern void *idem_alloc(size_t size);	/* zeroed */
extern void *idem_realloc(void *p, size_t size);
extern char *idem_strdup(const char *s);
extern char *idem_strndup(const char *s, size_t len);

#endif							/* IDEM_COURIER_H */

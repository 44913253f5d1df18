/*-------------------------------------------------------------------------
 *
 * courier.c
 *		The runtime of couriers: main(), the relay's socket, the loop.
 *
 * The relay is at the other end of descriptor 3.  Everything this process
 * knows came from there, secrets included; nothing is taken from arguments
 * or the environment, and nothing is written anywhere else.  End of file
 * means that the relay is gone, and ends us.
 *
 * What is held is bounded: the relay keeps to its window, and if it does not,
 * we stop reading.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "courier.h"
#include "frame.h"
#include "order.h"

#define RELAY_FD		3
#define PROTOCOL		1
#define DRAIN_MS		2000
#define LAST_WORDS_MS	500
#define MAX_TEXT		1024
#define MAX_BATCH		8192	/* tickets in one frame */
#define REPORT_MS		2		/* how long a delivery may wait to be reported */

/* Above these we read no further until something is done. */
#define MAX_HELD		100000
#define MAX_HELD_BYTES	(256 * 1024 * 1024)
#define MAX_UNSENT		(4 * 1024 * 1024)

/* Options of the relay, which it may or may not keep to itself. */
static const char *const relay_options[] = {
	"url", "window_messages", "window_bytes", "retry_min", "retry_max",
	"retry_min_ms", "retry_max_ms", "max_attempts", "gate", "standbys", "order",
	"on_unknown", "keep_answer", "public_only", NULL
};

typedef struct Option
{
	char	   *name;
	char	   *value;
} Option;

typedef struct Watch
{
	int			fd;
	short		events;
	IdemWatch	watch;
	void	   *arg;
} Watch;

/* A message in one piece: ours, what the transport sees, its strings. */
typedef struct Held
{
	size_t		size;
	IdemMessage message;
} Held;

struct IdemCourier
{
	IdemBuffer	in;
	IdemBuffer	out;
	bool		greeted;
	bool		quitting;
	bool		eof;
	int64_t		deadline;		/* of quitting */

	char	   *server;
	Option	   *options;
	uint32_t	n_options;
	char	   *refusal;

	int			state;			/* last sent, or -1 */
	size_t		held;
	size_t		held_bytes;
	uint64_t   *done;			/* delivered, not yet in a frame */
	uint32_t	n_done;
	int64_t		done_since;		/* when the first of them was */
	IdemFailed *failed;			/* NULL if order does not matter */

	Watch	   *watches;
	int			n_watches;
	int			max_watches;
	struct pollfd *polled;
	int64_t		timer;			/* when, or -1 */
};

/*
 * Memory
 */

static void *
check_memory(void *p)
{
	/* Nothing we could still do would be right; the relay starts us again. */
	if (p == NULL)
		abort();
	return p;
}

void *
idem_alloc(size_t size)
{
	return check_memory(calloc(1, size));
}

void *
idem_realloc(void *p, size_t size)
{
	return check_memory(realloc(p, size));
}

char *
idem_strdup(const char *s)
{
	return check_memory(strdup(s));
}

char *
idem_strndup(const char *s, size_t len)
{
	char	   *copy = idem_alloc(len + 1);

	if (len > 0)
		memcpy(copy, s, len);
	return copy;
}

/*
 * Options
 */

const char *
idem_option(IdemCourier *courier, const char *name)
{
	for (uint32_t i = 0; i < courier->n_options; i++)
		if (strcmp(courier->options[i].name, name) == 0)
			return courier->options[i].value;
	return NULL;
}

const char *
idem_option_required(IdemCourier *courier, const char *name)
{
	const char *value = idem_option(courier, name);

	if (value == NULL || *value == '\0')
	{
		idem_courier_refuse(courier, "option \"%s\" is required", name);
		return "";
	}
	return value;
}

int
idem_option_int(IdemCourier *courier, const char *name, int value_if_none,
				int min, int max)
{
	const char *value = idem_option(courier, name);
	char	   *end;
	long		number;

	if (value == NULL)
		return value_if_none;
	errno = 0;
	number = strtol(value, &end, 10);
	if (errno != 0 || end == value || *end != '\0' || number < min || number > max)
	{
		idem_courier_refuse(courier, "option \"%s\" must be a number from %d to %d",
							name, min, max);
		return value_if_none;
	}
	return (int) number;
}

bool
idem_option_bool(IdemCourier *courier, const char *name, bool value_if_none)
{
	const char *value = idem_option(courier, name);

	if (value == NULL)
		return value_if_none;
	if (strcmp(value, "true") == 0 || strcmp(value, "on") == 0 ||
		strcmp(value, "yes") == 0 || strcmp(value, "1") == 0)
		return true;
	if (strcmp(value, "false") != 0 && strcmp(value, "off") != 0 &&
		strcmp(value, "no") != 0 && strcmp(value, "0") != 0)
		idem_courier_refuse(courier, "option \"%s\" must be true or false", name);
	return false;
}

void
idem_option_each(IdemCourier *courier, const char *prefix,
				 void (*each) (IdemCourier *courier, const char *rest, const char *value))
{
	size_t		len = strlen(prefix);

	for (uint32_t i = 0; i < courier->n_options; i++)
		if (strncmp(courier->options[i].name, prefix, len) == 0)
			each(courier, courier->options[i].name + len, courier->options[i].value);
}

static bool
listed(const char *const *names, const char *name)
{
	for (; names != NULL && *names != NULL; names++)
	{
		size_t		len = strlen(*names);

		if (strcmp(*names, name) == 0)
			return true;
		if (len > 0 && (*names)[len - 1] == '.' && strncmp(*names, name, len) == 0)
			return true;
	}
	return false;
}

static void
check_options(IdemCourier *courier)
{
	for (uint32_t i = 0; i < courier->n_options; i++)
	{
		const char *name = courier->options[i].name;

		if (!listed(idem_transport.options, name) && !listed(relay_options, name))
			idem_courier_refuse(courier, "%s has no option \"%s\"",
								idem_transport.program, name);
	}
}

void
idem_courier_refuse(IdemCourier *courier, const char *format,...)
{
	char		text[MAX_TEXT];
	va_list		args;

	if (courier->refusal != NULL)
		return;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	courier->refusal = idem_strdup(text);
}

const char *
idem_courier_server(IdemCourier *courier)
{
	return courier->server;
}

/*
 * What we tell the relay
 */

/* Length of the valid UTF-8 character at s, or 0. */
static size_t
utf8_len(const unsigned char *s, size_t left)
{
	size_t		len;
	uint32_t	min;
	uint32_t	code;

	if (s[0] < 0x80)
		return s[0] != '\0';
	else if ((s[0] & 0xe0) == 0xc0)
		len = 2, min = 0x80, code = s[0] & 0x1f;
	else if ((s[0] & 0xf0) == 0xe0)
		len = 3, min = 0x800, code = s[0] & 0x0f;
	else if ((s[0] & 0xf8) == 0xf0)
		len = 4, min = 0x10000, code = s[0] & 0x07;
	else
		return 0;
	if (left < len)
		return 0;
	for (size_t i = 1; i < len; i++)
	{
		if ((s[i] & 0xc0) != 0x80)
			return 0;
		code = code << 6 | (s[i] & 0x3f);
	}
	return code < min || code > 0x10ffff || (code >= 0xd800 && code < 0xe000) ? 0 : len;
}

/* Put a text of at most MAX_TEXT bytes; what is not UTF-8 becomes "?". */
static void
put_text(IdemBuffer *out, const char *text, size_t len)
{
	char		clean[MAX_TEXT];
	size_t		n = 0;

	for (size_t i = 0; i < len;)
	{
		size_t		step = utf8_len((const unsigned char *) text + i, len - i);

		if (n + (step == 0 ? 1 : step) > sizeof(clean))
			break;
		if (step == 0)
		{
			clean[n++] = '?';
			i++;
		}
		else
		{
			memcpy(clean + n, text + i, step);
			n += step;
			i += step;
		}
	}
	idem_frame_put_str(out, clean, n);
}

static void
flush_done(IdemCourier *courier)
{
	size_t		frame;

	if (courier->n_done == 0)
		return;
	frame = idem_frame_begin(&courier->out, 'd');
	idem_frame_put_u32(&courier->out, courier->n_done);
	for (uint32_t i = 0; i < courier->n_done; i++)
		idem_frame_put_u64(&courier->out, courier->done[i]);
	idem_frame_end(&courier->out, frame);
	courier->n_done = 0;
}

static void
release(IdemCourier *courier, IdemMessage *message)
{
	Held	   *held = (Held *) ((char *) message - offsetof(Held, message));

	courier->held--;
	courier->held_bytes -= held->size;
	free(held);
}

void
idem_courier_delivered(IdemCourier *courier, IdemMessage *message)
{
	if (courier->n_done == MAX_BATCH)
		flush_done(courier);
	if (courier->n_done == 0)
		courier->done_since = idem_courier_now();
	courier->done[courier->n_done++] = message->ticket;
	release(courier, message);
}

void
idem_courier_answer(IdemCourier *courier, IdemMessage *message,
					IdemOutcome outcome, uint32_t retry_after_ms, uint32_t code,
					const char *text, size_t len)
{
	size_t		frame;

	flush_done(courier);
	frame = idem_frame_begin(&courier->out, 'o');
	idem_frame_put_u64(&courier->out, message->ticket);
	idem_frame_put_u8(&courier->out, (uint8_t) outcome);
	idem_frame_put_u32(&courier->out, retry_after_ms);
	idem_frame_put_u32(&courier->out, code);
	put_text(&courier->out, text, len);
	idem_frame_end(&courier->out, frame);

	/* One that is refused for ever is out of the way of its successors. */
	if (courier->failed != NULL && outcome != IDEM_DELIVERED && outcome != IDEM_PERMANENT)
		idem_failed_add(courier->failed, message);
	release(courier, message);
}

void
idem_courier_outcome(IdemCourier *courier, IdemMessage *message,
					 IdemOutcome outcome, uint32_t retry_after_ms, uint32_t code,
					 const char *format,...)
{
	char		text[MAX_TEXT + 1];
	va_list		args;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	idem_courier_answer(courier, message, outcome, retry_after_ms, code,
						text, strlen(text));
}

void
idem_courier_state(IdemCourier *courier, IdemState state, uint32_t retry_after_ms,
				   const char *format,...)
{
	char		text[MAX_TEXT + 1];
	va_list		args;
	size_t		frame;

	if ((int) state == courier->state &&
		state != IDEM_STATE_DOWN && state != IDEM_STATE_BLOCKED)
		return;
	courier->state = state;
	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	flush_done(courier);
	frame = idem_frame_begin(&courier->out, 's');
	idem_frame_put_u8(&courier->out, (uint8_t) state);
	idem_frame_put_u32(&courier->out, retry_after_ms);
	put_text(&courier->out, text, strlen(text));
	idem_frame_end(&courier->out, frame);
}

void
idem_courier_log(IdemCourier *courier, IdemLogLevel level, const char *format,...)
{
	char		text[MAX_TEXT + 1];
	va_list		args;
	size_t		frame;

	va_start(args, format);
	vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	frame = idem_frame_begin(&courier->out, 'l');
	idem_frame_put_u8(&courier->out, (uint8_t) level);
	put_text(&courier->out, text, strlen(text));
	idem_frame_end(&courier->out, frame);
}

/*
 * Waiting
 */

int64_t
idem_courier_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t) now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void
idem_courier_timer(IdemCourier *courier, int64_t ms)
{
	courier->timer = ms < 0 ? -1 : idem_courier_now() + ms;
}

void
idem_courier_watch(IdemCourier *courier, int fd, short events, IdemWatch watch, void *arg)
{
	int			i = 0;

	while (i < courier->n_watches && courier->watches[i].fd != fd)
		i++;
	if (events == 0)
	{
		if (i < courier->n_watches)
			courier->watches[i] = courier->watches[--courier->n_watches];
		return;
	}
	if (i == courier->n_watches)
	{
		if (courier->n_watches == courier->max_watches)
		{
			courier->max_watches = courier->max_watches * 2 + 16;
			courier->watches = idem_realloc(courier->watches,
											sizeof(Watch) * courier->max_watches);
			courier->polled = idem_realloc(courier->polled,
										   sizeof(struct pollfd) * (courier->max_watches + 1));
		}
		courier->n_watches++;
	}
	courier->watches[i] = (Watch) {.fd = fd, .events = events, .watch = watch, .arg = arg};
}

bool
idem_courier_quitting(IdemCourier *courier)
{
	return courier->quitting;
}

/*
 * What the relay tells us
 */

/* It cannot be made sense of: say so, as far as that goes, and end. */
static void
protocol_error(IdemCourier *courier, const char *what)
{
	flush_done(courier);
	idem_courier_log(courier, IDEM_LOG_WARNING, "protocol error: %s", what);
	idem_buffer_send(&courier->out, RELAY_FD);
	exit(1);
}

/* A text; ends with NUL, and has no other. */
static char *
get_text(IdemReader *reader)
{
	size_t		len;
	const char *s = idem_frame_get_str(reader, &len);

	if (s == NULL)
		return NULL;
	if (memchr(s, '\0', len) != NULL)
	{
		reader->bad = true;
		return NULL;
	}
	return idem_strndup(s, len);
}

static void
hello(IdemCourier *courier, IdemReader *reader)
{
	uint32_t	version = idem_frame_get_u32(reader);
	size_t		frame;
	char		program[256];
	const char *order;

	if (courier->greeted)
		protocol_error(courier, "second hello");
	if (!reader->bad && version != PROTOCOL)
		protocol_error(courier, "protocol version not supported");
	courier->server = get_text(reader);
	courier->n_options = idem_frame_get_u32(reader);

	/* each takes at least eight bytes */
	if (reader->bad || courier->server == NULL ||
		courier->n_options > (size_t) (reader->end - reader->p) / 8)
		protocol_error(courier, "malformed hello");
	courier->options = idem_alloc(sizeof(Option) * (courier->n_options + 1));
	for (uint32_t i = 0; i < courier->n_options; i++)
	{
		courier->options[i].name = get_text(reader);
		courier->options[i].value = get_text(reader);
		if (courier->options[i].name == NULL || courier->options[i].value == NULL)
			protocol_error(courier, "malformed hello");
	}
	if (reader->p != reader->end)
		protocol_error(courier, "malformed hello");
	courier->greeted = true;

	order = idem_option(courier, "order");
	if (order == NULL || strcmp(order, "none") != 0)
		courier->failed = idem_failed_create();

	check_options(courier);
	if (courier->refusal == NULL)
		idem_transport.start(courier);
	if (courier->refusal != NULL)
	{
		idem_courier_state(courier, IDEM_STATE_BLOCKED, 0, "%s", courier->refusal);
		courier->quitting = true;
		courier->deadline = idem_courier_now();
		return;
	}
	snprintf(program, sizeof(program), "%s %s%s%s", idem_transport.program,
			 IDEM_COURIER_VERSION, idem_transport.library != NULL ? " " : "",
			 idem_transport.library != NULL ? idem_transport.library() : "");
	frame = idem_frame_begin(&courier->out, 'h');
	idem_frame_put_u32(&courier->out, PROTOCOL);
	put_text(&courier->out, program, strlen(program));
	idem_frame_end(&courier->out, frame);
}

/* Copy a string of a message to where the last one ended. */
static const char *
copy_str(IdemReader *reader, char **to, size_t *len, bool text)
{
	size_t		n;
	const char *s = idem_frame_get_str(reader, &n);
	char	   *copy = *to;

	if (len != NULL)
		*len = n;
	if (s == NULL)
		return NULL;
	if (text && memchr(s, '\0', n) != NULL)
	{
		reader->bad = true;
		return NULL;
	}
	memcpy(copy, s, n);
	copy[n] = '\0';
	*to += n + 1;
	return copy;
}

static void
take_message(IdemCourier *courier, IdemReader *reader)
{
	/* the length of each string makes more than the room for its NUL */
	size_t		size = sizeof(Held) + (size_t) (reader->end - reader->p);
	Held	   *held = idem_realloc(NULL, size);
	IdemMessage *m = &held->message;
	char	   *to = (char *) (held + 1);

	memset(held, 0, sizeof(Held));
	held->size = size;
	m->ticket = idem_frame_get_u64(reader);
	m->msg_id = copy_str(reader, &to, NULL, true);
	m->destination = copy_str(reader, &to, NULL, true);
	m->topic = copy_str(reader, &to, NULL, true);
	m->key = copy_str(reader, &to, NULL, true);
	m->content_type = copy_str(reader, &to, NULL, true);
	m->headers = copy_str(reader, &to, NULL, true);
	m->enqueued_at = (int64_t) idem_frame_get_u64(reader);
	m->attempt = idem_frame_get_u32(reader);
	m->body = copy_str(reader, &to, &m->body_len, false);
	if (reader->bad || reader->p != reader->end || m->msg_id == NULL ||
		m->destination == NULL || m->topic == NULL || m->content_type == NULL ||
		m->body == NULL)
		protocol_error(courier, "malformed message");
	courier->held++;
	courier->held_bytes += size;

	if (courier->quitting)
		idem_courier_outcome(courier, m, IDEM_RETURNED, 0, 0, "quitting");
	else if (courier->failed != NULL && !idem_failed_admit(courier->failed, m))
		idem_courier_outcome(courier, m, IDEM_RETURNED, 0, 0,
							 "a message before it with the same key failed");
	else
		idem_transport.message(courier, m);
}

static void
quit(IdemCourier *courier)
{
	if (courier->quitting)
		return;
	courier->quitting = true;
	courier->deadline = idem_courier_now() + DRAIN_MS;
	if (courier->greeted && idem_transport.drain != NULL)
		idem_transport.drain(courier);
}

static bool
may_read(IdemCourier *courier)
{
	return !courier->eof && courier->held < MAX_HELD &&
		courier->held_bytes < MAX_HELD_BYTES &&
		courier->out.end - courier->out.begin < MAX_UNSENT;
}

/* Handle the frames that have come in. */
static void
take_frames(IdemCourier *courier)
{
	while (may_read(courier))
	{
		char		type;
		IdemReader	reader;

		switch (idem_frame_next(&courier->in, &type, &reader))
		{
			case IDEM_FRAME_OK:
				break;
			case IDEM_FRAME_MORE:
				return;
			default:
				protocol_error(courier, "frame of impossible length");
		}
		if (type == 'H')
			hello(courier, &reader);
		else if (type == 'Q')
			quit(courier);
		else if (!courier->greeted)
			protocol_error(courier, "no hello");
		else if (type == 'M')
			take_message(courier, &reader);
		else
			protocol_error(courier, "frame of a type that does not exist");
	}
}

static void
relay_gone(IdemCourier *courier)
{
	courier->eof = true;
	quit(courier);
}

static void
read_relay(IdemCourier *courier)
{
	/* a few chunks, then others have their turn */
	for (int i = 0; i < 16 && may_read(courier); i++)
	{
		switch (idem_buffer_receive(&courier->in, RELAY_FD))
		{
			case IDEM_FRAME_OK:
				take_frames(courier);
				break;
			case IDEM_FRAME_MORE:
				return;
			default:
				relay_gone(courier);
				return;
		}
	}
}

/*
 * Deliveries that come one by one are reported together: every report wakes
 * the relay, which costs more than it brings while we have more to do than we
 * have done.
 */
static bool
report_is_due(IdemCourier *courier)
{
	return courier->n_done >= courier->held || courier->quitting ||
		idem_courier_now() >= courier->done_since + REPORT_MS;
}

static void
write_relay(IdemCourier *courier)
{
	if (courier->n_done > 0 && report_is_due(courier))
		flush_done(courier);
	if (courier->eof)
		courier->out.begin = courier->out.end = 0;
	else if (idem_buffer_send(&courier->out, RELAY_FD) == IDEM_FRAME_EOF)
		relay_gone(courier);
}

/* The shorter of two times to wait, of which the first may be -1: for ever. */
static int64_t
sooner(int64_t timeout, int64_t left)
{
	if (left < 0)
		left = 0;
	return timeout < 0 || left < timeout ? left : timeout;
}

static void
loop_once(IdemCourier *courier)
{
	int64_t		now = idem_courier_now();
	int64_t		timeout = -1;
	int			n = courier->n_watches;
	struct pollfd *polled = courier->polled;
	bool		unsent = courier->out.begin < courier->out.end;

	if (courier->timer >= 0)
		timeout = sooner(timeout, courier->timer - now);
	if (courier->quitting)
		timeout = sooner(timeout, courier->deadline - now);
	if (courier->n_done > 0)
		timeout = sooner(timeout, courier->done_since + REPORT_MS - now);

	/*
	 * Even if we read nothing just now, we want to know when the relay is
	 * gone.  Once it is, there is nothing to wait for.
	 */
	polled[0] = (struct pollfd) {.fd = courier->eof ? -1 : RELAY_FD};
	if (may_read(courier))
		polled[0].events |= POLLIN;
	if (unsent)
		polled[0].events |= POLLOUT;
	for (int i = 0; i < n; i++)
		polled[i + 1] = (struct pollfd) {
			.fd = courier->watches[i].fd, .events = courier->watches[i].events
		};

	if (poll(polled, (nfds_t) n + 1, timeout > INT_MAX ? INT_MAX : (int) timeout) < 0)
	{
		if (errno != EINTR)
			abort();
		return;
	}

	/* callbacks add and remove watches, and may have all of them moved */
	if (polled[0].revents & (POLLIN | POLLHUP | POLLERR))
	{
		if (polled[0].revents & POLLIN)
			read_relay(courier);
		else if (polled[0].revents & (POLLHUP | POLLERR))
			relay_gone(courier);
	}
	for (int i = 1; i <= n; i++)
	{
		struct pollfd ready = courier->polled[i];

		if (ready.revents == 0)
			continue;
		for (int j = 0; j < courier->n_watches; j++)
			if (courier->watches[j].fd == ready.fd)
			{
				courier->watches[j].watch(courier, ready.fd, ready.revents,
										  courier->watches[j].arg);
				break;
			}
	}
	if (courier->timer >= 0 && courier->timer <= idem_courier_now())
	{
		courier->timer = -1;
		if (idem_transport.timer != NULL)
			idem_transport.timer(courier);
	}

	/* what we stopped at because we held too much */
	take_frames(courier);
	if (courier->greeted && courier->refusal == NULL && idem_transport.round != NULL)
		idem_transport.round(courier);
	write_relay(courier);
}

/* Whatever we have said shall arrive, if the relay still reads. */
static void
last_words(IdemCourier *courier)
{
	int64_t		deadline = idem_courier_now() + LAST_WORDS_MS;

	write_relay(courier);
	while (!courier->eof && courier->out.begin < courier->out.end)
	{
		struct pollfd polled = {.fd = RELAY_FD, .events = POLLOUT};
		int64_t		left = deadline - idem_courier_now();

		if (left <= 0 || poll(&polled, 1, (int) left) <= 0)
			break;
		write_relay(courier);
	}
}

int
main(int argc, char **argv)
{
	static IdemCourier courier = {.state = -1, .timer = -1};
	static char *no_environment[] = {NULL};
	extern char **environ;
	struct rlimit no_core = {0, 0};
	int			type;
	socklen_t	len = sizeof(type);

	if (argc > 1 || getsockopt(RELAY_FD, SOL_SOCKET, SO_TYPE, &type, &len) != 0)
	{
		bool		version = argc == 2 && strcmp(argv[1], "--version") == 0;

		fprintf(version ? stdout : stderr, "%s %s%s\n", idem_transport.program,
				IDEM_COURIER_VERSION,
				version ? "" : ": is started by idem's relay, which talks to it over descriptor 3");
		return version ? 0 : 2;
	}

	/* Libraries take proxies, trace files and more from there. */
	environ = no_environment;
	signal(SIGPIPE, SIG_IGN);
	setrlimit(RLIMIT_CORE, &no_core);	/* a core would hold secrets */

	courier.done = idem_alloc(sizeof(uint64_t) * MAX_BATCH);
	courier.polled = idem_alloc(sizeof(struct pollfd));
	while (!courier.quitting ||
		   (courier.held > 0 && idem_courier_now() < courier.deadline))
		loop_once(&courier);
	last_words(&courier);
	if (courier.greeted && courier.refusal == NULL && idem_transport.stop != NULL)
		idem_transport.stop(&courier);
	return 0;
}

/*-------------------------------------------------------------------------
 *
 * amqp_parts.h
 *		The courier for RabbitMQ: what its parts share.
 *
 * amqp.c has the messages, amqp_protocol.c what is said to the broker and what
 * it says, amqp_link.c the connection, amqp_option.c the options.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_AMQP_H
#define IDEM_AMQP_H

#include <netdb.h>
#include <stdint.h>

#if __has_include(<rabbitmq-c/amqp.h>)
#include <rabbitmq-c/amqp.h>
#include <rabbitmq-c/framing.h>
#else
#include <amqp.h>
#include <amqp_framing.h>
#endif
#include <openssl/ssl.h>

#include "courier.h"

#define CHANNEL			1
#define FRAME_MAX		131072
#define SHORTSTR_MAX	255
#define OUT_ENOUGH		(256 * 1024)	/* encode no more than about this ahead */
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

typedef struct Amqp
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
} Amqp;

/* There is one of it: a courier has one connection. */
extern Amqp amqp;

/* amqp.c */
extern void amqp_queue_remove(Queue *q, IdemMessage *m);
extern void amqp_settle(IdemCourier *courier, IdemMessage *m,
						IdemOutcome outcome, uint32_t code, const char *why);
extern void amqp_return_waiting(IdemCourier *courier, const char *why);
extern void amqp_confirmed(IdemCourier *courier, uint64_t tag, bool multiple,
						   bool ok);
extern void amqp_channel_closed(IdemCourier *courier,
								amqp_channel_close_t *close);
extern void amqp_returned(amqp_basic_properties_t *p, uint64_t body_size);
extern void amqp_pump(IdemCourier *courier);

/* amqp_protocol.c */
extern void amqp_put_uint(char *p, uint64_t value, int bytes);
extern void amqp_put_frame(char *p, int type, int channel, size_t size);
extern bool amqp_put_method(int channel, amqp_method_number_t id,
							void *decoded);
extern amqp_bytes_t amqp_text(const char *s);
extern void amqp_open_channel(void);
extern bool amqp_take_frame(IdemCourier *courier, amqp_frame_t *f);

/* amqp_link.c */
extern void amqp_set_timer(IdemCourier *courier);
extern void amqp_close_fd(IdemCourier *courier);
extern void amqp_lose(IdemCourier *courier, IdemState state,
					  const char *format,...) idem_printf_like(3, 4);
extern void amqp_watch(IdemCourier *courier);
extern char *amqp_reserve(size_t size);
extern bool amqp_flush(IdemCourier *courier);
extern void amqp_connect(IdemCourier *courier);

/* amqp_option.c */
extern void amqp_start(IdemCourier *courier);

#endif							/* IDEM_AMQP_H */

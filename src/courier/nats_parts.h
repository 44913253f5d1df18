/*-------------------------------------------------------------------------
 *
 * nats_parts.h
 *		The courier for NATS JetStream: what its parts share.
 *
 * nats.c has the options and what is sent, nats_ack.c what becomes of it,
 * nats_link.c the connection.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_NATS_H
#define IDEM_NATS_H

#include <nats/nats.h>

#include "courier.h"

#define OUT_ENOUGH		(256 * 1024)	/* have the library keep about this */
#define SEND_ENOUGH		(32 * 1024) /* send when there is so much */
#define MAX_SENT		65536	/* messages not acknowledged; a power of two */

typedef enum Phase
{
	PHASE_NONE,					/* not connected */
	PHASE_CONNECTING,			/* a thread is at it */
	PHASE_UP
} Phase;

/* What is known of a message that has been given to the library. */
typedef struct Sent
{
	IdemMessage *message;
	int64_t		at;
	uint64_t	begin;			/* it is not before this in what is written */
} Sent;

typedef struct Nats
{
	/* options */
	IdemUrl		url;
	const char *user;			/* these may be NULL */
	const char *password;
	const char *token;
	const char *creds;
	const char *tls_ca;
	const char *tls_cert;
	const char *tls_key;
	const char *inbox;
	int			timeout;
	int			heartbeat;
	int			connect_timeout;
	bool		public_only;

	/* the link */
	Phase		phase;
	natsConnection *connection;
	natsSubscription *answers;
	char		reply[64];		/* where answers go, up to the number */
	size_t		reply_len;
	int			fd;
	uint64_t	written;		/* bytes, since the connection was made */
	int64_t		last_answer;
	int64_t		drain_deadline; /* or 0 */

	/* messages */
	IdemList	waiting;		/* not given to the library */
	size_t		waiting_bytes;	/* about, since we last sent */
	IdemList	sent;			/* not acknowledged, in order of tags */
	Sent		slots[MAX_SENT];	/* of those, by tag */
	uint64_t	next_tag;
	uint64_t	trouble_tag;	/* the trouble reported is that up to here */
	bool		trouble;
} Nats;

/* There is one of it: a courier has one connection. */
extern Nats nats;

#define SLOT(tag)		(&nats.slots[(tag) % MAX_SENT])

/* nats.c */
extern void nats_pump(IdemCourier *courier);
extern void nats_set_timer(IdemCourier *courier);

/* nats_ack.c */
extern void nats_settle(IdemCourier *courier, IdemMessage *m,
						IdemOutcome outcome, uint32_t code, const char *why);
extern void nats_answer(IdemCourier *courier, natsMsg *answer);
extern void nats_forbidden(IdemCourier *courier, const char *error);
extern void nats_overdue(IdemCourier *courier);

/* nats_link.c */
extern void nats_link_start(void);
extern void nats_connect(IdemCourier *courier);
extern void nats_lose(IdemCourier *courier, IdemState state,
					  const char *format,...) idem_printf_like(3, 4);
extern bool nats_flush(IdemCourier *courier);
extern void nats_watch(IdemCourier *courier);
extern void nats_close(IdemCourier *courier);

#endif							/* IDEM_NATS_H */

/*-------------------------------------------------------------------------
 *
 * redis_parts.h
 *		The courier for Redis Streams: what its parts share.
 *
 * redis.c has the options and the messages, redis_reply.c what becomes of
 * them, redis_link.c the connection, redis_tls.c encryption.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_REDIS_H
#define IDEM_REDIS_H

#include <netdb.h>
#include <hiredis/hiredis.h>

#include "courier.h"

#define OUT_ENOUGH		(32 * 1024) /* hand over about this at once */

/* How far the link is. */
typedef enum Phase
{
	PHASE_NONE,					/* not connected */
	PHASE_TCP,
	PHASE_LOGIN,				/* logging in; TLS, too, is part of it */
	PHASE_UP
} Phase;

/* What was asked while logging in, in this order. */
typedef enum Ask
{
	ASK_AUTH = 1,
	ASK_SELECT = 2,
	ASK_SCRIPT = 4,
	ASK_NAME = 8,
	ASK_END = 16
} Ask;

typedef struct Redis
{
	/* options */
	IdemUrl		url;
	int			database;
	const char *user;			/* or NULL */
	const char *password;		/* or NULL */
	char		maxlen[16];		/* empty: keep all */
	bool		maxlen_exact;
	char		dedup[16];		/* seconds; empty: none */
	int			timeout;
	int			connect_timeout;
	bool		public_only;

	/* the link */
	Phase		phase;
	int			asked;			/* Ask of which the answer is to come */
	redisContext *context;
	int			fd;
	bool		unwritten;		/* hiredis has something to write */
	bool		dying;			/* hang up when all have been answered */
	struct addrinfo *addresses;
	struct addrinfo *address;	/* the one being tried */
	int64_t		deadline;		/* of connecting */
	int64_t		last_answer;	/* or when the first of those sent was */
	int64_t		drain_deadline; /* or 0 */
	char		why[256];		/* why the last address did not do */

	/* commands being encoded */
	char	   *out;
	size_t		out_len;
	size_t		out_size;

	/* messages */
	IdemList	waiting;		/* not encoded */
	size_t		waiting_bytes;	/* about, since we last sent */
	IdemList	sent;			/* given to hiredis, not answered */
	uint64_t	next_tag;
	uint64_t	trouble_tag;	/* the trouble reported is that up to here */
	bool		trouble;
} Redis;

/* There is one of it: a courier has one connection. */
extern Redis redis;

/* redis.c */
extern void redis_put_command(int nargs, const char *command);
extern void redis_put_arg(const char *arg);
extern void redis_pump(IdemCourier *courier);
extern const char *const redis_script;
extern void redis_script_known(const char *sha);

/* redis_reply.c; both return false if the connection is no more */
extern bool redis_login_answer(IdemCourier *courier, const redisReply *reply);
extern bool redis_answer(IdemCourier *courier, const redisReply *reply);

/* redis_link.c */
extern void redis_close(IdemCourier *courier);
extern void redis_lose(IdemCourier *courier, IdemState state,
					   const char *format,...) idem_printf_like(3, 4);
extern void redis_connect(IdemCourier *courier);
extern void redis_hand_over(void);
extern bool redis_flush(IdemCourier *courier);
extern void redis_watch(IdemCourier *courier);
extern void redis_set_timer(IdemCourier *courier);

/* redis_tls.c */
extern void redis_tls_options(IdemCourier *courier);
extern bool redis_tls_begin(void);
extern const char *redis_tls_refusal(void);
extern void redis_tls_end(void);

#endif							/* IDEM_REDIS_H */

/*-------------------------------------------------------------------------
 *
 * server.h
 *		Servers: where messages go, and how they are to be treated.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SERVER_H
#define IDEM_SERVER_H

#include "nodes/pg_list.h"

typedef struct IdemOption
{
	char	   *name;
	char	   *value;
} IdemOption;

/* In the order of the words in server.c. */
typedef enum IdemGate
{
	IDEM_GATE_LOCAL,
	IDEM_GATE_STANDBY
} IdemGate;

typedef enum IdemOrder
{
	IDEM_ORDER_KEY,
	IDEM_ORDER_NONE
} IdemOrder;

typedef enum IdemOnUnknown
{
	IDEM_UNKNOWN_RESEND,
	IDEM_UNKNOWN_HOLD
} IdemOnUnknown;

typedef struct IdemServer
{
	Oid			oid;
	char	   *name;
	char	   *url;
	char	   *scheme;			/* lower case */
	int			batch_messages;
	int			window_messages;
	int			window_bytes;
	int			retry_min_ms;
	int			retry_max_ms;
	int			max_attempts;
	IdemGate	gate;
	char	   *standbys;		/* names, as SplitGUCList() takes them */
	IdemOrder	order;
	IdemOnUnknown on_unknown;
	bool		keep_answer;
	bool		public_only;
	char	   *error;			/* NULL, or why it cannot be used */
	List	   *options;		/* of IdemOption: all that the courier is to
								 * know, in UTF-8, secrets resolved */
} IdemServer;

extern Oid	idem_server_oid(const char *name);
extern List *idem_servers_load(void);
extern uint64 idem_servers_generation(void);
extern char *idem_courier_path(const char *scheme);

#endif							/* IDEM_SERVER_H */

/*-------------------------------------------------------------------------
 *
 * delivery.h
 *		The messages on their way to one server.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_DELIVERY_H
#define IDEM_DELIVERY_H

#include "access/xlogdefs.h"
#include "lib/ilist.h"
#include "utils/hsearch.h"

#include "link.h"
#include "log.h"
#include "relay_stat.h"
#include "replay.h"
#include "server.h"

/* A replay under way. */
typedef struct IdemReplaying
{
	IdemReplay	orders;
	IdemReader	reader;
	IdemPosition done;
	int64		position_id;
	bool		dirty;
	dlist_head	entries;
	int			nentries;
} IdemReplaying;

typedef struct IdemDelivery
{
	char		name[NAMEDATALEN];
	MemoryContext context;		/* everything here */
	MemoryContext orders_context;	/* server and routes */
	IdemServer *server;
	List	   *routes;			/* of IdemRoute */
	List	   *replays;		/* of IdemReplay */

	IdemServerState state;
	char		reason[256];
	TimestampTz until;			/* backing off or blocked: when to try again */
	int			backoff_ms;
	bool		probing;		/* one at a time until one gets through */
	int			failures;		/* in a row without a delivery between */
	int			unflushed;		/* delivered, but a crash might not know */
	bool		has_delivered;	/* anything, since the relay was started */
	bool		alone;			/* what is sent is suspected of killing couriers */
	char		logged[256];	/* the trouble that the log knows of */

	IdemLink   *link;			/* NULL: no courier */
	TimestampTz replace_by;		/* 0, or when the courier goes at the latest */
	int64		gate_tick;		/* up to which we wait for standbys, or may read */
	XLogRecPtr	gate_lsn;		/* what they need for that */
	bool		round_is_open;	/* the round under way may be read */
	bool		nameless;		/* somebody else is at the server's name */
	bool		positioned;
	IdemReader	reader;
	IdemPosition done;			/* all before this is settled */
	int64		position_id;	/* of the last record */
	bool		dirty;			/* "done" has moved since */

	IdemReplaying *replaying;	/* or NULL */
	dlist_head	entries;		/* in the order of the log */
	dlist_node *unsent;			/* none before it waits to be sent; NULL: not known */
	dlist_head	retries;		/* parked ones that are due */
	dlist_head	settled;		/* to be written with the next record */
	int			nentries;
	int			nretries;
	int			nsent;
	int64		nbytes;
	struct DeliveryEntry **ring;	/* what is sent, by ticket */
	uint64		ring_mask;
	uint64		next_ticket;

	HTAB	   *parked_keys;	/* how many are parked, by hash of the key */
	TimestampTz next_due;		/* of parked ones; 0: not known */
	IdemServerStat *stat;
} IdemDelivery;

extern IdemDelivery *idem_delivery_create(const char *name);
extern void idem_delivery_rename(IdemDelivery *d, const char *name);
extern void idem_delivery_drop(IdemDelivery *d);
extern void idem_delivery_set_state(IdemDelivery *d, IdemServerState state,
									const char *reason);
extern void idem_delivery_position(IdemDelivery *d, int64 newest_tick);
extern bool idem_delivery_wants(IdemDelivery *d);
extern void idem_delivery_read(IdemDelivery *d, int64 newest_tick);
extern void idem_delivery_set_replays(IdemDelivery *d, List *replays);
extern bool idem_delivery_read_replay(IdemDelivery *d);
extern void idem_delivery_recount(IdemDelivery *d);
extern void idem_delivery_read_due(IdemDelivery *d);
extern void idem_delivery_send(IdemDelivery *d);
extern void idem_delivery_receive(IdemDelivery *d);
extern bool idem_delivery_needs_record(IdemDelivery *d);
extern void idem_delivery_record(IdemDelivery *d);
extern void idem_delivery_recorded(IdemDelivery *d);
extern void idem_delivery_hang_up(IdemDelivery *d);

#endif							/* IDEM_DELIVERY_H */

/*-------------------------------------------------------------------------
 *
 * replay.h
 *		Sending a stretch of the outbox to a server again.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_REPLAY_H
#define IDEM_REPLAY_H

#include "nodes/pg_list.h"
#include "utils/timestamp.h"

typedef struct IdemReplay
{
	int64		id;
	int64		route;			/* 0: all routes */
	char	   *consumer;		/* or NULL: to a server */
	bool		fresh;			/* all of it is new there */
	int64		tick;			/* up to which messages are old; 0: not begun */
	int64		from_seq;
	TimestampTz since;
	TimestampTz until;
} IdemReplay;

extern List *idem_replays_load(const char *server);
extern void idem_replay_begin(IdemReplay *replay, int64 tick);
extern void idem_replay_finish(int64 id);

#endif							/* IDEM_REPLAY_H */

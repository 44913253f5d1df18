/*-------------------------------------------------------------------------
 *
 * parked.h
 *		What could not be delivered yet, and what never will be.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_PARKED_H
#define IDEM_PARKED_H

#include "nodes/pg_list.h"

#include "log.h"

typedef enum IdemParkedState
{
	IDEM_PARKED_RETRY,			/* tried again when due */
	IDEM_PARKED_BEHIND,			/* waits for an earlier one of its key */
	IDEM_PARKED_DELAYED,		/* deliver_at */
	IDEM_PARKED_HELD,			/* nobody knows whether it arrived */
	IDEM_PARKED_DELIVERED		/* somebody has said that it did */
} IdemParkedState;

typedef struct IdemParked
{
	int64		seq;
	int64		route;
	char	   *key;			/* or NULL */
	char	   *destination;
	IdemParkedState state;
	int			attempts;
	TimestampTz due;			/* 0: none */
} IdemParked;

extern void idem_parked_put(const char *server, const IdemMessage *m,
							const IdemParked *parked, uint32 code,
							const char *error);
extern void idem_parked_remove(const char *server, const IdemParked *parked);
extern bool idem_parked_exists(const char *server, int64 seq, int64 route);
extern void idem_parked_promote(const char *server);
extern List *idem_parked_due(const char *server, int max);
extern List *idem_parked_keys(const char *server);
extern TimestampTz idem_parked_next_due(const char *server);
extern void idem_dead_letter_put(const char *server, const IdemMessage *m,
								 const IdemParked *parked, uint32 code,
								 const char *reason);
extern void idem_dead_letter_lost(const char *server, const IdemParked *parked);
extern IdemMessage *idem_kept_message(int64 seq);
extern void idem_answer_put(const char *server, const IdemParked *parked,
							uint32 code, const char *answer);
extern bool idem_position_load(const char *server, int64 replay, IdemPosition *pos,
							   int64 *id);
extern void idem_position_record(const char *server, int64 replay,
								 const IdemPosition *pos, int64 id);
extern void idem_position_forget(const char *server, int64 replay, int64 before);
extern int64 idem_position_start(int64 first_seq);

#endif							/* IDEM_PARKED_H */

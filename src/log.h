/*-------------------------------------------------------------------------
 *
 * log.h
 *		Reading the outbox: ticks, and rounds between two of them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_LOG_H
#define IDEM_LOG_H

#include "utils/timestamp.h"
#include "utils/uuid.h"

/*
 * A moment at which the log was looked at.  Which transactions had committed
 * then is a matter of comparing numbers, for ever after.
 */
typedef struct IdemTick
{
	int64		id;
	bool		all;			/* everything up to seq_before, whoever wrote it */
	uint64		xmin;
	uint64		xmax;
	int			nxip;
	uint64	   *xip;			/* sorted */
	uint64		xid;			/* of the tick itself, newer than its snapshot */
	int64		seq_before;		/* last number given before, */
	int64		seq_after;		/* and after the snapshot was taken */
	TimestampTz at;
	int64		adopted_id;		/* newest tick up to this one that sees all; 0: none */
	int64		adopted;		/* what it sees: rows that may be from another cluster */
	uint64	   *pending;		/* see idem_tick_is_due() */
	int			npending;
} IdemTick;

/*
 * How far a destination has got: everything visible in tick a is done, and
 * of what became visible up to tick b, in this phase, all up to seq.
 */
typedef struct IdemPosition
{
	int64		a;
	int64		b;
	int			phase;
	int64		seq;
} IdemPosition;

/* A message as it stands in the log; in UTF-8. */
typedef struct IdemMessage
{
	int64		seq;
	TimestampTz enqueued_at;
	TimestampTz deliver_at;		/* 0: at once */
	pg_uuid_t	id;
	char	   *topic;
	char	   *key;			/* or NULL */
	char	   *content_type;
	char	   *headers;		/* or NULL */
	char	   *body;
	int			body_len;
} IdemMessage;

typedef struct IdemReader
{
	MemoryContext context;		/* holds the ticks */
	IdemPosition pos;
	IdemTick   *a;
	IdemTick   *b;				/* NULL: no round is under way */
	uint64	   *late;			/* committed between a and b, begun before a */
	int			nlate;
} IdemReader;

#define IDEM_PHASE_LATE	1
#define IDEM_PHASE_NEW	2

extern IdemTick *idem_tick_newest(void);
extern IdemTick *idem_tick_get(int64 id);
extern IdemTick *idem_tick_take(int64 id);
extern bool idem_tick_is_due(IdemTick *newest);

extern void idem_reader_init(IdemReader *reader, const IdemPosition *pos);
extern bool idem_reader_begin_round(IdemReader *reader, int64 newest_tick);
extern void idem_reader_stop(IdemReader *reader);
extern List *idem_reader_page(IdemReader *reader, int max_messages,
							  int64 max_bytes, IdemPosition *at);
extern IdemMessage *idem_log_message(int64 seq);
extern int64 idem_log_last_seq(void);

#endif							/* IDEM_LOG_H */

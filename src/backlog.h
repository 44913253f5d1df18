/*-------------------------------------------------------------------------
 *
 * backlog.h
 *		What all processes know of the work that waits for consumers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_BACKLOG_H
#define IDEM_BACKLOG_H

#include "utils/timestamp.h"
#include "utils/uuid.h"

/*
 * From where on to look.  Everything below "low" was gone when somebody
 * looked last; whoever commits something takes "incoming" down.
 */
typedef struct IdemMark
{
	int64		low;
	int64		incoming;		/* PG_INT64_MAX: nothing */
} IdemMark;

typedef struct IdemBacklog IdemBacklog;

/* What a process that looks remembers from beginning to end. */
typedef struct IdemLook
{
	IdemBacklog *backlog;	/* NULL: nobody keeps track */
	int64		from;
	uint32		folds;			/* so often was anything taken down before */
} IdemLook;

typedef enum IdemMarkKind
{
	IDEM_MARK_SEQ,				/* of inbox_message, by number */
	IDEM_MARK_DUE,				/* of inbox_parked, by time */
	IDEM_MARKS
} IdemMarkKind;

extern void idem_backlog_request(void);
extern void idem_backlog_startup(void);
extern void idem_backlog_init(void);
extern bool idem_backlog_cautious(void);

extern IdemBacklog *idem_backlog(int32 consumer);
extern void idem_backlog_forget(int32 consumer);
extern void idem_backlog_forget_database(Oid database);
extern void idem_backlog_added(int32 consumer, IdemMarkKind kind, int64 at);
extern void idem_backlog_unknown(void);

extern void idem_backlog_look(IdemLook *look, int32 consumer, IdemMarkKind kind);
extern void idem_backlog_looked(IdemLook *look, IdemMarkKind kind, int64 low);
extern int64 idem_backlog_resume(IdemLook *look, int64 resume, uint32 *generation);
extern void idem_backlog_took(IdemLook *look, int64 seq);

/* For those who run handlers. */
extern bool idem_backlog_enter(IdemBacklog *b, int concurrency);
extern void idem_backlog_leave(IdemBacklog *b);
extern bool idem_backlog_ready(IdemBacklog *b, TimestampTz now);
extern void idem_backlog_set_ready(IdemBacklog *b);
extern void idem_backlog_set_due(IdemBacklog *b, TimestampTz due);
extern TimestampTz idem_backlog_next_due(IdemBacklog *b);
extern int	idem_backlog_describe(IdemBacklog *b, char *reason);
extern void idem_backlog_set_reason(IdemBacklog *b, const char *reason);

/* Attempts that ended with their transaction. */
typedef struct IdemLostAttempt
{
	Oid			database;
	int32		consumer;
	int64		seq;
} IdemLostAttempt;

extern bool idem_backlog_counts(int sqlstate);
extern void idem_backlog_taken(int32 consumer, int64 seq, const pg_uuid_t *claim);
extern bool idem_backlog_is_handled(const pg_uuid_t *claim);
extern void idem_backlog_set_handled(const pg_uuid_t *claim);
extern bool idem_backlog_settled(int32 consumer, int64 seq);
extern bool idem_backlog_has(int32 consumer, int64 seq);
extern bool idem_backlog_next_lost(IdemLostAttempt *lost);
extern void idem_backlog_lose(int32 consumer, int64 seq);

#endif							/* IDEM_BACKLOG_H */

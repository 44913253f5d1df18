/*-------------------------------------------------------------------------
 *
 * worker.h
 *		The databases that have workers, as all processes see them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WORKER_H
#define IDEM_WORKER_H

#include "storage/lwlock.h"
#include "utils/timestamp.h"

/* The workers that a database has, one of each. */
typedef enum IdemWorkerKind
{
	IDEM_WORKER_MAINTENANCE,	/* always; finds out if the extension is there */
	IDEM_WORKER_RELAY,			/* only where it is */
	IDEM_WORKER_HANDLER			/* only where consumers have handlers; the first of several */
} IdemWorkerKind;

/* So many processes of a database can run handlers. */
#define IDEM_MAX_HANDLERS	16

#define IDEM_WORKER_KINDS	(IDEM_WORKER_HANDLER + IDEM_MAX_HANDLERS)

typedef enum IdemWorkerState
{
	IDEM_WORKER_WAITING,		/* the launcher will start it */
	IDEM_WORKER_STARTING,		/* the launcher has asked for it */
	IDEM_WORKER_RUNNING			/* it has attached */
} IdemWorkerState;

typedef struct IdemWorker
{
	IdemWorkerState state;
	int			pid;			/* or 0 */
	int			failures;		/* starts in a row that came to nothing */
	TimestampTz started_at;
	TimestampTz not_before;		/* earliest time for the next start */
	char		reason[256];	/* why there is none, or "" */
} IdemWorker;

/* What retention has done for one kind of row. */
typedef struct IdemRetentionFigures
{
	TimestampTz last_run;		/* 0: never */
	int64		removed_last;
	int64		removed_total;
	int64		backlog;		/* -1: not known */
	TimestampTz oldest_due;		/* 0: nothing is due */
} IdemRetentionFigures;

/* A database that has the extension, or is to be looked at. */
typedef struct IdemDatabase
{
	Oid			oid;			/* InvalidOid: this slot is free */
	bool		wanted;			/* false: its workers are to end for good */
	bool		installed;		/* the extension has been found there */
	bool		handlers;		/* and consumers that have handlers */
	int			holder;			/* pid of the session that keeps workers away */
	IdemWorker	workers[IDEM_WORKER_KINDS];
	IdemRetentionFigures inbox;
	IdemRetentionFigures key;
} IdemDatabase;

typedef struct IdemWorkerShared
{
	LWLock	   *lock;			/* protects all of this */
	int			launcher;		/* pid, or 0 */
	int			ndatabases;		/* number of slots */
	IdemDatabase databases[FLEXIBLE_ARRAY_MEMBER];
} IdemWorkerShared;

/* NULL if idem was not preloaded. */
extern IdemWorkerShared *idem_workers;

extern void idem_worker_request(void);
extern void idem_worker_startup(void);

/* With the lock held. */
extern IdemDatabase *idem_database_find(Oid oid);
extern IdemDatabase *idem_database_add(Oid oid);
extern void idem_database_free_unwanted(IdemDatabase *db);
extern void idem_database_wake(IdemDatabase *db);
extern bool idem_worker_allowed(const IdemDatabase *db, IdemWorkerKind kind);
extern void idem_process_wake(int pid);
extern void idem_wake_maintenance(void);

/* For the workers themselves. */
extern IdemDatabase *idem_worker_start(Datum arg, IdemWorkerKind kind);
extern IdemDatabase *idem_worker_attach(Oid oid, IdemWorkerKind kind);
extern bool idem_worker_may_run(IdemDatabase *db, IdemWorkerKind kind);
extern void idem_worker_succeeded(IdemDatabase *db, IdemWorkerKind kind);
extern void idem_worker_failed(IdemDatabase *db, IdemWorkerKind kind, const char *reason);
extern void idem_worker_found(IdemDatabase *db, bool installed, bool handlers);
extern void idem_worker_expect_handlers(void);

#endif							/* IDEM_WORKER_H */

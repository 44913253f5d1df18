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

typedef enum IdemDatabaseState
{
	IDEM_DB_WAITING,			/* the launcher will start its worker */
	IDEM_DB_STARTING,			/* the launcher has asked for one */
	IDEM_DB_RUNNING				/* the worker has attached */
} IdemDatabaseState;

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
	IdemDatabaseState state;
	bool		wanted;			/* false: its worker is to end for good */
	int			worker;			/* pid, or 0 */
	int			holder;			/* pid of the session that keeps workers away */
	int			failures;		/* starts in a row that came to nothing */
	TimestampTz started_at;
	TimestampTz not_before;		/* earliest time for the next start */
	char		reason[256];	/* why there is no worker, or "" */
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
extern void idem_process_wake(int pid);

/* For the workers themselves. */
extern IdemDatabase *idem_worker_attach(Oid oid);
extern bool idem_worker_may_run(IdemDatabase *db);
extern void idem_worker_succeeded(IdemDatabase *db);
extern void idem_worker_failed(IdemDatabase *db, const char *reason);

#endif							/* IDEM_WORKER_H */

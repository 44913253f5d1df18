/*-------------------------------------------------------------------------
 *
 * worker.c
 *		The databases that have workers, as all processes see them.
 *
 * A table in shared memory, one slot per database, with a place for each kind
 * of worker.  The launcher starts what is wanted, a worker attaches to its
 * place and lets go of it when it exits in whatever way, and a session that
 * runs a database command may keep all of them away for the time being.  Pids,
 * not pointers, are kept here.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/shmem.h"
#include "tcop/tcopprot.h"
#include "utils/guc.h"

#include "clock.h"
#include "guc.h"
#include "worker.h"

/* Pause before a worker starts again, doubled with every failure. */
#define RESTART_MIN_MS	200
#define RESTART_MAX_MS	60000

IdemWorkerShared *idem_workers = NULL;

/* The slot that this process has attached to. */
static IdemDatabase *my_database = NULL;

static Size
shared_size(void)
{
	return add_size(offsetof(IdemWorkerShared, databases),
					mul_size(idem_max_databases, sizeof(IdemDatabase)));
}

void
idem_worker_request(void)
{
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("idem_worker", 1);
}

void
idem_worker_startup(void)
{
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	idem_workers = ShmemInitStruct("idem_worker", shared_size(), &found);
	if (!found)
	{
		memset(idem_workers, 0, shared_size());
		idem_workers->lock = &GetNamedLWLockTranche("idem_worker")->lock;
		idem_workers->ndatabases = idem_max_databases;
	}
	LWLockRelease(AddinShmemInitLock);
}

/* The slot of a database, or NULL.  Caller holds the lock. */
IdemDatabase *
idem_database_find(Oid oid)
{
	for (int i = 0; i < idem_workers->ndatabases; i++)
	{
		if (idem_workers->databases[i].oid == oid)
			return &idem_workers->databases[i];
	}
	return NULL;
}

/*
 * The slot of a database, which may be new; its workers are wanted.  NULL if
 * all slots are taken.  Caller holds the lock exclusively.
 */
IdemDatabase *
idem_database_add(Oid oid)
{
	IdemDatabase *db = idem_database_find(oid);

	if (db == NULL)
	{
		db = idem_database_find(InvalidOid);
		if (db == NULL)
			return NULL;
		memset(db, 0, sizeof(IdemDatabase));
		db->oid = oid;
		db->inbox.backlog = -1;
		db->key.backlog = -1;
	}
	db->wanted = true;
	return db;
}

/*
 * Give the slot of a database back whose workers have ended for good.  Caller
 * holds the lock exclusively.
 */
void
idem_database_free_unwanted(IdemDatabase *db)
{
	if (db->wanted)
		return;
	for (int kind = 0; kind < IDEM_WORKER_KINDS; kind++)
	{
		if (db->workers[kind].pid != 0)
			return;
	}
	db->oid = InvalidOid;
}

/* Set the latch of a process, if it is still there. */
void
idem_process_wake(int pid)
{
	PGPROC	   *proc = pid != 0 ? BackendPidGetProc(pid) : NULL;

	if (proc != NULL)
		SetLatch(&proc->procLatch);
}

/* Have the maintenance worker of this database look at what was lost. */
void
idem_wake_maintenance(void)
{
	IdemDatabase *db;

	if (idem_workers == NULL)
		return;
	LWLockAcquire(idem_workers->lock, LW_SHARED);
	db = idem_database_find(MyDatabaseId);
	if (db != NULL)
		idem_process_wake(db->workers[IDEM_WORKER_MAINTENANCE].pid);
	LWLockRelease(idem_workers->lock);
}

/* Have all workers of a database look whether they may run. */
void
idem_database_wake(IdemDatabase *db)
{
	for (int kind = 0; kind < IDEM_WORKER_KINDS; kind++)
		idem_process_wake(db->workers[kind].pid);
}

/* Is a worker of this kind to run here?  Caller holds the lock. */
bool
idem_worker_allowed(const IdemDatabase *db, IdemWorkerKind kind)
{
	if (!OidIsValid(db->oid) || !db->wanted || db->holder != 0)
		return false;
	if (kind == IDEM_WORKER_MAINTENANCE)
		return true;
	if (kind == IDEM_WORKER_RELAY)
		return db->installed && idem_relay;
	return db->installed && db->handlers && (int) kind - IDEM_WORKER_HANDLER < idem_handler_workers;
}

/* Let go of the place when the worker exits. */
static void
detach(int code pg_attribute_unused(), Datum arg)
{
	IdemWorker *worker = &my_database->workers[DatumGetInt32(arg)];
	int			delay = RESTART_MIN_MS;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	if (worker->pid == MyProcPid)
	{
		worker->pid = 0;
		worker->state = IDEM_WORKER_WAITING;
		for (int i = 0; i < worker->failures && delay < RESTART_MAX_MS; i++)
			delay *= 2;
		worker->not_before = TimestampTzPlusMilliseconds(idem_clock(),
														 Min(delay, RESTART_MAX_MS));
		idem_database_free_unwanted(my_database);
	}
	idem_process_wake(idem_workers->launcher);
	LWLockRelease(idem_workers->lock);
}

/*
 * idem_worker_attach
 *		Take a place for this process; NULL if that is not for us.
 */
IdemDatabase *
idem_worker_attach(Oid oid, IdemWorkerKind kind)
{
	IdemDatabase *db;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	db = idem_database_find(oid);
	if (db != NULL && db->workers[kind].pid != 0)
		db = NULL;
	if (db != NULL)
	{
		IdemWorker *worker = &db->workers[kind];

		if (idem_worker_allowed(db, kind))
		{
			worker->pid = MyProcPid;
			worker->state = IDEM_WORKER_RUNNING;
			worker->failures++; /* until it has succeeded at something */
			my_database = db;
			before_shmem_exit(detach, Int32GetDatum(kind));
		}
		else
		{
			/* Sent away before it was there, which is no failure. */
			worker->state = IDEM_WORKER_WAITING;
			db = NULL;
		}
	}
	LWLockRelease(idem_workers->lock);
	return db;
}

/*
 * idem_worker_start
 *		What every worker begins with: signals, its place, its database.
 *
 * The argument is the oid of the database.  Does not return if the worker is
 * not wanted any more.  Whatever a role or database sets must not change what
 * our statements mean.
 */
IdemDatabase *
idem_worker_start(Datum arg, IdemWorkerKind kind)
{
	IdemDatabase *db;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);

	/* The server ignores the signal while it starts us. */
	ConfigReloadPending = true;
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();

	db = idem_worker_attach(DatumGetObjectId(arg), kind);
	if (db == NULL)
		proc_exit(0);
	BackgroundWorkerInitializeConnectionByOid(DatumGetObjectId(arg), InvalidOid, 0);
	SetConfigOption("search_path", "pg_catalog, pg_temp", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("enable_seqscan", "off", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("jit", "off", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_isolation", "read committed",
					PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("default_transaction_read_only", "off",
					PGC_SUSET, PGC_S_OVERRIDE);
	return db;
}

/* Has nobody asked this worker to go away? */
bool
idem_worker_may_run(IdemDatabase *db, IdemWorkerKind kind)
{
	bool		result;

	LWLockAcquire(idem_workers->lock, LW_SHARED);
	result = idem_worker_allowed(db, kind) &&
		db->workers[kind].pid == MyProcPid;
	LWLockRelease(idem_workers->lock);
	return result;
}

void
idem_worker_succeeded(IdemDatabase *db, IdemWorkerKind kind)
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	db->workers[kind].failures = 0;
	db->workers[kind].reason[0] = '\0';
	LWLockRelease(idem_workers->lock);
}

void
idem_worker_failed(IdemDatabase *db, IdemWorkerKind kind, const char *reason)
{
	IdemWorker *worker = &db->workers[kind];

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	strlcpy(worker->reason, reason, sizeof(worker->reason));
	LWLockRelease(idem_workers->lock);
}

/*
 * idem_worker_found
 *		Note whether the extension is in this database, and any handlers.
 *
 * If it is, the other workers start; if not, all of them end.
 */
void
idem_worker_found(IdemDatabase *db, bool installed, bool handlers)
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	if (!installed)
		db->wanted = false;
	installed &= db->wanted;
	if (db->installed != installed || db->handlers != handlers)
	{
		db->installed = installed;
		db->handlers = handlers;
		idem_database_wake(db);
		idem_process_wake(idem_workers->launcher);
	}
	LWLockRelease(idem_workers->lock);
}

/*
 * idem_worker_expect_handlers
 *		This database has a consumer with a handler now.
 */
void
idem_worker_expect_handlers(void)
{
	IdemDatabase *db;

	if (idem_workers == NULL)
		return;
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	db = idem_database_find(MyDatabaseId);
	if (db != NULL && !db->handlers)
	{
		db->handlers = true;
		idem_process_wake(idem_workers->launcher);
	}
	LWLockRelease(idem_workers->lock);
}

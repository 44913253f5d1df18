/*-------------------------------------------------------------------------
 *
 * worker.c
 *		The databases that have workers, as all processes see them.
 *
 * A table in shared memory, one slot per database.  The launcher starts what
 * is wanted, a worker attaches to its slot and lets go of it when it exits in
 * whatever way, and a session that runs a database command may keep workers
 * away for the time being.  Pids, not pointers, are kept here.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/procarray.h"
#include "storage/shmem.h"

#include "guc.h"
#include "worker.h"

/* Pause before a worker starts again, doubled with every failure. */
#define RESTART_MIN_MS	200
#define RESTART_MAX_MS	60000

IdemWorkerShared *idem_workers = NULL;

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
 * The slot of a database, which may be new; its worker is wanted.  NULL if
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

/* Set the latch of a process, if it is still there. */
void
idem_process_wake(int pid)
{
	PGPROC	   *proc = pid != 0 ? BackendPidGetProc(pid) : NULL;

	if (proc != NULL)
		SetLatch(&proc->procLatch);
}

/* Let go of the slot when the worker exits. */
static void
detach(int code pg_attribute_unused(), Datum arg)
{
	IdemDatabase *db = (IdemDatabase *) DatumGetPointer(arg);
	int			delay = RESTART_MIN_MS;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	if (db->worker == MyProcPid)
	{
		db->worker = 0;
		db->state = IDEM_DB_WAITING;
		for (int i = 0; i < db->failures && delay < RESTART_MAX_MS; i++)
			delay *= 2;
		db->not_before = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													 Min(delay, RESTART_MAX_MS));
		if (!db->wanted)
			db->oid = InvalidOid;
	}
	idem_process_wake(idem_workers->launcher);
	LWLockRelease(idem_workers->lock);
}

/*
 * idem_worker_attach
 *		Take the slot of a database for this process; NULL if that is not for us.
 */
IdemDatabase *
idem_worker_attach(Oid oid)
{
	IdemDatabase *db;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	db = idem_database_find(oid);
	if (db != NULL && (db->worker != 0 || db->holder != 0 || !db->wanted))
		db = NULL;
	if (db != NULL)
	{
		db->worker = MyProcPid;
		db->state = IDEM_DB_RUNNING;
		db->failures++;			/* until it has succeeded at something */
		before_shmem_exit(detach, PointerGetDatum(db));
	}
	LWLockRelease(idem_workers->lock);
	return db;
}

/* Has nobody asked this worker to go away? */
bool
idem_worker_may_run(IdemDatabase *db)
{
	bool		result;

	LWLockAcquire(idem_workers->lock, LW_SHARED);
	result = db->wanted && db->holder == 0 && db->worker == MyProcPid;
	LWLockRelease(idem_workers->lock);
	return result;
}

void
idem_worker_succeeded(IdemDatabase *db)
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	db->failures = 0;
	db->reason[0] = '\0';
	LWLockRelease(idem_workers->lock);
}

void
idem_worker_failed(IdemDatabase *db, const char *reason)
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	strlcpy(db->reason, reason, sizeof(db->reason));
	LWLockRelease(idem_workers->lock);
}

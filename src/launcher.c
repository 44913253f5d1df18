/*-------------------------------------------------------------------------
 *
 * launcher.c
 *		The process that keeps the workers of all databases running.
 *
 * A static background worker, connected to no database.  When it starts it
 * has every database looked at once, one at a time: the worker started there
 * goes away again if the extension is not installed.  After that it is told,
 * by CREATE EXTENSION and, should that be missed (a restored template, a
 * prepared transaction), by the first session that uses the extension.  That
 * first worker is the one for maintenance; the relay follows when it has found
 * the extension.
 *
 * Workers that end are started again, with growing pauses if they come to
 * nothing.  On a standby it does not run before promotion.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "clock.h"
#include "backlog.h"
#include "guc.h"
#include "input.h"
#include "launcher.h"
#include "stat.h"
#include "worker.h"

/* How long to wait for a worker that was asked for, and for free slots. */
#define START_TIMEOUT_MS	10000
#define NO_SLOT_RETRY_MS	1000
#define POLL_MS				10000

/* What the workers are called, and where they begin. */
static const struct
{
	const char *type;
	const char *function;
}			programs[] = {
	[IDEM_WORKER_MAINTENANCE] = {"idem maintenance", "idem_maintenance_main"},
	[IDEM_WORKER_RELAY] = {"idem relay", "idem_relay_main"},
	[IDEM_WORKER_HANDLER] = {"idem handler", "idem_handler_main"}
};

/* Why a database has no worker. */
typedef enum DatabaseFitness
{
	DATABASE_FIT,
	DATABASE_GONE,
	DATABASE_TEMPLATE
} DatabaseFitness;

/* Handles of the workers we asked for, in the order of the slots. */
static BackgroundWorkerHandle *(*handles)[IDEM_WORKER_KINDS];

PG_FUNCTION_INFO_V1(idem_worker_status);

/* Register the launcher; called while the postmaster loads us. */
void
idem_launcher_register(void)
{
	BackgroundWorker worker;

	/* pg_upgrade starts both servers: nothing must be written or sent then. */
	if (IsBinaryUpgrade)
		return;
	memset(&worker, 0, sizeof(worker));
	strlcpy(worker.bgw_name, "idem launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_type, "idem launcher", BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "idem", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, "idem_launcher_main", BGW_MAXLEN);
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = 1;
	RegisterBackgroundWorker(&worker);
}

/*
 * idem_launcher_nudge
 *		Make sure that this database has workers, or will have.
 *
 * Called by sessions now and then; cheap if all is well.
 */
void
idem_launcher_nudge(void)
{
	bool		known;

	if (idem_workers == NULL)
		return;

	LWLockAcquire(idem_workers->lock, LW_SHARED);
	known = idem_database_find(MyDatabaseId) != NULL;
	LWLockRelease(idem_workers->lock);
	if (known)
		return;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	if (idem_database_add(MyDatabaseId) != NULL)
		idem_process_wake(idem_workers->launcher);
	LWLockRelease(idem_workers->lock);
}

static void
on_launcher_exit(int code pg_attribute_unused(), Datum arg pg_attribute_unused())
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	if (idem_workers->launcher == MyProcPid)
		idem_workers->launcher = 0;
	LWLockRelease(idem_workers->lock);
}

/* The databases to look at, in the caller's memory context. */
static List *
list_databases(void)
{
	MemoryContext caller = CurrentMemoryContext;
	List	   *result = NIL;
	Relation	rel;
	TableScanDesc scan;
	HeapTuple	tup;

	StartTransactionCommand();
	(void) GetTransactionSnapshot();
	rel = table_open(DatabaseRelationId, AccessShareLock);
	scan = table_beginscan_catalog(rel, 0, NULL);
	while (HeapTupleIsValid(tup = heap_getnext(scan, ForwardScanDirection)))
	{
		Form_pg_database db = (Form_pg_database) GETSTRUCT(tup);

		if (db->datallowconn && !db->datistemplate)
		{
			MemoryContext old = MemoryContextSwitchTo(caller);

			result = lappend_oid(result, db->oid);
			MemoryContextSwitchTo(old);
		}
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	CommitTransactionCommand();
	return result;
}

static DatabaseFitness
database_fitness(Oid oid)
{
	DatabaseFitness result = DATABASE_GONE;
	HeapTuple	tup;

	StartTransactionCommand();
	tup = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(oid));
	if (HeapTupleIsValid(tup))
	{
		Form_pg_database db = (Form_pg_database) GETSTRUCT(tup);

		result = db->datallowconn && !db->datistemplate ?
			DATABASE_FIT : DATABASE_TEMPLATE;
		ReleaseSysCache(tup);
	}
	CommitTransactionCommand();
	return result;
}

static bool
register_worker(Oid oid, IdemWorkerKind kind, BackgroundWorkerHandle **handle)
{
	BackgroundWorker worker;
	int			program = Min(kind, IDEM_WORKER_HANDLER);

	memset(&worker, 0, sizeof(worker));
	snprintf(worker.bgw_name, BGW_MAXLEN, "%s for database %u", programs[program].type, oid);
	strlcpy(worker.bgw_type, programs[program].type, BGW_MAXLEN);
	strlcpy(worker.bgw_library_name, "idem", BGW_MAXLEN);
	strlcpy(worker.bgw_function_name, programs[program].function, BGW_MAXLEN);
	memcpy(worker.bgw_extra, &kind, sizeof(kind));
	worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
	worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
	worker.bgw_restart_time = BGW_NEVER_RESTART;	/* that is our job */
	worker.bgw_main_arg = ObjectIdGetDatum(oid);
	worker.bgw_notify_pid = MyProcPid;
	return RegisterDynamicBackgroundWorker(&worker, handle);
}

/* Put off the next start of a worker; caller holds the lock exclusively. */
static void
put_off(IdemWorker *worker, int ms, const char *reason)
{
	worker->state = IDEM_WORKER_WAITING;
	worker->not_before = TimestampTzPlusMilliseconds(idem_clock(), ms);
	strlcpy(worker->reason, reason, sizeof(worker->reason));
}

/*
 * A process that died without saying so must not keep its place for ever.
 * The list of backends would not do: a worker that is about to connect is not
 * in it yet.
 */
static bool
process_is_gone(int pid)
{
	return pid != 0 && kill(pid, 0) != 0 && errno == ESRCH;
}

static void
forget_dead(IdemDatabase *db)
{
	if (process_is_gone(db->holder))
		db->holder = 0;
	for (int kind = 0; kind < IDEM_WORKER_KINDS; kind++)
	{
		if (process_is_gone(db->workers[kind].pid))
		{
			db->workers[kind].pid = 0;
			db->workers[kind].state = IDEM_WORKER_WAITING;
		}
	}
}

/* Note if a worker that was asked for did not come to life. */
static void
notice_failed_start(IdemWorker *worker, BackgroundWorkerHandle *handle)
{
	pid_t		pid;
	bool		dead;

	if (worker->state != IDEM_WORKER_STARTING)
		return;
	dead = handle != NULL ?
		GetBackgroundWorkerPid(handle, &pid) == BGWH_STOPPED :
		TimestampDifferenceExceeds(worker->started_at, idem_clock(),
								   START_TIMEOUT_MS);
	if (dead)
	{
		worker->failures++;
		put_off(worker, Min(1000 << Min(worker->failures, 6), POLL_MS * 6),
				"worker could not start; see the server log");
	}
}

/* May this worker be started, sooner or later?  Caller holds the lock. */
static bool
waits_for_start(const IdemDatabase *db, IdemWorkerKind kind)
{
	return idem_worker_allowed(db, kind) &&
		db->workers[kind].state == IDEM_WORKER_WAITING;
}

/* The database whose worker is to be started now in this place, or none. */
static Oid
start_is_due(int slot, IdemWorkerKind kind)
{
	IdemDatabase *db = &idem_workers->databases[slot];
	Oid			result = InvalidOid;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	if (OidIsValid(db->oid))
	{
		forget_dead(db);
		idem_database_free_unwanted(db);
		notice_failed_start(&db->workers[kind], handles[slot][kind]);
	}
	if (waits_for_start(db, kind) &&
		db->workers[kind].not_before <= idem_clock())
		result = db->oid;
	LWLockRelease(idem_workers->lock);
	return result;
}

static void
start_worker(int slot, IdemWorkerKind kind, Oid oid)
{
	IdemDatabase *db = &idem_workers->databases[slot];
	IdemWorker *worker = &db->workers[kind];
	BackgroundWorkerHandle **handle = &handles[slot][kind];
	DatabaseFitness fitness = database_fitness(oid);

	if (*handle != NULL)
		pfree(*handle);
	*handle = NULL;
	if (fitness == DATABASE_GONE)
	{
		idem_stat_forget(oid);
		idem_backlog_forget_database(oid);
	}

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	/* Meanwhile the slot may have become another one's. */
	if (db->oid == oid && waits_for_start(db, kind))
	{
		if (fitness == DATABASE_GONE)
		{
			db->wanted = false;
			idem_database_free_unwanted(db);
		}
		else if (fitness == DATABASE_TEMPLATE)
			put_off(worker, POLL_MS, "database is a template or allows no connections");
		else if (!register_worker(oid, kind, handle))
			put_off(worker, NO_SLOT_RETRY_MS,
					"no free background worker slot; increase max_worker_processes and restart the server");
		else
		{
			worker->state = IDEM_WORKER_STARTING;
			worker->started_at = idem_clock();
		}
	}
	LWLockRelease(idem_workers->lock);
}

/* How long we can wait as far as this worker is concerned. */
static long
time_to_wait(const IdemDatabase *db, IdemWorkerKind kind)
{
	const IdemWorker *worker = &db->workers[kind];

	if (!OidIsValid(db->oid))
		return POLL_MS;
	if (worker->state == IDEM_WORKER_STARTING || db->holder != 0)
		return 1000;
	if (!waits_for_start(db, kind))
		return POLL_MS;
	return Max(10, TimestampDifferenceMilliseconds(idem_clock(),
												   worker->not_before));
}

/*
 * Go through all slots and start what is due.  Returns how long to wait, and
 * sets *looking if a database is being looked at by a worker that has not come
 * to life yet.
 */
static long
manage_slots(bool *looking)
{
	long		wait = POLL_MS;

	*looking = false;
	for (int slot = 0; slot < idem_workers->ndatabases; slot++)
	{
		IdemDatabase *db = &idem_workers->databases[slot];

		for (int kind = 0; kind < IDEM_WORKER_KINDS; kind++)
		{
			Oid			oid = start_is_due(slot, kind);

			if (OidIsValid(oid))
				start_worker(slot, kind, oid);

			LWLockAcquire(idem_workers->lock, LW_SHARED);
			wait = Min(wait, time_to_wait(db, kind));
			if (OidIsValid(db->oid) && kind == IDEM_WORKER_MAINTENANCE &&
				db->workers[kind].state == IDEM_WORKER_STARTING)
				*looking = true;
			LWLockRelease(idem_workers->lock);
		}
	}
	return wait;
}

/*
 * Take one more database to look at; false if there is no slot for it.  That
 * may be because of databases that turn out to be without the extension, so
 * it is worth a warning only if it lasts.
 */
static bool
look_at(Oid oid)
{
	static TimestampTz full_since = 0;
	static bool warned = false;
	TimestampTz now = idem_clock();
	bool		ok;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	ok = idem_database_add(oid) != NULL;
	LWLockRelease(idem_workers->lock);

	if (ok)
		full_since = 0;
	else if (full_since == 0)
		full_since = now;
	else if (!warned &&
			 TimestampDifferenceExceeds(full_since, now, START_TIMEOUT_MS))
	{
		warned = true;
		ereport(WARNING,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("idem has no worker slot left for database %u", oid),
				 errhint("Increase idem.max_databases.")));
	}
	return ok;
}

/* Entry point of the launcher. */
void
idem_launcher_main(Datum arg pg_attribute_unused())
{
	List	   *unseen;

	pqsignal(SIGHUP, SignalHandlerForConfigReload);
	pqsignal(SIGTERM, die);
	BackgroundWorkerUnblockSignals();
	BackgroundWorkerInitializeConnection(NULL, NULL, 0);

	before_shmem_exit(on_launcher_exit, (Datum) 0);
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	idem_workers->launcher = MyProcPid;
	LWLockRelease(idem_workers->lock);

	MemoryContextSwitchTo(TopMemoryContext);
	handles = palloc0(idem_workers->ndatabases * sizeof(*handles));
	unseen = list_databases();

	for (;;)
	{
		bool		looking;
		long		wait;

		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}

		wait = manage_slots(&looking);
		if (unseen != NIL && !looking && look_at(linitial_oid(unseen)))
		{
			unseen = list_delete_first(unseen);
			continue;
		}

		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 wait, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
	}
}

/* What the status views say of a worker that is managed. */
static void
describe_managed(const IdemDatabase *db, IdemWorkerKind kind,
				 const char **state, const char **reason)
{
	static const char *const states[] = {
		[IDEM_WORKER_WAITING] = "waiting",
		[IDEM_WORKER_STARTING] = "starting",
		[IDEM_WORKER_RUNNING] = "running"
	};
	const IdemWorker *worker = &db->workers[kind];
	const IdemWorker *first = &db->workers[IDEM_WORKER_MAINTENANCE];

	*state = states[worker->state];
	if (db->holder != 0)
	{
		*state = "held";
		*reason = "a database command keeps workers away";
	}
	else if (kind == IDEM_WORKER_RELAY && !idem_relay)
	{
		*state = "off";
		*reason = "idem.relay is off";
	}
	else if (kind == IDEM_WORKER_RELAY && !db->installed)
		*reason = first->reason[0] != '\0' ? pstrdup(first->reason) :
			"the maintenance worker has not looked at this database yet";
	else if (kind >= IDEM_WORKER_HANDLER && idem_handler_workers == 0)
	{
		*state = "off";
		*reason = "idem.handler_workers is 0";
	}
	else if (worker->reason[0] != '\0')
		*reason = pstrdup(worker->reason);

	if (kind == IDEM_WORKER_MAINTENANCE && db->holder == 0 && !idem_maintenance)
	{
		if (worker->state == IDEM_WORKER_RUNNING)
			*state = "off";
		if (*reason == NULL)
			*reason = "idem.maintenance is off";
	}
}

/* What the status views say of a worker of this database; db may be NULL. */
static void
describe(const IdemDatabase *db, IdemWorkerKind kind, const char **state,
		 const char **reason, int *pid)
{
	*pid = db != NULL ? db->workers[kind].pid : 0;
	*reason = NULL;
	if (idem_workers == NULL)
	{
		*state = "not loaded";
		*reason = "idem is not in shared_preload_libraries; add it there and restart the server";
	}
	else if (RecoveryInProgress())
	{
		*state = "standby";
		*reason = "workers start when the server is promoted";
	}
	else if (idem_workers->launcher == 0)
	{
		*state = "stopped";
		*reason = "the launcher is not running; if it does not start within seconds, increase max_worker_processes and restart the server";
	}
	else if (db == NULL)
	{
		*state = "stopped";
		*reason = idem_database_find(InvalidOid) == NULL ?
			"all worker slots are taken; increase idem.max_databases and restart the server" :
			"the launcher has not looked at this database yet";
	}
	else
		describe_managed(db, kind, state, reason);
}

/* A copy of the slot of this database; false if there is none. */
static bool
copy_slot(IdemDatabase *copy)
{
	IdemDatabase *db;

	if (idem_workers == NULL)
		return false;
	if (!RecoveryInProgress())
		idem_launcher_nudge();
	LWLockAcquire(idem_workers->lock, LW_SHARED);
	db = idem_database_find(MyDatabaseId);
	if (db != NULL)
		*copy = *db;
	LWLockRelease(idem_workers->lock);
	return db != NULL;
}

/*
 * idem_worker_describe
 *		How a worker of this database is, and why it does not run.
 *
 * *reason is NULL if all is well, and *pid 0 if there is no worker.
 */
void
idem_worker_describe(IdemWorkerKind kind, const char **state,
					 const char **reason, int *pid)
{
	IdemDatabase copy;
	bool		known = copy_slot(&copy);

	describe(known ? &copy : NULL, kind, state, reason, pid);
}

static void
put_status(ReturnSetInfo *rsinfo, const char *what, IdemWorkerKind kind,
		   const IdemDatabase *db, const IdemRetentionFigures *figures)
{
	Datum		values[9] = {0};
	bool		nulls[9] = {0};
	const char *state;
	const char *reason;
	int			pid;

	describe(db, kind, &state, &reason, &pid);
	if (kind == IDEM_WORKER_MAINTENANCE && reason == NULL &&
		idem_inbox_retention < IDEM_SHORT_RETENTION)
		reason = "idem.inbox_retention is shorter than an hour: what is redelivered later is processed again";
	values[0] = CStringGetTextDatum(what);
	values[1] = CStringGetTextDatum(state);
	if (reason != NULL)
		values[2] = CStringGetTextDatum(reason);
	nulls[2] = reason == NULL;
	values[3] = Int32GetDatum(pid);
	nulls[3] = pid == 0;

	memset(&nulls[4], figures == NULL, 5);
	if (figures != NULL)
	{
		values[4] = TimestampTzGetDatum(figures->last_run);
		nulls[4] = figures->last_run == 0;
		values[5] = Int64GetDatum(figures->removed_last);
		nulls[5] = figures->last_run == 0;
		values[6] = Int64GetDatum(figures->removed_total);
		values[7] = Int64GetDatum(figures->backlog);
		nulls[7] = figures->backlog < 0;
		values[8] = TimestampTzGetDatum(figures->oldest_due);
		nulls[8] = figures->oldest_due == 0;
	}
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/*
 * worker_status() returns setof (what, state, reason, pid, last_run,
 *		removed_last, removed_total, backlog, oldest_due)
 */
Datum
idem_worker_status(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemDatabase copy;
	bool		known;

	InitMaterializedSRF(fcinfo, 0);
	known = copy_slot(&copy);
	put_status(rsinfo, "inbox", IDEM_WORKER_MAINTENANCE,
			   known ? &copy : NULL, known ? &copy.inbox : NULL);
	put_status(rsinfo, "key", IDEM_WORKER_MAINTENANCE,
			   known ? &copy : NULL, known ? &copy.key : NULL);
	put_status(rsinfo, "relay", IDEM_WORKER_RELAY, known ? &copy : NULL, NULL);
	return (Datum) 0;
}

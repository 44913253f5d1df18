/*-------------------------------------------------------------------------
 *
 * retention.c
 *		Removes what is older than it has to be.
 *
 * The maintenance worker of a database: every naptime it removes expired
 * claims (see sweep.c) and idempotency keys, in batches of a transaction
 * each, with a pause in between.  Nothing here waits for a session, or makes
 * one wait: a row that is being removed still says "duplicate".
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/bufmgr.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lwlock.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "backlog.h"
#include "catalog.h"
#include "declared.h"
#include "guc.h"
#include "input.h"
#include "outbox.h"
#include "retention.h"
#include "statement.h"
#include "sweep.h"
#include "take.h"
#include "work.h"
#include "worker.h"

/* Keys are larger than claims, so there are fewer of them in a batch. */
#define KEY_BATCH			1000
#define CLAIMS_PER_BLOCK	157

/*
 * Whoever removes claims keeps changes of retentions out for so long.  Else a
 * claim could be removed under a retention that has just been made longer.
 */
#define KEEP_LOCK			ShareLock
#define KEEP_LOCK_RETRY_MS	100

/* So often are marks forgotten, and work is looked for from the start. */
#define LOOK_ANEW_MS		600000

PG_FUNCTION_INFO_V1(idem_inbox_purge);
PG_FUNCTION_INFO_V1(idem_key_purge);

/* How many rows a purge by hand may remove at most. */
int32
idem_max_rows_arg(FunctionCallInfo fcinfo)
{
	idem_require(fcinfo, 0, "max_rows");
	if (PG_GETARG_INT32(0) < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max_rows must be greater than zero")));
	return PG_GETARG_INT32(0);
}

/*
 * inbox_purge(max_rows) returns bigint
 *		Remove expired claims by hand, in the caller's transaction.
 */
Datum
idem_inbox_purge(PG_FUNCTION_ARGS)
{
	int32		max_rows = idem_max_rows_arg(fcinfo);
	IdemKeep	keep;
	int64		next_due = PG_INT64_MAX;

	PreventCommandIfReadOnly("inbox_purge()");
	PreventCommandDuringRecovery("inbox_purge()");

	LockRelationOid(idem_rel(IDEM_REL_CONSUMER), KEEP_LOCK);
	idem_keep_load(&keep);
	PG_RETURN_INT64(idem_sweep_blocks(0, InvalidBlockNumber, &keep, max_rows,
									  &next_due));
}

/* Remove some expired keys; a row that somebody has locked is left to them. */
static int64
remove_keys(int32 max_rows)
{
	static IdemStatement del = {
		.sql = "DELETE FROM idem.key WHERE ctid = ANY (ARRAY("
		"SELECT ctid FROM idem.key WHERE expires_at < $2"
		" ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))",
		.nargs = 2,
		.types = {INT4OID, TIMESTAMPTZOID}
	};
	Datum		values[2];
	int64		removed;

	values[0] = Int32GetDatum(max_rows);
	values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
	SPI_connect();
	removed = idem_statement_run(&del, values, NULL);
	SPI_finish();
	return removed;
}

/*
 * key_purge(max_rows) returns bigint
 *		Remove expired keys by hand, in the caller's transaction.
 */
Datum
idem_key_purge(PG_FUNCTION_ARGS)
{
	PG_RETURN_INT64(remove_keys(idem_max_rows_arg(fcinfo)));
}

static void
start_transaction(const char *activity)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_report_activity(STATE_RUNNING, activity);
}

static void
end_transaction(void)
{
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_stat(true);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/* Start a transaction for a batch of work; false if the extension has gone meanwhile. */
static bool
start_batch(const char *activity)
{
	start_transaction(activity);
	if (idem_installed())
		return true;
	end_transaction();
	return false;
}

/* Note what was done, and what is still to do, where the status view sees it. */
static void
report(IdemRetentionFigures *figures, int64 removed, bool done, int64 backlog,
	   TimestampTz oldest_due)
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	figures->removed_last += removed;
	figures->removed_total += removed;
	if (done)
		figures->last_run = GetCurrentTimestamp();
	figures->backlog = backlog;
	figures->oldest_due = oldest_due;
	LWLockRelease(idem_workers->lock);
}

static void
report_start(IdemRetentionFigures *figures)
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	figures->removed_last = 0;
	LWLockRelease(idem_workers->lock);
}

/*
 * Between two batches: rest, listen to signals, and say whether to go on.
 */
static bool
rest(IdemDatabase *db, long ms)
{
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 ms, PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
	CHECK_FOR_INTERRUPTS();
	if (ConfigReloadPending)
	{
		ConfigReloadPending = false;
		ProcessConfigFile(PGC_SIGHUP);
	}
	return idem_worker_may_run(db, IDEM_WORKER_MAINTENANCE);
}

/*
 * Read the retentions anew, and measure the table; caller has a transaction.
 */
static void
prepare_sweep(IdemSweep *sweep)
{
	static MemoryContext contexts[2];
	static int	which = 0;
	IdemKeep	keep;
	MemoryContext old;
	Relation	rel;

	/* These retentions and those before are needed, no others. */
	which = 1 - which;
	if (contexts[which] == NULL)
		contexts[which] = AllocSetContextCreate(TopMemoryContext, "idem keep",
												ALLOCSET_DEFAULT_SIZES);
	MemoryContextReset(contexts[which]);
	old = MemoryContextSwitchTo(contexts[which]);
	idem_keep_load(&keep);
	MemoryContextSwitchTo(old);

	rel = idem_rel_open(IDEM_REL_INBOX_CLAIM, AccessShareLock);
	if (sweep->keep.by_id != NULL && idem_keep_shorter(&keep, &sweep->keep))
		idem_sweep_forget(sweep);
	idem_sweep_measure(sweep, RelationGetNumberOfBlocks(rel));
	sweep->keep = keep;
	table_close(rel, AccessShareLock);
}

/*
 * Start a transaction in which retentions stay as they are; false if we are to
 * stop instead.  If somebody is changing one, we come back later.
 */
static bool
start_sweep_batch(IdemDatabase *db, IdemSweep *sweep)
{
	for (;;)
	{
		if (!start_batch("removing expired claims"))
			return false;
		if (ConditionalLockRelationOid(idem_rel(IDEM_REL_CONSUMER), KEEP_LOCK))
		{
			prepare_sweep(sweep);
			return true;
		}
		end_transaction();
		if (!rest(db, KEEP_LOCK_RETRY_MS))
			return false;
	}
}

/* How much is due, at most, and since when. */
static void
report_sweep(IdemDatabase *db, IdemSweep *sweep, int64 removed, bool done)
{
	int64		now = idem_sweep_now();
	int64		backlog = 0;
	int64		oldest = now;
	bool		unknown = false;

	for (int i = idem_sweep_next(sweep, 0, now); i >= 0;
		 i = idem_sweep_next(sweep, i + 1, now))
	{
		backlog += (int64) sweep->stretch * CLAIMS_PER_BLOCK;
		oldest = Min(oldest, sweep->due[i]);
		unknown |= sweep->due[i] == 0;
	}
	report(&db->inbox, removed, done, unknown ? -1 : backlog,
		   unknown || oldest == now ? 0 : oldest * USECS_PER_SEC);
}

/* Remove the claims that have expired; false if we are to stop. */
static bool
purge_claims(IdemDatabase *db, IdemSweep *sweep)
{
	int			i = -1;

	report_start(&db->inbox);
	do
	{
		int64		removed = 0;

		if (!start_sweep_batch(db, sweep))
			return false;
		i = idem_sweep_next(sweep, i + 1, idem_sweep_now());
		if (i >= 0)
		{
			int64		next_due = idem_sweep_now() + sweep->keep.least;

			removed = idem_sweep_blocks(i * sweep->stretch, sweep->stretch,
										&sweep->keep, PG_INT64_MAX, &next_due);
			sweep->due[i] = next_due;
		}
		end_transaction();

		report_sweep(db, sweep, removed, i < 0);
		if (!rest(db, idem_maintenance_delay))
			return false;
	} while (i >= 0 && idem_maintenance);
	return true;
}

/* Remove the keys that have expired; false if we are to stop. */
static bool
purge_keys(IdemDatabase *db)
{
	int64		removed;

	report_start(&db->key);
	do
	{
		if (!start_batch("removing expired keys"))
			return false;
		removed = remove_keys(KEY_BATCH);
		end_transaction();

		report(&db->key, removed, removed < KEY_BATCH, -1, 0);
		if (!rest(db, idem_maintenance_delay))
			return false;
	} while (removed >= KEY_BATCH);
	return true;
}

/* Forget old ids of the outbox; false if we are to stop. */
static bool
purge_outbox(IdemDatabase *db)
{
	int64		removed;

	do
	{
		if (!start_batch("forgetting old ids of the outbox"))
			return false;
		removed = idem_outbox_forget(KEY_BATCH);
		end_transaction();
		if (!rest(db, idem_maintenance_delay))
			return false;
	} while (removed >= KEY_BATCH);
	return true;
}

/* Is this still a database that has the extension and may have a worker? */
static bool
database_has_extension(void)
{
	HeapTuple	tup;
	bool		result;

	start_transaction("looking for the extension");
	result = idem_installed();
	tup = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(MyDatabaseId));
	if (HeapTupleIsValid(tup))
	{
		result &= ((Form_pg_database) GETSTRUCT(tup))->datallowconn &&
			!((Form_pg_database) GETSTRUCT(tup))->datistemplate;
		ReleaseSysCache(tup);
	}
	end_transaction();
	return result;
}

/* Does any consumer have a handler? */
static bool
has_handlers(void)
{
	bool		result = false;
	ListCell   *lc;

	start_transaction("looking for handlers");
	foreach(lc, idem_declared_all())
		result |= ((IdemDeclared *) lfirst(lc))->handler != NULL;
	end_transaction();
	return result;
}

/* Count attempts at messages that ended with their transaction; were there any? */
static bool
record_lost(void)
{
	bool		more = true;
	int			n = 0;

	while (more && start_batch("counting attempts"))
	{
		more = idem_work_record_lost();
		n += more;
		end_transaction();
	}
	return n > 0;
}

/*
 * What waits for nothing goes on, and outcomes go with the claims that they
 * belong to; false if we are to stop.
 */
static bool
tend_work(IdemDatabase *db)
{
	static IdemStatement outcomes = {
		.sql = "DELETE FROM idem.inbox_outcome o WHERE o.ctid = ANY (ARRAY("
		"SELECT p.ctid FROM idem.inbox_outcome p WHERE p.at < pg_catalog.now() - $1 * interval '1 second'"
		" AND NOT EXISTS (SELECT FROM idem.inbox_claim c WHERE c.key = p.claim) LIMIT 1000))",
		.nargs = 1,
		.types = {INT4OID}
	};
	static TimestampTz looked_at = 0;
	Datum		values[1] = {Int32GetDatum(Min(idem_inbox_retention, 60))};

	/* Rows that somebody has put there by hand are found in the end. */
	if (TimestampDifferenceExceeds(looked_at, GetCurrentTimestamp(), LOOK_ANEW_MS))
	{
		looked_at = GetCurrentTimestamp();
		idem_backlog_unknown();
	}
	if (!start_batch("tending what waits for consumers"))
		return false;
	idem_take_promote();
	SPI_connect();
	idem_statement_run(&outcomes, values, NULL);
	SPI_finish();
	end_transaction();
	return rest(db, idem_maintenance_delay);
}

/* One run over everything; false if we are to stop. */
static bool
run(IdemDatabase *db, IdemSweep *sweep)
{
	bool		installed = database_has_extension();
	bool		go_on = true;

	idem_worker_found(db, installed, installed && has_handlers());
	if (!installed)
		return false;

	if (idem_maintenance)
		go_on = purge_claims(db, sweep) && purge_keys(db) && purge_outbox(db) && tend_work(db);
	if (go_on)
		idem_worker_succeeded(db, IDEM_WORKER_MAINTENANCE);
	return go_on;
}

/* Tell the status view of an error, then die of it: the launcher starts anew. */
static bool
run_and_tell(IdemDatabase *db, IdemSweep *sweep)
{
	MemoryContext context = CurrentMemoryContext;
	volatile bool go_on = false;

	PG_TRY();
	{
		go_on = run(db, sweep);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		idem_worker_failed(db, IDEM_WORKER_MAINTENANCE,
						   psprintf("%s: %s",
									unpack_sql_state(error->sqlerrcode),
									error->message));
		PG_RE_THROW();
	}
	PG_END_TRY();
	return go_on;
}

/* Entry point of the maintenance worker. */
void
idem_maintenance_main(Datum arg)
{
	IdemSweep	sweep = {0};
	IdemDatabase *db = idem_worker_start(arg, IDEM_WORKER_MAINTENANCE);

	while (run_and_tell(db, &sweep))
	{
		TimestampTz wake = TimestampTzPlusMilliseconds(GetCurrentTimestamp(),
													   idem_maintenance_naptime * 1000L);

		/* Whoever wakes us only because of an attempt that was lost gets just that. */
		do
		{
			if (!rest(db, TimestampDifferenceMilliseconds(GetCurrentTimestamp(), wake)))
				proc_exit(0);
		} while (record_lost());
	}
	proc_exit(0);
}

/*-------------------------------------------------------------------------
 *
 * database.c
 *		Keeps workers out of the way of commands on databases and extensions.
 *
 * A worker is a session.  CREATE DATABASE ... TEMPLATE, DROP DATABASE, RENAME
 * and SET TABLESPACE refuse to run while there is one, so the workers of that
 * database are sent away and none is started until the transaction has ended;
 * then, whatever came of the command, they are wanted again.
 *
 * CREATE EXTENSION and DROP EXTENSION start and end the workers when they
 * commit.  Until then they keep them away likewise: dropping locks one table
 * after the other, and must not meet a worker that does the same.
 *
 * COMMIT PREPARED wakes the relay, and who runs handlers: no callback of the
 * transaction that has enqueued, or taken a message, runs then.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/objectaccess.h"
#include "catalog/pg_database.h"
#include "catalog/pg_extension.h"
#include "commands/dbcommands.h"
#include "commands/defrem.h"
#include "commands/extension.h"
#include "miscadmin.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "tcop/utility.h"
#include "utils/acl.h"
#include "utils/resowner.h"
#include "utils/syscache.h"
#include "utils/wait_event.h"

#include "backlog.h"
#include "catalog.h"
#include "compat.h"
#include "database.h"
#include "route.h"
#include "wake.h"
#include "worker.h"

/* A worker goes when asked; after a while it is told, and then left alone. */
#define ASK_MS		500
#define GIVE_UP_MS	5000
#define CHECK_MS	10

/* Has this transaction created or dropped the extension? */
static bool extension_changed = false;
static bool extension_stays;	/* is it there when this transaction commits? */

/* Has this transaction sent workers away? */
static bool holding = false;

static ProcessUtility_hook_type next_utility = NULL;
static object_access_hook_type next_object_access = NULL;

/* Is our extension among the objects to drop, and the user allowed to? */
static bool
drops_extension(DropStmt *stmt)
{
	ListCell   *lc;

	if (stmt->removeType != OBJECT_EXTENSION &&
		!(stmt->removeType == OBJECT_SCHEMA && stmt->behavior == DROP_CASCADE))
		return false;

	foreach(lc, stmt->objects)
	{
		if (strcmp(strVal(lfirst(lc)), "idem") == 0)
		{
			Oid			oid = get_extension_oid("idem", true);

			return OidIsValid(oid) && idem_owns_extension(oid);
		}
	}
	return false;
}

static bool
creates_extension(CreateExtensionStmt *stmt)
{
	return strcmp(stmt->extname, "idem") == 0 && !idem_installed();
}

/*
 * The database that must be free of workers for this command: invalid if
 * there is none, or if the command will fail for want of rights anyway.
 */
static Oid
database_to_clear(Node *stmt)
{
	const char *name = NULL;
	Oid			oid;
	HeapTuple	tup;
	ListCell   *lc;

	switch (nodeTag(stmt))
	{
		case T_CreatedbStmt:
			name = "template1";
			foreach(lc, ((CreatedbStmt *) stmt)->options)
			{
				DefElem    *option = lfirst(lc);

				if (strcmp(option->defname, "template") == 0 && option->arg)
					name = defGetString(option);
			}
			break;
		case T_DropdbStmt:
			name = ((DropdbStmt *) stmt)->dbname;
			break;
		case T_RenameStmt:
			if (((RenameStmt *) stmt)->renameType == OBJECT_DATABASE)
				name = ((RenameStmt *) stmt)->subname;
			break;
		case T_AlterDatabaseStmt:
			foreach(lc, ((AlterDatabaseStmt *) stmt)->options)
			{
				if (strcmp(((DefElem *) lfirst(lc))->defname, "tablespace") == 0)
					name = ((AlterDatabaseStmt *) stmt)->dbname;
			}
			break;
		case T_CreateExtensionStmt:
			return creates_extension((CreateExtensionStmt *) stmt) ?
				MyDatabaseId : InvalidOid;
		case T_DropStmt:
			return drops_extension((DropStmt *) stmt) ? MyDatabaseId : InvalidOid;
		default:
			break;
	}

	if (name == NULL || !OidIsValid(oid = get_database_oid(name, true)))
		return InvalidOid;

	tup = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(oid));
	if (!HeapTupleIsValid(tup))
		return InvalidOid;
	if (!has_privs_of_role(GetUserId(),
						   ((Form_pg_database) GETSTRUCT(tup))->datdba))
		oid = InvalidOid;
	ReleaseSysCache(tup);
	return oid;
}

/*
 * Mark the database as held, so that its workers go; on request they are
 * terminated.  Are all of them gone?
 */
static bool
hold(Oid oid, bool terminate)
{
	IdemDatabase *db;
	bool		clear = true;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	db = idem_database_find(oid);
	if (db != NULL)
	{
		db->holder = MyProcPid;
		idem_database_wake(db);
		for (int kind = 0; kind < IDEM_WORKER_KINDS; kind++)
		{
			int			pid = db->workers[kind].pid;

			if (pid != 0)
				clear = false;
			if (pid != 0 && terminate)
				kill(pid, SIGTERM);
		}
	}
	LWLockRelease(idem_workers->lock);
	return clear;
}

/* Allow workers again wherever we have sent them away. */
static void
let_go(void)
{
	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	for (int i = 0; i < idem_workers->ndatabases; i++)
	{
		IdemDatabase *db = &idem_workers->databases[i];

		if (db->holder == MyProcPid)
		{
			db->holder = 0;
			for (int kind = 0; kind < IDEM_WORKER_KINDS; kind++)
				db->workers[kind].not_before = 0;
		}
	}
	idem_process_wake(idem_workers->launcher);
	LWLockRelease(idem_workers->lock);
	holding = false;
}

/*
 * When the transaction has ended and released its locks, so that a new worker
 * finds the database as it is to be, or not at all.  This is also called if
 * the session is terminated.
 */
static void
on_resource_release(ResourceReleasePhase phase, bool is_commit pg_attribute_unused(),
					bool is_top, void *arg pg_attribute_unused())
{
	if (holding && is_top && phase == RESOURCE_RELEASE_AFTER_LOCKS)
		let_go();
}

/*
 * Send the workers of a database away and wait until they are gone.  One that
 * does not go in time is left to the command to complain about.
 */
static void
clear_database(Oid oid)
{
	holding = true;
	for (int waited = 0; waited < GIVE_UP_MS; waited += CHECK_MS)
	{
		if (hold(oid, waited == ASK_MS))
			return;
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 CHECK_MS, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		CHECK_FOR_INTERRUPTS();
	}
}

static void
call_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
			 ProcessUtilityContext context, ParamListInfo params,
			 QueryEnvironment *env, DestReceiver *dest, QueryCompletion *qc)
{
	(next_utility ? next_utility : standard_ProcessUtility)
		(pstmt, query, read_only_tree, context, params, env, dest, qc);
}

/* Does this command make, change or drop a server? */
static bool
concerns_server(Node *stmt)
{
	switch (nodeTag(stmt))
	{
		case T_CreateForeignServerStmt:
		case T_AlterForeignServerStmt:
			return true;
		case T_DropStmt:
			return ((DropStmt *) stmt)->removeType == OBJECT_FOREIGN_SERVER;
		case T_RenameStmt:
			return ((RenameStmt *) stmt)->renameType == OBJECT_FOREIGN_SERVER;
		default:
			return false;
	}
}

static void
on_utility(PlannedStmt *pstmt, const char *query, bool read_only_tree,
		   ProcessUtilityContext context, ParamListInfo params,
		   QueryEnvironment *env, DestReceiver *dest, QueryCompletion *qc)
{
	Node	   *stmt = pstmt->utilityStmt;
	bool		ends_prepared = IsA(stmt, TransactionStmt) &&
		(((TransactionStmt *) stmt)->kind == TRANS_STMT_COMMIT_PREPARED ||
		 ((TransactionStmt *) stmt)->kind == TRANS_STMT_ROLLBACK_PREPARED);

	if (idem_workers != NULL && context != PROCESS_UTILITY_SUBCOMMAND)
	{
		Oid			oid = database_to_clear(stmt);

		if (OidIsValid(oid))
			clear_database(oid);
	}

	if (concerns_server(stmt))
	{
		idem_route_utility(stmt);
		idem_wake_orders();
	}

	call_utility(pstmt, query, read_only_tree, context, params, env, dest, qc);

	if (IsA(stmt, CreateExtensionStmt) &&
		strcmp(((CreateExtensionStmt *) stmt)->extname, "idem") == 0)
		extension_changed = true;
	if (ends_prepared)
	{
		idem_wake_now();
		idem_backlog_unknown();
	}
}

/* Notices DROP EXTENSION, in whatever way it comes about. */
static void
on_object_access(ObjectAccessType access, Oid class, Oid object, int sub,
				 void *arg)
{
	if (next_object_access)
		next_object_access(access, class, object, sub, arg);

	if (access == OAT_DROP && class == ExtensionRelationId)
	{
		char	   *name = get_extension_name(object);

		if (name != NULL && strcmp(name, "idem") == 0)
			extension_changed = true;
	}
}

/*
 * Once that has committed, the workers are wanted or are to go.  Which of the
 * two is found out at the very end: there may have been savepoints.  It is
 * noted before our locks are released, and so in the right order if somebody
 * else waits to do the reverse.
 */
static void
on_xact_end(XactEvent event, void *arg pg_attribute_unused())
{
	bool		changed = extension_changed;
	IdemDatabase *db;

	if (event == XACT_EVENT_PRE_COMMIT && changed)
		extension_stays = idem_installed();
	if (event == XACT_EVENT_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE)
		return;
	extension_changed = false;
	if (event != XACT_EVENT_COMMIT || !changed || idem_workers == NULL)
		return;

	LWLockAcquire(idem_workers->lock, LW_EXCLUSIVE);
	db = extension_stays ? idem_database_add(MyDatabaseId) :
		idem_database_find(MyDatabaseId);
	if (db != NULL)
	{
		db->wanted = extension_stays;
		if (!extension_stays)
			db->installed = false;
		idem_database_wake(db);
	}
	idem_process_wake(idem_workers->launcher);
	LWLockRelease(idem_workers->lock);

	/* Numbers begin anew, and rows may be restored behind our back. */
	idem_backlog_unknown();
}

/* Install the hooks; called while the postmaster loads us. */
void
idem_database_hooks(void)
{
	next_utility = ProcessUtility_hook;
	ProcessUtility_hook = on_utility;
	next_object_access = object_access_hook;
	object_access_hook = on_object_access;
	RegisterXactCallback(on_xact_end, NULL);
	RegisterResourceReleaseCallback(on_resource_release, NULL);
}

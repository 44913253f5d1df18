/*-------------------------------------------------------------------------
 *
 * handler.c
 *		Runs the handlers of consumers.
 *
 * A few processes per database take messages of all consumers that have a
 * handler, one transaction for each: the handler's effects and the end of the
 * message commit together.  The handler runs in a subtransaction, so that its
 * error undoes its effects and leaves us the lock on the message, to write
 * down in the same transaction that an attempt has failed.
 *
 * It runs with the rights of the consumer's owner and never more: it cannot
 * change who it is, what it has deferred runs before it ends, what it has set
 * is set back, and the transaction commits as the owner.
 *
 * Whoever takes the process down with it may take the whole server down, and
 * then nothing tells of the attempt.  So for a while after a crash, and for
 * whatever has failed before, it is written down first that it runs.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/prepare.h"
#include "commands/trigger.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "nodes/makefuncs.h"
#include "parser/parse_func.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/guc.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/regproc.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timeout.h"

#include "backlog.h"
#include "catalog.h"
#include "compat.h"
#include "declared.h"
#include "fault.h"
#include "guc.h"
#include "handler.h"
#include "inbox.h"
#include "launcher.h"
#include "payload.h"
#include "stat.h"
#include "statement.h"
#include "take.h"
#include "wake.h"
#include "work.h"
#include "worker.h"

/* So many messages of one consumer before the others have their turn. */
#define MAX_IN_A_ROW	100
#define MAX_IN_A_ROW_MS	200

/* The safety net under lost wake-ups. */
#define POLL_MS			5000

/* What cannot run is tried again after this. */
#define BLOCKED_USECS	(5 * USECS_PER_SEC)

/* What was written down as running, and is not, is taken again after this. */
#define RUNNING_USECS	(2 * USECS_PER_SEC)

/* A conflict with others is over soon. */
#define CONFLICT_USECS	(50 * 1000)

#define ERRCODE_NOT_YET	MAKE_SQLSTATE('I', 'D', '0', '0', '1')

/* How a handler ended. */
typedef struct Ending
{
	bool		ok;
	bool		duplicate;		/* somebody else has claimed the message */
	Datum		result;			/* of type jsonb */
	bool		has_result;
	int			sqlstate;
	char	   *error;
} Ending;

PG_FUNCTION_INFO_V1(idem_consumer_work);
PG_FUNCTION_INFO_V1(idem_handler_workers_rows);

static int	me;					/* which of the processes we are */
static MemoryContext message_context;
static IdemBacklog *running = NULL;	/* of whom we run a handler, */
static int32 running_consumer;	/* and for which message */
static int64 running_seq = 0;
static int	rotation = 0;

/* The process ends: let others in, and let the attempt count. */
static void
on_exit_leave(int code pg_attribute_unused(), Datum arg pg_attribute_unused())
{
	if (running == NULL)
		return;
	if (running_seq != 0)
		idem_backlog_lose(running_consumer, running_seq);
	idem_backlog_leave(running);
	running = NULL;
	idem_wake_maintenance();
	idem_wake_handler();
}

static void
begin(const char *activity)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	MemoryContextSwitchTo(message_context);
	pgstat_report_activity(STATE_RUNNING, activity);
}

static void
commit(void)
{
	PopActiveSnapshot();
	CommitTransactionCommand();
	MemoryContextSwitchTo(message_context);
	pgstat_report_activity(STATE_IDLE, NULL);
}

/*
 * idem_handler_check
 *		Find a handler that this role may run; NULL, or why that cannot be.
 */
const char *
idem_handler_check(const char *handler, Oid owner, Oid *function)
{
	Oid			type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid,
									   CStringGetDatum("message"),
									   ObjectIdGetDatum(get_namespace_oid("idem", false)));
	Oid			result;

	*function = LookupFuncName(idem_qualified_name(handler), 1, &type, true);
	if (!OidIsValid(*function))
		return psprintf("handler %s(idem.message) does not exist", handler);
	if (get_func_prokind(*function) != PROKIND_FUNCTION || get_func_retset(*function))
		return psprintf("handler %s(idem.message) is not a function that returns one value", handler);
	result = get_func_rettype(*function);
	if (result != VOIDOID && result != JSONBOID)
		return psprintf("handler %s(idem.message) must return jsonb or void", handler);
	if (!idem_may_execute(*function, owner))
		return psprintf("owner \"%s\" of the consumer may not execute handler %s(idem.message)",
						GetUserNameFromId(owner, true), handler);
	return NULL;
}

/* The owner and handler of a consumer; NULL, or why it cannot be run. */
static const char *
look_up(const IdemDeclared *c, Oid *owner, Oid *function)
{
	*owner = get_role_oid(c->owner, true);
	if (!OidIsValid(*owner))
		return psprintf("owner \"%s\" of the consumer does not exist", c->owner);
	return idem_handler_check(c->handler, *owner, function);
}

/* Call the handler; everything it may do is inside a subtransaction. */
static void
call(const IdemDeclared *c, IdemTaken *t, Oid owner, Oid function, Ending *ending)
{
	Oid			user;
	int			context;
	int			guc_level;
	FmgrInfo	flinfo;
	LOCAL_FCINFO(fcinfo, 1);
	ConstraintsSetStmt *immediate = makeNode(ConstraintsSetStmt);
	Datum		result;

	PushActiveSnapshot(GetTransactionSnapshot());
	if (!t->claimed && !t->replayed &&
		idem_inbox_claim_key(c->name, &t->claim, true, NULL) != IDEM_CLAIM_CLAIMED)
	{
		PopActiveSnapshot();
		ending->duplicate = true;
		return;
	}
	PopActiveSnapshot();
	CommandCounterIncrement();
	/* From here on, whoever asks for the message has it. */
	idem_backlog_set_handled(c->id, t->seq, &t->claim);

	PushActiveSnapshot(GetTransactionSnapshot());
	InitFunctionCallInfoData(*fcinfo, &flinfo, 1, InvalidOid, NULL, NULL);
	fcinfo->args[0].value = idem_taken_message(c, t, NULL);
	fcinfo->args[0].isnull = false;

	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(owner, context | SECURITY_LOCAL_USERID_CHANGE);
	guc_level = NewGUCNestLevel();
	(void) set_config_option("search_path", c->search_path, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_SAVE, true, 0, false);
	if (c->timeout > 0)
		enable_timeout_after(STATEMENT_TIMEOUT, (int) Min(c->timeout / 1000 + 1, INT_MAX));

	fmgr_info(function, &flinfo);
	result = FunctionCallInvoke(fcinfo);
	if (get_func_rettype(function) == JSONBOID && !fcinfo->isnull)
	{
		MemoryContext old = MemoryContextSwitchTo(message_context);

		ending->result = PointerGetDatum(PG_DETOAST_DATUM_COPY(result));
		ending->has_result = true;
		MemoryContextSwitchTo(old);
	}
	PopActiveSnapshot();

	/* Before PostgreSQL 18, deferred triggers run as whoever is there at commit. */
	immediate->constraints = NIL;
	immediate->deferred = false;
	AfterTriggerSetState(immediate);

	if (c->timeout > 0)
		disable_timeout(STATEMENT_TIMEOUT, false);
	AtEOXact_GUC(false, guc_level);
	SetUserIdAndSecContext(user, context);
}

/* Run the handler for a message. */
static void
run(const IdemDeclared *c, IdemTaken *t, Oid owner, Oid function, Ending *ending)
{
	ResourceOwner resources = CurrentResourceOwner;
	char	   *trace = NULL;

	memset(ending, 0, sizeof(Ending));
	if (!t->isnull[Anum_message_headers - 1])
		trace = idem_payload_trace_of(idem_taken_text(t, Anum_message_headers));
	idem_payload_trace = trace;

	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(message_context);
	PG_TRY();
	{
		call(c, t, owner, function, ending);
		ReleaseCurrentSubTransaction();
		ending->ok = true;
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(message_context);
		disable_timeout(STATEMENT_TIMEOUT, false);
		QueryCancelPending = false;
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		ending->sqlstate = error->sqlerrcode;
		ending->error = error->message;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(message_context);
	CurrentResourceOwner = resources;
	idem_backlog_set_handled(0, 0, NULL);
	idem_payload_trace = NULL;
}

/* "Not yet" burns no attempt, but has its bounds. */
static void
not_yet(const IdemDeclared *c, IdemTaken *t, const Ending *ending)
{
	TimestampTz now = GetCurrentTimestamp();
	IdemWait	wait = {.state = "retry", .sqlstate = "ID001", .error = ending->error};

	if (t->not_yet_since == 0)
		t->not_yet_since = now;
	if (now - t->not_yet_since >= c->not_yet_for)
	{
		idem_taken_bury(c, t, "ID001", ending->error);
		return;
	}
	wait.attempts = t->attempts;
	wait.not_yet_since = t->not_yet_since;
	/* the longer it has taken, the longer it may take */
	wait.due = now + Min(c->backoff_max, Max(c->backoff, (now - t->not_yet_since) / 2));
	idem_taken_park(c, t, &wait);
}

/* Write down what came of a message. */
static void
settle(const IdemDeclared *c, IdemTaken *t, const Ending *ending)
{
	IdemStat	stat = {0};
	IdemStatColumn column = IDEM_STAT_PROCESSED;
	char		sqlstate[6];

	strlcpy(sqlstate, unpack_sql_state(ending->sqlstate), sizeof(sqlstate));
	if (ending->ok)
	{
		if (ending->has_result)
			idem_work_outcome(c, t, ending->result);
		idem_taken_done(c, t);
		if (ending->duplicate)
			return;
	}
	else if (ending->sqlstate == ERRCODE_NOT_YET)
	{
		not_yet(c, t, ending);
		column = t->buried ? IDEM_STAT_DEAD : IDEM_STAT_RETRIED;
	}
	else if (!idem_backlog_counts(ending->sqlstate))
	{
		IdemWait	wait = {.state = "retry", .attempts = t->attempts,
			.due = GetCurrentTimestamp() + CONFLICT_USECS,
			.not_yet_since = t->not_yet_since, .sqlstate = sqlstate,
		.error = ending->error};

		idem_taken_park(c, t, &wait);
		column = IDEM_STAT_RETRIED;
	}
	else
	{
		idem_taken_failed(c, t, sqlstate, ending->error, -1);
		column = t->buried ? IDEM_STAT_DEAD : IDEM_STAT_RETRIED;
	}
	idem_stat_count(&stat, IDEM_STAT_CONSUMER, c->name, column, 1);
}

/* Leave nothing of one handler to the next. */
static void
clean_up(void)
{
	Oid			temp;
	Oid			toast;

	PortalHashTableDeleteAll();
	DropAllPreparedStatements();
	LockReleaseSession(USER_LOCKMETHOD);
	GetTempNamespaceState(&temp, &toast);
	if (OidIsValid(temp))
	{
		PushActiveSnapshot(GetTransactionSnapshot());
		ResetTempTableNamespace();
		PopActiveSnapshot();
	}
}

/*
 * Commit as the owner: what triggers have deferred once more still runs now,
 * with those rights and where the handler ran.
 */
static void
commit_as(Oid owner, const char *search_path)
{
	Oid			user;
	int			context;

	GetUserIdAndSecContext(&user, &context);
	SetUserIdAndSecContext(owner, context | SECURITY_LOCAL_USERID_CHANGE);
	(void) set_config_option("search_path", search_path, PGC_USERSET, PGC_S_SESSION,
							 GUC_ACTION_LOCAL, true, 0, false);
	commit();
	SetUserIdAndSecContext(user, context);
}

/*
 * Write down that a message is about to be run.  Between the two transactions
 * nobody has it, so it is not due before a while has passed.
 */
static IdemTaken *
write_down(const IdemDeclared *c, IdemTaken *t)
{
	IdemWait	wait = {.state = "running", .attempts = t->attempts,
		.due = GetCurrentTimestamp() + RUNNING_USECS,
	.not_yet_since = t->not_yet_since};
	int64		seq = t->seq;
	int32		id = c->id;

	idem_taken_park(c, t, &wait);
	ForceSyncCommit();
	commit();
	begin("taking a message");
	c = idem_declared_by_id(id);
	return c == NULL ? NULL : idem_take_seq(c, seq);
}

/*
 * Process one message of a consumer; false if there is none to process now.
 */
static bool
process(int32 consumer, IdemBacklog *b)
{
	IdemDeclared *c;
	IdemTaken  *t;
	List	   *taken;
	TimestampTz next_due = DT_NOEND;
	TimestampTz start;
	Oid			owner;
	Oid			function;
	Ending		ending;
	const char *why;

	MemoryContextReset(message_context);
	begin("taking a message");
	c = idem_declared_by_id(consumer);
	if (c == NULL || c->handler == NULL)
	{
		commit();
		return false;
	}
	why = look_up(c, &owner, &function);
	idem_backlog_set_reason(b, why != NULL ? why : "");
	taken = why == NULL ? idem_take(c, 1, &next_due) : NIL;
	if (taken == NIL)
	{
		TimestampTz now = GetCurrentTimestamp();

		/* What is due and not for us is looked at again soon, but not at once. */
		idem_backlog_set_due(b, why != NULL ? now + BLOCKED_USECS :
							 Max(next_due, now + CONFLICT_USECS));
		commit();
		return false;
	}
	t = linitial(taken);
	running_consumer = c->id;
	running_seq = t->seq;
	if ((t->attempts > 0 || idem_backlog_cautious()) && !t->running)
	{
		t = write_down(c, t);
		c = idem_declared_by_id(consumer);
		if (t == NULL || c == NULL || look_up(c, &owner, &function) != NULL)
		{
			running_seq = 0;
			commit();
			return true;
		}
	}

	start = GetCurrentTimestamp();
	pgstat_report_activity(STATE_RUNNING, psprintf("handler of consumer \"%s\", message %s",
												   c->name, idem_taken_text(t, Anum_message_msg_id)));
	IDEM_FAULT("handler-before");
	run(c, t, owner, function, &ending);
	IDEM_FAULT("handler-after");
	settle(c, t, &ending);
	clean_up();
	{
		IdemStat	stat = {0};

		idem_stat_count(&stat, IDEM_STAT_CONSUMER, c->name, IDEM_STAT_BUSY_USECS,
						Max(GetCurrentTimestamp() - start, 0));
	}
	commit_as(owner, c->search_path);
	running_seq = 0;
	IDEM_FAULT("handler-committed");
	return true;
}

/*
 * The transaction of a message has failed where that is not the handler's
 * fault, or not only: get over it, and let the attempt count.
 */
static void
carry_on(IdemBacklog *b)
{
	int			sqlstate = geterrcode();

	MemoryContextSwitchTo(message_context);
	HOLD_INTERRUPTS();
	disable_timeout(STATEMENT_TIMEOUT, false);
	QueryCancelPending = false;
	EmitErrorReport();
	FlushErrorState();
	AbortCurrentTransaction();
	RESUME_INTERRUPTS();
	MemoryContextSwitchTo(message_context);
	idem_backlog_set_handled(0, 0, NULL);
	idem_payload_trace = NULL;
	pgstat_report_activity(STATE_IDLE, NULL);
	if (running_seq != 0)
		idem_backlog_give_back(running_consumer, running_seq, sqlstate);
	else
		idem_backlog_unknown();
	running_seq = 0;
	idem_backlog_set_due(b, GetCurrentTimestamp() + USECS_PER_SEC);
}

/* Process what a consumer has, for a while; true if it had anything. */
static bool
serve(int32 consumer, int concurrency)
{
	IdemBacklog *b = idem_backlog(consumer);
	TimestampTz start = GetCurrentTimestamp();
	volatile int n = 0;
	volatile bool more = true;

	if (b == NULL || !idem_backlog_ready(b, start))
		return false;
	if (!idem_backlog_enter(b, concurrency))
	{
		/* One of those who are at it may be just about to leave. */
		idem_backlog_set_ready(b);
		return false;
	}
	running = b;
	PG_TRY();
	{
		while (more && n < MAX_IN_A_ROW && !ShutdownRequestPending &&
			   !TimestampDifferenceExceeds(start, GetCurrentTimestamp(), MAX_IN_A_ROW_MS))
		{
			CHECK_FOR_INTERRUPTS();
			more = process(consumer, b);
			if (more && ++n == 2 && concurrency > 1)
			{
				/* There is more than one of us can do. */
				idem_backlog_set_ready(b);
				idem_wake_handler();
			}
		}
	}
	PG_CATCH();
	{
		carry_on(b);
		more = false;
	}
	PG_END_TRY();
	running = NULL;
	idem_backlog_leave(b);
	if (more)
		idem_backlog_set_ready(b);
	return n > 0;
}

typedef struct Turn
{
	int32		consumer;
	int			concurrency;
} Turn;

/* Go through all consumers that have a handler; *next is when to look again. */
static bool
serve_all(TimestampTz *next, bool *any)
{
	static Turn *turns = NULL;
	int			n = 0;
	bool		did = false;
	List	   *all;
	ListCell   *lc;

	MemoryContextReset(message_context);
	begin("looking for consumers");
	all = idem_declared_all();
	if (turns != NULL)
		pfree(turns);
	turns = MemoryContextAlloc(TopMemoryContext, (list_length(all) + 1) * sizeof(Turn));
	foreach(lc, all)
	{
		IdemDeclared *c = lfirst(lc);

		if (c->handler == NULL)
			continue;
		turns[n].consumer = c->id;
		turns[n++].concurrency = c->concurrency;
	}
	while (idem_work_record_lost())
		CommandCounterIncrement();
	commit();

	*any = n > 0;
	*next = DT_NOEND;
	rotation++;
	for (int i = 0; i < n && !ShutdownRequestPending; i++)
	{
		Turn	   *turn = &turns[(i + rotation) % n];
		IdemBacklog *b;

		did |= serve(turn->consumer, turn->concurrency);
		b = idem_backlog(turn->consumer);
		if (b != NULL)
			*next = Min(*next, idem_backlog_next_due(b));
	}
	return did;
}

static void
wait_until(TimestampTz next)
{
	TimestampTz now = GetCurrentTimestamp();
	long		ms = Min(POLL_MS, TimestampDifferenceMilliseconds(now, next));

	/* Ready, but others are at it: they go on by themselves. */
	(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
					 next == 0 ? 100 : Max(ms, 1), PG_WAIT_EXTENSION);
	ResetLatch(MyLatch);
}

/* consumer_work() returns setof (consumer, running, reason) */
Datum
idem_consumer_work(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	ListCell   *lc;

	InitMaterializedSRF(fcinfo, 0);
	foreach(lc, idem_declared_all())
	{
		IdemDeclared *c = lfirst(lc);
		IdemBacklog *b = idem_backlog(c->id);
		Datum		values[3] = {0};
		bool		nulls[3] = {0};
		char		reason[256];

		values[0] = Int32GetDatum(c->id);
		if (b == NULL)
			strlcpy(reason, "no place left to keep track of it; increase idem.max_consumers and restart the server",
					sizeof(reason));
		else
			values[1] = Int32GetDatum(idem_backlog_describe(b, reason));
		values[2] = CStringGetTextDatum(reason);
		nulls[2] = reason[0] == '\0';
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

/* handler_workers() returns setof (worker, state, reason, pid) */
Datum
idem_handler_workers_rows(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	for (int i = 0; i < Max(idem_handler_workers, 1); i++)
	{
		const char *state;
		const char *reason;
		int			pid;
		Datum		values[4];
		bool		nulls[4] = {0};

		idem_worker_describe(IDEM_WORKER_HANDLER + i, &state, &reason, &pid);
		values[0] = Int32GetDatum(i + 1);
		values[1] = CStringGetTextDatum(state);
		nulls[2] = reason == NULL;
		if (reason != NULL)
			values[2] = CStringGetTextDatum(reason);
		values[3] = Int32GetDatum(pid);
		nulls[3] = pid == 0;
		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
	}
	return (Datum) 0;
}

/* Entry point of the processes that run handlers. */
void
idem_handler_main(Datum arg)
{
	IdemWorkerKind kind;
	IdemDatabase *db;
	TimestampTz next;
	bool		any = true;

	memcpy(&kind, MyBgworkerEntry->bgw_extra, sizeof(kind));
	me = kind - IDEM_WORKER_HANDLER;
	db = idem_worker_start(arg, kind);
	SetConfigOption("synchronous_commit", "off", PGC_SUSET, PGC_S_OVERRIDE);
	message_context = AllocSetContextCreate(TopMemoryContext, "idem message",
											ALLOCSET_DEFAULT_SIZES);
	on_shmem_exit(on_exit_leave, (Datum) 0);
	idem_wake_handler_attach(me);

	while (any && idem_worker_may_run(db, kind))
	{
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
		if (!serve_all(&next, &any))
		{
			idem_wake_handler_sleeps(me);
			if (!serve_all(&next, &any))
				wait_until(next);
			idem_wake_handler_awake(me);
		}
		idem_worker_succeeded(db, kind);
		pgstat_report_stat(false);
	}
	if (!any)
		idem_worker_found(db, true, false);
	proc_exit(0);
}

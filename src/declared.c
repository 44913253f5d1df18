/*-------------------------------------------------------------------------
 *
 * declared.c
 *		Consumers as they were declared.
 *
 * All of them are read at once, and again when anybody has changed one.  A
 * result is good until the end of the transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "backlog.h"
#include "catalog.h"
#include "consumer.h"
#include "declared.h"
#include "guc.h"
#include "handler.h"
#include "input.h"
#include "log.h"
#include "route.h"
#include "statement.h"
#include "wake.h"

PG_FUNCTION_INFO_V1(idem_consumer_create);
PG_FUNCTION_INFO_V1(idem_consumer_alter);
PG_FUNCTION_INFO_V1(idem_consumer_drop);

static MemoryContext context = NULL;
static List *declared = NIL;
static uint64 generation = 0;

static List *
text_list(Datum array)
{
	Datum	   *elements;
	bool	   *nulls;
	int			n;
	List	   *result = NIL;

	deconstruct_array(DatumGetArrayTypeP(array), TEXTOID, -1, false, TYPALIGN_INT,
					  &elements, &nulls, &n);
	for (int i = 0; i < n; i++)
	{
		if (!nulls[i])
			result = lappend(result, TextDatumGetCString(elements[i]));
	}
	return result;
}

static char *
text_value(Datum value, bool isnull)
{
	return isnull ? NULL : TextDatumGetCString(value);
}

static int64
span_value(Datum value, bool isnull, int64 if_null)
{
	return isnull ? if_null : idem_span_usecs(DatumGetIntervalP(value));
}

#define COLUMN(name)	values[Anum_consumer_##name - 1]
#define IS_NULL(name)	isnull[Anum_consumer_##name - 1]

static IdemDeclared *
declared_row(HeapTuple row, TupleDesc desc)
{
	IdemDeclared *c = palloc0(sizeof(IdemDeclared));
	Datum		values[Natts_consumer];
	bool		isnull[Natts_consumer];

	heap_deform_tuple(row, desc, values, isnull);
	c->id = DatumGetInt32(COLUMN(id));
	c->name = TextDatumGetCString(COLUMN(name));
	c->owner = pstrdup(NameStr(*DatumGetName(COLUMN(owner))));
	c->search_path = TextDatumGetCString(COLUMN(search_path));
	c->handler = text_value(COLUMN(handler), IS_NULL(handler));
	c->topics = IS_NULL(topics) ? NIL : text_list(COLUMN(topics));
	c->first_seq = DatumGetInt64(COLUMN(first_seq));
	c->max_attempts = DatumGetInt32(COLUMN(max_attempts));
	c->backoff = span_value(COLUMN(backoff), false, 0);
	c->backoff_max = span_value(COLUMN(backoff_max), false, 0);
	c->retention = span_value(COLUMN(retention), IS_NULL(retention), -1);
	c->timeout = span_value(COLUMN(timeout), IS_NULL(timeout), 0);
	c->not_yet_for = span_value(COLUMN(not_yet_for), false, 0);
	c->concurrency = DatumGetInt32(COLUMN(concurrency));
	c->ordered = strcmp(TextDatumGetCString(COLUMN(ordering)), "key") == 0;
	c->never_retry = text_list(COLUMN(never_retry));
	return c;
}

/*
 * idem_declared_all
 *		All consumers that are declared, a list of IdemDeclared.
 *
 * As of now, whatever snapshot the transaction has: they are remembered for
 * longer.
 */
List *
idem_declared_all(void)
{
	uint64		before;
	Relation	rel;
	TableScanDesc scan;
	Snapshot	snapshot;
	HeapTuple	row;
	MemoryContext old;

	(void) idem_rel(IDEM_REL_CONSUMER);
	if (context != NULL && generation == idem_catalog_generation())
		return declared;

	/* Who asked earlier in this transaction may still hold what we gave. */
	if (context != NULL)
		MemoryContextSetParent(context, TopTransactionContext);
	context = AllocSetContextCreate(TopMemoryContext, "idem declared",
									ALLOCSET_DEFAULT_SIZES);
	generation = 0;
	declared = NIL;

	rel = idem_rel_open(IDEM_REL_CONSUMER, AccessShareLock);
	before = idem_catalog_generation();
	snapshot = RegisterSnapshot(GetLatestSnapshot());
	scan = table_beginscan(rel, snapshot, 0, NULL);
	old = MemoryContextSwitchTo(context);
	while ((row = heap_getnext(scan, ForwardScanDirection)) != NULL)
		declared = lappend(declared, declared_row(row, RelationGetDescr(rel)));
	MemoryContextSwitchTo(old);
	table_endscan(scan);
	UnregisterSnapshot(snapshot);
	table_close(rel, NoLock);
	generation = before;
	return declared;
}

/*
 * idem_declared_forget
 *		Read all of them anew next time.
 *
 * For those who are told of a change by other means: that may be before they
 * hear of it in the ordinary way, which follows when it is visible already.
 */
void
idem_declared_forget(void)
{
	generation = 0;
}

/* A consumer that is declared, or NULL. */
IdemDeclared *
idem_declared(const char *name)
{
	ListCell   *lc;

	foreach(lc, idem_declared_all())
	{
		IdemDeclared *c = lfirst(lc);

		if (strcmp(c->name, name) == 0)
			return c;
	}
	return NULL;
}

IdemDeclared *
idem_declared_by_id(int32 id)
{
	ListCell   *lc;

	foreach(lc, idem_declared_all())
	{
		IdemDeclared *c = lfirst(lc);

		if (c->id == id)
			return c;
	}
	return NULL;
}

/*
 * idem_declared_required
 *		A consumer that must be declared, and stays so in this transaction.
 */
IdemDeclared *
idem_declared_required(const char *name)
{
	IdemDeclared *c;

	LockRelationOid(idem_rel(IDEM_REL_CONSUMER), RowShareLock);
	c = idem_declared(name);
	if (c == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("consumer \"%s\" does not exist", name),
				 errhint("Create it with idem.consumer_create().")));
	return c;
}

/* Does it get messages of this topic from the outbox? */
bool
idem_declared_takes(const IdemDeclared *c, const char *topic, int64 seq)
{
	ListCell   *lc;

	if (seq < c->first_seq)
		return false;
	foreach(lc, c->topics)
	{
		if (idem_route_match(lfirst(lc), topic))
			return true;
	}
	return false;
}

/* What consumer_create() and consumer_alter() can set. */
typedef enum Setting
{
	SET_HANDLER,
	SET_TOPICS,
	SET_RETENTION,
	SET_MAX_ATTEMPTS,
	SET_BACKOFF,
	SET_BACKOFF_MAX,
	SET_CONCURRENCY,
	SET_ORDERING,
	SET_TIMEOUT,
	SET_NEVER_RETRY,
	SET_NOT_YET_FOR,
	NUM_SETTINGS
} Setting;

static const struct
{
	const char *name;
	int			create_arg;
	int			alter_arg;
	const char *if_reset;		/* what its default is, as SQL */
}			settings[NUM_SETTINGS] = {
	[SET_HANDLER] = {"handler", 1, 1, "NULL"},
	[SET_TOPICS] = {"topics", 2, 2, "NULL"},
	[SET_RETENTION] = {"retention", 3, 3, "NULL"},
	[SET_MAX_ATTEMPTS] = {"max_attempts", 4, 4, "10"},
	[SET_BACKOFF] = {"backoff", 5, 5, "interval '1 second'"},
	[SET_BACKOFF_MAX] = {"backoff_max", 6, 6, "interval '1 hour'"},
	[SET_CONCURRENCY] = {"concurrency", 7, 7, "1"},
	[SET_ORDERING] = {"ordering", 8, 8, "'none'"},
	[SET_TIMEOUT] = {"timeout", 10, 9, "NULL"},
	[SET_NEVER_RETRY] = {"never_retry", 11, 10, "'{}'"},
	[SET_NOT_YET_FOR] = {"not_yet_for", 12, 11, "interval '1 day'"},
};

#define SETTING_TYPES TEXTOID, TEXTARRAYOID, INTERVALOID, INT4OID, INTERVALOID, INTERVALOID, \
	INT4OID, TEXTOID, INTERVALOID, TEXTARRAYOID, INTERVALOID

static void
out_of_range(const char *what, int low, int high)
{
	ereport(ERROR,
			(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
			 errmsg("%s must be between %d and %d", what, low, high)));
}

static void
check_texts(Datum array, const char *what, int longest)
{
	ListCell   *lc;
	ArrayType  *a = DatumGetArrayTypeP(array);

	if (array_contains_nulls(a))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not contain nulls", what)));
	foreach(lc, text_list(PointerGetDatum(a)))
	{
		int			len = strlen(lfirst(lc));

		if (len == 0 || len > longest)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("element of %s must have 1 to %d bytes", what, longest)));
	}
}

/* SQLSTATEs of five characters, or their classes of two. */
static void
check_sqlstates(Datum array)
{
	ListCell   *lc;

	check_texts(array, "never_retry", 5);
	foreach(lc, text_list(array))
	{
		const char *s = lfirst(lc);

		if ((strlen(s) != 5 && strlen(s) != 2) ||
			strspn(s, "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ") != strlen(s))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("\"%s\" is not a SQLSTATE", s),
					 errhint("Give codes of five characters, like 22P02, or classes of two, like 22.")));
	}
}

/* The name of a handler that this role may run. */
static Datum
handler_value(Oid function, Oid owner)
{
	char	   *function_name = get_func_name(function);
	char	   *name;
	Oid			found;
	const char *why;

	if (function_name == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("function with OID %u does not exist", function)));
	name = quote_qualified_identifier(get_namespace_name(get_func_namespace(function)),
									  function_name);
	why = idem_handler_check(name, owner, &found);
	if (why != NULL)
		ereport(ERROR,
				(errcode(OidIsValid(found) ? ERRCODE_INVALID_FUNCTION_DEFINITION : ERRCODE_UNDEFINED_FUNCTION),
				 errmsg("%s", why),
				 errhint("A handler is a function that takes one argument of type idem.message and returns jsonb or void; the owner of the consumer must have EXECUTE on it.")));
	return CStringGetTextDatum(name);
}

/*
 * Read and check the settings among the arguments of a call; those that are
 * not given are null.
 */
static void
read_settings(FunctionCallInfo fcinfo, bool create, const char *consumer, Oid owner,
			  Datum *values, char *nulls)
{
	for (int i = 0; i < NUM_SETTINGS; i++)
	{
		int			arg = create ? settings[i].create_arg : settings[i].alter_arg;
		const char *what = settings[i].name;

		nulls[i] = PG_ARGISNULL(arg) ? 'n' : ' ';
		if (PG_ARGISNULL(arg))
			continue;
		values[i] = PG_GETARG_DATUM(arg);
		switch ((Setting) i)
		{
			case SET_HANDLER:
				values[i] = handler_value(DatumGetObjectId(values[i]), owner);
				break;
			case SET_TOPICS:
				check_texts(values[i], what, IDEM_MAX_NAME);
				break;
			case SET_RETENTION:
				idem_check_span(DatumGetIntervalP(values[i]), what);
				if (idem_span_usecs(DatumGetIntervalP(values[i])) < IDEM_SHORT_RETENTION * USECS_PER_SEC)
					ereport(WARNING,
							(errmsg("retention of consumer \"%s\" is shorter than an hour", consumer),
							 errdetail("A message that is redelivered later than that is processed again.")));
				break;
			case SET_MAX_ATTEMPTS:
				if (DatumGetInt32(values[i]) < 1 || DatumGetInt32(values[i]) > 1000000)
					out_of_range(what, 1, 1000000);
				break;
			case SET_CONCURRENCY:
				if (DatumGetInt32(values[i]) < 1 || DatumGetInt32(values[i]) > 1000)
					out_of_range(what, 1, 1000);
				break;
			case SET_ORDERING:
				if (strcmp(TextDatumGetCString(values[i]), "none") != 0 &&
					strcmp(TextDatumGetCString(values[i]), "key") != 0)
					ereport(ERROR,
							(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
							 errmsg("ordering must be \"none\" or \"key\"")));
				break;
			case SET_NEVER_RETRY:
				check_sqlstates(values[i]);
				break;
			case SET_BACKOFF:
			case SET_BACKOFF_MAX:
			case SET_TIMEOUT:
			case SET_NOT_YET_FOR:
				idem_check_span(DatumGetIntervalP(values[i]), what);
				break;
			case NUM_SETTINGS:
				break;
		}
	}
}

/*
 * The time before which claims may have been removed under a retention that
 * is about to change.
 *
 * Removal takes a lock on the table that keeps changes out.  Once we have
 * ours, nothing is removed until we commit.
 */
static TimestampTz
removed_before(int64 retention_usecs)
{
	LockRelationOid(idem_rel(IDEM_REL_CONSUMER), RowExclusiveLock);
	return GetCurrentTimestamp() - retention_usecs;
}

static void
subscribe(const char *name, const char *start, bool any_topics)
{
	static IdemStatement first = {
		.sql = "UPDATE idem.consumer SET first_seq = CASE WHEN $2 THEN idem.outbox_seq_at($3)"
		" ELSE $4 END WHERE name = $1",
		.nargs = 4,
		.types = {TEXTOID, BOOLOID, TIMESTAMPTZOID, INT8OID}
	};
	static IdemStatement replay = {
		.sql = "INSERT INTO idem.relay_replay (server, consumer, fresh, from_seq, since)"
		" SELECT '', $1, true, idem.outbox_seq_at($2), $2",
		.nargs = 2,
		.types = {TEXTOID, TIMESTAMPTZOID}
	};
	/* as with the first route; see relay.c */
	static IdemStatement mark = {
		.sql = "INSERT INTO idem.relay_identity (system_identifier, database, site)"
		" SELECT * FROM idem.relay_whereabouts()"
		" WHERE NOT EXISTS (SELECT FROM idem.relay_identity)"
	};
	TimestampTz since;
	bool		past = idem_route_starts_in_past(start, &since) && any_topics;
	Datum		values[4] = {CStringGetTextDatum(name), BoolGetDatum(past),
	TimestampTzGetDatum(since), Int64GetDatum(idem_log_last_seq() + 1)};

	idem_statement_run(&first, values, NULL);
	if (any_topics)
		idem_statement_run(&mark, NULL, NULL);
	if (!past)
		return;
	values[1] = values[2];
	idem_statement_run(&replay, values, NULL);
}

/* consumer_create(name, handler, ...): see consumer.sql */
Datum
idem_consumer_create(PG_FUNCTION_ARGS)
{
	static IdemStatement insert = {
		.sql = "INSERT INTO idem.consumer (handler, topics, retention, max_attempts, backoff,"
		" backoff_max, concurrency, ordering, timeout, never_retry, not_yet_for,"
		" name, owner, search_path, horizon_floor)"
		" VALUES ($1, $2, $3, coalesce($4, 10), coalesce($5, '1 second'), coalesce($6, '1 hour'),"
		" coalesce($7, 1), coalesce($8, 'none'), $9, coalesce($10, '{}'), coalesce($11, '1 day'),"
		" $12, $13, $14, $15) ON CONFLICT (name) DO NOTHING",
		.nargs = 15,
		.types = {SETTING_TYPES, TEXTOID, NAMEOID, TEXTOID, TIMESTAMPTZOID}
	};
	text	   *name = idem_name_arg(fcinfo, 0, "name of the consumer");
	char	   *consumer = text_to_cstring(name);
	char	   *start;
	NameData	owner;
	Datum		values[15];
	char		nulls[] = "               ";
	IdemCaller	caller;

	idem_require(fcinfo, 9, "start_from");
	start = text_to_cstring(PG_GETARG_TEXT_PP(9));
	PreventCommandIfReadOnly("consumer_create()");
	read_settings(fcinfo, true, consumer, GetUserId(), values, nulls);
	namestrcpy(&owner, GetUserNameFromId(GetUserId(), false));
	values[11] = PointerGetDatum(name);
	values[12] = NameGetDatum(&owner);
	values[13] = CStringGetTextDatum(psprintf("%s%spg_temp", namespace_search_path,
											  namespace_search_path[0] == '\0' ? "" : ", "));

	idem_become_owner(&caller);
	values[14] = TimestampTzGetDatum(removed_before(idem_inbox_retention * USECS_PER_SEC));
	if (idem_statement_run(&insert, values, nulls) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("consumer \"%s\" already exists", consumer),
				 errhint("Change it with idem.consumer_alter().")));
	subscribe(consumer, start, nulls[SET_TOPICS] == ' ');
	idem_become_caller(&caller);
	idem_wake_orders();
	if (nulls[SET_HANDLER] == ' ')
		idem_wake_expect_handlers();
	PG_RETURN_VOID();
}

/* Which settings does consumer_alter() reset? */
static void
read_reset(FunctionCallInfo fcinfo, int arg, Datum *reset)
{
	ListCell   *lc;

	for (int i = 0; i < NUM_SETTINGS; i++)
		reset[i] = BoolGetDatum(false);
	if (PG_ARGISNULL(arg))
		return;
	check_texts(PG_GETARG_DATUM(arg), "reset", NAMEDATALEN);
	foreach(lc, text_list(PG_GETARG_DATUM(arg)))
	{
		bool		found = false;

		for (int i = 0; i < NUM_SETTINGS; i++)
		{
			if (strcmp(settings[i].name, lfirst(lc)) == 0)
			{
				reset[i] = BoolGetDatum(true);
				found = true;
			}
		}
		if (!found)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("a consumer has no setting \"%s\"", (char *) lfirst(lc))));
	}
}

/* Is the caller somebody who may act as this role, if that is still there? */
static void
check_may_act_as(const char *role, const char *consumer)
{
	Oid			oid = get_role_oid(role, true);

	if (!superuser() && (!OidIsValid(oid) || !has_privs_of_role(GetUserId(), oid)))
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("must have the privileges of role \"%s\"", role),
				 errdetail("The handler of consumer \"%s\" runs with them.", consumer)));
}

/* consumer_alter(name, handler, ...): see consumer.sql */
Datum
idem_consumer_alter(PG_FUNCTION_ARGS)
{
	static IdemStatement select = {
		.sql = "SELECT retention, owner FROM idem.consumer WHERE name = $1 FOR UPDATE",
		.nargs = 1,
		.types = {TEXTOID}
	};
	text	   *name = idem_name_arg(fcinfo, 0, "name of the consumer");
	char	   *consumer = text_to_cstring(name);
	IdemDeclared *c = idem_declared_required(consumer);
	char	   *owner = PG_ARGISNULL(12) ? c->owner : NameStr(*PG_GETARG_NAME(12));
	bool		subscribes = c->topics == NIL && !PG_ARGISNULL(2);
	Datum		reset[NUM_SETTINGS];
	Datum		values[15];
	char		nulls[] = "               ";
	Datum		before;
	bool		isnull;
	IdemCaller	caller;
	StringInfoData sql;
	NameData	owner_name;

	PreventCommandIfReadOnly("consumer_alter()");
	namestrcpy(&owner_name, owner);
	read_reset(fcinfo, 13, reset);
	if (!PG_ARGISNULL(12))
	{
		(void) get_role_oid(owner, false);
		check_may_act_as(owner, consumer);
	}
	if (!PG_ARGISNULL(12) || !PG_ARGISNULL(1))
		check_may_act_as(c->owner, consumer);
	read_settings(fcinfo, false, consumer, get_role_oid(owner, true), values, nulls);
	for (int i = 0; i < NUM_SETTINGS; i++)
	{
		if (DatumGetBool(reset[i]) && nulls[i] == ' ')
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("%s cannot be both set and reset", settings[i].name)));
	}

	idem_become_owner(&caller);
	values[11] = PointerGetDatum(name);
	if (idem_statement_run(&select, &values[11], NULL) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("consumer \"%s\" does not exist", consumer)));
	if (strcmp(SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 2), c->owner) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("consumer \"%s\" got another owner at the same time", consumer)));
	before = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1, &isnull);
	values[12] = NameGetDatum(&owner_name);
	values[13] = TimestampTzGetDatum(removed_before(isnull ?
													idem_inbox_retention * USECS_PER_SEC :
													idem_span_usecs(DatumGetIntervalP(before))));
	initStringInfo(&sql);
	appendStringInfoString(&sql, "UPDATE idem.consumer SET owner = $13,"
						   " horizon_floor = greatest(horizon_floor, $14)");
	for (int i = 0; i < NUM_SETTINGS; i++)
	{
		if (DatumGetBool(reset[i]))
			appendStringInfo(&sql, ", %s = %s", settings[i].name, settings[i].if_reset);
		else
			appendStringInfo(&sql, ", %s = coalesce($%d, %s)", settings[i].name, i + 1, settings[i].name);
	}
	appendStringInfoString(&sql, " WHERE name = $12");
	{
		Oid			types[] = {SETTING_TYPES, TEXTOID, NAMEOID, TIMESTAMPTZOID};

		if (SPI_execute_with_args(sql.data, lengthof(types), types, values, nulls, false, 0) < 0)
			elog(ERROR, "could not change consumer \"%s\"", consumer);
	}
	if (subscribes)
		subscribe(consumer, "now", true);
	idem_become_caller(&caller);
	idem_wake_orders();
	if (c->handler != NULL || !PG_ARGISNULL(1))
		idem_wake_expect_handlers();
	idem_backlog_added(c->id, IDEM_MARK_SEQ, PG_INT64_MAX - 1);
	PG_RETURN_VOID();
}

/* consumer_drop(name, discard) */
Datum
idem_consumer_drop(PG_FUNCTION_ARGS)
{
	static IdemStatement waiting = {
		.sql = "SELECT FROM idem.inbox_message WHERE consumer = $1 UNION ALL"
		" SELECT FROM idem.inbox_parked WHERE consumer = $1 LIMIT 1",
		.nargs = 1,
		.types = {INT4OID}
	};
	static IdemStatement delete = {
		.sql = "WITH m AS (DELETE FROM idem.inbox_message WHERE consumer = $1),"
		" p AS (DELETE FROM idem.inbox_parked WHERE consumer = $1),"
		" o AS (DELETE FROM idem.inbox_outcome WHERE consumer = $1),"
		" r AS (DELETE FROM idem.relay_replay WHERE consumer = $2 AND finished_at IS NULL),"
		" d AS (UPDATE idem.dead_letter SET state = 'discarded', settled_at = pg_catalog.now(),"
		" settled_by = session_user, note = 'consumer was dropped'"
		" WHERE origin = 'consumer' AND name = $2 AND state = 'dead')"
		" DELETE FROM idem.consumer WHERE name = $2",
		.nargs = 2,
		.types = {INT4OID, TEXTOID}
	};
	char	   *name = text_to_cstring(idem_name_arg(fcinfo, 0, "name of the consumer"));
	IdemDeclared *c;
	Datum		values[2];
	IdemCaller	caller;

	idem_require(fcinfo, 1, "discard");
	PreventCommandIfReadOnly("consumer_drop()");
	c = idem_declared_required(name);
	idem_become_owner(&caller);

	/* Nobody adds to what waits until we are done; see idem_declared_required(). */
	LockRelationOid(idem_rel(IDEM_REL_CONSUMER), ExclusiveLock);
	values[0] = Int32GetDatum(c->id);
	values[1] = CStringGetTextDatum(name);
	if (!PG_GETARG_BOOL(1) && idem_statement_run(&waiting, values, NULL) > 0)
		ereport(ERROR,
				(errcode(ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST),
				 errmsg("cannot drop consumer \"%s\" because messages wait for it", name),
				 errhint("Let them be processed, or give discard => true.")));
	idem_statement_run(&delete, values, NULL);
	idem_become_caller(&caller);
	idem_wake_orders();
	PG_RETURN_VOID();
}

/*-------------------------------------------------------------------------
 *
 * route.c
 *		Routes: which topics go to which server.
 *
 * A route holds for messages with sequence numbers from the first to the
 * last; so it is defined which messages a new route takes, and dropping one
 * drops nothing that is enqueued.
 *
 * Routes name their server, since oids change when a dump is restored.  So
 * DROP SERVER and RENAME are followed here; a server that goes in some other
 * way (DROP OWNED, or while idem is not preloaded) leaves its routes behind,
 * and messages wait.
 *
 * The functions run with the rights of their caller, who must be allowed to
 * use the server, and write with those of the table's owner.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_class.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "foreign/foreign.h"
#include "miscadmin.h"
#include "nodes/parsenodes.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "catalog.h"
#include "compat.h"
#include "input.h"
#include "log.h"
#include "route.h"
#include "server.h"
#include "statement.h"
#include "wake.h"

PG_FUNCTION_INFO_V1(idem_route_add);
PG_FUNCTION_INFO_V1(idem_route_drop);
PG_FUNCTION_INFO_V1(idem_route_matches);
PG_FUNCTION_INFO_V1(idem_route_expand);

static int64
result_int64(int column)
{
	bool		isnull;

	return DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc,
									   column, &isnull));
}

static int
compare_routes(const ListCell *a, const ListCell *b)
{
	int64		x = ((IdemRoute *) lfirst(a))->id;
	int64		y = ((IdemRoute *) lfirst(b))->id;

	return x < y ? -1 : x > y;
}

/*
 * idem_routes_load
 *		All routes that are committed by now, as a list of IdemRoute, by id.
 *
 * Caller has a transaction; everything is in CurrentMemoryContext.
 */
List *
idem_routes_load(void)
{
	Relation	rel = idem_rel_open(IDEM_REL_ROUTE, AccessShareLock);
	Snapshot	now = RegisterSnapshot(GetLatestSnapshot());
	SysScanDesc scan = systable_beginscan(rel, InvalidOid, false, now, 0, NULL);
	List	   *routes = NIL;
	HeapTuple	tup;

	while (HeapTupleIsValid(tup = systable_getnext(scan)))
	{
		Datum		values[Natts_route];
		bool		isnull[Natts_route];
		IdemRoute  *route = palloc(sizeof(IdemRoute));

		heap_deform_tuple(tup, RelationGetDescr(rel), values, isnull);
		route->id = DatumGetInt64(values[Anum_route_id - 1]);
		route->pattern = TextDatumGetCString(values[Anum_route_pattern - 1]);
		route->server = TextDatumGetCString(values[Anum_route_server - 1]);
		route->destination = TextDatumGetCString(values[Anum_route_destination - 1]);
		route->first_seq = DatumGetInt64(values[Anum_route_first_seq - 1]);
		route->last_seq = isnull[Anum_route_last_seq - 1] ? PG_INT64_MAX :
			DatumGetInt64(values[Anum_route_last_seq - 1]);
		route->since = isnull[Anum_route_since - 1] ? DT_NOBEGIN :
			DatumGetTimestampTz(values[Anum_route_since - 1]);
		routes = lappend(routes, route);
	}
	systable_endscan(scan);
	UnregisterSnapshot(now);
	table_close(rel, AccessShareLock);
	list_sort(routes, compare_routes);
	return routes;
}

/*
 * idem_route_match
 *		Does a topic match a pattern?
 *
 * A star takes as little as it can; if what follows does not match, the last
 * single star before it takes one more character, or, where that would be a
 * dot, the last double one.  No earlier star needs a second try: wherever it
 * could end later, what follows it was looked for already.
 */
bool
idem_route_match(const char *pattern, const char *topic)
{
	const char *star = NULL,	/* what follows the last star */
			   *star_topic = NULL;	/* and where we tried to match that */
	const char *stars = NULL,	/* likewise for the last double star */
			   *stars_topic = NULL;

	for (;;)
	{
		if (pattern[0] == '*' && pattern[1] == '*')
		{
			stars = pattern += 2;
			stars_topic = topic;
			star = NULL;
		}
		else if (*pattern == '*')
		{
			star = ++pattern;
			star_topic = topic;
		}
		else if (*pattern == *topic && *topic != '\0')
		{
			pattern++;
			topic++;
		}
		else if (*pattern == '\0' && *topic == '\0')
			return true;
		else if (star != NULL && *star_topic != '\0' && *star_topic != '.')
		{
			topic = ++star_topic;
			pattern = star;
		}
		else if (stars != NULL && *stars_topic != '\0')
		{
			topic = ++stars_topic;
			pattern = stars;
			star = NULL;
		}
		else
			return false;
	}
}

/*
 * idem_route_destination
 *		Where on its server a route sends a message.
 *
 * A message without a key has an empty one here.
 */
char *
idem_route_destination(const IdemRoute *route, const char *topic, const char *key)
{
	const char *c = route->destination;
	StringInfoData buf;

	initStringInfo(&buf);
	while (*c != '\0')
	{
		if (strncmp(c, "{topic}", 7) == 0)
		{
			appendStringInfoString(&buf, topic);
			c += 7;
		}
		else if (strncmp(c, "{key}", 5) == 0)
		{
			appendStringInfoString(&buf, key ? key : "");
			c += 5;
		}
		else
			appendStringInfoChar(&buf, *c++);
	}
	return buf.data;
}

static void
check_printable(const char *value, const char *what)
{
	for (const char *c = value; *c; c++)
	{
		if ((unsigned char) *c < ' ' || *c == 0x7f)
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("%s contains a control character", what)));
	}
}

/* A template may be empty: some brokers have a destination of that name. */
static char *
destination_arg(FunctionCallInfo fcinfo, int arg)
{
	char	   *value;

	idem_require(fcinfo, arg, "destination");
	value = text_to_cstring(PG_GETARG_TEXT_PP(arg));
	if (value[0] != '\0')
		idem_check_id(PG_GETARG_TEXT_PP(arg), "destination");
	check_printable(value, "destination");
	for (const char *c = value; (c = strpbrk(c, "{}")) != NULL;)
	{
		if (strncmp(c, "{topic}", 7) == 0)
			c += 7;
		else if (strncmp(c, "{key}", 5) == 0)
			c += 5;
		else
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("invalid destination \"%s\"", value),
					 errhint("The only braces it may contain are those of {topic} and {key}.")));
	}
	return value;
}

static void
server_missing(const char *name)
{
	if (OidIsValid(get_foreign_server_oid(name, true)))
		ereport(ERROR,
				(errcode(ERRCODE_WRONG_OBJECT_TYPE),
				 errmsg("server \"%s\" is not for messages", name),
				 errhint("Its foreign-data wrapper must be idem.")));
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("server \"%s\" does not exist", name),
			 errhint("Create it with CREATE SERVER ... FOREIGN DATA WRAPPER idem.")));
}

/*
 * Look up one of our servers and lock it, so that it is neither dropped nor
 * renamed while we refer to it, or the reverse.
 */
static Oid
lock_server(const char *name, LOCKMODE lockmode)
{
	Oid			oid = idem_server_oid(name);

	while (OidIsValid(oid))
	{
		Oid			now;

		LockDatabaseObject(ForeignServerRelationId, oid, 0, lockmode);
		now = idem_server_oid(name);
		if (now == oid)
			break;
		UnlockDatabaseObject(ForeignServerRelationId, oid, 0, lockmode);
		oid = now;
	}
	return oid;
}

static void
check_usage(Oid server, const char *name)
{
	if (idem_server_aclcheck(server, ACL_USAGE) != ACLCHECK_OK)
		aclcheck_error(ACLCHECK_NO_PRIV, OBJECT_FOREIGN_SERVER, name);
}

/*
 * idem_route_starts_in_past
 *		Does a new route, or subscription, begin in the past?
 *
 * *since is DT_NOBEGIN if it does not depend on when a message was enqueued.
 */
bool
idem_route_starts_in_past(const char *start, TimestampTz *since)
{
	*since = DT_NOBEGIN;
	if (strcmp(start, "now") == 0 || strcmp(start, "oldest") == 0)
		return start[0] == 'o';
	*since = DatumGetTimestampTz(DirectFunctionCall3(timestamptz_in,
													 CStringGetDatum(start),
													 ObjectIdGetDatum(InvalidOid),
													 Int32GetDatum(-1)));
	if (TIMESTAMP_NOT_FINITE(*since))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid start_from \"%s\"", start),
				 errhint("It must be \"now\", \"oldest\" or a time.")));
	return *since <= GetCurrentTimestamp();
}

/* route_add(pattern, server, destination, start_from) */
Datum
idem_route_add(PG_FUNCTION_ARGS)
{
	static IdemStatement insert = {
		.sql = "INSERT INTO idem.route (pattern, server, destination, first_seq, since)"
		" VALUES ($1, $2, $3, $4, $5)"
		" ON CONFLICT (pattern, server, destination) WHERE last_seq IS NULL DO NOTHING"
		" RETURNING id",
		.nargs = 5,
		.types = {TEXTOID, TEXTOID, TEXTOID, INT8OID, TIMESTAMPTZOID}
	};
	/* The relay knows what of the past it has read already. */
	static IdemStatement replay = {
		.sql = "INSERT INTO idem.relay_replay (server, route, from_seq) VALUES ($1, $2, $3)",
		.nargs = 3,
		.types = {TEXTOID, INT8OID, INT8OID}
	};
	/* Who has routes is at home here; see relay.c. */
	static IdemStatement mark = {
		.sql = "INSERT INTO idem.relay_identity (system_identifier, database, site)"
		" SELECT * FROM idem.relay_whereabouts()"
		" WHERE NOT EXISTS (SELECT FROM idem.relay_identity)"
	};
	static IdemStatement seq_at = {
		.sql = "SELECT idem.outbox_seq_at($1)",
		.nargs = 1,
		.types = {TIMESTAMPTZOID}
	};
	text	   *pattern = idem_name_arg(fcinfo, 0, "pattern");
	char	   *server = text_to_cstring(idem_name_arg(fcinfo, 1, "name of the server"));
	char	   *destination = destination_arg(fcinfo, 2);
	char	   *start;
	TimestampTz since;
	bool		past;
	Oid			oid;
	Datum		values[5];
	char		nulls[] = "     ";
	IdemCaller	caller;
	int64		id;

	check_printable(text_to_cstring(pattern), "pattern");
	idem_require(fcinfo, 3, "start_from");
	start = text_to_cstring(PG_GETARG_TEXT_PP(3));
	past = idem_route_starts_in_past(start, &since);
	PreventCommandIfReadOnly("route_add()");

	oid = lock_server(server, AccessShareLock);
	if (!OidIsValid(oid))
		server_missing(server);
	check_usage(oid, server);

	idem_become_owner(&caller);
	if (past)
	{
		values[0] = TimestampTzGetDatum(since);
		(void) idem_statement_run(&seq_at, values, NULL);
	}
	values[3] = Int64GetDatum(past ? result_int64(1) : idem_log_last_seq() + 1);
	values[0] = PointerGetDatum(pattern);
	values[1] = CStringGetTextDatum(server);
	values[2] = CStringGetTextDatum(destination);
	values[4] = TimestampTzGetDatum(since);
	if (since == DT_NOBEGIN)
		nulls[4] = 'n';
	if (idem_statement_run(&insert, values, nulls) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_DUPLICATE_OBJECT),
				 errmsg("route from \"%s\" to \"%s\" on server \"%s\" already exists",
						text_to_cstring(pattern), destination, server)));
	id = result_int64(1);
	if (past)
	{
		values[0] = values[1];
		values[1] = Int64GetDatum(id);
		values[2] = values[3];
		(void) idem_statement_run(&replay, values, NULL);
	}
	(void) idem_statement_run(&mark, NULL, NULL);
	idem_become_caller(&caller);
	idem_wake_orders();
	PG_RETURN_INT64(id);
}

/* route_drop(id, discard) */
Datum
idem_route_drop(PG_FUNCTION_ARGS)
{
	static IdemStatement close = {
		.sql = "UPDATE idem.route SET last_seq = $2 WHERE id = $1 AND last_seq IS NULL",
		.nargs = 2,
		.types = {INT8OID, INT8OID}
	};
	static IdemStatement delete = {
		.sql = "WITH replay AS (UPDATE idem.relay_replay SET finished_at = pg_catalog.now()"
		" WHERE route = $1 AND finished_at IS NULL)"
		" DELETE FROM idem.route WHERE id = $1",
		.nargs = 1,
		.types = {INT8OID}
	};
	IdemRoute  *route = NULL;
	Datum		values[2];
	Oid			oid;
	IdemCaller	caller;
	ListCell   *lc;

	idem_require(fcinfo, 0, "id");
	idem_require(fcinfo, 1, "discard");
	PreventCommandIfReadOnly("route_drop()");

	foreach(lc, idem_routes_load())
	{
		if (((IdemRoute *) lfirst(lc))->id == PG_GETARG_INT64(0))
			route = lfirst(lc);
	}
	if (route == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("route %lld does not exist", (long long) PG_GETARG_INT64(0)),
				 errhint("The view idem.routes shows all routes.")));

	/* without its server, a route can only be discarded */
	oid = idem_server_oid(route->server);
	if (OidIsValid(oid))
		check_usage(oid, route->server);

	idem_become_owner(&caller);
	values[0] = Int64GetDatum(route->id);
	/* there may be nothing that it could take */
	if (PG_GETARG_BOOL(1) || idem_log_last_seq() < route->first_seq)
		(void) idem_statement_run(&delete, values, NULL);
	else if (route->last_seq == PG_INT64_MAX)
	{
		values[1] = Int64GetDatum(idem_log_last_seq());
		(void) idem_statement_run(&close, values, NULL);
	}
	idem_become_caller(&caller);
	idem_wake_orders();
	PG_RETURN_VOID();
}

/* route_matches(pattern, topic) */
Datum
idem_route_matches(PG_FUNCTION_ARGS)
{
	text	   *pattern = idem_name_arg(fcinfo, 0, "pattern");

	idem_require(fcinfo, 1, "topic");
	PG_RETURN_BOOL(idem_route_match(text_to_cstring(pattern),
									text_to_cstring(PG_GETARG_TEXT_PP(1))));
}

/* route_destination(destination, topic, key) */
Datum
idem_route_expand(PG_FUNCTION_ARGS)
{
	IdemRoute	route = {.destination = destination_arg(fcinfo, 0)};

	idem_require(fcinfo, 1, "topic");
	PG_RETURN_TEXT_P(cstring_to_text(idem_route_destination(&route,
															text_to_cstring(PG_GETARG_TEXT_PP(1)),
															PG_ARGISNULL(2) ? NULL :
															text_to_cstring(PG_GETARG_TEXT_PP(2)))));
}

/*
 * One of our servers is about to be changed: lock it as the command will, so
 * that no route to it can be added meanwhile.  False if there is none of that
 * name, or the user may not change it; the command will say so.
 */
static bool
changes_server(const char *name)
{
	Oid			oid = idem_server_oid(name);

	return OidIsValid(oid) && idem_owns_server(oid) &&
		lock_server(name, AccessExclusiveLock) == oid;
}

static void
on_server_drop(const char *name, bool cascade)
{
	static IdemStatement delete = {
		.sql = "WITH route AS (DELETE FROM idem.route WHERE server = $1),"
		" position AS (DELETE FROM idem.relay_position WHERE server = $1),"
		" replay AS (DELETE FROM idem.relay_replay WHERE server = $1),"
		" answer AS (DELETE FROM idem.relay_answer WHERE server = $1),"
		" paused AS (DELETE FROM idem.relay_paused WHERE server = $1)"
		" DELETE FROM idem.relay_parked WHERE server = $1",
		.nargs = 1,
		.types = {TEXTOID}
	};
	Datum		value = CStringGetTextDatum(name);
	StringInfoData ids;
	ListCell   *lc;
	IdemCaller	caller;

	if (!changes_server(name))
		return;

	initStringInfo(&ids);
	foreach(lc, idem_routes_load())
	{
		IdemRoute  *route = lfirst(lc);

		if (strcmp(route->server, name) == 0)
			appendStringInfo(&ids, "%s%lld", ids.len > 0 ? ", " : "",
							 (long long) route->id);
	}
	if (ids.len > 0 && !cascade)
		ereport(ERROR,
				(errcode(ERRCODE_DEPENDENT_OBJECTS_STILL_EXIST),
				 errmsg("cannot drop server \"%s\" because routes lead to it", name),
				 errdetail("Routes: %s.", ids.data),
				 errhint("Close them with idem.route_drop() and wait until they are gone, or use DROP ... CASCADE to drop them, and whatever waits for the server, too.")));

	if (ids.len > 0)
		ereport(NOTICE,
				(errmsg("drop cascades to routes to server \"%s\"", name),
				 errdetail("Routes: %s.", ids.data)));
	idem_become_owner(&caller);
	(void) idem_statement_run(&delete, &value, NULL);
	idem_become_caller(&caller);
}

static void
on_server_rename(const char *name, const char *to)
{
	static IdemStatement update = {
		.sql = "WITH route AS (UPDATE idem.route SET server = $2 WHERE server = $1),"
		" position AS (UPDATE idem.relay_position SET server = $2 WHERE server = $1),"
		" replay AS (UPDATE idem.relay_replay SET server = $2 WHERE server = $1),"
		" answer AS (UPDATE idem.relay_answer SET server = $2 WHERE server = $1),"
		" paused AS (UPDATE idem.relay_paused SET server = $2 WHERE server = $1),"
		" dead AS (UPDATE idem.dead_letter SET name = $2 WHERE name = $1 AND origin = 'server')"
		" UPDATE idem.relay_parked SET server = $2 WHERE server = $1",
		.nargs = 2,
		.types = {TEXTOID, TEXTOID}
	};
	Datum		values[2] = {CStringGetTextDatum(name), CStringGetTextDatum(to)};
	IdemCaller	caller;

	/* if the new name is taken, the command says so */
	if (!changes_server(name) || OidIsValid(get_foreign_server_oid(to, true)))
		return;
	idem_become_owner(&caller);
	(void) idem_statement_run(&update, values, NULL);
	idem_become_caller(&caller);
}

/*
 * idem_route_utility
 *		Make routes follow their server.
 *
 * To be called from the utility hook, before the command is carried out; if
 * it fails, so does what we have done.
 */
void
idem_route_utility(Node *stmt)
{
	DropStmt   *drop = (DropStmt *) stmt;
	RenameStmt *rename = (RenameStmt *) stmt;
	ListCell   *lc;

	if (IsA(stmt, DropStmt) && drop->removeType == OBJECT_FOREIGN_SERVER &&
		!XactReadOnly)
	{
		foreach(lc, drop->objects)
			on_server_drop(strVal(lfirst(lc)), drop->behavior == DROP_CASCADE);
	}
	else if (IsA(stmt, RenameStmt) &&
			 rename->renameType == OBJECT_FOREIGN_SERVER && !XactReadOnly)
		on_server_rename(strVal(rename->object), rename->newname);
}

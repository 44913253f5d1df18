/*-------------------------------------------------------------------------
 *
 * key.c
 *		Idempotency keys: a command runs once, its outcome is told again.
 *
 *		(none) --begin--> in flight --complete--> completed
 *		  ^                   |  \--begin after lease or ttl--> in flight
 *		  +-----release-------+
 *
 * In one transaction the row is not visible to others before the outcome is:
 * they wait, or are told that it is in flight.  With a lease the row may be
 * committed in flight; a token then says who may finish it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "catalog.h"
#include "guc.h"
#include "input.h"
#include "stat.h"
#include "statement.h"
#include "unique.h"

/* Somebody else holds the lease by now. */
#define ERRCODE_IDEM_LEASE_LOST	MAKE_SQLSTATE('I', 'D', '0', '0', '2')

/* Columns of idem.key, as in key.sql. */
enum
{
	Anum_key_scope = 1,
	Anum_key_key,
	Anum_key_fingerprint,
	Anum_key_completed,
	Anum_key_started_at,
	Anum_key_expires_at,
	Anum_key_ttl,
	Anum_key_lease_until,
	Anum_key_token,
	Anum_key_code,
	Anum_key_headers,
	Anum_key_body,
	Natts_key = Anum_key_body
};

/* What key_begin() returns. */
enum
{
	BEGIN_STATUS,
	BEGIN_TOKEN,
	BEGIN_CODE,
	BEGIN_HEADERS,
	BEGIN_BODY,
	BEGIN_COLUMNS
};

/* A request for a key, and the row that it wants to write. */
typedef struct KeyRequest
{
	text	   *scope;
	text	   *key;
	Interval   *ttl;
	Interval   *lease;			/* or NULL */
	ScanKeyData scankeys[2];
	Datum		values[Natts_key];
	bool		isnull[Natts_key];
} KeyRequest;

PG_FUNCTION_INFO_V1(idem_key_begin);
PG_FUNCTION_INFO_V1(idem_key_complete);
PG_FUNCTION_INFO_V1(idem_key_release);
PG_FUNCTION_INFO_V1(idem_fingerprint);

static void
open_register(IdemUnique *reg, bool wait)
{
	idem_unique_open(reg, IDEM_REL_KEY, wait, true);
}

static void
request_key(FunctionCallInfo fcinfo, KeyRequest *req)
{
	req->scope = idem_name_arg(fcinfo, 0, "scope");
	req->key = idem_id_arg(fcinfo, 1, "key");
	ScanKeyInit(&req->scankeys[0], Anum_key_scope, BTEqualStrategyNumber,
				F_TEXTEQ, PointerGetDatum(req->scope));
	ScanKeyInit(&req->scankeys[1], Anum_key_key, BTEqualStrategyNumber,
				F_TEXTEQ, PointerGetDatum(req->key));
}

#define SET(req, column, datum) \
	((req)->values[(column) - 1] = (datum), (req)->isnull[(column) - 1] = false)

/* Fill in the row of a key that begins, all but the times. */
static void
build_row(FunctionCallInfo fcinfo, KeyRequest *req)
{
	memset(req->isnull, true, sizeof(req->isnull));
	SET(req, Anum_key_scope, PointerGetDatum(req->scope));
	SET(req, Anum_key_key, PointerGetDatum(req->key));
	SET(req, Anum_key_completed, BoolGetDatum(false));
	if (!PG_ARGISNULL(2))
	{
		bytea	   *fingerprint = PG_GETARG_BYTEA_PP(2);

		idem_check_id((text *) fingerprint, "fingerprint");
		SET(req, Anum_key_fingerprint, PointerGetDatum(fingerprint));
	}

	req->ttl = PG_ARGISNULL(3) ? idem_seconds_interval(idem_key_ttl) :
		PG_GETARG_INTERVAL_P(3);
	idem_check_span(req->ttl, "ttl");
	SET(req, Anum_key_ttl, IntervalPGetDatum(req->ttl));

	req->lease = NULL;
	if (!PG_ARGISNULL(5))
	{
		req->lease = PG_GETARG_INTERVAL_P(5);
		idem_check_span(req->lease, "lease");
		SET(req, Anum_key_token, DirectFunctionCall1(gen_random_uuid, (Datum) 0));
	}
}

/* Fill in the times, once there is nobody to wait for any more. */
static void
start_clock(KeyRequest *req)
{
	TimestampTz now = GetCurrentTimestamp();
	TimestampTz expires_at = idem_time_plus(now, req->ttl);

	if (req->lease != NULL)
	{
		TimestampTz until = idem_time_plus(now, req->lease);

		expires_at = Max(expires_at, until);
		SET(req, Anum_key_lease_until, TimestampTzGetDatum(until));
	}
	SET(req, Anum_key_started_at, TimestampTzGetDatum(now));
	SET(req, Anum_key_expires_at, TimestampTzGetDatum(expires_at));
}

/* Is the fingerprint of the row in the way another than ours? */
static bool
fingerprint_differs(KeyRequest *req, TupleTableSlot *row)
{
	bool		isnull;
	Datum		theirs = slot_getattr(row, Anum_key_fingerprint, &isnull);

	if (isnull || req->isnull[Anum_key_fingerprint - 1])
		return isnull != req->isnull[Anum_key_fingerprint - 1];
	return !DatumGetBool(DirectFunctionCall2(byteaeq, theirs,
											 req->values[Anum_key_fingerprint - 1]));
}

/*
 * Has whoever began it lost the right to finish it?  With a lease when that
 * is over, otherwise with the ttl.
 */
static bool
may_take_over(TupleTableSlot *row)
{
	bool		isnull;
	Datum		until = slot_getattr(row, Anum_key_lease_until, &isnull);

	if (isnull)
		until = slot_getattr(row, Anum_key_expires_at, &isnull);
	return DatumGetTimestampTz(until) <= GetCurrentTimestamp();
}

/*
 * Begin the key anew for us; false if somebody else was quicker, or, unless
 * we wait, is at it.
 */
static bool
take_over(KeyRequest *req, IdemUnique *reg, bool wait)
{
#define LOCK_SQL \
	"SELECT FROM idem.key WHERE scope = $1 AND key = $2" \
	" AND NOT completed AND started_at = $3 FOR UPDATE"
	static IdemStatement lock_wait = {
		.sql = LOCK_SQL,
		.nargs = 3,
		.types = {TEXTOID, TEXTOID, TIMESTAMPTZOID}
	};
	static IdemStatement lock_nowait = {
		.sql = LOCK_SQL " SKIP LOCKED",
		.nargs = 3,
		.types = {TEXTOID, TEXTOID, TIMESTAMPTZOID}
	};
	static IdemStatement update = {
		.sql = "UPDATE idem.key SET started_at = $3, expires_at = $4, ttl = $5,"
		" lease_until = $6, token = $7 WHERE scope = $1 AND key = $2",
		.nargs = 7,
		.types = {TEXTOID, TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID, INTERVALOID,
			TIMESTAMPTZOID, UUIDOID}
	};
	static const AttrNumber columns[7] = {
		Anum_key_scope, Anum_key_key, Anum_key_started_at, Anum_key_expires_at,
		Anum_key_ttl, Anum_key_lease_until, Anum_key_token
	};
	Datum		values[7];
	char		nulls[7];
	bool		isnull;

	values[0] = PointerGetDatum(req->scope);
	values[1] = PointerGetDatum(req->key);
	values[2] = slot_getattr(reg->existing, Anum_key_started_at, &isnull);
	idem_unique_release(reg);
	if (idem_statement_run(wait ? &lock_wait : &lock_nowait, values, NULL) == 0)
		return false;

	start_clock(req);
	for (int i = 0; i < 7; i++)
	{
		values[i] = req->values[columns[i] - 1];
		nulls[i] = req->isnull[columns[i] - 1] ? 'n' : ' ';
	}
	idem_statement_run(&update, values, nulls);
	return true;
}

/*
 * key_begin(scope, key, fingerprint, ttl, wait, lease,
 *			 OUT status, OUT token, OUT code, OUT headers, OUT body)
 */
Datum
idem_key_begin(PG_FUNCTION_ARGS)
{
	KeyRequest	req;
	IdemUnique	reg;
	bool		wait;
	TupleDesc	tupdesc;
	Datum		values[BEGIN_COLUMNS] = {0};
	bool		isnull[BEGIN_COLUMNS] = {false, true, true, true, true};
	const char *status;
	IdemStatColumn column;
	IdemStat	stat = {0};
	bool		taken_over = false;
	HeapTuple	tup;

	request_key(fcinfo, &req);
	idem_require(fcinfo, 4, "wait");
	PreventCommandIfReadOnly("key_begin()");
	PreventCommandDuringRecovery("key_begin()");
	if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	wait = PG_GETARG_BOOL(4);
	build_row(fcinfo, &req);

	SPI_connect();
	open_register(&reg, wait);
	for (;;)
	{
		IdemUniqueResult result;

		CHECK_FOR_INTERRUPTS();
		result = idem_unique_probe(&reg, req.scankeys, 2);
		if (result == IDEM_FREE)
		{
			start_clock(&req);
			if (!idem_unique_insert(&reg, req.values, req.isnull))
				continue;
			status = "started";
			column = IDEM_STAT_STARTED;
		}
		else if (fingerprint_differs(&req, reg.existing))
		{
			status = "mismatch";
			column = IDEM_STAT_CONFLICTS;
		}
		else if (result == IDEM_EXISTS &&
				 DatumGetBool(slot_getattr(reg.existing, Anum_key_completed,
										   &isnull[BEGIN_STATUS])))
		{
			status = "completed";
			column = IDEM_STAT_REPLAYED;
			values[BEGIN_CODE] = slot_getattr(reg.existing, Anum_key_code,
											  &isnull[BEGIN_CODE]);
			values[BEGIN_HEADERS] = slot_getattr(reg.existing, Anum_key_headers,
												 &isnull[BEGIN_HEADERS]);
			values[BEGIN_BODY] = slot_getattr(reg.existing, Anum_key_body,
											  &isnull[BEGIN_BODY]);
		}
		else if (result == IDEM_EXISTS && may_take_over(reg.existing))
		{
			taken_over = take_over(&req, &reg, wait);
			if (!taken_over && wait)
				continue;
			status = taken_over ? "started" : "in_flight";
			column = taken_over ? IDEM_STAT_STARTED : IDEM_STAT_KEY_IN_FLIGHT;
		}
		else
		{
			status = "in_flight";
			column = IDEM_STAT_KEY_IN_FLIGHT;
		}
		break;
	}

	if (column == IDEM_STAT_STARTED)
	{
		values[BEGIN_TOKEN] = req.values[Anum_key_token - 1];
		isnull[BEGIN_TOKEN] = req.isnull[Anum_key_token - 1];
	}
	values[BEGIN_STATUS] = idem_enum_datum(TupleDescAttr(tupdesc, 0)->atttypid,
										   status);
	tup = SPI_copytuple(heap_form_tuple(BlessTupleDesc(tupdesc), values, isnull));
	idem_unique_close(&reg);
	SPI_finish();

	idem_stat_count(&stat, IDEM_STAT_SCOPE, text_to_cstring(req.scope), column, 1);
	idem_stat_count(&stat, IDEM_STAT_SCOPE, text_to_cstring(req.scope),
					IDEM_STAT_TAKEN_OVER, taken_over ? 1 : 0);
	PG_RETURN_DATUM(HeapTupleGetDatum(tup));
}

/*
 * Lock the row of a key that is in flight and that the caller may finish;
 * false if there is none.
 */
static bool
lock_in_flight(KeyRequest *req, bool have_token, Datum token)
{
	static IdemStatement select = {
		.sql = "SELECT completed, token FROM idem.key"
		" WHERE scope = $1 AND key = $2 FOR UPDATE",
		.nargs = 2,
		.types = {TEXTOID, TEXTOID}
	};
	Datum		values[2] = {PointerGetDatum(req->scope), PointerGetDatum(req->key)};
	Datum		held;
	bool		isnull;
	bool		locked;
	bool		exists;

	/*
	 * What we say of a row must rest on a commit that is on disk, and a row
	 * that our snapshot does not see is a serialization failure: the probe
	 * takes care of both.
	 */
	do
	{
		IdemUnique	reg;

		CHECK_FOR_INTERRUPTS();
		locked = idem_statement_run(&select, values, NULL) == 1;
		open_register(&reg, true);
		exists = idem_unique_probe(&reg, req->scankeys, 2) != IDEM_FREE;
		idem_unique_close(&reg);
	} while (exists && !locked);
	if (!locked)
		return false;

	if (DatumGetBool(SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc,
								   1, &isnull)))
		ereport(ERROR,
				(errcode(have_token ? ERRCODE_IDEM_LEASE_LOST :
						 ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("key \"%s\" of scope \"%s\" is already completed",
						text_to_cstring(req->key), text_to_cstring(req->scope)),
				 errhint("Read the stored outcome with idem.key_begin().")));

	held = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 2, &isnull);
	if (!isnull && !have_token)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("key \"%s\" of scope \"%s\" was begun with a lease",
						text_to_cstring(req->key), text_to_cstring(req->scope)),
				 errhint("Pass the token that idem.key_begin() returned.")));
	if (have_token &&
		(isnull || !DatumGetBool(DirectFunctionCall2(uuid_eq, held, token))))
		ereport(ERROR,
				(errcode(ERRCODE_IDEM_LEASE_LOST),
				 errmsg("lease on key \"%s\" of scope \"%s\" was lost",
						text_to_cstring(req->key), text_to_cstring(req->scope)),
				 errdetail("It ran out, and another caller has begun the key anew."),
				 errhint("Roll back what was done under this lease, or make the lease longer.")));
	return true;
}

/* key_complete(scope, key, code, headers, body, token) */
Datum
idem_key_complete(PG_FUNCTION_ARGS)
{
	static IdemStatement update = {
		.sql = "UPDATE idem.key SET completed = true, lease_until = NULL, token = NULL,"
		" code = $3, headers = $4, body = $5, expires_at = clock_timestamp() + ttl"
		" WHERE scope = $1 AND key = $2",
		.nargs = 5,
		.types = {TEXTOID, TEXTOID, INT4OID, JSONBOID, TEXTOID}
	};
	KeyRequest	req;
	Datum		values[5];
	char		nulls[5];

	request_key(fcinfo, &req);
	SPI_connect();
	if (!lock_in_flight(&req, !PG_ARGISNULL(5), PG_GETARG_DATUM(5)))
		ereport(ERROR,
				(errcode(PG_ARGISNULL(5) ? ERRCODE_UNDEFINED_OBJECT :
						 ERRCODE_IDEM_LEASE_LOST),
				 errmsg("key \"%s\" of scope \"%s\" is not in flight",
						text_to_cstring(req.key), text_to_cstring(req.scope)),
				 errhint("Begin it with idem.key_begin().")));

	for (int i = 0; i < 5; i++)
	{
		values[i] = PG_GETARG_DATUM(i);
		nulls[i] = PG_ARGISNULL(i) ? 'n' : ' ';
	}
	idem_statement_run(&update, values, nulls);
	SPI_finish();
	PG_RETURN_VOID();
}

/* key_release(scope, key, token) returns boolean */
Datum
idem_key_release(PG_FUNCTION_ARGS)
{
	static IdemStatement del = {
		.sql = "DELETE FROM idem.key WHERE scope = $1 AND key = $2",
		.nargs = 2,
		.types = {TEXTOID, TEXTOID}
	};
	KeyRequest	req;
	Datum		values[2];
	bool		found;

	request_key(fcinfo, &req);
	SPI_connect();
	found = lock_in_flight(&req, !PG_ARGISNULL(2), PG_GETARG_DATUM(2));
	values[0] = PointerGetDatum(req.scope);
	values[1] = PointerGetDatum(req.key);
	if (found)
		idem_statement_run(&del, values, NULL);
	SPI_finish();
	PG_RETURN_BOOL(found);
}

/*
 * fingerprint(request jsonb) returns bytea
 *		SHA-256 of a request, in the one form in which jsonb is printed.
 */
Datum
idem_fingerprint(PG_FUNCTION_ARGS)
{
	char	   *request;

	idem_require(fcinfo, 0, "request");
	request = DatumGetCString(DirectFunctionCall1(jsonb_out, PG_GETARG_DATUM(0)));
	if (GetDatabaseEncoding() != PG_SQL_ASCII)
		request = pg_server_to_any(request, strlen(request), PG_UTF8);
	return DirectFunctionCall1(sha256_bytea, CStringGetTextDatum(request));
}

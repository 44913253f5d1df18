/*-------------------------------------------------------------------------
 *
 * input.c
 *		Checks of what callers hand in, and small helpers around it.
 *
 * Our functions are not STRICT: a NULL id would make them return NULL, which
 * an application takes for "already done", and the message would be lost.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/pg_enum.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

#include "input.h"

/*
 * idem_require
 *		Refuse NULL for an argument; "what" names it in the message.
 */
void
idem_require(FunctionCallInfo fcinfo, int arg, const char *what)
{
	if (PG_ARGISNULL(arg))
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("%s must not be null", what)));
}

static void
check_text(const text *value, const char *what, int limit)
{
	int			len = VARSIZE_ANY_EXHDR(value);

	if (len == 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be empty", what)));
	if (len > limit)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("%s is too long", what),
				 errdetail("It has %d bytes; the limit is %d.", len, limit),
				 errhint("Use a shorter one, for example a hash of it.")));
}

/* A name (of a consumer, a scope): not null, not empty, not too long. */
text *
idem_name_arg(FunctionCallInfo fcinfo, int arg, const char *what)
{
	text	   *value;

	idem_require(fcinfo, arg, what);
	value = PG_GETARG_TEXT_PP(arg);
	check_text(value, what, IDEM_MAX_NAME);
	return value;
}

/* An id given by others (of a message, a key, an entity). */
text *
idem_id_arg(FunctionCallInfo fcinfo, int arg, const char *what)
{
	text	   *value;

	idem_require(fcinfo, arg, what);
	value = PG_GETARG_TEXT_PP(arg);
	idem_check_id(value, what);
	return value;
}

void
idem_check_id(const text *id, const char *what)
{
	check_text(id, what, IDEM_MAX_ID);
}

/* A length of time: more than nothing, and not so long that sums overflow. */
void
idem_check_span(const Interval *span, const char *what)
{
	Interval	zero = {0};
	Interval	century = {.month = 100 * MONTHS_PER_YEAR};

	if (!DatumGetBool(DirectFunctionCall2(interval_gt,
										  IntervalPGetDatum(span),
										  IntervalPGetDatum(&zero))))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must be greater than zero", what)));
	if (DatumGetBool(DirectFunctionCall2(interval_gt,
										 IntervalPGetDatum(span),
										 IntervalPGetDatum(&century))))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("%s must not be longer than 100 years", what)));
}

/* The value of an enum type that bears this label. */
Datum
idem_enum_datum(Oid type, const char *label)
{
	HeapTuple	tup;
	Oid			value;

	tup = SearchSysCache2(ENUMTYPOIDNAME, ObjectIdGetDatum(type),
						  CStringGetDatum(label));
	if (!HeapTupleIsValid(tup))
		elog(ERROR, "enum type %u has no label \"%s\"", type, label);
	value = ((Form_pg_enum) GETSTRUCT(tup))->oid;
	ReleaseSysCache(tup);
	return ObjectIdGetDatum(value);
}

TimestampTz
idem_time_plus(TimestampTz t, const Interval *span)
{
	return DatumGetTimestampTz(DirectFunctionCall2(timestamptz_pl_interval,
												   TimestampTzGetDatum(t),
												   IntervalPGetDatum(span)));
}

/*
 * The length of a span of time in microseconds, a month being 30 days: what
 * counts is that everybody counts alike, the one who removes a claim and the
 * one who says that it is too old to be known.
 */
int64
idem_span_usecs(const Interval *span)
{
	return span->time +
		(span->day + (int64) span->month * DAYS_PER_MONTH) * USECS_PER_DAY;
}

Interval *
idem_seconds_interval(int seconds)
{
	Interval   *span = palloc0(sizeof(Interval));

	span->time = seconds * USECS_PER_SEC;
	return span;
}

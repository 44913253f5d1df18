/*-------------------------------------------------------------------------
 *
 * version.c
 *		Guards against late and out-of-order events.
 *
 * One row per entity holds the last version applied.  It only ever grows, so
 * an event that is not newer than what is committed can be answered at once;
 * anything else waits for whoever is changing the row.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/timestamp.h"

#include "catalog.h"
#include "input.h"
#include "statement.h"
#include "unique.h"

/* Columns of idem.version, as in version.sql. */
enum
{
	Anum_version_consumer = 1,
	Anum_version_entity,
	Anum_version_version,
	Anum_version_advanced_at,
	Natts_version = Anum_version_advanced_at
};

PG_FUNCTION_INFO_V1(idem_version_advance);
PG_FUNCTION_INFO_V1(idem_version_reset);

/* Move the row from one version to another; false if it was not there. */
static bool
move(text *consumer, text *entity, int64 from, int64 to)
{
	static IdemStatement update = {
		.sql = "UPDATE idem.version SET version = $4, advanced_at = clock_timestamp()"
		" WHERE consumer = $1 AND entity = $2 AND version = $3",
		.nargs = 4,
		.types = {TEXTOID, TEXTOID, INT8OID, INT8OID}
	};
	Datum		values[4] = {
		PointerGetDatum(consumer), PointerGetDatum(entity),
		Int64GetDatum(from), Int64GetDatum(to)
	};

	return idem_statement_run(&update, values, NULL) == 1;
}

/* version_advance(consumer, entity, version, mode) returns idem.version_status */
Datum
idem_version_advance(PG_FUNCTION_ARGS)
{
	text	   *consumer = idem_name_arg(fcinfo, 0, "consumer");
	text	   *entity = idem_id_arg(fcinfo, 1, "entity");
	int64		version;
	bool		next;
	Datum		values[Natts_version];
	bool		isnull[Natts_version] = {0};
	ScanKeyData keys[2];
	IdemUnique	reg;
	const char *status;

	idem_require(fcinfo, 2, "version");
	idem_require(fcinfo, 3, "mode");
	PreventCommandIfReadOnly("version_advance()");
	PreventCommandDuringRecovery("version_advance()");
	version = PG_GETARG_INT64(2);
	next = strcmp(text_to_cstring(PG_GETARG_TEXT_PP(3)), "next") == 0;
	if (!next && strcmp(text_to_cstring(PG_GETARG_TEXT_PP(3)), "newer") != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("mode must be \"newer\" or \"next\"")));

	ScanKeyInit(&keys[0], Anum_version_consumer, BTEqualStrategyNumber,
				F_TEXTEQ, PointerGetDatum(consumer));
	ScanKeyInit(&keys[1], Anum_version_entity, BTEqualStrategyNumber,
				F_TEXTEQ, PointerGetDatum(entity));
	values[Anum_version_consumer - 1] = PointerGetDatum(consumer);
	values[Anum_version_entity - 1] = PointerGetDatum(entity);
	values[Anum_version_version - 1] = Int64GetDatum(version);
	values[Anum_version_advanced_at - 1] = TimestampTzGetDatum(GetCurrentTimestamp());

	SPI_connect();
	idem_unique_open(&reg, IDEM_REL_VERSION, true, false);
	for (;;)
	{
		int64		current;
		bool		null;

		CHECK_FOR_INTERRUPTS();
		if (idem_unique_probe(&reg, keys, 2) == IDEM_FREE)
		{
			if (!idem_unique_insert(&reg, values, isnull))
				continue;
			status = "applied";
			break;
		}

		current = DatumGetInt64(slot_getattr(reg.existing, Anum_version_version,
											 &null));
		if (version <= current)
		{
			status = version == current ? "duplicate" : "stale";
			break;
		}

		/* current < version, so current + 1 cannot overflow */
		if (next && version != current + 1)
		{
			if (!idem_unique_await_updater(&reg))
			{
				status = "gap";
				break;
			}
		}
		else
		{
			idem_unique_release(&reg);
			if (move(consumer, entity, current, version))
			{
				status = "applied";
				break;
			}
		}
	}
	idem_unique_close(&reg);
	SPI_finish();

	PG_RETURN_DATUM(idem_enum_datum(get_func_rettype(fcinfo->flinfo->fn_oid), status));
}

/* version_reset(consumer, entity) returns the number of entities forgotten */
Datum
idem_version_reset(PG_FUNCTION_ARGS)
{
	static IdemStatement del = {
		.sql = "DELETE FROM idem.version WHERE consumer = $1"
		" AND ($2 IS NULL OR entity = $2)",
		.nargs = 2,
		.types = {TEXTOID, TEXTOID}
	};
	Datum		values[2];
	char		nulls[2] = {' ', PG_ARGISNULL(1) ? 'n' : ' '};
	uint64		n;

	values[0] = PointerGetDatum(idem_name_arg(fcinfo, 0, "consumer"));
	values[1] = PG_ARGISNULL(1) ? (Datum) 0 :
		PointerGetDatum(idem_id_arg(fcinfo, 1, "entity"));

	SPI_connect();
	n = idem_statement_run(&del, values, nulls);
	SPI_finish();
	PG_RETURN_INT64(n);
}

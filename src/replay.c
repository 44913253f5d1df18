/*-------------------------------------------------------------------------
 *
 * replay.c
 *		Sending a stretch of the outbox to a server again.
 *
 * Also how a new route gets what was enqueued before it.  A replay covers what
 * the server's own reading has passed: it begins between two rounds, and the
 * tick at which it does is its end.  What comes after that tick is read in
 * the ordinary way, so a new route takes effect at that very moment.
 *
 * Caller provides a transaction.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "utils/builtins.h"

#include "replay.h"
#include "statement.h"

/*
 * idem_replays_load
 *		The replays of a server that are not finished, a list of IdemReplay.
 *
 * Those to consumers of this database are of the server with the empty name.
 */
List *
idem_replays_load(const char *server)
{
	static IdemStatement st = {
		.sql = "SELECT id, coalesce(route, 0), coalesce(tick, 0), from_seq, since, until, consumer, fresh"
		" FROM idem.relay_replay WHERE server = $1 AND finished_at IS NULL ORDER BY id",
		.nargs = 1,
		.types = {TEXTOID}
	};
	MemoryContext caller = CurrentMemoryContext;
	Datum		values[1] = {CStringGetTextDatum(server)};
	List	   *result = NIL;
	uint64		n;

	SPI_connect();
	n = idem_statement_run(&st, values, NULL);
	for (uint64 i = 0; i < n; i++)
	{
		HeapTuple	row = SPI_tuptable->vals[i];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		MemoryContext old = MemoryContextSwitchTo(caller);
		IdemReplay *replay = palloc0(sizeof(IdemReplay));
		bool		isnull;
		Datum		value;

		replay->id = DatumGetInt64(SPI_getbinval(row, desc, 1, &isnull));
		replay->route = DatumGetInt64(SPI_getbinval(row, desc, 2, &isnull));
		replay->tick = DatumGetInt64(SPI_getbinval(row, desc, 3, &isnull));
		replay->from_seq = DatumGetInt64(SPI_getbinval(row, desc, 4, &isnull));
		value = SPI_getbinval(row, desc, 5, &isnull);
		replay->since = isnull ? DT_NOBEGIN : DatumGetTimestampTz(value);
		value = SPI_getbinval(row, desc, 6, &isnull);
		replay->until = isnull ? DT_NOEND : DatumGetTimestampTz(value);
		replay->consumer = SPI_getvalue(row, desc, 7);
		replay->fresh = DatumGetBool(SPI_getbinval(row, desc, 8, &isnull));
		result = lappend(result, replay);
		MemoryContextSwitchTo(old);
	}
	SPI_finish();
	return result;
}

/* A replay begins: everything that this tick sees is old. */
void
idem_replay_begin(IdemReplay *replay, int64 tick)
{
	static IdemStatement st = {
		.sql = "UPDATE idem.relay_replay SET tick = $2 WHERE id = $1",
		.nargs = 2,
		.types = {INT8OID, INT8OID}
	};
	Datum		values[2] = {Int64GetDatum(replay->id), Int64GetDatum(tick)};

	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
	replay->tick = tick;
}

void
idem_replay_finish(int64 id)
{
	static IdemStatement st = {
		.sql = "WITH done AS (DELETE FROM idem.relay_position WHERE replay = $1)"
		" UPDATE idem.relay_replay SET finished_at = pg_catalog.clock_timestamp()"
		" WHERE id = $1 AND finished_at IS NULL",
		.nargs = 1,
		.types = {INT8OID}
	};
	Datum		values[1] = {Int64GetDatum(id)};

	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
}

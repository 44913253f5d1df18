/*-------------------------------------------------------------------------
 *
 * segment.c
 *		The tables of the log: which to write to, and which to empty.
 *
 * Messages are never deleted one by one.  The relay has sessions write to one
 * segment at a time, goes on to the next empty one when that is full or old
 * enough, and empties a segment at once when every server has passed all of
 * it and the replay window is over.
 *
 * It takes the lock for that only if nobody else has the table: whoever
 * waited for it would make every enqueue wait behind, for as long as a dump
 * runs.  Which segment is in use is a hint; readers look into all of them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "pgstat.h"
#include "storage/bufmgr.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

#include "catalog.h"
#include "delivery.h"
#include "guc.h"
#include "local.h"
#include "route.h"
#include "segment.h"
#include "statement.h"
#include "wake.h"

/* So many parked messages are copied in one transaction. */
#define MAX_KEPT_AT_ONCE	1000

/* What is in a segment, as far as it is committed. */
typedef struct Segment
{
	bool		empty;
	int64		first_seq;
	int64		last_seq;
	TimestampTz first_at;
	TimestampTz last_at;
	uint64		last_xid;		/* of rows that were not adopted; 0: none */
} Segment;

static int	current = -1;

/* The newest tick that sees all, and what it sees; see IdemTick. */
static int64 adopted_id = 0;
static int64 adopted = 0;

static int64
get_int64(int column)
{
	bool		isnull;

	return DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[0],
									   SPI_tuptable->tupdesc, column, &isnull));
}

/* Caller provides a transaction. */
static void
look_into(int i, Segment *segment)
{
	Relation	rel = idem_rel_open(IDEM_REL_OUTBOX_0 + i, AccessShareLock);
	char	   *name = RelationGetRelationName(rel);
	char	   *sql;

	memset(segment, 0, sizeof(Segment));
	segment->empty = RelationGetNumberOfBlocks(rel) == 0;
	sql = psprintf("SELECT f.seq, f.enqueued_at, l.seq, l.enqueued_at,"
				   " (SELECT xid FROM idem.%1$s WHERE seq > %2$lld ORDER BY xid DESC, seq DESC LIMIT 1)"
				   " FROM (SELECT seq, enqueued_at FROM idem.%1$s ORDER BY seq LIMIT 1) f,"
				   " (SELECT seq, enqueued_at FROM idem.%1$s ORDER BY seq DESC LIMIT 1) l",
				   name, (long long) adopted);
	table_close(rel, AccessShareLock);
	if (segment->empty)
		return;

	SPI_connect();
	if (SPI_execute(sql, true, 1) < 0)
		elog(ERROR, "could not look into segment %d", i);
	if (SPI_processed > 0)
	{
		segment->first_seq = get_int64(1);
		segment->first_at = get_int64(2);
		segment->last_seq = get_int64(3);
		segment->last_at = get_int64(4);
		segment->last_xid = (uint64) get_int64(5);
	}
	SPI_finish();
}

/* Has every server seen all that is there, and settled it? */
static bool
all_have_passed(const Segment *segment, List *deliveries)
{
	ListCell   *lc;

	if (!idem_local_has_passed(segment->last_seq, segment->last_xid, adopted_id))
		return false;
	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);
		IdemTick   *a;
		ListCell   *lc2;

		if (d->routes == NIL && !d->positioned)
			continue;
		if (!d->positioned || d->reader.a->id != d->done.a)
			return false;
		a = d->reader.a;
		if (a->id < adopted_id)
			return false;
		if (a->all ? segment->last_seq > a->seq_before : segment->last_xid >= a->xmin)
			return false;
		foreach(lc2, d->replays)
		{
			IdemReplay *replay = lfirst(lc2);
			int64		from = d->replaying != NULL && d->replaying->orders.id == replay->id ?
			d->replaying->done.seq : replay->from_seq;

			if (segment->last_seq >= from)
				return false;
		}
	}
	return true;
}

/*
 * Copy parked messages out of a segment, some at a time; true if none is left
 * to be copied.
 */
static bool
keep_parked(int i)
{
	char	   *sql = psprintf("INSERT INTO idem.relay_kept (seq, enqueued_at, msg_id, topic, key,"
							   " content_type, headers, body)"
							   " SELECT o.seq, o.enqueued_at, o.msg_id, o.topic, o.key,"
							   " o.content_type, o.headers, o.body FROM idem.outbox_%d o"
							   " WHERE o.seq IN (SELECT p.seq FROM idem.relay_parked p"
							   " WHERE NOT EXISTS (SELECT FROM idem.relay_kept k WHERE k.seq = p.seq))"
							   " LIMIT %d ON CONFLICT DO NOTHING", i, MAX_KEPT_AT_ONCE);
	uint64		n;

	SPI_connect();
	if (SPI_execute(sql, false, 0) < 0)
		elog(ERROR, "could not copy parked messages of segment %d", i);
	n = SPI_processed;
	SPI_finish();
	return n < MAX_KEPT_AT_ONCE;
}

static bool
is_older(TimestampTz t, int64 seconds)
{
	return t + seconds * USECS_PER_SEC <= GetCurrentTimestamp();
}

/* Empty a segment, if that can be done now and nobody wants what is there. */
static void
empty_if_done(int i, List *deliveries)
{
	Segment		segment;

	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	look_into(i, &segment);
	if (!segment.empty && is_older(segment.last_at, idem_outbox_retention) &&
		all_have_passed(&segment, deliveries) && keep_parked(i) &&
		ConditionalLockRelationOid(idem_rel(IDEM_REL_OUTBOX_0 + i), AccessExclusiveLock))
	{
		/* Nobody writes here any more; was there one until just now? */
		PopActiveSnapshot();
		PushActiveSnapshot(GetTransactionSnapshot());
		look_into(i, &segment);
		if (is_older(segment.last_at, idem_outbox_retention) &&
			all_have_passed(&segment, deliveries))
		{
			SPI_connect();
			if (SPI_execute(psprintf("TRUNCATE ONLY idem.outbox_%d", i), false, 0) < 0)
				elog(ERROR, "could not empty segment %d", i);
			SPI_finish();
		}
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
}

/*
 * Choose where sessions write.  A segment serves until it has enough rows and
 * the ring as a whole covers the replay window, or until it is as old as that.
 */
static void
choose_current(void)
{
	Segment		segments[IDEM_SEGMENTS];
	int			next;

	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	for (int i = 0; i < IDEM_SEGMENTS; i++)
		look_into(i, &segments[i]);
	PopActiveSnapshot();
	CommitTransactionCommand();

	if (current < 0)
	{
		current = 0;
		for (int i = 1; i < IDEM_SEGMENTS; i++)
		{
			if (segments[i].last_seq > segments[current].last_seq)
				current = i;
		}
	}
	next = (current + 1) % IDEM_SEGMENTS;
	if (!segments[current].empty && segments[next].empty &&
		segments[current].last_seq > 0 &&
		(is_older(segments[current].first_at, idem_outbox_retention) ||
		 (segments[current].last_seq - segments[current].first_seq >= idem_outbox_segment_rows &&
		  is_older(segments[current].first_at, idem_outbox_retention / IDEM_SEGMENTS))))
		current = next;
	idem_wake_set_segment(current);
}

/*
 * Remove positions that were overtaken, and ticks that nobody needs.  Rows that
 * somebody has locked, for one who renames a server, are left for next time.
 */
static void
forget_old(List *deliveries)
{
	static IdemStatement positions = {
		.sql = "DELETE FROM idem.relay_position WHERE ctid = ANY (ARRAY("
		"SELECT ctid FROM idem.relay_position WHERE server = $1 AND replay = $3 AND id < $2"
		" FOR UPDATE SKIP LOCKED))",
		.nargs = 3,
		.types = {TEXTOID, INT8OID, INT8OID}
	};
	/* One tick a second stays, to find messages by time. */
	static IdemStatement ticks = {
		.sql = "DELETE FROM idem.outbox_tick t WHERE t.id < $1 AND t.snapshot IS NOT NULL AND (t.at < $2"
		" OR EXISTS (SELECT FROM idem.outbox_tick p WHERE p.id < t.id AND p.id >= t.id - 1000"
		" AND pg_catalog.date_trunc('second', p.at) = pg_catalog.date_trunc('second', t.at)))"
		" AND (t.id > $3 OR t.at < $2)",
		.nargs = 3,
		.types = {INT8OID, TIMESTAMPTZOID, INT8OID}
	};
	static IdemStatement kept = {
		.sql = "DELETE FROM idem.relay_kept k WHERE k.seq = ANY ($1)"
		" AND NOT EXISTS (SELECT FROM idem.relay_parked p WHERE p.seq = k.seq)",
		.nargs = 1,
		.types = {INT8ARRAYOID}
	};
	/* Somebody who is parking one holds a lock on it; see dead_letter_redrive. */
	static IdemStatement unused = {
		.sql = "SELECT pg_catalog.array_agg(u.seq) FROM (SELECT k.seq FROM idem.relay_kept k"
		" WHERE NOT EXISTS (SELECT FROM idem.relay_parked p WHERE p.seq = k.seq)"
		" LIMIT 10000 FOR UPDATE OF k SKIP LOCKED) u"
	};
	/* One that is paused has not said here where it is. */
	static IdemStatement behind = {
		.sql = "SELECT pg_catalog.min(tick_a) FROM idem.relay_position WHERE server = $1",
		.nargs = 1,
		.types = {TEXTOID}
	};
	static IdemStatement answers = {
		.sql = "DELETE FROM idem.relay_answer WHERE ctid = ANY (ARRAY("
		"SELECT ctid FROM idem.relay_answer WHERE at < $1 ORDER BY at LIMIT 10000"
		" FOR UPDATE SKIP LOCKED))",
		.nargs = 1,
		.types = {TIMESTAMPTZOID}
	};
	static int64 thinned = 0;
	bool		none;
	int64		needed = PG_INT64_MAX;
	Datum		values[3];
	ListCell   *lc;
	ListCell   *lc2;

	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	SPI_connect();
	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		if (d->positioned)
		{
			needed = Min(needed, d->done.a);
			values[0] = CStringGetTextDatum(d->name);
			values[1] = Int64GetDatum(d->position_id - 1);
			values[2] = Int64GetDatum(0);
			idem_statement_run(&positions, values, NULL);
			if (d->replaying != NULL)
			{
				values[1] = Int64GetDatum(d->replaying->position_id - 1);
				values[2] = Int64GetDatum(d->replaying->orders.id);
				idem_statement_run(&positions, values, NULL);
			}
			foreach(lc2, d->replays)
			{
				IdemReplay *replay = lfirst(lc2);

				if (replay->tick != 0)
					needed = Min(needed, replay->tick);
			}
		}
		else
		{
			bool		isnull;
			Datum		tick;

			values[0] = CStringGetTextDatum(d->name);
			idem_statement_run(&behind, values, NULL);
			tick = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1, &isnull);
			if (!isnull)
				needed = Min(needed, DatumGetInt64(tick));
			else if (d->routes != NIL)
				needed = 0;
		}
	}
	needed = Min(needed, idem_local_forget());
	if (needed > 0 && needed < PG_INT64_MAX)
	{
		values[0] = Int64GetDatum(needed);
		values[1] = TimestampTzGetDatum(GetCurrentTimestamp() -
										idem_outbox_retention * USECS_PER_SEC);
		values[2] = Int64GetDatum(thinned);
		idem_statement_run(&ticks, values, NULL);
		thinned = needed - 1;
	}
	/* In two steps: the second sees what was parked before the first locked. */
	idem_statement_run(&unused, NULL, NULL);
	values[0] = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1, &none);
	if (!none)
		idem_statement_run(&kept, values, NULL);
	values[0] = TimestampTzGetDatum(GetCurrentTimestamp() -
									idem_outbox_retention * USECS_PER_SEC);
	idem_statement_run(&answers, values, NULL);
	SPI_finish();
	PopActiveSnapshot();
	CommitTransactionCommand();
}

/*
 * Remove routes that were dropped, once nothing can come that they would take.
 *
 * That is so when no number was given out since the newest tick, all that had
 * one have ended, and the server has got that far.
 */
static void
remove_closed_routes(List *deliveries, IdemTick *newest)
{
	static IdemStatement st = {
		.sql = "DELETE FROM idem.route WHERE ctid = ANY (ARRAY("
		"SELECT r.ctid FROM idem.route r WHERE r.server = $1 AND r.last_seq <= $2"
		" AND NOT EXISTS (SELECT FROM idem.relay_parked p WHERE p.server = r.server AND p.route = r.id)"
		" AND NOT EXISTS (SELECT FROM idem.relay_replay y WHERE y.server = r.server AND y.finished_at IS NULL)"
		" FOR UPDATE SKIP LOCKED))",
		.nargs = 2,
		.types = {TEXTOID, INT8OID}
	};
	bool		any = false;
	Datum		values[2];
	ListCell   *lc;
	ListCell   *lc2;

	foreach(lc, deliveries)
	{
		foreach(lc2, ((IdemDelivery *) lfirst(lc))->routes)
			any |= ((IdemRoute *) lfirst(lc2))->last_seq != PG_INT64_MAX;
	}
	if (!any || newest == NULL)
		return;

	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	if (!idem_tick_is_due(newest) && newest->npending == 0)
	{
		SPI_connect();
		foreach(lc, deliveries)
		{
			IdemDelivery *d = lfirst(lc);

			if (!d->positioned || d->done.a != newest->id || d->done.b != 0 ||
				d->nentries > 0 || d->nretries > 0 || idem_delivery_needs_record(d))
				continue;
			values[0] = CStringGetTextDatum(d->name);
			values[1] = Int64GetDatum(newest->seq_before);
			idem_statement_run(&st, values, NULL);
		}
		SPI_finish();
	}
	PopActiveSnapshot();
	CommitTransactionCommand();
}

/*
 * idem_segment_tend
 *		Housekeeping, now and then.  No transaction may be open.
 */
void
idem_segment_tend(List *deliveries, IdemTick *newest)
{
	pgstat_report_activity(STATE_RUNNING, "tending the outbox");
	adopted_id = newest != NULL ? newest->adopted_id : 0;
	adopted = newest != NULL ? newest->adopted : 0;
	choose_current();
	for (int i = 0; i < IDEM_SEGMENTS; i++)
	{
		if (i != current)
			empty_if_done(i, deliveries);
	}
	forget_old(deliveries);
	remove_closed_routes(deliveries, newest);
	pgstat_report_activity(STATE_IDLE, NULL);
}

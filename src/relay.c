/*-------------------------------------------------------------------------
 *
 * relay.c
 *		Delivers what is in the outbox.
 *
 * One worker per database serves all its servers.  It looks at the log (a
 * tick), reads what has become visible, hands it to a courier per server, and
 * writes down how far each has got.  Every transaction is short, and none is
 * open while anything is waited for.
 *
 * An error ends the worker, and the launcher starts it anew.  The exception
 * is writing down positions, and ticks: if that fails (a full disk, a
 * read-only server) what has been acknowledged stays in memory, and nothing
 * more is sent until it works again, since else every restart would send the
 * same things anew.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "foreign/foreign.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lock.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/pg_lsn.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"

#include "catalog.h"
#include "clock.h"
#include "compat.h"
#include "delivery.h"
#include "fault.h"
#include "guc.h"
#include "launcher.h"
#include "local.h"
#include "relay.h"
#include "route.h"
#include "segment.h"
#include "statement.h"
#include "wake.h"
#include "worker.h"

/* The safety net under lost wake-ups, and orders that passed us by. */
#define POLL_MS			1000
#define ORDERS_MS		5000

/*
 * Looking at the log for servers costs a flush of WAL, for which committers wait
 * in line.  So under load we look no more often than this; what is alone is seen
 * at once.
 */
#define TICK_MS			10

/* Positions are written at most so often, unless there is more to write. */
#define RECORD_MS		10
#define RECORD_RETRY_MS	1000

/* At the end, couriers get this long to answer for what they have. */
#define DRAIN_MS		2000

PG_FUNCTION_INFO_V1(idem_relay_notice);
PG_FUNCTION_INFO_V1(idem_relay_worker);

static List *deliveries = NIL;
static IdemTick *newest = NULL;
static MemoryContext tick_context;
static bool orders_changed = true;
static TimestampTz orders_read_at = 0;
static TimestampTz ticked_at = 0;
static bool tick_waits = false; /* there may be news; TICK_MS is not over */
static TimestampTz recorded_at = 0;
static TimestampTz record_again_at = 0; /* 0: recording works */
static XLogRecPtr newest_lsn = InvalidXLogRecPtr;
static bool marked = false;		/* it is known where this outbox is at home */
static bool at_home = false;

/*
 * relay_notice() returns void
 *		Make the relay read its orders anew when this transaction commits.
 */
Datum
idem_relay_notice(PG_FUNCTION_ARGS pg_attribute_unused())
{
	idem_wake_orders();
	PG_RETURN_VOID();
}

/* relay_worker(OUT state, OUT reason, OUT pid) */
Datum
idem_relay_worker(PG_FUNCTION_ARGS)
{
	TupleDesc	tupdesc;
	const char *state;
	const char *reason;
	int			pid;
	Datum		values[3];
	bool		nulls[3] = {0};

	if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");
	idem_worker_describe(IDEM_WORKER_RELAY, &state, &reason, &pid);
	values[0] = CStringGetTextDatum(state);
	nulls[1] = reason == NULL;
	if (reason != NULL)
		values[1] = CStringGetTextDatum(reason);
	values[2] = Int32GetDatum(pid);
	nulls[2] = pid == 0;
	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(tupdesc),
													  values, nulls)));
}

static void
begin(const char *activity)
{
	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	pgstat_report_activity(STATE_RUNNING, activity);
}

static void
begin_reading(const char *activity)
{
	begin(activity);
	PushActiveSnapshot(GetTransactionSnapshot());
}

static void
commit(void)
{
	if (ActiveSnapshotSet())
		PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_activity(STATE_IDLE, NULL);
}

static void
on_servers_changed(Datum arg pg_attribute_unused(), int cache pg_attribute_unused(),
				   uint32 hash pg_attribute_unused())
{
	orders_changed = true;
}

/*
 * Is this database the one to which the outbox belongs?  NULL, or what is
 * different.
 *
 * We never leave the mark ourselves: while a dump is restored we may be there
 * before its tables have their rows, and would take it for our own.  The mark
 * comes with the first route; so routes without a mark are not ours, either.
 */
static char *
away_from_home(void)
{
	static IdemStatement compare = {
		.sql = "SELECT pg_catalog.concat_ws(', ',"
		" CASE WHEN i.system_identifier <> w.system_identifier THEN 'another cluster' END,"
		" CASE WHEN i.database <> w.database THEN 'another database' END,"
		" CASE WHEN i.site <> w.site THEN pg_catalog.format('idem.site was \"%s\"', i.site) END) AS difference"
		" FROM idem.relay_identity i, idem.relay_whereabouts() w ORDER BY difference DESC LIMIT 1"
	};
	MemoryContext caller = CurrentMemoryContext;
	char	   *difference = NULL;

	SPI_connect();
	marked = idem_statement_run(&compare, NULL, NULL) > 0;
	if (marked)
	{
		char	   *s = SPI_getvalue(SPI_tuptable->vals[0],
									 SPI_tuptable->tupdesc, 1);

		if (s != NULL && s[0] != '\0')
			difference = MemoryContextStrdup(caller, s);
	}
	SPI_finish();
	at_home = marked && difference == NULL;
	return difference;
}

static bool
is_paused(const char *server)
{
	static IdemStatement st = {
		.sql = "SELECT FROM idem.relay_paused WHERE server = $1",
		.nargs = 1,
		.types = {TEXTOID}
	};
	Datum		values[1] = {CStringGetTextDatum(server)};
	bool		result;

	SPI_connect();
	result = idem_statement_run(&st, values, NULL) > 0;
	SPI_finish();
	return result;
}

/* A secret that could not be read has no value. */
static bool
same_value(const char *a, const char *b)
{
	return a == NULL || b == NULL ? a == b : strcmp(a, b) == 0;
}

static bool
same_options(List *a, List *b)
{
	ListCell   *la;
	ListCell   *lb;

	if (list_length(a) != list_length(b))
		return false;
	forboth(la, a, lb, b)
	{
		IdemOption *x = lfirst(la);
		IdemOption *y = lfirst(lb);

		if (strcmp(x->name, y->name) != 0 || !same_value(x->value, y->value))
			return false;
	}
	return true;
}

/* The delivery of a server, which may have been renamed since. */
static IdemDelivery *
find_delivery(IdemServer *server)
{
	ListCell   *lc;

	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		if (d->server->oid == server->oid)
			return d;
	}
	return NULL;
}

/* Put a server's orders into force. */
static void
give_orders(IdemServer *server, List *all_routes, MemoryContext context,
			const char *away, bool asked)
{
	IdemDelivery *d = find_delivery(server);
	MemoryContext old_context;
	MemoryContext old;
	bool		other = false;
	ListCell   *lc;

	if (d == NULL)
	{
		old = MemoryContextSwitchTo(TopMemoryContext);
		d = idem_delivery_create(server->name);
		deliveries = lappend(deliveries, d);
		MemoryContextSwitchTo(old);
	}
	else
	{
		other = !same_options(d->server->options, server->options);
		if (strcmp(d->name, server->name) != 0)
		{
			idem_delivery_rename(d, server->name);
			other = true;		/* its courier knows the old name */
		}
	}

	old_context = d->orders_context;
	d->server = server;
	d->orders_context = context;
	d->routes = NIL;
	foreach(lc, all_routes)
	{
		IdemRoute  *route = lfirst(lc);

		if (strcmp(route->server, server->name) == 0)
		{
			old = MemoryContextSwitchTo(context);
			d->routes = lappend(d->routes, route);
			MemoryContextSwitchTo(old);
		}
	}
	old = MemoryContextSwitchTo(context);
	idem_delivery_set_replays(d, idem_replays_load(server->name));
	MemoryContextSwitchTo(old);
	if (old_context != NULL)
		MemoryContextDelete(old_context);
	if (other)
		d->replace_by = TimestampTzPlusMilliseconds(idem_clock(), DRAIN_MS);
	idem_delivery_recount(d);
	if (asked)
		d->next_due = 0;		/* somebody may have parked something */

	if (away == NULL && !marked && d->routes != NIL)
		away = "this is a copy, or a dump is being restored; relay_adopt() makes it send";
	if (away != NULL)
		idem_delivery_set_state(d, IDEM_SERVER_HOLDING, away);
	else if (server->error != NULL)
	{
		d->until = DT_NOEND;
		idem_delivery_set_state(d, IDEM_SERVER_BLOCKED, server->error);
	}
	else if (is_paused(server->name))
		idem_delivery_set_state(d, IDEM_SERVER_PAUSED, NULL);
	else if (d->state == IDEM_SERVER_STARTING || d->state == IDEM_SERVER_PAUSED ||
			 d->state == IDEM_SERVER_HOLDING || d->until == DT_NOEND || other || asked)
	{
		d->until = 0;
		idem_delivery_set_state(d, IDEM_SERVER_RUNNING, NULL);
	}
}

/* Read servers, routes and all that an operator has said. */
static void
read_orders(bool asked)
{
	List	   *servers;
	List	   *gone = NIL;
	ListCell   *lc;
	char	   *away;
	int64		known;
	MemoryContext old;

	begin_reading("reading servers and routes");
	orders_changed = false;
	orders_read_at = idem_clock();
	away = away_from_home();
	if (away != NULL)
		away = psprintf("this is a copy (%s); relay_adopt() makes it send", away);

	known = newest != NULL ? newest->id : 0;
	MemoryContextReset(tick_context);
	old = MemoryContextSwitchTo(tick_context);
	newest = idem_tick_newest();
	MemoryContextSwitchTo(old);
	/* One that somebody else has written is further on in the log than ours. */
	if (newest == NULL || newest->id != known)
		newest_lsn = InvalidXLogRecPtr;
	if (newest != NULL && newest->id != known)
	{
		/* Is it on disk?  When we have committed, it is. */
		(void) GetCurrentTransactionId();
		ForceSyncCommit();
	}

	servers = idem_servers_load();
	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);
		bool		found = false;
		ListCell   *lc2;

		foreach(lc2, servers)
			found |= ((IdemServer *) lfirst(lc2))->oid == d->server->oid;
		if (!found)
			gone = lappend(gone, d);
	}
	foreach(lc, gone)
	{
		IdemDelivery *d = lfirst(lc);

		deliveries = list_delete_ptr(deliveries, d);
		MemoryContextDelete(d->orders_context);
		idem_delivery_drop(d);
	}
	foreach(lc, servers)
	{
		/* Every server has its own copy, which lives as long as its orders. */
		MemoryContext context = AllocSetContextCreate(TopMemoryContext, "idem orders",
													  ALLOCSET_SMALL_SIZES);
		IdemServer *server = lfirst(lc);
		List	   *mine;
		ListCell   *lc2;

		old = MemoryContextSwitchTo(context);
		mine = idem_servers_load();
		foreach(lc2, mine)
		{
			if (strcmp(((IdemServer *) lfirst(lc2))->name, server->name) == 0)
				give_orders(lfirst(lc2), idem_routes_load(), context, away, asked);
		}
		MemoryContextSwitchTo(old);
	}
	idem_local_orders(newest != NULL ? newest->id : 0, !at_home);
	commit();
}

/*
 * Get over an error while writing: what we know must not get lost.  Caller has
 * caught it.
 */
static void
carry_on(MemoryContext context)
{
	MemoryContextSwitchTo(context);
	HOLD_INTERRUPTS();
	EmitErrorReport();
	FlushErrorState();
	AbortCurrentTransaction();
	RESUME_INTERRUPTS();
	MemoryContextSwitchTo(context);
	pgstat_report_activity(STATE_IDLE, NULL);
	record_again_at = TimestampTzPlusMilliseconds(idem_clock(), RECORD_RETRY_MS);
}

/* Look at the log again; false if that did not work. */
static bool
take_tick(void)
{
	MemoryContext caller = CurrentMemoryContext;
	MemoryContext context = AllocSetContextCreate(TopMemoryContext, "idem newest tick",
												  ALLOCSET_DEFAULT_SIZES);
	IdemTick   *volatile tick = NULL;
	int64		id = newest != NULL ? newest->id + 1 : 1;
	TimestampTz start = idem_clock();

	PG_TRY();
	{
		begin("looking at the outbox");
		MemoryContextSwitchTo(context);
		tick = idem_tick_take(id);
		MemoryContextSwitchTo(caller);
		commit();
	}
	PG_CATCH();
	{
		carry_on(caller);
		tick = NULL;
	}
	PG_END_TRY();

	if (tick == NULL)
	{
		MemoryContextDelete(context);
		return false;
	}
	MemoryContextDelete(tick_context);
	tick_context = context;
	newest = tick;
	newest_lsn = XactLastCommitEnd;
	ticked_at = start;			/* a slow flush is pause enough */
	return true;
}

/* How long until we may look again; 0 if we may. */
static long
tick_pause(void)
{
	return TimestampDifferenceMilliseconds(idem_clock(),
										   TimestampTzPlusMilliseconds(ticked_at, TICK_MS));
}

/*
 * Have the standbys that this server waits for everything up to a tick?
 *
 * It stays the same tick until they have: under load the newest may always be
 * ahead of what they have.
 *
 * One that was promoted need not wait for itself; its name is that under which
 * it has connected as a standby, unless somebody has chosen another.
 */
static bool
gate_is_open(IdemDelivery *d)
{
	static IdemStatement st = {
		.sql = "SELECT pg_catalog.string_agg(n, ', ')"
		" FROM pg_catalog.regexp_split_to_table($1, '\\s*,\\s*') n"
		" WHERE n <> pg_catalog.current_setting('cluster_name')"
		" AND NOT EXISTS (SELECT FROM pg_catalog.pg_stat_replication r"
		" WHERE r.application_name = n AND r.flush_lsn >= $2)",
		.nargs = 2,
		.types = {TEXTOID, PG_LSNOID}
	};
	Datum		values[2];
	char	   *missing;
	const char *reason = "";

	if (d->server->gate != IDEM_GATE_STANDBY)
	{
		d->gate_tick = newest->id;
		return true;
	}
	if (d->gate_tick <= d->reader.pos.a || XLogRecPtrIsInvalid(d->gate_lsn))
	{
		if (XLogRecPtrIsInvalid(newest_lsn))
			newest_lsn = GetXLogInsertRecPtr();
		d->gate_tick = newest->id;
		d->gate_lsn = newest_lsn;
	}
	values[0] = CStringGetTextDatum(d->server->standbys);
	values[1] = LSNGetDatum(d->gate_lsn);
	SPI_connect();
	idem_statement_run(&st, values, NULL);
	missing = SPI_getvalue(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1);
	if (missing != NULL)
		reason = psprintf("waits until these have on disk what is to be sent: %s", missing);
	if (strcmp(reason, d->reason) != 0)
		idem_delivery_set_state(d, d->state, reason);
	SPI_finish();
	return missing == NULL;
}

/* Does any courier's answer wait to be written down? */
static bool
acknowledged(void)
{
	ListCell   *lc;

	foreach(lc, deliveries)
	{
		if (idem_delivery_needs_record(lfirst(lc)))
			return true;
	}
	return false;
}

/*
 * May we write under the name of this server?  If so nobody renames or drops
 * it until we have committed; whoever is just about to goes first.
 */
static bool
name_is_ours(IdemDelivery *d)
{
	ForeignServer *server;
	LOCKTAG		tag;

	SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ForeignServerRelationId, d->server->oid, 0);
	if (LockAcquire(&tag, AccessShareLock, false, true) == LOCKACQUIRE_NOT_AVAIL)
		return false;
	AcceptInvalidationMessages();
	server = GetForeignServerExtended(d->server->oid, FSV_MISSING_OK);
	if (server != NULL && strcmp(server->servername, d->name) == 0)
		return true;
	orders_changed = true;
	return false;
}

/*
 * Positions are committed asynchronously.  Should the server crash, no more
 * than a window is to be sent again for want of them.
 */
static void
flush_positions(void)
{
	bool		due = false;
	ListCell   *lc;

	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		due |= d->unflushed >= (d->server->window_messages + 1) / 2;
	}
	if (!due)
		return;
	XLogFlush(XactLastCommitEnd);
	foreach(lc, deliveries)
		((IdemDelivery *) lfirst(lc))->unflushed = 0;
}

/* Write down all positions; false if that did not work. */
static bool
record(void)
{
	MemoryContext context = CurrentMemoryContext;
	volatile bool ok = true;
	ListCell   *lc;

	if (!acknowledged())
	{
		record_again_at = 0;
		return true;
	}

	PG_TRY();
	{
		begin_reading("recording positions");
		foreach(lc, deliveries)
		{
			IdemDelivery *d = lfirst(lc);

			d->nameless = idem_delivery_needs_record(d) && !name_is_ours(d);
			if (idem_delivery_needs_record(d) && !d->nameless)
				idem_delivery_record(d);
		}
		IDEM_FAULT("relay-recording");
		commit();
		flush_positions();
	}
	PG_CATCH();
	{
		carry_on(context);
		ok = false;
	}
	PG_END_TRY();

	if (ok)
		IDEM_FAULT("relay-recorded");
	recorded_at = idem_clock();
	if (ok)
		record_again_at = 0;
	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		if (ok && idem_delivery_needs_record(d) && !d->nameless)
			idem_delivery_recorded(d);
	}
	return ok;
}

/* Is it time to write positions down? */
static bool
record_is_due(void)
{
	TimestampTz now = idem_clock();

	if (record_again_at != 0)
		return now >= record_again_at;
	return TimestampDifferenceExceeds(recorded_at, now, RECORD_MS);
}

/*
 * When the clock was set back, what is to be tried again must not wait for it
 * to get there once more.  Messages that a user has delayed go by the clock.
 */
static void
follow_clock(void)
{
	static IdemStatement st = {
		.sql = "UPDATE idem.relay_parked SET due = due - pg_catalog.make_interval(secs => $1)"
		" WHERE state <> 'delayed' AND due IS NOT NULL",
		.nargs = 1,
		.types = {FLOAT8OID}
	};
	static int64 last = PG_INT64_MIN;
	int64		ahead = GetCurrentTimestamp() - idem_clock();
	Datum		values[1];
	ListCell   *lc;

	if (ahead + USECS_PER_SEC < last)
	{
		values[0] = Float8GetDatum((last - ahead) / (double) USECS_PER_SEC);
		ereport(LOG, (errmsg("idem: the clock was set back by %.0f s", DatumGetFloat8(values[0]))));
		begin_reading("following the clock");
		SPI_connect();
		idem_statement_run(&st, values, NULL);
		SPI_finish();
		commit();
		foreach(lc, deliveries)
			((IdemDelivery *) lfirst(lc))->next_due = 0;
	}
	last = ahead;
}

/* Start the courier of a server, if it should have one. */
static void
start_courier(IdemDelivery *d)
{
	char	   *path = idem_courier_path(d->server->scheme);
	MemoryContext old;

	/* It was there when the server was loaded. */
	if (path == NULL)
	{
		d->until = TimestampTzPlusMilliseconds(idem_clock(), ORDERS_MS);
		idem_delivery_set_state(d, IDEM_SERVER_BLOCKED,
								psprintf("courier \"idem-courier-%s\" is not installed",
										 d->server->scheme));
		return;
	}
	old = MemoryContextSwitchTo(d->context);
	d->link = idem_link_open(path, d->name, d->server->options);
	MemoryContextSwitchTo(old);
	idem_delivery_set_state(d, d->state, d->reason);
	pfree(path);
}

/* Whatever a server's state asks for now. */
static void
tend(IdemDelivery *d)
{
	/* Another courier is to take over: this one answers for what it has. */
	if (d->replace_by != 0 && (d->nsent == 0 || d->replace_by <= idem_clock()))
	{
		d->replace_by = 0;
		idem_delivery_hang_up(d);
	}
	if ((d->state == IDEM_SERVER_BACKING_OFF || d->state == IDEM_SERVER_BLOCKED) &&
		d->until <= idem_clock())
		idem_delivery_set_state(d, IDEM_SERVER_RUNNING, NULL);
	if (d->state == IDEM_SERVER_RUNNING && d->link == NULL &&
		(d->routes != NIL || d->nentries > 0))
		start_courier(d);
}

/* Read for one server; true if it got something to do. */
static bool
feed(IdemDelivery *d, bool *hungry)
{
	bool		fed = false;

	if (d->state != IDEM_SERVER_RUNNING || record_again_at != 0 || d->nameless)
		return false;
	/* What is sent must be here after a crash, too. */
	if (!XLogRecPtrIsInvalid(newest_lsn))
		XLogFlush(newest_lsn);
	if (!d->positioned)
	{
		begin_reading("finding a position");
		idem_delivery_position(d, newest != NULL ? newest->id : 0);
		commit();
		*hungry |= d->routes != NIL;
	}
	if (d->positioned && d->next_due <= GetCurrentTimestamp() && d->nretries == 0)
	{
		begin_reading("reading parked messages");
		idem_delivery_read_due(d);
		commit();
		fed |= d->nretries > 0;
	}
	if (idem_delivery_wants(d) && d->replays != NIL)
	{
		begin_reading("reading for a replay");
		fed |= idem_delivery_read_replay(d);
		commit();
	}
	if (!idem_delivery_wants(d))
		return fed;
	if (d->reader.b == NULL && d->reader.pos.b == 0 &&
		(newest == NULL || newest->id <= d->reader.pos.a))
	{
		*hungry = true;
		return fed;
	}

	begin_reading("reading the outbox");
	if (d->round_is_open || gate_is_open(d))
	{
		idem_delivery_read(d, d->gate_tick);
		d->round_is_open = d->reader.pos.b != 0;
		fed = true;
	}
	commit();
	return fed;
}

/* Hand messages to consumers in this database; true if there were any. */
static bool
feed_local(bool *hungry)
{
	MemoryContext context = CurrentMemoryContext;
	volatile bool fed = false;

	if (record_again_at != 0)
		return false;
	PG_TRY();
	{
		fed = idem_local_read(newest != NULL ? newest->id : 0, hungry);
	}
	PG_CATCH();
	{
		carry_on(context);
		idem_local_reset();
		orders_changed = true;
	}
	PG_END_TRY();
	return fed;
}

/* Show the world where a server stands. */
static void
publish(IdemDelivery *d)
{
	SpinLockAcquire(&d->stat->mutex);
	d->stat->in_flight = d->nsent;
	if (d->positioned)
	{
		/* Between two rounds, everything up to the tick is done. */
		d->stat->seq = d->done.b == 0 && d->reader.a->id == d->done.a ?
			d->reader.a->seq_after : Max(d->done.seq, d->stat->seq);
		if (d->reader.a->id == d->done.a)
			d->stat->tick_at = d->reader.a->at;
	}
	SpinLockRelease(&d->stat->mutex);
}

/* Send what may be sent. */
static void
send_and_flush(IdemDelivery *d)
{
	if (record_again_at == 0)
		idem_delivery_send(d);
	if (d->link != NULL)
		idem_link_flush(d->link);
}

/* One turn of the wheel; true if there may be more to do at once. */
static bool
turn(void)
{
	bool		busy = false;
	bool		hungry = false;
	ListCell   *lc;

	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		idem_delivery_receive(d);
		tend(d);
	}
	if (acknowledged())
		IDEM_FAULT("relay-acknowledged");
	if (record_is_due())
		(void) record();
	follow_clock();
	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		/* What was read ahead goes out before we read on. */
		send_and_flush(d);
		busy |= feed(d, &hungry);
		if (d->nentries > d->nsent)
			IDEM_FAULT("relay-read");
		send_and_flush(d);
		if (d->nsent > 0)
			IDEM_FAULT("relay-sent");
		publish(d);
	}

	busy |= feed_local(&hungry);

	/* While we pause, nobody needs to wake us. */
	tick_waits = hungry && !busy && tick_pause() > 0;
	if (hungry && !busy && !tick_waits)
	{
		bool		due;

		idem_wake_prepare_sleep();
		begin_reading("looking for news");
		due = idem_tick_is_due(newest);
		commit();
		if (due)
		{
			idem_wake_awake();
			busy = take_tick();
		}
	}
	return busy;
}

/* How long to wait at most. */
static long
sleep_time(void)
{
	TimestampTz now = idem_clock();
	long		ms = tick_waits ? tick_pause() : POLL_MS;
	ListCell   *lc;

	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		if (d->state == IDEM_SERVER_BACKING_OFF || d->state == IDEM_SERVER_BLOCKED)
			ms = Min(ms, TimestampDifferenceMilliseconds(now, d->until));
		else if (d->state == IDEM_SERVER_RUNNING && d->positioned && d->nretries == 0)
			ms = Min(ms, TimestampDifferenceMilliseconds(GetCurrentTimestamp(), d->next_due));
		if (d->replace_by != 0)
			ms = Min(ms, TimestampDifferenceMilliseconds(now, d->replace_by));
		if (idem_delivery_needs_record(d))
			ms = Min(ms, record_again_at != 0 ?
					 TimestampDifferenceMilliseconds(now, record_again_at) : RECORD_MS);
		if (d->server->gate == IDEM_GATE_STANDBY)
			ms = Min(ms, 100);
		if (record_again_at != 0)
			ms = Min(ms, TimestampDifferenceMilliseconds(now, record_again_at));
	}
	return Max(ms, 1);
}

/* Wait for the latch, for couriers, and for the time to come. */
static void
wait_for_something(long ms)
{
	WaitEventSet *set = idem_create_wait_event_set(list_length(deliveries) + 2);
	WaitEvent	event;
	ListCell   *lc;

	AddWaitEventToSet(set, WL_LATCH_SET, PGINVALID_SOCKET, MyLatch, NULL);
	AddWaitEventToSet(set, WL_EXIT_ON_PM_DEATH, PGINVALID_SOCKET, NULL, NULL);
	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		if (d->link != NULL)
			AddWaitEventToSet(set, WL_SOCKET_READABLE |
							  (idem_link_pending(d->link) > 0 ? WL_SOCKET_WRITEABLE : 0),
							  d->link->sock, NULL, NULL);
	}
	(void) WaitEventSetWait(set, ms, &event, 1, PG_WAIT_EXTENSION);
	FreeWaitEventSet(set);
	ResetLatch(MyLatch);
}

/*
 * Let couriers answer for what they have, for a bounded time, and write that
 * down.  A stop that nobody notices sends nothing twice.
 */
static void
drain(void)
{
	TimestampTz end = TimestampTzPlusMilliseconds(idem_clock(), DRAIN_MS);
	bool		waiting = true;
	ListCell   *lc;

	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		if (d->link != NULL && d->nsent > 0)
			idem_link_quit(d->link);
	}
	while (waiting && idem_clock() < end)
	{
		waiting = false;
		foreach(lc, deliveries)
		{
			IdemDelivery *d = lfirst(lc);

			if (d->link != NULL)
				idem_link_flush(d->link);
			idem_delivery_receive(d);
			waiting |= d->link != NULL && d->nsent > 0;
		}
		if (waiting)
			wait_for_something(TimestampDifferenceMilliseconds(idem_clock(), end));
	}
	(void) record();
}

/*
 * May what nobody needs be removed?  Not from a copy, and not while a dump is
 * being restored, of which parts are missing that need others.  An outbox
 * that has never had a route has no mark, and must not grow for ever.
 */
static bool
may_tend(void)
{
	static TimestampTz unmarked_since = 0;
	TimestampTz now = idem_clock();

	if (marked || unmarked_since == 0)
		unmarked_since = now;
	return at_home || now - unmarked_since > idem_outbox_retention * USECS_PER_SEC;
}

/* However we leave, no courier stays behind. */
static void
on_exit_hang_up(int code pg_attribute_unused(), Datum arg pg_attribute_unused())
{
	ListCell   *lc;

	foreach(lc, deliveries)
	{
		IdemDelivery *d = lfirst(lc);

		if (d->link != NULL)
			idem_link_close(d->link);
		d->link = NULL;
		d->stat->courier = 0;
	}
}

/* Serve until we are asked to leave. */
static void
serve(IdemDatabase *db)
{
	MemoryContext turn_context = AllocSetContextCreate(TopMemoryContext, "idem relay turn",
													   ALLOCSET_DEFAULT_SIZES);

	tick_context = AllocSetContextCreate(TopMemoryContext, "idem newest tick",
										 ALLOCSET_DEFAULT_SIZES);
	while (!ShutdownRequestPending && idem_worker_may_run(db, IDEM_WORKER_RELAY))
	{
		bool		asked = idem_wake_orders_pending();

		MemoryContextReset(turn_context);
		MemoryContextSwitchTo(turn_context);
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
			orders_changed = true;
		}
		if (asked || orders_changed ||
			TimestampDifferenceExceeds(orders_read_at, idem_clock(), ORDERS_MS))
		{
			read_orders(asked);
			idem_worker_succeeded(db, IDEM_WORKER_RELAY);
			if (may_tend())
				idem_segment_tend(deliveries, newest);
		}
		if (!turn())
			wait_for_something(sleep_time());
		idem_wake_awake();
		pgstat_report_stat(false);
	}
	drain();
}

/* Entry point of the relay. */
void
idem_relay_main(Datum arg)
{
	IdemDatabase *db = idem_worker_start(arg, IDEM_WORKER_RELAY);
	MemoryContext context = CurrentMemoryContext;

	/* We leave in an orderly way; see drain(). */
	pqsignal(SIGTERM, SignalHandlerForShutdownRequest);
	SetConfigOption("lock_timeout", "5s", PGC_SUSET, PGC_S_OVERRIDE);
	SetConfigOption("synchronous_commit", "off", PGC_SUSET, PGC_S_OVERRIDE);
	before_shmem_exit(on_exit_hang_up, (Datum) 0);
	CacheRegisterSyscacheCallback(FOREIGNSERVEROID, on_servers_changed, (Datum) 0);
	idem_wake_attach();

	PG_TRY();
	{
		serve(db);
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		idem_worker_failed(db, IDEM_WORKER_RELAY,
						   psprintf("%s: %s", unpack_sql_state(error->sqlerrcode),
									error->message));
		PG_RE_THROW();
	}
	PG_END_TRY();
	proc_exit(0);
}

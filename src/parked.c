/*-------------------------------------------------------------------------
 *
 * parked.c
 *		What could not be delivered yet, and what never will be.
 *
 * The tables behind the relay: positions, parked messages, dead letters.  All
 * of it runs in the relay's transactions, in which a position moves past a
 * message only together with whatever became of that.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "parked.h"
#include "statement.h"

/* So many are taken along with the one that they wait for. */
#define MAX_BEHIND	100

static const char *const state_names[] = {
	[IDEM_PARKED_RETRY] = "retry",
	[IDEM_PARKED_BEHIND] = "behind",
	[IDEM_PARKED_DELAYED] = "delayed",
	[IDEM_PARKED_HELD] = "held",
	[IDEM_PARKED_DELIVERED] = "delivered",
};

/* Messages are in UTF-8; what is stored is in the database's encoding. */
static Datum
text_datum(const char *utf8)
{
	return CStringGetTextDatum(pg_any_to_server(utf8, strlen(utf8), PG_UTF8));
}

/* Fill in an argument that may be NULL. */
static void
set_text(Datum *values, char *nulls, int i, const char *utf8)
{
	nulls[i] = utf8 == NULL ? 'n' : ' ';
	values[i] = utf8 == NULL ? (Datum) 0 : text_datum(utf8);
}

/*
 * idem_parked_put
 *		Park a message, or change how one is parked.
 *
 * One that is to wait behind an earlier one of its key, which has gone
 * meanwhile, does not wait.
 */
void
idem_parked_put(const char *server, const IdemMessage *m,
				const IdemParked *parked, uint32 code, const char *error)
{
	static IdemStatement st = {
		.sql = "INSERT INTO idem.relay_parked AS p (server, seq, route, msg_id, key,"
		" destination, state, attempts, due, parked_at, code, first_error, last_error)"
		" SELECT $1, $2, $3, $4, $5, $6, s.state, $8,"
		" CASE WHEN s.state = $7 THEN $9 ELSE pg_catalog.clock_timestamp() END,"
		" pg_catalog.clock_timestamp(), $10, $11, $11"
		" FROM (SELECT CASE WHEN $7 = 'behind' AND NOT EXISTS (SELECT FROM idem.relay_parked b"
		" WHERE b.server = $1 AND b.key = $5 AND b.state <> 'delayed'"
		" AND (b.seq, b.route) < ($2, $3)) THEN 'retry' ELSE $7 END) s(state)"
		" ON CONFLICT (server, seq, route) DO UPDATE SET"
		" state = CASE WHEN excluded.state = 'behind' AND p.state <> 'delayed' THEN p.state ELSE excluded.state END,"
		" due = CASE WHEN excluded.state = 'behind' AND p.state <> 'delayed' THEN p.due ELSE excluded.due END,"
		" attempts = excluded.attempts, code = excluded.code,"
		" first_error = coalesce(p.first_error, excluded.first_error),"
		" last_error = coalesce(excluded.last_error, p.last_error)",
		.nargs = 11,
		.types = {TEXTOID, INT8OID, INT8OID, UUIDOID, TEXTOID, TEXTOID, TEXTOID,
		INT4OID, TIMESTAMPTZOID, INT4OID, TEXTOID}
	};
	Datum		values[11];
	char		nulls[11];

	memset(nulls, ' ', sizeof(nulls));
	values[0] = CStringGetTextDatum(server);
	values[1] = Int64GetDatum(parked->seq);
	values[2] = Int64GetDatum(parked->route);
	values[3] = UUIDPGetDatum(&m->id);
	set_text(values, nulls, 4, parked->key);
	values[5] = text_datum(parked->destination);
	values[6] = CStringGetTextDatum(state_names[parked->state]);
	values[7] = Int32GetDatum(parked->attempts);
	values[8] = TimestampTzGetDatum(parked->due);
	nulls[8] = parked->due == 0 ? 'n' : ' ';
	values[9] = Int32GetDatum((int32) code);
	set_text(values, nulls, 10, error);
	SPI_connect();
	idem_statement_run(&st, values, nulls);
	SPI_finish();
}

/*
 * idem_parked_remove
 *		A parked message is settled; the next one of its key gets its turn.
 */
void
idem_parked_remove(const char *server, const IdemParked *parked)
{
	static IdemStatement del = {
		.sql = "DELETE FROM idem.relay_parked WHERE server = $1 AND seq = $2 AND route = $3",
		.nargs = 3,
		.types = {TEXTOID, INT8OID, INT8OID}
	};
	static IdemStatement promote = {
		.sql = "UPDATE idem.relay_parked p SET state = 'retry', due = pg_catalog.clock_timestamp()"
		" FROM (SELECT seq, route, state FROM idem.relay_parked"
		" WHERE server = $1 AND key = $2 AND state <> 'delayed'"
		" ORDER BY seq, route LIMIT 1) first"
		" WHERE p.server = $1 AND p.seq = first.seq AND p.route = first.route"
		" AND first.state = 'behind'",
		.nargs = 2,
		.types = {TEXTOID, TEXTOID}
	};
	Datum		values[3];

	values[0] = CStringGetTextDatum(server);
	values[1] = Int64GetDatum(parked->seq);
	values[2] = Int64GetDatum(parked->route);
	SPI_connect();
	idem_statement_run(&del, values, NULL);
	if (parked->key != NULL)
	{
		values[1] = text_datum(parked->key);
		idem_statement_run(&promote, values, NULL);
	}
	SPI_finish();
}

/* Is this message parked; with 0 for a number, is any? */
bool
idem_parked_exists(const char *server, int64 seq, int64 route)
{
	static IdemStatement any = {
		.sql = "SELECT FROM idem.relay_parked WHERE server = $1 LIMIT 1",
		.nargs = 1,
		.types = {TEXTOID}
	};
	static IdemStatement one = {
		.sql = "SELECT FROM idem.relay_parked WHERE server = $1 AND seq = $2 AND route = $3",
		.nargs = 3,
		.types = {TEXTOID, INT8OID, INT8OID}
	};
	Datum		values[3];
	bool		result;

	values[0] = CStringGetTextDatum(server);
	values[1] = Int64GetDatum(seq);
	values[2] = Int64GetDatum(route);
	SPI_connect();
	result = idem_statement_run(seq == 0 ? &any : &one, values, NULL) > 0;
	SPI_finish();
	return result;
}

/*
 * idem_parked_promote
 *		Whatever waits for an earlier message of its key that is gone, goes on.
 */
void
idem_parked_promote(const char *server)
{
	static IdemStatement st = {
		.sql = "UPDATE idem.relay_parked SET state = 'retry', due = pg_catalog.clock_timestamp()"
		" WHERE ctid = ANY (ARRAY("
		"SELECT p.ctid FROM idem.relay_parked p WHERE p.server = $1 AND p.state = 'behind'"
		" AND NOT EXISTS (SELECT FROM idem.relay_parked b WHERE b.server = p.server"
		" AND b.key = p.key AND b.state <> 'delayed' AND (b.seq, b.route) < (p.seq, p.route))"
		" FOR UPDATE SKIP LOCKED))",
		.nargs = 1,
		.types = {TEXTOID}
	};
	Datum		values[1] = {CStringGetTextDatum(server)};

	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
}

static char *
column_utf8(HeapTuple row, TupleDesc desc, int column)
{
	char	   *s = SPI_getvalue(row, desc, column);

	return s == NULL ? NULL : pg_server_to_any(s, strlen(s), PG_UTF8);
}

static IdemParkedState
state_of(const char *name)
{
	for (int i = 0; i < (int) lengthof(state_names); i++)
	{
		if (strcmp(state_names[i], name) == 0)
			return i;
	}
	elog(ERROR, "\"%s\" is no state of a parked message", name);
}

#define PARKED_COLUMNS "p.seq, p.route, p.key, p.destination, p.state, p.attempts"

/* Run a query for parked messages and add them to a list, in this context. */
static List *
add_parked(List *list, IdemStatement *st, Datum *values)
{
	MemoryContext caller = CurrentMemoryContext;
	uint64		n;

	SPI_connect();
	n = idem_statement_run(st, values, NULL);
	for (uint64 i = 0; i < n; i++)
	{
		HeapTuple	row = SPI_tuptable->vals[i];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		MemoryContext old = MemoryContextSwitchTo(caller);
		IdemParked *parked = palloc0(sizeof(IdemParked));
		bool		isnull;

		parked->seq = DatumGetInt64(SPI_getbinval(row, desc, 1, &isnull));
		parked->route = DatumGetInt64(SPI_getbinval(row, desc, 2, &isnull));
		parked->key = column_utf8(row, desc, 3);
		parked->destination = column_utf8(row, desc, 4);
		parked->state = state_of(SPI_getvalue(row, desc, 5));
		parked->attempts = DatumGetInt32(SPI_getbinval(row, desc, 6, &isnull));
		list = lappend(list, parked);
		MemoryContextSwitchTo(old);
	}
	SPI_finish();
	return list;
}

/*
 * idem_parked_due
 *		Parked messages whose time has come, a list of IdemParked.
 *
 * Those that wait directly behind one of them come, too, after it.  They are
 * not due until it is settled, but if it is delivered, they can be as well.
 */
List *
idem_parked_due(const char *server, int max)
{
	static IdemStatement due = {
		.sql = "SELECT " PARKED_COLUMNS
		" FROM idem.relay_parked p WHERE p.server = $1 AND p.due <= $2"
		" AND NOT EXISTS (SELECT FROM idem.relay_parked b WHERE b.server = p.server"
		" AND b.key = p.key AND (b.seq, b.route) < (p.seq, p.route)"
		" AND b.state <> 'delayed' AND p.state <> 'delayed')"
		" ORDER BY p.due, p.seq, p.route LIMIT $3",
		.nargs = 3,
		.types = {TEXTOID, TIMESTAMPTZOID, INT4OID}
	};
	static IdemStatement behind = {
		.sql = "SELECT " PARKED_COLUMNS
		" FROM idem.relay_parked p WHERE p.server = $1 AND p.key = $2"
		" AND (p.seq, p.route) > ($3, $4) AND p.seq >= $3 AND p.state = 'behind'"
		" ORDER BY p.seq, p.route LIMIT $5",
		.nargs = 5,
		.types = {TEXTOID, TEXTOID, INT8OID, INT8OID, INT4OID}
	};
	List	   *heads;
	List	   *result = NIL;
	Datum		values[5];
	ListCell   *lc;

	values[0] = CStringGetTextDatum(server);
	values[1] = TimestampTzGetDatum(GetCurrentTimestamp());
	values[2] = Int32GetDatum(max);
	heads = add_parked(NIL, &due, values);
	max -= list_length(heads);
	foreach(lc, heads)
	{
		IdemParked *head = lfirst(lc);
		int			before = list_length(result);

		result = lappend(result, head);
		if (max <= 0 || head->key == NULL || head->state != IDEM_PARKED_RETRY)
			continue;
		values[1] = text_datum(head->key);
		values[2] = Int64GetDatum(head->seq);
		values[3] = Int64GetDatum(head->route);
		values[4] = Int32GetDatum(Min(max, MAX_BEHIND));
		result = add_parked(result, &behind, values);
		max -= list_length(result) - before - 1;
	}
	return result;
}

/* The keys of parked messages, once for every message; those delayed count not. */
List *
idem_parked_keys(const char *server)
{
	static IdemStatement st = {
		.sql = "SELECT key FROM idem.relay_parked"
		" WHERE server = $1 AND key IS NOT NULL AND state <> 'delayed'",
		.nargs = 1,
		.types = {TEXTOID}
	};
	MemoryContext caller = CurrentMemoryContext;
	List	   *result = NIL;
	Datum		values[1] = {CStringGetTextDatum(server)};
	uint64		n;

	SPI_connect();
	n = idem_statement_run(&st, values, NULL);
	for (uint64 i = 0; i < n; i++)
	{
		MemoryContext old = MemoryContextSwitchTo(caller);

		result = lappend(result, column_utf8(SPI_tuptable->vals[i],
											 SPI_tuptable->tupdesc, 1));
		MemoryContextSwitchTo(old);
	}
	SPI_finish();
	return result;
}

/* When the next parked message is due; DT_NOEND if none is. */
TimestampTz
idem_parked_next_due(const char *server)
{
	static IdemStatement st = {
		.sql = "SELECT due FROM idem.relay_parked"
		" WHERE server = $1 AND due IS NOT NULL ORDER BY due LIMIT 1",
		.nargs = 1,
		.types = {TEXTOID}
	};
	Datum		values[1] = {CStringGetTextDatum(server)};
	TimestampTz result = DT_NOEND;
	bool		isnull;

	SPI_connect();
	if (idem_statement_run(&st, values, NULL) > 0)
		result = DatumGetTimestampTz(SPI_getbinval(SPI_tuptable->vals[0],
												   SPI_tuptable->tupdesc, 1,
												   &isnull));
	SPI_finish();
	return result;
}

/*
 * idem_kept_message
 *		A parked message that was copied out of the outbox; NULL if none was.
 */
IdemMessage *
idem_kept_message(int64 seq)
{
	static IdemStatement st = {
		.sql = "SELECT enqueued_at, msg_id, topic, key, content_type, headers, body"
		" FROM idem.relay_kept WHERE seq = $1",
		.nargs = 1,
		.types = {INT8OID}
	};
	MemoryContext caller = CurrentMemoryContext;
	IdemMessage *m = NULL;
	Datum		values[1] = {Int64GetDatum(seq)};

	SPI_connect();
	if (idem_statement_run(&st, values, NULL) > 0)
	{
		HeapTuple	row = SPI_tuptable->vals[0];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		MemoryContext old = MemoryContextSwitchTo(caller);
		bool		isnull;
		bytea	   *body;

		m = palloc0(sizeof(IdemMessage));
		m->seq = seq;
		m->enqueued_at = DatumGetTimestampTz(SPI_getbinval(row, desc, 1, &isnull));
		m->id = *DatumGetUUIDP(SPI_getbinval(row, desc, 2, &isnull));
		m->topic = column_utf8(row, desc, 3);
		m->key = column_utf8(row, desc, 4);
		m->content_type = column_utf8(row, desc, 5);
		m->headers = column_utf8(row, desc, 6);
		body = DatumGetByteaPP(SPI_getbinval(row, desc, 7, &isnull));
		m->body_len = VARSIZE_ANY_EXHDR(body);
		m->body = palloc(m->body_len + 1);
		memcpy(m->body, VARDATA_ANY(body), m->body_len);
		MemoryContextSwitchTo(old);
	}
	SPI_finish();
	return m;
}

/* Keep what a server said to a message that it took. */
void
idem_answer_put(const char *server, const IdemParked *parked, uint32 code,
				const char *answer)
{
	static IdemStatement st = {
		.sql = "INSERT INTO idem.relay_answer (server, seq, route, code, answer, at)"
		" VALUES ($1, $2, $3, $4, $5, pg_catalog.clock_timestamp())"
		" ON CONFLICT (server, seq, route) DO UPDATE SET code = excluded.code,"
		" answer = excluded.answer, at = excluded.at",
		.nargs = 5,
		.types = {TEXTOID, INT8OID, INT8OID, INT4OID, TEXTOID}
	};
	Datum		values[5];
	char		nulls[5];

	memset(nulls, ' ', sizeof(nulls));
	values[0] = CStringGetTextDatum(server);
	values[1] = Int64GetDatum(parked->seq);
	values[2] = Int64GetDatum(parked->route);
	values[3] = Int32GetDatum((int32) code);
	set_text(values, nulls, 4, answer);
	SPI_connect();
	idem_statement_run(&st, values, nulls);
	SPI_finish();
}

/* Give a message up, visibly. */
void
idem_dead_letter_put(const char *server, const IdemMessage *m,
					 const IdemParked *parked, uint32 code, const char *reason)
{
	static IdemStatement st = {
		.sql = "INSERT INTO idem.dead_letter (origin, name, msg_id, topic, key, destination,"
		" content_type, headers, body, enqueued_at, seq, route, attempts, code, reason, first_error)"
		" SELECT 'server', $1, $2::text, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14,"
		" coalesce((SELECT p.first_error FROM idem.relay_parked p"
		" WHERE p.server = $1 AND p.seq = $10 AND p.route = $11), $14)",
		.nargs = 14,
		.types = {TEXTOID, UUIDOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, BYTEAOID,
		TIMESTAMPTZOID, INT8OID, INT8OID, INT4OID, INT4OID, TEXTOID}
	};
	Datum		values[14];
	char		nulls[14];

	memset(nulls, ' ', sizeof(nulls));
	values[0] = CStringGetTextDatum(server);
	values[1] = UUIDPGetDatum(&m->id);
	values[2] = text_datum(m->topic);
	set_text(values, nulls, 3, m->key);
	values[4] = text_datum(parked->destination);
	set_text(values, nulls, 5, m->content_type);
	set_text(values, nulls, 6, m->headers);
	values[7] = PointerGetDatum(cstring_to_text_with_len(m->body, m->body_len));
	values[8] = TimestampTzGetDatum(m->enqueued_at);
	values[9] = Int64GetDatum(m->seq);
	values[10] = Int64GetDatum(parked->route);
	values[11] = Int32GetDatum(parked->attempts);
	values[12] = Int32GetDatum((int32) code);
	set_text(values, nulls, 13, reason);
	SPI_connect();
	idem_statement_run(&st, values, nulls);
	SPI_finish();
}

/*
 * Give a parked message up that is nowhere to be found: its part of the outbox
 * was emptied by hand.  Its id is all there is to show.
 */
void
idem_dead_letter_lost(const char *server, const IdemParked *parked)
{
	static IdemStatement st = {
		.sql = "INSERT INTO idem.dead_letter (origin, name, msg_id, topic, key, destination,"
		" body, enqueued_at, seq, route, attempts, reason, first_error, state)"
		" SELECT 'server', p.server, p.msg_id, '', p.key, p.destination, '', p.parked_at, p.seq, p.route,"
		" p.attempts, 'is not in the outbox any more', p.first_error, 'lost'"
		" FROM idem.relay_parked p WHERE p.server = $1 AND p.seq = $2 AND p.route = $3",
		.nargs = 3,
		.types = {TEXTOID, INT8OID, INT8OID}
	};
	Datum		values[3];

	values[0] = CStringGetTextDatum(server);
	values[1] = Int64GetDatum(parked->seq);
	values[2] = Int64GetDatum(parked->route);
	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
	idem_parked_remove(server, parked);
}

/* How far a server has got; false if it has never been anywhere. */
bool
idem_position_load(const char *server, int64 replay, IdemPosition *pos, int64 *id)
{
	static IdemStatement st = {
		.sql = "SELECT id, tick_a, tick_b, phase, seq FROM idem.relay_position"
		" WHERE server = $1 AND replay = $2 ORDER BY id DESC LIMIT 1",
		.nargs = 2,
		.types = {TEXTOID, INT8OID}
	};
	Datum		values[2] = {CStringGetTextDatum(server), Int64GetDatum(replay)};
	bool		found;
	bool		isnull;

	SPI_connect();
	found = idem_statement_run(&st, values, NULL) > 0;
	if (found)
	{
		HeapTuple	row = SPI_tuptable->vals[0];
		TupleDesc	desc = SPI_tuptable->tupdesc;

		*id = DatumGetInt64(SPI_getbinval(row, desc, 1, &isnull));
		pos->a = DatumGetInt64(SPI_getbinval(row, desc, 2, &isnull));
		pos->b = DatumGetInt64(SPI_getbinval(row, desc, 3, &isnull));
		pos->phase = DatumGetInt16(SPI_getbinval(row, desc, 4, &isnull));
		pos->seq = DatumGetInt64(SPI_getbinval(row, desc, 5, &isnull));
	}
	SPI_finish();
	return found;
}

void
idem_position_record(const char *server, int64 replay, const IdemPosition *pos,
					 int64 id)
{
	static IdemStatement st = {
		.sql = "INSERT INTO idem.relay_position (server, id, tick_a, tick_b, phase, seq, replay, at)"
		" VALUES ($1, $2, $3, $4, $5, $6, $7, pg_catalog.clock_timestamp())",
		.nargs = 7,
		.types = {TEXTOID, INT8OID, INT8OID, INT8OID, INT2OID, INT8OID, INT8OID}
	};
	Datum		values[7];

	values[0] = CStringGetTextDatum(server);
	values[1] = Int64GetDatum(id);
	values[2] = Int64GetDatum(pos->a);
	values[3] = Int64GetDatum(pos->b);
	values[4] = Int16GetDatum(pos->phase);
	values[5] = Int64GetDatum(pos->seq);
	values[6] = Int64GetDatum(replay);
	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
}

/*
 * idem_position_start
 *		The tick from which to read so as to miss nothing from a number on.
 */
int64
idem_position_start(int64 first_seq)
{
	static IdemStatement st = {
		.sql = "SELECT id FROM idem.outbox_tick WHERE seq_after < $1"
		" ORDER BY id DESC LIMIT 1",
		.nargs = 1,
		.types = {INT8OID}
	};
	Datum		values[1] = {Int64GetDatum(first_seq)};
	int64		result = 0;
	bool		isnull;

	SPI_connect();
	if (idem_statement_run(&st, values, NULL) > 0)
		result = DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[0],
											 SPI_tuptable->tupdesc, 1, &isnull));
	SPI_finish();
	return result;
}

/* Remove the records of positions that were overtaken. */
void
idem_position_forget(const char *server, int64 replay, int64 before)
{
	static IdemStatement st = {
		.sql = "DELETE FROM idem.relay_position WHERE server = $1 AND replay = $2 AND id < $3",
		.nargs = 3,
		.types = {TEXTOID, INT8OID, INT8OID}
	};
	Datum		values[3] = {CStringGetTextDatum(server), Int64GetDatum(replay),
	Int64GetDatum(before)};

	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
}

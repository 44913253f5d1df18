/*-------------------------------------------------------------------------
 *
 * settle.c
 *		What comes of messages that were taken for a consumer.
 *
 * Its end is the end of a message's row.  What is to wait moves to
 * inbox_parked, or stays there, with the time when it is due; what is given up
 * becomes a dead letter.  Whatever waited behind it by its key has its turn.
 *
 * Caller provides the transaction that holds the lock on the message, and the
 * rights of the tables' owner.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/namespace.h"
#include "catalog/pg_type.h"
#include "common/pg_prng.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/typcache.h"

#include "backlog.h"
#include "catalog.h"
#include "consumer.h"
#include "fault.h"
#include "guc.h"
#include "inbox.h"
#include "stat.h"
#include "statement.h"
#include "take.h"
/* Longest error that is kept. */
#define MAX_ERROR		1024

/* The next one of the same key has its turn. */
static void
promote_next(const IdemDeclared *c, const IdemTaken *t)
{
	static IdemStatement st = {
		.sql = "UPDATE idem.inbox_parked p SET state = 'retry', due = pg_catalog.clock_timestamp()"
		" FROM (SELECT seq, state FROM idem.inbox_parked WHERE consumer = $1 AND key = $2"
		" AND state <> 'delayed' AND seq <> $3 ORDER BY seq LIMIT 1) n"
		" WHERE p.consumer = $1 AND p.seq = n.seq AND n.state = 'behind'",
		.nargs = 3,
		.types = {INT4OID, TEXTOID, INT8OID}
	};
	Datum		values[3] = {Int32GetDatum(c->id), t->values[Anum_message_key - 1],
	Int64GetDatum(t->seq)};

	if (t->isnull[Anum_message_key - 1])
		return;
	SPI_connect();
	if (idem_statement_run(&st, values, NULL) > 0)
		idem_backlog_added(c->id, IDEM_MARK_DUE, GetCurrentTimestamp() - USECS_PER_SEC);
	SPI_finish();
	/* Those in the other table are where they were, but may be taken now. */
	idem_backlog_added(c->id, IDEM_MARK_SEQ, PG_INT64_MAX - 1);
}

/*
 * idem_take_promote
 *		Whatever waits for a message of its key that is gone, goes on.
 *
 * A safety net, of all consumers.
 */
void
idem_take_promote(void)
{
	static IdemStatement st = {
		.sql = "UPDATE idem.inbox_parked p SET state = 'retry', due = pg_catalog.clock_timestamp()"
		" WHERE p.state = 'behind' AND NOT EXISTS (SELECT FROM idem.inbox_parked b"
		" WHERE b.consumer = p.consumer AND b.key = p.key AND b.state <> 'delayed' AND b.seq < p.seq)"
		" RETURNING p.consumer"
	};
	uint64		n;

	SPI_connect();
	n = idem_statement_run(&st, NULL, NULL);
	for (uint64 i = 0; i < n; i++)
	{
		bool		isnull;

		idem_backlog_added(DatumGetInt32(SPI_getbinval(SPI_tuptable->vals[i],
													   SPI_tuptable->tupdesc, 1, &isnull)),
						   IDEM_MARK_DUE, GetCurrentTimestamp() - USECS_PER_SEC);
	}
	SPI_finish();
}

/* The row of a message goes; so does what others waited for. */
static void
remove_row(const IdemDeclared *c, IdemTaken *t)
{
	static IdemStatement del = {
		.sql = "DELETE FROM idem.inbox_parked WHERE consumer = $1 AND seq = $2",
		.nargs = 2,
		.types = {INT4OID, INT8OID}
	};
	Datum		values[2] = {Int32GetDatum(c->id), Int64GetDatum(t->seq)};

	if (!t->parked)
	{
		Relation	heap = idem_rel_open(IDEM_REL_INBOX_MESSAGE, RowExclusiveLock);

		simple_heap_delete(heap, &t->tid);
		table_close(heap, NoLock);
		return;
	}
	SPI_connect();
	idem_statement_run(&del, values, NULL);
	SPI_finish();
	promote_next(c, t);
}

/*
 * The claim of a message counts from when it is done.  One that was made a
 * good while before is brought up to that.
 */
static void
refresh_claim(const IdemDeclared *c, const IdemTaken *t)
{
	static IdemStatement st = {
		.sql = "UPDATE idem.inbox_claim SET claimed_at = $2 WHERE key = $1",
		.nargs = 2,
		.types = {UUIDOID, INT4OID}
	};
	int64		retention = c->retention >= 0 ? c->retention :
		idem_inbox_retention * USECS_PER_SEC;
	TimestampTz now = GetCurrentTimestamp();
	Datum		values[2] = {UUIDPGetDatum(&t->claim),
	Int32GetDatum((int32) (now / USECS_PER_SEC))};

	if (!t->claimed || now - t->stored_at < Min(retention / 1000, 60 * USECS_PER_SEC))
		return;
	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
}

/*
 * idem_taken_done
 *		A message has been processed.
 */
void
idem_taken_done(const IdemDeclared *c, IdemTaken *t)
{
	remove_row(c, t);
	refresh_claim(c, t);
}

/*
 * idem_taken_park
 *		A message waits on, in this way.
 */
void
idem_taken_park(const IdemDeclared *c, IdemTaken *t, const IdemWait *wait)
{
	static IdemStatement move = {
		.sql = "WITH gone AS (DELETE FROM idem.inbox_message WHERE consumer = $1 AND seq = $2"
		" RETURNING *) INSERT INTO idem.inbox_parked (consumer, seq, claim, claimed, replayed,"
		" stored_at, enqueued_at, msg_id, topic, key, content_type, headers, source, type, body,"
		" state, attempts, due, token, not_yet_since, sqlstate, first_error, last_error)"
		" SELECT consumer, seq, claim, claimed OR $10, replayed, stored_at, enqueued_at, msg_id,"
		" topic, key, content_type, headers, source, type, body,"
		" $3, $4, $5, $6, $7, $8, $9, $9 FROM gone",
		.nargs = 10,
		.types = {INT4OID, INT8OID, TEXTOID, INT4OID, TIMESTAMPTZOID, UUIDOID,
		TIMESTAMPTZOID, TEXTOID, TEXTOID, BOOLOID}
	};
	static IdemStatement change = {
		.sql = "UPDATE idem.inbox_parked SET state = $3, attempts = $4, due = $5, token = $6,"
		" not_yet_since = $7, sqlstate = coalesce($8, sqlstate),"
		" first_error = coalesce(first_error, $9), last_error = coalesce($9, last_error),"
		" claimed = claimed OR $10"
		" WHERE consumer = $1 AND seq = $2",
		.nargs = 10,
		.types = {INT4OID, INT8OID, TEXTOID, INT4OID, TIMESTAMPTZOID, UUIDOID,
		TIMESTAMPTZOID, TEXTOID, TEXTOID, BOOLOID}
	};
	Datum		values[10] = {0};
	char		nulls[] = "          ";

	values[0] = Int32GetDatum(c->id);
	values[1] = Int64GetDatum(t->seq);
	values[2] = CStringGetTextDatum(wait->state);
	values[3] = Int32GetDatum(wait->attempts);
	values[4] = TimestampTzGetDatum(wait->due);
	nulls[4] = wait->due == 0 ? 'n' : ' ';
	values[5] = UUIDPGetDatum(wait->token);
	nulls[5] = wait->token == NULL ? 'n' : ' ';
	values[6] = TimestampTzGetDatum(wait->not_yet_since);
	nulls[6] = wait->not_yet_since == 0 ? 'n' : ' ';
	nulls[7] = wait->sqlstate == NULL ? 'n' : ' ';
	if (wait->sqlstate != NULL)
		values[7] = CStringGetTextDatum(wait->sqlstate);
	nulls[8] = wait->error == NULL ? 'n' : ' ';
	if (wait->error != NULL)
		values[8] = PointerGetDatum(cstring_to_text_with_len(wait->error,
															 pg_mbcliplen(wait->error, strlen(wait->error), MAX_ERROR)));
	values[9] = BoolGetDatum(t->claimed);
	SPI_connect();
	idem_statement_run(t->parked ? &change : &move, values, nulls);
	SPI_finish();
	t->parked = true;
	t->attempts = wait->attempts;
	if (wait->due != 0)
		idem_backlog_added(c->id, IDEM_MARK_DUE, wait->due);
}

/*
 * idem_taken_bury
 *		A message is given up, visibly.
 */
void
idem_taken_bury(const IdemDeclared *c, IdemTaken *t, const char *sqlstate,
				const char *error)
{
	static IdemStatement st = {
		.sql = "INSERT INTO idem.dead_letter (origin, name, msg_id, topic, key, content_type, headers,"
		" body, enqueued_at, seq, attempts, reason, first_error, sqlstate, source, type, claim,"
		" claimed, replayed)"
		" SELECT 'consumer', $1, $2, coalesce($3, ''), $4, $5, $6, $7, $8, $9, $10, $11,"
		" coalesce((SELECT p.first_error FROM idem.inbox_parked p WHERE p.consumer = $18 AND p.seq = $9), $11),"
		" $12, $13, $14, $15, $16, $17",
		.nargs = 18,
		.types = {TEXTOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, BYTEAOID, TIMESTAMPTZOID,
			INT8OID, INT4OID, TEXTOID, TEXTOID, TEXTOID, TEXTOID, UUIDOID, BOOLOID, BOOLOID, INT4OID}
	};
	static const int texts[] = {Anum_message_msg_id, Anum_message_topic, Anum_message_key,
	Anum_message_content_type, Anum_message_headers};
	Datum		values[18];
	char		nulls[] = "                  ";

	/* A dead letter keeps its claim: nobody else processes the message. */
	if (!t->claimed && !t->replayed)
		t->claimed = idem_inbox_claim_key(c->name, &t->claim, false, NULL) == IDEM_CLAIM_CLAIMED;

	values[0] = CStringGetTextDatum(c->name);
	for (int i = 0; i < (int) lengthof(texts); i++)
	{
		values[1 + i] = t->values[texts[i] - 1];
		nulls[1 + i] = t->isnull[texts[i] - 1] ? 'n' : ' ';
	}
	values[6] = t->values[Anum_message_body - 1];
	values[7] = t->values[Anum_message_enqueued_at - 1];
	values[8] = Int64GetDatum(t->seq);
	values[9] = Int32GetDatum(t->attempts);
	nulls[10] = error == NULL ? 'n' : ' ';
	if (error != NULL)
		values[10] = PointerGetDatum(cstring_to_text_with_len(error,
															  pg_mbcliplen(error, strlen(error), MAX_ERROR)));
	nulls[11] = sqlstate == NULL ? 'n' : ' ';
	if (sqlstate != NULL)
		values[11] = CStringGetTextDatum(sqlstate);
	values[12] = t->values[Anum_message_source - 1];
	nulls[12] = t->isnull[Anum_message_source - 1] ? 'n' : ' ';
	values[13] = t->values[Anum_message_type - 1];
	nulls[13] = t->isnull[Anum_message_type - 1] ? 'n' : ' ';
	values[14] = UUIDPGetDatum(&t->claim);
	values[15] = BoolGetDatum(t->claimed);
	values[16] = BoolGetDatum(t->replayed);
	values[17] = Int32GetDatum(c->id);
	SPI_connect();
	idem_statement_run(&st, values, nulls);
	SPI_finish();
	remove_row(c, t);
	t->buried = true;
	ereport(LOG,
			(errmsg("idem: message %s of consumer \"%s\" is a dead letter: %s",
					idem_taken_text(t, Anum_message_msg_id), c->name,
					error != NULL ? error : "no reason given")));
}

/*
 * idem_taken_failed
 *		An attempt has failed, and counts: try again later, or give it up.
 *
 * A delay of less than zero stands for the consumer's own backoff.
 */
void
idem_taken_failed(const IdemDeclared *c, IdemTaken *t, const char *sqlstate,
				  const char *error, int64 delay)
{
	IdemWait	wait = {.state = "retry"};
	ListCell   *lc;
	bool		never = false;

	foreach(lc, c->never_retry)
	{
		const char *class = lfirst(lc);

		never |= sqlstate != NULL && strncmp(sqlstate, class, strlen(class)) == 0;
	}
	t->attempts++;
	if (never || t->attempts >= c->max_attempts)
	{
		idem_taken_bury(c, t, sqlstate, error);
		return;
	}
	if (delay < 0)
	{
		delay = c->backoff;
		for (int i = 1; i < t->attempts && delay < c->backoff_max; i++)
			delay *= 2;
		delay = Min(delay, c->backoff_max);
		/* Half of it is left to chance, so that what failed together does not come back together. */
		delay = delay / 2 + (int64) (delay / 2 * pg_prng_double(&pg_global_prng_state));
	}
	wait.attempts = t->attempts;
	wait.due = GetCurrentTimestamp() + delay;
	wait.not_yet_since = t->not_yet_since;
	wait.sqlstate = sqlstate;
	wait.error = error;
	idem_taken_park(c, t, &wait);
}

/* Text that says it is JSON, as jsonb; false if it cannot be. */
static bool
parse_payload(const IdemTaken *t, Datum *payload)
{
	MemoryContext context = CurrentMemoryContext;
	volatile bool ok = true;
	bytea	   *body;

	if (!t->isnull[Anum_message_content_type - 1])
	{
		char	   *s = idem_taken_text(t, Anum_message_content_type);
		if (strncmp(s, "application/json", 16) != 0 && strstr(s, "+json") == NULL)
			return false;
	}
	body = DatumGetByteaPP(t->values[Anum_message_body - 1]);

	/*
	 * Some of it is no text, and some JSON no jsonb.  Parsing has no effects
	 * that would have to be undone.
	 */
	PG_TRY();
	{
		char	   *s = pg_any_to_server(pnstrdup(VARDATA_ANY(body), VARSIZE_ANY_EXHDR(body)),
										 VARSIZE_ANY_EXHDR(body), PG_UTF8);

		*payload = DirectFunctionCall1(jsonb_in, CStringGetDatum(s));
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		if (ERRCODE_TO_CATEGORY(error->sqlerrcode) != ERRCODE_DATA_EXCEPTION &&
			ERRCODE_TO_CATEGORY(error->sqlerrcode) != ERRCODE_PROGRAM_LIMIT_EXCEEDED)
			PG_RE_THROW();
		FlushErrorState();
		FreeErrorData(error);
		ok = false;
	}
	PG_END_TRY();
	return ok;
}

/*
 * idem_taken_message
 *		A message as handlers and applications get it, of type idem.message.
 */
Datum
idem_taken_message(const IdemDeclared *c, const IdemTaken *t, const pg_uuid_t *token)
{
	static const int from[] = {0, Anum_message_msg_id, Anum_message_topic, Anum_message_key,
		0, 0, Anum_message_body, Anum_message_content_type, Anum_message_source,
	Anum_message_type};
	Oid			type;
	TupleDesc	desc;
	Datum		values[14] = {0};
	bool		nulls[14];
	HeapTuple	row;
	Datum		result;

	type = GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("message"),
						   ObjectIdGetDatum(get_namespace_oid("idem", false)));
	if (!OidIsValid(type))
		elog(ERROR, "type idem.message does not exist");
	desc = lookup_rowtype_tupdesc(type, -1);
	memset(nulls, true, sizeof(nulls));
	for (int i = 0; i < (int) lengthof(from); i++)
	{
		if (from[i] == 0)
			continue;
		values[i] = t->values[from[i] - 1];
		nulls[i] = t->isnull[from[i] - 1];
	}
	values[0] = CStringGetTextDatum(c->name);
	nulls[0] = false;
	if (!t->isnull[Anum_message_headers - 1])
	{
		values[4] = DirectFunctionCall1(jsonb_in, CStringGetDatum(idem_taken_text(t, Anum_message_headers)));
		nulls[4] = false;
	}
	nulls[5] = !parse_payload(t, &values[5]);
	if (nulls[7])
	{
		values[7] = CStringGetTextDatum("application/json");
		nulls[7] = false;
	}
	values[10] = Int32GetDatum(t->attempts + 1);
	nulls[10] = false;
	values[11] = BoolGetDatum(t->replayed);
	nulls[11] = false;
	values[12] = t->values[Anum_message_enqueued_at - 1];
	nulls[12] = false;
	values[13] = UUIDPGetDatum(token);
	nulls[13] = token == NULL;
	row = heap_form_tuple(desc, values, nulls);
	result = HeapTupleGetDatum(row);
	ReleaseTupleDesc(desc);
	return result;
}

/*-------------------------------------------------------------------------
 *
 * store.c
 *		Storing messages for a consumer, to be processed later.
 *
 * The claim of a message is made with it, in the register that also serves
 * inbox_try_claim(): what was claimed or stored once is not stored again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_type.h"
#include "commands/sequence.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"

#include "backlog.h"
#include "catalog.h"
#include "inbox.h"
#include "input.h"
#include "payload.h"
#include "stat.h"
#include "statement.h"
#include "store.h"
#include "take.h"
#include "unique.h"

PG_FUNCTION_INFO_V1(idem_inbox_store);

static HeapTuple
form_row(Relation rel, const IdemDeclared *c, const IdemToStore *m, int64 seq,
		 TimestampTz now)
{
	Datum		values[Natts_message];
	bool		nulls[Natts_message] = {0};
	const text *texts[] = {m->topic, m->key, m->content_type, m->headers, m->source, m->type};

	values[Anum_message_consumer - 1] = Int32GetDatum(c->id);
	values[Anum_message_seq - 1] = Int64GetDatum(seq);
	values[Anum_message_claim - 1] = UUIDPGetDatum(&m->claim);
	values[Anum_message_claimed - 1] = BoolGetDatum(m->claimed);
	values[Anum_message_replayed - 1] = BoolGetDatum(m->replayed);
	values[Anum_message_stored_at - 1] = TimestampTzGetDatum(now);
	values[Anum_message_enqueued_at - 1] = TimestampTzGetDatum(m->enqueued_at);
	values[Anum_message_msg_id - 1] = PointerGetDatum(m->msg_id);
	for (int i = 0; i < (int) lengthof(texts); i++)
	{
		values[Anum_message_topic - 1 + i] = PointerGetDatum(texts[i]);
		nulls[Anum_message_topic - 1 + i] = texts[i] == NULL;
	}
	values[Anum_message_body - 1] = PointerGetDatum(m->body);
	return heap_form_tuple(RelationGetDescr(rel), values, nulls);
}

/* One that is not to be processed before its time goes where such things are. */
static void
delay(const IdemDeclared *c, int64 seq, TimestampTz until)
{
	IdemTaken	t = {.seq = seq};
	IdemWait	wait = {.state = "delayed", .due = until};

	idem_taken_park(c, &t, &wait);
}

/*
 * idem_store
 *		Store messages, in their order.
 *
 * Their claims are the caller's business.  Delayed ones need the rights of
 * the tables' owner.
 */
void
idem_store(const IdemDeclared *c, const IdemToStore *list, int n)
{
	Relation	rel = idem_rel_open(IDEM_REL_INBOX_MESSAGE, RowExclusiveLock);
	Oid			sequence = idem_rel(IDEM_REL_INBOX_SEQ);
	HeapTuple  *rows = palloc(n * sizeof(HeapTuple));
	int64	   *seqs = palloc(n * sizeof(int64));
	TimestampTz now = GetCurrentTimestamp();
	bool		any_delayed = false;

	for (int i = 0; i < n; i++)
	{
		seqs[i] = nextval_internal(sequence, false);
		rows[i] = form_row(rel, c, &list[i], seqs[i], now);
		any_delayed |= list[i].deliver_at > now;
	}
	idem_insert_rows(rel, rows, n);
	table_close(rel, NoLock);
	idem_backlog_added(c->id, IDEM_MARK_SEQ, seqs[0]);
	if (any_delayed)
	{
		CommandCounterIncrement();
		for (int i = 0; i < n; i++)
		{
			if (list[i].deliver_at > now)
				delay(c, seqs[i], list[i].deliver_at);
		}
	}
	pfree(rows);
	pfree(seqs);
}

static text *
label_arg(FunctionCallInfo fcinfo, int arg, const char *what)
{
	text	   *value = PG_ARGISNULL(arg) ? NULL : idem_name_arg(fcinfo, arg, what);

	if (value != NULL)
		idem_check_printable(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value), what, false);
	return value;
}

static char *
label(const text *value)
{
	return value == NULL ? NULL : text_to_cstring(value);
}

/*
 * inbox_store(consumer, msg_id, payload "any", key, headers, dedup_key, source,
 *		type, sent_at, content_type, topic) returns store_status
 */
Datum
idem_inbox_store(PG_FUNCTION_ARGS)
{
	char	   *name = text_to_cstring(idem_name_arg(fcinfo, 0, "consumer"));
	IdemToStore m = {0};
	text	   *dedup_key = NULL;
	TimestampTz sent_at = 0;
	IdemDeclared *c;
	IdemClaimStatus claim;
	IdemStat	stat = {0};
	IdemStatColumn column = IDEM_STAT_STORED;
	const char *status = "stored";

	PreventCommandIfReadOnly("inbox_store()");
	PreventCommandIfParallelMode("inbox_store()");
	PreventCommandDuringRecovery("inbox_store()");
	m.msg_id = idem_id_arg(fcinfo, 1, "msg_id");
	idem_require(fcinfo, 2, "payload");
	if (!PG_ARGISNULL(3))
	{
		m.key = PG_GETARG_TEXT_PP(3);
		idem_check_key(m.key);
	}
	m.headers = idem_payload_headers(PG_ARGISNULL(4) ? NULL : PG_GETARG_JSONB_P(4));
	if (!PG_ARGISNULL(5))
		dedup_key = idem_id_arg(fcinfo, 5, "dedup_key");
	m.source = label_arg(fcinfo, 6, "source");
	m.type = label_arg(fcinfo, 7, "type");
	if (!PG_ARGISNULL(8))
		sent_at = PG_GETARG_TIMESTAMPTZ(8);
	if (!PG_ARGISNULL(9))
	{
		m.content_type = PG_GETARG_TEXT_PP(9);
		idem_check_content_type(m.content_type);
	}
	m.topic = label_arg(fcinfo, 10, "topic");
	m.body = idem_payload_body(PG_GETARG_DATUM(2), get_fn_expr_argtype(fcinfo->flinfo, 2),
							   &m.content_type);
	m.enqueued_at = sent_at != 0 ? sent_at : GetCurrentTimestamp();
	m.claimed = true;

	c = idem_declared_required(name);
	idem_inbox_message_key(name, m.msg_id, &m.claim);
	claim = idem_inbox_claim_key(name, &m.claim, true, PG_ARGISNULL(8) ? NULL : &sent_at);
	if (claim == IDEM_CLAIM_CLAIMED && dedup_key != NULL)
	{
		pg_uuid_t	business;

		idem_inbox_business_key(name, dedup_key, &business);
		if (idem_inbox_claim_key(name, &business, true, NULL) == IDEM_CLAIM_DUPLICATE)
		{
			status = "business_duplicate";
			column = IDEM_STAT_BUSINESS_DUPLICATES;
		}
	}
	if (claim != IDEM_CLAIM_CLAIMED)
	{
		status = claim == IDEM_CLAIM_EXPIRED ? "expired" : "duplicate";
		column = claim == IDEM_CLAIM_EXPIRED ? IDEM_STAT_EXPIRED : IDEM_STAT_DUPLICATES;
	}
	else if (column == IDEM_STAT_STORED)
	{
		/* Waiting for others, we may have missed a change. */
		c = idem_declared_required(name);
		idem_store(c, &m, 1);
	}

	/* Claims have counted themselves for the consumer as a whole. */
	if (m.type != NULL || m.source != NULL)
		idem_stat_count_from(&stat, IDEM_STAT_CONSUMER, name, label(m.type), label(m.source),
							 column, 1);
	else if (column == IDEM_STAT_STORED || column == IDEM_STAT_BUSINESS_DUPLICATES)
		idem_stat_count(&stat, IDEM_STAT_CONSUMER, name, column, 1);
	PG_RETURN_DATUM(idem_enum_datum(get_func_rettype(fcinfo->flinfo->fn_oid), status));
}

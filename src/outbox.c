/*-------------------------------------------------------------------------
 *
 * outbox.c
 *		Enqueueing: a message exists exactly if its transaction commits.
 *
 * A message is a row of the log in the caller's transaction, written straight
 * into the table and its indexes.  It is kept in the form in which it is sent,
 * and checked here for everything that could keep it from being sent.
 *
 * The transaction id is taken before the number: reading rests on that, see
 * log.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/pg_type.h"
#include "commands/sequence.h"
#include "commands/trigger.h"
#include "executor/executor.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/jsonb.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/timestamp.h"
#include "utils/xid8.h"

#include "catalog.h"
#include "digest.h"
#include "guc.h"
#include "input.h"
#include "outbox.h"
#include "payload.h"
#include "retention.h"
#include "stat.h"
#include "statement.h"
#include "unique.h"
#include "wake.h"

/* What is to be enqueued; zero means absent. */
typedef struct Enqueue
{
	text	   *topic;
	text	   *key;
	text	   *content_type;
	text	   *headers;		/* as they are kept */
	bytea	   *body;
	TimestampTz deliver_at;
	bool		has_deliver_at;
	bool		has_id;
	pg_uuid_t	id;
	text	   *dedup_key;
	TimestampTz now;
} Enqueue;

PG_FUNCTION_INFO_V1(idem_outbox_enqueue);
PG_FUNCTION_INFO_V1(idem_outbox_enqueue_batch);
PG_FUNCTION_INFO_V1(idem_outbox_capture);
PG_FUNCTION_INFO_V1(idem_outbox_purge);

/*
 * A new UUIDv7: milliseconds, 12 bits of their fraction, and 62 random bits.
 * Within a session they rise.
 */
static void
new_id(TimestampTz now, pg_uuid_t *id)
{
	static uint8 pool[1024];
	static int	left = 0;
	static uint64 last = 0;
	int64		usec = now + (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY;
	uint64		stamp = (uint64) (usec / 1000) << 12 | (uint64) (usec % 1000) * 4096 / 1000;
	uint64		wire;

	if (left < 8)
	{
		if (!pg_strong_random(pool, sizeof(pool)))
			ereport(ERROR,
					(errcode(ERRCODE_INTERNAL_ERROR),
					 errmsg("could not generate random values")));
		left = sizeof(pool);
	}
	if (stamp <= last)
		stamp = last + 1;
	last = stamp;

	wire = pg_hton64((stamp >> 12) << 16 | 0x7000 | (stamp & 0xFFF));
	memcpy(id->data, &wire, 8);
	memcpy(id->data + 8, pool + sizeof(pool) - left, 8);
	id->data[8] = (id->data[8] & 0x3F) | 0x80;
	left -= 8;
}

/* Count for a topic; the last one is remembered. */
static void
count_topic(text *topic, IdemStatColumn column, uint64 n)
{
	static char name[IDEM_MAX_NAME + 1];
	static IdemStat stat;
	int			len = VARSIZE_ANY_EXHDR(topic);

	if (strlen(name) != (Size) len || memcmp(name, VARDATA_ANY(topic), len) != 0)
	{
		memset(&stat, 0, sizeof(stat));
		memcpy(name, VARDATA_ANY(topic), len);
		name[len] = '\0';
	}
	idem_stat_count(&stat, IDEM_STAT_TOPIC, name, column, n);
}

/*
 * Enter a key that may be used once; true if it is new.  Otherwise *id becomes
 * the id of the message that has it.
 */
static bool
register_once(char kind, const char *scope, int scopelen, const void *data,
			  int len, TimestampTz now, pg_uuid_t *id)
{
	char		head[1 + sizeof(uint32) + IDEM_MAX_NAME];
	uint32		wirelen = pg_hton32(scopelen);
	pg_uuid_t	key;
	IdemUnique	reg;
	ScanKeyData scankey;
	Datum		values[3];
	bool		nulls[3] = {0};
	bool		isnew;

	head[0] = kind;
	memcpy(head + 1, &wirelen, sizeof(uint32));
	memcpy(head + 1 + sizeof(uint32), scope, scopelen);
	idem_digest(head, 1 + sizeof(uint32) + scopelen, data, len, &key);

	values[0] = UUIDPGetDatum(&key);
	values[1] = UUIDPGetDatum(id);
	values[2] = Int32GetDatum((int32) (now / USECS_PER_SEC));
	ScanKeyInit(&scankey, 1, BTEqualStrategyNumber, F_UUID_EQ, UUIDPGetDatum(&key));
	idem_unique_open(&reg, IDEM_REL_OUTBOX_DEDUP, true, false);
	for (;;)
	{
		isnew = idem_unique_probe(&reg, &scankey, 1) == IDEM_FREE;
		if (!isnew)
		{
			bool		isnull;

			*id = *DatumGetUUIDP(slot_getattr(reg.existing, 2, &isnull));
			break;
		}
		if (idem_unique_insert(&reg, values, nulls))
			break;
	}
	idem_unique_close(&reg);
	return isnew;
}

/* Is this message new?  If not, its id is that of the first. */
static bool
is_new(Enqueue *e)
{
	bool		result = true;

	if (e->dedup_key != NULL)
		result = register_once('d', VARDATA_ANY(e->topic), VARSIZE_ANY_EXHDR(e->topic),
							   VARDATA_ANY(e->dedup_key), VARSIZE_ANY_EXHDR(e->dedup_key),
							   e->now, &e->id);
	if (result && e->has_id)
	{
		pg_uuid_t	id = e->id;

		result = register_once('m', "", 0, id.data, UUID_LEN, e->now, &e->id);
	}
	return result;
}

/* Form the row of a message under the next number. */
static HeapTuple
form_row(Relation rel, const Enqueue *e, FullTransactionId xid)
{
	Datum		values[Natts_outbox];
	bool		nulls[Natts_outbox];

	memset(nulls, false, sizeof(nulls));
	values[Anum_outbox_seq - 1] =
		Int64GetDatum(nextval_internal(idem_rel(IDEM_REL_OUTBOX_SEQ), false));
	values[Anum_outbox_xid - 1] = FullTransactionIdGetDatum(xid);
	values[Anum_outbox_enqueued_at - 1] = TimestampTzGetDatum(e->now);
	values[Anum_outbox_deliver_at - 1] = TimestampTzGetDatum(e->deliver_at);
	nulls[Anum_outbox_deliver_at - 1] = !e->has_deliver_at;
	values[Anum_outbox_msg_id - 1] = UUIDPGetDatum(&e->id);
	values[Anum_outbox_topic - 1] = PointerGetDatum(e->topic);
	values[Anum_outbox_key - 1] = PointerGetDatum(e->key);
	nulls[Anum_outbox_key - 1] = e->key == NULL;
	values[Anum_outbox_content_type - 1] = PointerGetDatum(e->content_type);
	nulls[Anum_outbox_content_type - 1] = e->content_type == NULL;
	values[Anum_outbox_headers - 1] = PointerGetDatum(e->headers);
	nulls[Anum_outbox_headers - 1] = e->headers == NULL;
	values[Anum_outbox_body - 1] = PointerGetDatum(e->body);
	return heap_form_tuple(RelationGetDescr(rel), values, nulls);
}

/* What every enqueue checks first. */
static void
check_may_enqueue(void)
{
	PreventCommandIfReadOnly("an enqueue");
	PreventCommandIfParallelMode("an enqueue");
	PreventCommandDuringRecovery("an enqueue");
}

/* Store messages, in their order. */
static void
store(Enqueue *list, int n)
{
	/* Before the first number is taken; see log.c. */
	FullTransactionId xid = GetTopFullTransactionId();
	Relation	rel = idem_rel_open(IDEM_REL_OUTBOX_0 + idem_wake_segment(),
									RowExclusiveLock);
	HeapTuple  *rows = palloc(n * sizeof(HeapTuple));

	for (int i = 0; i < n; i++)
		rows[i] = form_row(rel, &list[i], xid);
	idem_insert_rows(rel, rows, n);
	table_close(rel, NoLock);
	pfree(rows);
	idem_wake_enqueued();
}

/* Enqueue one message; the result is its id. */
static pg_uuid_t *
enqueue(Enqueue *e)
{
	pg_uuid_t  *result = palloc(sizeof(pg_uuid_t));

	if (!e->has_id)
		new_id(e->now, &e->id);
	if ((e->dedup_key == NULL && !e->has_id) || is_new(e))
	{
		store(e, 1);
		count_topic(e->topic, IDEM_STAT_ENQUEUED, 1);
	}
	else
		count_topic(e->topic, IDEM_STAT_DEDUPED, 1);
	*result = e->id;
	return result;
}

/*
 * outbox_enqueue(topic text, payload "any", key text, headers jsonb,
 *		msg_id uuid, dedup_key text, deliver_at timestamptz, content_type text)
 *		returns uuid
 */
Datum
idem_outbox_enqueue(PG_FUNCTION_ARGS)
{
	Enqueue		e = {0};

	check_may_enqueue();
	e.now = GetCurrentTimestamp();
	e.topic = idem_topic_arg(fcinfo, 0);
	idem_require(fcinfo, 1, "payload");
	if (!PG_ARGISNULL(2))
	{
		e.key = PG_GETARG_TEXT_PP(2);
		idem_check_key(e.key);
	}
	e.headers = idem_payload_headers(PG_ARGISNULL(3) ? NULL : PG_GETARG_JSONB_P(3));
	if (!PG_ARGISNULL(4))
	{
		e.has_id = true;
		e.id = *PG_GETARG_UUID_P(4);
	}
	if (!PG_ARGISNULL(5))
	{
		e.dedup_key = PG_GETARG_TEXT_PP(5);
		idem_check_id(e.dedup_key, "dedup_key");
	}
	e.has_deliver_at = !PG_ARGISNULL(6);
	if (e.has_deliver_at)
		e.deliver_at = PG_GETARG_TIMESTAMPTZ(6);
	if (!PG_ARGISNULL(7))
	{
		e.content_type = PG_GETARG_TEXT_PP(7);
		idem_check_content_type(e.content_type);
	}
	e.body = idem_payload_body(PG_GETARG_DATUM(1), get_fn_expr_argtype(fcinfo->flinfo, 1), &e.content_type);
	PG_RETURN_UUID_P(enqueue(&e));
}

/* An optional array argument that goes with the payloads, element by element. */
static Datum *
array_arg(FunctionCallInfo fcinfo, int arg, const char *what, int n, bool **nulls)
{
	ArrayType  *array;
	Datum	   *elements;
	int			count;
	int16		len;
	bool		byval;
	char		align;

	if (PG_ARGISNULL(arg))
		return NULL;
	array = PG_GETARG_ARRAYTYPE_P(arg);
	get_typlenbyvalalign(ARR_ELEMTYPE(array), &len, &byval, &align);
	deconstruct_array(array, ARR_ELEMTYPE(array), len, byval, align,
					  &elements, nulls, &count);
	if (n >= 0 && count != n)
		ereport(ERROR,
				(errcode(ERRCODE_ARRAY_SUBSCRIPT_ERROR),
				 errmsg("%s must have as many elements as payloads", what),
				 errdetail("There are %d, and %d payloads.", count, n)));
	return elements;
}

/*
 * outbox_enqueue_batch(topic text, payloads anyarray, keys text[],
 *		headers jsonb[], content_type text) returns uuid[]
 */
Datum
idem_outbox_enqueue_batch(PG_FUNCTION_ARGS)
{
	text	   *topic;
	text	   *content_type = NULL;
	Datum	   *payloads;
	Datum	   *keys;
	Datum	   *headers;
	bool	   *nulls;
	bool	   *key_nulls = NULL;
	bool	   *header_nulls = NULL;
	ArrayType  *array;
	Oid			type;
	text	   *no_headers;
	TimestampTz now = GetCurrentTimestamp();
	Enqueue    *list;
	Datum	   *ids;
	int			n;

	check_may_enqueue();
	topic = idem_topic_arg(fcinfo, 0);
	idem_require(fcinfo, 1, "payloads");
	array = PG_GETARG_ARRAYTYPE_P(1);
	type = ARR_ELEMTYPE(array);
	n = ArrayGetNItems(ARR_NDIM(array), ARR_DIMS(array));
	payloads = array_arg(fcinfo, 1, "payloads", n, &nulls);
	keys = array_arg(fcinfo, 2, "keys", n, &key_nulls);
	headers = array_arg(fcinfo, 3, "headers", n, &header_nulls);
	if (!PG_ARGISNULL(4))
	{
		content_type = PG_GETARG_TEXT_PP(4);
		idem_check_content_type(content_type);
	}
	if (n == 0)
		PG_RETURN_ARRAYTYPE_P(construct_empty_array(UUIDOID));

	list = palloc0(n * sizeof(Enqueue));
	ids = palloc(n * sizeof(Datum));
	no_headers = idem_payload_headers(NULL);
	for (int i = 0; i < n; i++)
	{
		Enqueue    *e = &list[i];

		if (nulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("payloads must not contain nulls")));
		e->topic = topic;
		e->now = now;
		e->content_type = content_type;
		if (keys != NULL && !key_nulls[i])
		{
			e->key = DatumGetTextPP(keys[i]);
			idem_check_key(e->key);
		}
		e->headers = headers == NULL || header_nulls[i] ? no_headers :
			idem_payload_headers(DatumGetJsonbP(headers[i]));
		e->body = idem_payload_body(payloads[i], type, &e->content_type);
		new_id(now, &e->id);
		ids[i] = UUIDPGetDatum(&e->id);
	}
	store(list, n);
	count_topic(topic, IDEM_STAT_ENQUEUED, n);
	PG_RETURN_ARRAYTYPE_P(construct_array(ids, n, UUIDOID, UUID_LEN, false, TYPALIGN_CHAR));
}

/* The value of the column that an argument of the trigger names. */
static Datum
captured(TriggerData *trigger, const char *column, Oid *type, bool *isnull)
{
	TupleDesc	desc = RelationGetDescr(trigger->tg_relation);
	int			attno = SPI_fnumber(desc, column);

	if (attno <= 0)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_COLUMN),
				 errmsg("column \"%s\" named by trigger \"%s\" does not exist", column,
						trigger->tg_trigger->tgname)));
	*type = SPI_gettypeid(desc, attno);
	return SPI_getbinval(trigger->tg_trigtuple, desc, attno, isnull);
}

/* The same as text, whatever the column's type. */
static text *
captured_text(TriggerData *trigger, const char *column)
{
	Oid			type;
	bool		isnull;
	Datum		value = captured(trigger, column, &type, &isnull);
	Oid			output;
	bool		varlena;

	if (isnull)
		return NULL;
	getTypeOutputInfo(type, &output, &varlena);
	return cstring_to_text(OidOutputFunctionCall(output, value));
}

static Datum
captured_as(TriggerData *trigger, const char *column, Oid wanted, bool *isnull)
{
	Oid			type;
	Datum		value = captured(trigger, column, &type, isnull);

	if (type != wanted)
		ereport(ERROR,
				(errcode(ERRCODE_DATATYPE_MISMATCH),
				 errmsg("column \"%s\" named by trigger \"%s\" must be of type %s", column,
						trigger->tg_trigger->tgname, format_type_be(wanted))));
	return value;
}

/*
 * outbox_capture() returns trigger
 *		Enqueue each row that is inserted into somebody's own outbox table.
 *
 * Arguments are pairs of a name and a value: see outbox.sql.
 */
Datum
idem_outbox_capture(PG_FUNCTION_ARGS)
{
	TriggerData *trigger = (TriggerData *) fcinfo->context;
	Enqueue		e = {0};
	Jsonb	   *headers = NULL;
	Datum		payload = (Datum) 0;
	Oid			type = InvalidOid;
	bool		isnull;

	if (!CALLED_AS_TRIGGER(fcinfo) || !TRIGGER_FIRED_AFTER(trigger->tg_event) ||
		!TRIGGER_FIRED_FOR_ROW(trigger->tg_event) || !TRIGGER_FIRED_BY_INSERT(trigger->tg_event))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("outbox_capture() must be called by a trigger AFTER INSERT FOR EACH ROW")));
	if (trigger->tg_trigger->tgnargs % 2 != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("trigger \"%s\" must name its arguments in pairs", trigger->tg_trigger->tgname)));

	check_may_enqueue();
	e.now = GetCurrentTimestamp();
	for (int i = 0; i < trigger->tg_trigger->tgnargs; i += 2)
	{
		const char *name = trigger->tg_trigger->tgargs[i];
		const char *value = trigger->tg_trigger->tgargs[i + 1];

		if (strcmp(name, "topic") == 0)
			e.topic = cstring_to_text(value);
		else if (strcmp(name, "topic_column") == 0)
			e.topic = captured_text(trigger, value);
		else if (strcmp(name, "key_column") == 0)
			e.key = captured_text(trigger, value);
		else if (strcmp(name, "id_column") == 0)
		{
			Datum		id = captured_as(trigger, value, UUIDOID, &isnull);

			e.has_id = !isnull;
			if (!isnull)
				e.id = *DatumGetUUIDP(id);
		}
		else if (strcmp(name, "headers_column") == 0)
		{
			Datum		h = captured_as(trigger, value, JSONBOID, &isnull);

			headers = isnull ? NULL : DatumGetJsonbP(h);
		}
		else if (strcmp(name, "deliver_at_column") == 0)
		{
			Datum		at = captured_as(trigger, value, TIMESTAMPTZOID, &isnull);

			e.has_deliver_at = !isnull;
			e.deliver_at = isnull ? 0 : DatumGetTimestampTz(at);
		}
		else if (strcmp(name, "content_type") == 0)
			e.content_type = cstring_to_text(value);
		else if (strcmp(name, "content_type_column") == 0)
			e.content_type = captured_text(trigger, value);
		else if (strcmp(name, "payload_column") == 0)
		{
			payload = captured(trigger, value, &type, &isnull);
			if (isnull)
				ereport(ERROR,
						(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
						 errmsg("payload must not be null")));
		}
		else
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("trigger \"%s\" has an argument \"%s\" that outbox_capture() does not know",
							trigger->tg_trigger->tgname, name),
					 errhint("It knows topic, topic_column, key_column, payload_column, headers_column, id_column, content_type, content_type_column and deliver_at_column.")));
	}

	if (e.topic == NULL || VARSIZE_ANY_EXHDR(e.topic) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
				 errmsg("trigger \"%s\" finds no topic", trigger->tg_trigger->tgname),
				 errhint("Give outbox_capture() a topic or a topic_column.")));
	if (VARSIZE_ANY_EXHDR(e.topic) > IDEM_MAX_NAME)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("topic is too long")));
	idem_check_printable(VARDATA_ANY(e.topic), VARSIZE_ANY_EXHDR(e.topic), "topic", false);
	if (e.key != NULL)
		idem_check_key(e.key);
	if (e.content_type != NULL)
		idem_check_content_type(e.content_type);
	e.headers = idem_payload_headers(headers);
	if (type == InvalidOid)
	{
		payload = DirectFunctionCall1(row_to_json,
									  heap_copy_tuple_as_datum(trigger->tg_trigtuple,
															   RelationGetDescr(trigger->tg_relation)));
		type = JSONOID;
	}
	e.body = idem_payload_body(payload, type, &e.content_type);
	(void) enqueue(&e);
	return PointerGetDatum(NULL);
}

/*
 * idem_outbox_forget
 *		Remove some of the keys that are older than the outbox's retention.
 */
int64
idem_outbox_forget(int32 max_rows)
{
	static IdemStatement del = {
		.sql = "DELETE FROM idem.outbox_dedup WHERE ctid = ANY (ARRAY("
		"SELECT ctid FROM idem.outbox_dedup WHERE enqueued_at < $2"
		" ORDER BY enqueued_at LIMIT $1 FOR UPDATE SKIP LOCKED))",
		.nargs = 2,
		.types = {INT4OID, INT4OID}
	};
	Datum		values[2];
	int64		removed;

	values[0] = Int32GetDatum(max_rows);
	values[1] = Int32GetDatum((int32) (GetCurrentTimestamp() / USECS_PER_SEC - idem_outbox_retention));
	SPI_connect();
	removed = idem_statement_run(&del, values, NULL);
	SPI_finish();
	return removed;
}

/*
 * outbox_purge(max_rows) returns bigint
 *		The same by hand, in the caller's transaction.
 */
Datum
idem_outbox_purge(PG_FUNCTION_ARGS)
{
	PG_RETURN_INT64(idem_outbox_forget(idem_max_rows_arg(fcinfo)));
}

/*-------------------------------------------------------------------------
 *
 * inbox.c
 *		The idempotent consumer: claims.
 *
 * A claim is a row under a 16-byte key in the caller's transaction, no more.
 * Whoever inserts it has the message; the claim and the work it stands for
 * commit or roll back together.  Only a hash of consumer and id is kept, so
 * that rows stay small whatever the ids look like.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/execdesc.h"
#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "tcop/dest.h"
#include "tcop/pquery.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/portal.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "backlog.h"
#include "catalog.h"
#include "consumer.h"
#include "digest.h"
#include "guc.h"
#include "inbox.h"
#include "input.h"
#include "unique.h"

#define CANONICAL_UUID_LEN 36

static const char *const claim_labels[IDEM_NUM_CLAIM_STATUS] = {
	[IDEM_CLAIM_CLAIMED] = "claimed",
	[IDEM_CLAIM_DUPLICATE] = "duplicate",
	[IDEM_CLAIM_IN_FLIGHT] = "in_flight",
	[IDEM_CLAIM_EXPIRED] = "expired",
};

PG_FUNCTION_INFO_V1(idem_inbox_try_claim);
PG_FUNCTION_INFO_V1(idem_inbox_try_claim_uuid);
PG_FUNCTION_INFO_V1(idem_inbox_claim);
PG_FUNCTION_INFO_V1(idem_inbox_claim_batch);
PG_FUNCTION_INFO_V1(idem_inbox_key);

/*
 * Read a uuid in its canonical text form, the one PostgreSQL prints.  Other
 * spellings are ordinary text: an id means what its bytes are.
 */
static bool
parse_canonical_uuid(const char *s, int len, pg_uuid_t *uuid)
{
	if (len != CANONICAL_UUID_LEN)
		return false;

	for (int i = 0, nibble = 0; i < len; i++)
	{
		int			digit;

		if (i == 8 || i == 13 || i == 18 || i == 23)
		{
			if (s[i] != '-')
				return false;
			continue;
		}
		if (s[i] >= '0' && s[i] <= '9')
			digit = s[i] - '0';
		else if (s[i] >= 'a' && s[i] <= 'f')
			digit = s[i] - 'a' + 10;
		else
			return false;

		if (nibble % 2 == 0)
			uuid->data[nibble / 2] = digit << 4;
		else
			uuid->data[nibble / 2] |= digit;
		nibble++;
	}
	return true;
}

/* In a database without an encoding, text is just bytes. */
static bool
must_convert(void)
{
	return GetDatabaseEncoding() != PG_UTF8 &&
		GetDatabaseEncoding() != PG_SQL_ASCII;
}

/*
 * The key of a claim: SHA-256 of length of consumer, consumer, kind of id and
 * id, cut to 16 bytes.  Text counts in UTF-8, so that a dump can be restored
 * into a database of another encoding.  Nobody can make two ids meet, and a
 * uuid cannot be made to look like somebody else's hash.
 */
static void
hash_claim(const char *consumer, char kind, const void *id, int idlen,
		   pg_uuid_t *key)
{
	char		head[sizeof(uint32) + MAX_CONVERSION_GROWTH * IDEM_MAX_NAME + 1];
	uint32		len;
	uint32		wirelen;

	if (must_convert())
		consumer = pg_server_to_any(consumer, strlen(consumer), PG_UTF8);
	len = strlen(consumer);
	wirelen = pg_hton32(len);
	memcpy(head, &wirelen, sizeof(uint32));
	memcpy(head + sizeof(uint32), consumer, len);
	head[sizeof(uint32) + len] = kind;

	idem_digest(head, sizeof(uint32) + len + 1, id, idlen, key);
}

static void
uuid_key(const char *consumer, const pg_uuid_t *id, pg_uuid_t *key)
{
	hash_claim(consumer, 'u', id->data, UUID_LEN, key);
}

static void
text_key(const char *consumer, const text *id, pg_uuid_t *key)
{
	const char *data = VARDATA_ANY(id);
	int			len = VARSIZE_ANY_EXHDR(id);
	pg_uuid_t	uuid;

	if (parse_canonical_uuid(data, len, &uuid))
	{
		uuid_key(consumer, &uuid, key);
		return;
	}
	if (must_convert())
	{
		data = pg_server_to_any(data, len, PG_UTF8);
		if (data != VARDATA_ANY(id))
			len = strlen(data);
	}
	hash_claim(consumer, 't', data, len, key);
}

/* Does this plan call more functions than one that are not PostgreSQL's own? */
static bool
calls_other_functions(PlannedStmt *plan)
{
	int			n = 0;
	ListCell   *lc;

	foreach(lc, plan->invalItems)
	{
		if (((PlanInvalItem *) lfirst(lc))->cacheId == PROCOID)
			n++;
	}
	return n > 1;
}

/*
 * Is this claim all that its transaction does?  That is: no transaction block
 * is open, and a client has sent a plain SELECT that calls us itself, rather
 * than a function that calls us (which shows in whose executor state we run,
 * and in who gets the result), and no other function that might do the work.
 * In doubt the answer is no.
 */
static bool
claim_is_alone(void)
{
	QueryDesc  *query;

	if (IsTransactionBlock() || ActivePortal == NULL)
		return false;
	query = ActivePortal->queryDesc;
	if (query == NULL || query->estate == NULL || query->dest == NULL)
		return false;
	return query->operation == CMD_SELECT &&
		(query->dest->mydest == DestRemote ||
		 query->dest->mydest == DestRemoteExecute ||
		 query->dest->mydest == DestRemoteSimple ||
		 query->dest->mydest == DestDebug) &&
		!query->plannedstmt->hasModifyingCTE &&
		!calls_other_functions(query->plannedstmt) &&
		MemoryContextGetParent(CurrentMemoryContext) == query->estate->es_query_cxt;
}

/* What every claim checks first, in the caller's memory context. */
static void
check_may_claim(void)
{
	static bool warned = false;

	PreventCommandIfReadOnly("a claim");
	PreventCommandIfParallelMode("a claim");
	PreventCommandDuringRecovery("a claim");

	if (idem_claim_outside_transaction == IDEM_LONE_ALLOW || !claim_is_alone())
		return;
	if (idem_claim_outside_transaction == IDEM_LONE_WARN && warned)
		return;

	warned = true;
	ereport(idem_claim_outside_transaction == IDEM_LONE_ERROR ? ERROR : WARNING,
			(errcode(ERRCODE_NO_ACTIVE_SQL_TRANSACTION),
			 errmsg("claim outside a transaction commits without its work"),
			 errdetail("If the work fails later, the message is lost."),
			 errhint("Claim and work in one transaction or one statement, or set idem.claim_outside_transaction to \"allow\".")));
}

/* The time of a claim is kept in seconds since 2000. */
static int32
claim_time(void)
{
	return (int32) (GetCurrentTimestamp() / USECS_PER_SEC);
}

static void
open_register(IdemUnique *reg, bool wait)
{
	idem_unique_open(reg, IDEM_REL_INBOX_CLAIM, wait, false);
}

/*
 * Claim one key.  A message that was sent before the consumer's horizon is
 * not claimed, unless sent_at is NULL; if we still know it, that is the
 * better answer.
 */
static IdemClaimStatus
claim(IdemUnique *reg, IdemConsumer *consumer, pg_uuid_t *key,
	  const TimestampTz *sent_at)
{
	Datum		values[Natts_inbox_claim];
	bool		isnull[Natts_inbox_claim] = {0};
	ScanKeyData scankey;
	uint64		waits = reg->waits;
	IdemClaimStatus status;
	IdemStatColumn column;

	ScanKeyInit(&scankey, Anum_inbox_claim_key, BTEqualStrategyNumber,
				F_UUID_EQ, UUIDPGetDatum(key));

	/* Whoever processes a message has it. */
	if (idem_backlog_is_handled(key))
		return IDEM_CLAIM_CLAIMED;

	for (;;)
	{
		IdemUniqueResult result = idem_unique_probe(reg, &scankey, 1);

		if (result == IDEM_EXISTS)
			status = IDEM_CLAIM_DUPLICATE;
		else if (result == IDEM_IN_FLIGHT)
			status = IDEM_CLAIM_IN_FLIGHT;
		else if (sent_at != NULL && *sent_at < idem_consumer_horizon(consumer))
			status = IDEM_CLAIM_EXPIRED;
		else
		{
			values[Anum_inbox_claim_key - 1] = UUIDPGetDatum(key);
			values[Anum_inbox_claim_consumer - 1] =
				Int32GetDatum(idem_consumer_id(consumer));
			values[Anum_inbox_claim_at - 1] = Int32GetDatum(claim_time());
			if (!idem_unique_insert(reg, values, isnull))
				continue;
			status = IDEM_CLAIM_CLAIMED;
		}
		break;
	}

	column = status == IDEM_CLAIM_CLAIMED ? IDEM_STAT_CLAIMS :
		status == IDEM_CLAIM_DUPLICATE ? IDEM_STAT_DUPLICATES :
		status == IDEM_CLAIM_IN_FLIGHT ? IDEM_STAT_IN_FLIGHT : IDEM_STAT_EXPIRED;
	idem_stat_count(&consumer->stat, IDEM_STAT_CONSUMER, consumer->name,
					column, 1);
	idem_stat_count(&consumer->stat, IDEM_STAT_CONSUMER, consumer->name,
					IDEM_STAT_WAITS, reg->waits - waits);
	return status;
}

static bool
try_claim(IdemConsumer *consumer, pg_uuid_t *key)
{
	IdemUnique	reg;
	IdemClaimStatus status;

	open_register(&reg, true);
	status = claim(&reg, consumer, key, NULL);
	idem_unique_close(&reg);
	return status == IDEM_CLAIM_CLAIMED;
}

/* The key of a message of a consumer; both as callers gave them. */
void
idem_inbox_message_key(const char *consumer, const text *id, pg_uuid_t *key)
{
	text_key(consumer, id, key);
}

/* The key of a business key, which is no message id. */
void
idem_inbox_business_key(const char *consumer, const text *id, pg_uuid_t *key)
{
	const char *data = VARDATA_ANY(id);
	int			len = VARSIZE_ANY_EXHDR(id);

	if (must_convert())
	{
		data = pg_server_to_any(data, len, PG_UTF8);
		if (data != VARDATA_ANY(id))
			len = strlen(data);
	}
	hash_claim(consumer, 'b', data, len, key);
}

/*
 * idem_inbox_claim_key
 *		Claim by key, for those who store and process messages.
 */
IdemClaimStatus
idem_inbox_claim_key(const char *consumer, pg_uuid_t *key, bool wait,
					 const TimestampTz *sent_at)
{
	IdemUnique	reg;
	IdemClaimStatus status;

	open_register(&reg, wait);
	status = claim(&reg, idem_consumer(cstring_to_text(consumer)), key, sent_at);
	idem_unique_close(&reg);
	return status;
}

/* Is this claimed already?  Waits for those who are at it. */
bool
idem_inbox_is_known(pg_uuid_t *key)
{
	IdemUnique	reg;
	ScanKeyData scankey;
	bool		known;

	ScanKeyInit(&scankey, Anum_inbox_claim_key, BTEqualStrategyNumber,
				F_UUID_EQ, UUIDPGetDatum(key));
	open_register(&reg, true);
	known = idem_unique_probe(&reg, &scankey, 1) != IDEM_FREE;
	idem_unique_close(&reg);
	return known;
}

/* inbox_try_claim(consumer text, msg_id text) returns boolean */
Datum
idem_inbox_try_claim(PG_FUNCTION_ARGS)
{
	text	   *name = idem_name_arg(fcinfo, 0, "consumer");
	text	   *id = idem_id_arg(fcinfo, 1, "msg_id");
	IdemConsumer *consumer;
	pg_uuid_t	key;

	check_may_claim();
	consumer = idem_consumer(name);
	text_key(consumer->name, id, &key);
	PG_RETURN_BOOL(try_claim(consumer, &key));
}

/* inbox_try_claim(consumer text, msg_id uuid) returns boolean */
Datum
idem_inbox_try_claim_uuid(PG_FUNCTION_ARGS)
{
	text	   *name = idem_name_arg(fcinfo, 0, "consumer");
	IdemConsumer *consumer;
	pg_uuid_t	key;

	idem_require(fcinfo, 1, "msg_id");
	check_may_claim();
	consumer = idem_consumer(name);
	uuid_key(consumer->name, PG_GETARG_UUID_P(1), &key);
	PG_RETURN_BOOL(try_claim(consumer, &key));
}

/*
 * inbox_claim(consumer text, msg_id text, wait boolean, sent_at timestamptz,
 *			   OUT status, OUT first_seen)
 */
Datum
idem_inbox_claim(PG_FUNCTION_ARGS)
{
	text	   *name = idem_name_arg(fcinfo, 0, "consumer");
	text	   *id = idem_id_arg(fcinfo, 1, "msg_id");
	TimestampTz sent_at;
	IdemConsumer *consumer;
	pg_uuid_t	key;
	IdemUnique	reg;
	IdemClaimStatus status;
	TupleDesc	tupdesc;
	Datum		values[2];
	bool		isnull[2] = {false, true};

	idem_require(fcinfo, 2, "wait");
	check_may_claim();
	if (get_call_result_type(fcinfo, NULL, &tupdesc) != TYPEFUNC_COMPOSITE)
		elog(ERROR, "return type must be a row type");

	/* A transaction that has its locks already would not hear of a new retention. */
	if (!PG_ARGISNULL(3))
		AcceptInvalidationMessages();
	consumer = idem_consumer(name);
	text_key(consumer->name, id, &key);
	open_register(&reg, PG_GETARG_BOOL(2));
	sent_at = PG_ARGISNULL(3) ? 0 : PG_GETARG_TIMESTAMPTZ(3);
	status = claim(&reg, consumer, &key, PG_ARGISNULL(3) ? NULL : &sent_at);

	values[0] = idem_enum_datum(TupleDescAttr(tupdesc, 0)->atttypid,
								claim_labels[status]);
	if (status == IDEM_CLAIM_DUPLICATE)
	{
		Datum		at = slot_getattr(reg.existing, Anum_inbox_claim_at,
									  &isnull[1]);

		values[1] = TimestampTzGetDatum(DatumGetInt32(at) * USECS_PER_SEC);
	}
	idem_unique_close(&reg);

	PG_RETURN_DATUM(HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(tupdesc),
													  values, isnull)));
}

/* An element of a batch: where it stands in the input, and its key. */
typedef struct BatchItem
{
	int			pos;
	pg_uuid_t	key;
} BatchItem;

static int
compare_items(const void *a, const void *b)
{
	const BatchItem *x = a;
	const BatchItem *y = b;
	int			order = memcmp(x->key.data, y->key.data, UUID_LEN);

	return order != 0 ? order : x->pos - y->pos;
}

/*
 * inbox_claim_batch(consumer text, msg_ids text[])
 *		returns setof (msg_id text, status)
 *
 * Keys are taken in sorted order, so that two batches cannot wait for each
 * other.  The second copy of an id finds the first as a row of our own.
 */
Datum
idem_inbox_claim_batch(PG_FUNCTION_ARGS)
{
	text	   *name = idem_name_arg(fcinfo, 0, "consumer");
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemConsumer *consumer;
	IdemUnique	reg;
	Datum	   *ids;
	bool	   *idnulls;
	int			nids;
	BatchItem  *items;
	IdemClaimStatus *result;
	Datum		labels[IDEM_NUM_CLAIM_STATUS];

	idem_require(fcinfo, 1, "msg_ids");
	check_may_claim();
	InitMaterializedSRF(fcinfo, 0);
	deconstruct_array(PG_GETARG_ARRAYTYPE_P(1), TEXTOID, -1, false, TYPALIGN_INT,
					  &ids, &idnulls, &nids);
	if (nids == 0)
		return (Datum) 0;

	items = palloc(nids * sizeof(BatchItem));
	result = palloc(nids * sizeof(IdemClaimStatus));
	consumer = idem_consumer(name);
	for (int i = 0; i < nids; i++)
	{
		if (idnulls[i])
			ereport(ERROR,
					(errcode(ERRCODE_NULL_VALUE_NOT_ALLOWED),
					 errmsg("msg_ids must not contain nulls")));
		idem_check_id(DatumGetTextPP(ids[i]), "msg_id");
		items[i].pos = i;
		text_key(consumer->name, DatumGetTextPP(ids[i]), &items[i].key);
	}
	qsort(items, nids, sizeof(BatchItem), compare_items);

	open_register(&reg, true);
	for (int i = 0; i < nids; i++)
	{
		CHECK_FOR_INTERRUPTS();
		result[items[i].pos] = claim(&reg, consumer, &items[i].key, NULL);
	}
	idem_unique_close(&reg);

	for (int i = 0; i < IDEM_NUM_CLAIM_STATUS; i++)
		labels[i] = idem_enum_datum(TupleDescAttr(rsinfo->setDesc, 1)->atttypid,
									claim_labels[i]);
	for (int i = 0; i < nids; i++)
	{
		Datum		values[2] = {ids[i], labels[result[i]]};
		bool		isnull[2] = {0};

		tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, isnull);
	}
	return (Datum) 0;
}

/*
 * inbox_key(consumer text, msg_id text) returns uuid
 *		The key under which a claim is kept, for looking it up.
 */
Datum
idem_inbox_key(PG_FUNCTION_ARGS)
{
	text	   *name = idem_name_arg(fcinfo, 0, "consumer");
	text	   *id = idem_id_arg(fcinfo, 1, "msg_id");
	pg_uuid_t  *key = palloc(sizeof(pg_uuid_t));

	text_key(text_to_cstring(name), id, key);
	PG_RETURN_UUID_P(key);
}

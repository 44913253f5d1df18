/*-------------------------------------------------------------------------
 *
 * work.c
 *		Messages that applications fetch and process.
 *
 * Without a lease a message is taken in the caller's transaction: what is done
 * about it and that it is done commit together, and if the session ends in
 * whatever way, the message is there again.  With a lease it is written down
 * as taken, and a later transaction that presents the token says what came of
 * it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "storage/proc.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/uuid.h"

#include "backlog.h"
#include "compat.h"
#include "inbox.h"
#include "input.h"
#include "stat.h"
#include "statement.h"
#include "take.h"
#include "work.h"

PG_FUNCTION_INFO_V1(idem_inbox_next);
PG_FUNCTION_INFO_V1(idem_inbox_done);
PG_FUNCTION_INFO_V1(idem_inbox_retry);
PG_FUNCTION_INFO_V1(idem_inbox_reject);
PG_FUNCTION_INFO_V1(idem_inbox_renew);
PG_FUNCTION_INFO_V1(idem_inbox_notice);

/* Messages that this transaction has taken without a lease. */
static List *mine = NIL;
static LocalTransactionId mine_of = InvalidLocalTransactionId;

typedef struct Mine
{
	int32		consumer;
	IdemTaken  *taken;
} Mine;

static void
count(const char *consumer, IdemStatColumn column)
{
	IdemStat	stat = {0};

	idem_stat_count(&stat, IDEM_STAT_CONSUMER, consumer, column, 1);
}

static void
check_may_work(const char *what)
{
	PreventCommandIfReadOnly(what);
	PreventCommandIfParallelMode(what);
	PreventCommandDuringRecovery(what);
}

/*
 * A message from the outbox is claimed by processing it.  If somebody else has
 * claimed its id meanwhile, there is nothing to do: false.
 *
 * The claim is made at the end, since a transaction may commit without having
 * said what came of the message.
 */
static bool
is_to_be_done(const IdemDeclared *c, IdemTaken *t)
{
	if (t->claimed || t->replayed || !idem_inbox_is_known(&t->claim))
		return true;
	idem_taken_done(c, t);
	return false;
}

static void
claim_now(const IdemDeclared *c, IdemTaken *t)
{
	if (t->claimed || t->replayed)
		return;
	if (idem_inbox_claim_key(c->name, &t->claim, true, NULL) != IDEM_CLAIM_CLAIMED)
		ereport(ERROR,
				(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
				 errmsg("message \"%s\" of consumer \"%s\" was claimed by somebody else meanwhile",
						idem_taken_text(t, Anum_message_msg_id), c->name)));
	t->claimed = true;
}

static void
lease_out(const IdemDeclared *c, IdemTaken *t, const Interval *lease, pg_uuid_t *token)
{
	IdemWait	wait = {.state = "leased"};

	if (!pg_strong_random(token->data, UUID_LEN))
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not generate random values")));
	token->data[6] = (token->data[6] & 0x0F) | 0x40;
	token->data[8] = (token->data[8] & 0x3F) | 0x80;
	wait.attempts = t->attempts;
	wait.due = idem_time_plus(GetCurrentTimestamp(), lease);
	wait.token = token;
	wait.not_yet_since = t->not_yet_since;
	idem_taken_park(c, t, &wait);
}

/* inbox_next(consumer, max, lease) returns setof message */
Datum
idem_inbox_next(PG_FUNCTION_ARGS)
{
	char	   *name = text_to_cstring(idem_name_arg(fcinfo, 0, "consumer"));
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	IdemDeclared *c;
	TimestampTz next_due;
	List	   *taken;
	ListCell   *lc;
	MemoryContext old;

	idem_require(fcinfo, 1, "max");
	if (PG_GETARG_INT32(1) < 1)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("max must be greater than zero")));
	if (!PG_ARGISNULL(2))
		idem_check_span(PG_GETARG_INTERVAL_P(2), "lease");
	check_may_work("inbox_next()");
	c = idem_declared_required(name);
	InitMaterializedSRF(fcinfo, 0);

	/* What is taken is remembered until the transaction ends. */
	if (mine_of != idem_my_lxid())
		mine = NIL;
	mine_of = idem_my_lxid();
	old = MemoryContextSwitchTo(TopTransactionContext);
	taken = idem_take(c, PG_GETARG_INT32(1), &next_due);
	MemoryContextSwitchTo(old);

	foreach(lc, taken)
	{
		IdemTaken  *t = lfirst(lc);
		pg_uuid_t	token;
		bool		lease = !PG_ARGISNULL(2);
		Datum		message;
		HeapTupleHeader row;
		HeapTupleData tuple;

		if (!is_to_be_done(c, t))
			continue;
		message = idem_taken_message(c, t, NULL);
		if (lease)
		{
			claim_now(c, t);
			lease_out(c, t, PG_GETARG_INTERVAL_P(2), &token);
			message = idem_taken_message(c, t, &token);
		}
		else
		{
			Mine	   *m;

			old = MemoryContextSwitchTo(TopTransactionContext);
			m = palloc(sizeof(Mine));
			m->consumer = c->id;
			m->taken = t;
			mine = lappend(mine, m);
			MemoryContextSwitchTo(old);
			idem_backlog_taken(c->id, t->seq, &t->claim);
		}
		row = DatumGetHeapTupleHeader(message);
		tuple.t_len = HeapTupleHeaderGetDatumLength(row);
		ItemPointerSetInvalid(&tuple.t_self);
		tuple.t_tableOid = InvalidOid;
		tuple.t_data = row;
		tuplestore_puttuple(rsinfo->setResult, &tuple);
	}
	return (Datum) 0;
}

/*
 * The message that a call is about: one that is leased under the token, or
 * else one that this transaction has taken.
 */
static IdemTaken *
taken_arg(FunctionCallInfo fcinfo, IdemDeclared **c)
{
	char	   *name = text_to_cstring(idem_name_arg(fcinfo, 0, "consumer"));
	text	   *id = idem_id_arg(fcinfo, 1, "msg_id");
	pg_uuid_t	claim;
	IdemTaken  *t = NULL;
	ListCell   *lc;

	*c = idem_declared_required(name);
	if (!PG_ARGISNULL(2))
	{
		t = idem_take_leased(*c, text_to_cstring(id), PG_GETARG_UUID_P(2));
		if (t == NULL)
			ereport(ERROR,
					(errcode(MAKE_SQLSTATE('I', 'D', '0', '0', '2')),
					 errmsg("lease of message \"%s\" of consumer \"%s\" was lost",
							text_to_cstring(id), name),
					 errdetail("It ran out and somebody else has taken the message, or the message is done."),
					 errhint("Roll back what was done about it; it is processed elsewhere.")));
		return t;
	}

	idem_inbox_message_key(name, id, &claim);
	if (mine_of == idem_my_lxid())
	{
		foreach(lc, mine)
		{
			Mine	   *m = lfirst(lc);

			if (m->consumer == (*c)->id && memcmp(&m->taken->claim, &claim, UUID_LEN) == 0 &&
				idem_backlog_settled(m->consumer, m->taken->seq))
			{
				t = m->taken;
				break;
			}
		}
	}
	if (t == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("message \"%s\" of consumer \"%s\" is not taken by this transaction",
						text_to_cstring(id), name),
				 errhint("Take it with idem.inbox_next() in the same transaction, or present the token of a lease.")));
	return t;
}

/* Keep what processing a message came to. */
void
idem_work_outcome(const IdemDeclared *c, const IdemTaken *t, Datum result)
{
	static IdemStatement st = {
		.sql = "INSERT INTO idem.inbox_outcome (claim, consumer, msg_id, result) VALUES ($1, $2, $3, $4)"
		" ON CONFLICT (claim) DO UPDATE SET result = excluded.result, at = excluded.at",
		.nargs = 4,
		.types = {UUIDOID, INT4OID, TEXTOID, JSONBOID}
	};
	Datum		values[4] = {UUIDPGetDatum(&t->claim), Int32GetDatum(c->id),
	t->values[Anum_message_msg_id - 1], result};

	SPI_connect();
	idem_statement_run(&st, values, NULL);
	SPI_finish();
}

/* inbox_done(consumer, msg_id, token, result) */
Datum
idem_inbox_done(PG_FUNCTION_ARGS)
{
	IdemDeclared *c;
	IdemTaken  *t;

	check_may_work("inbox_done()");
	t = taken_arg(fcinfo, &c);
	claim_now(c, t);
	if (!PG_ARGISNULL(3))
		idem_work_outcome(c, t, PG_GETARG_DATUM(3));
	idem_taken_done(c, t);
	count(c->name, IDEM_STAT_PROCESSED);
	PG_RETURN_VOID();
}

/* inbox_retry(consumer, msg_id, token, error, delay) */
Datum
idem_inbox_retry(PG_FUNCTION_ARGS)
{
	IdemDeclared *c;
	IdemTaken  *t;
	int64		delay = -1;

	check_may_work("inbox_retry()");
	if (!PG_ARGISNULL(4))
	{
		delay = idem_span_usecs(PG_GETARG_INTERVAL_P(4));
		if (delay != 0)
			idem_check_span(PG_GETARG_INTERVAL_P(4), "delay");
	}
	t = taken_arg(fcinfo, &c);
	idem_taken_failed(c, t, NULL,
					  PG_ARGISNULL(3) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(3)), delay);
	count(c->name, t->buried ? IDEM_STAT_DEAD : IDEM_STAT_RETRIED);
	PG_RETURN_VOID();
}

/* inbox_reject(consumer, msg_id, token, error) */
Datum
idem_inbox_reject(PG_FUNCTION_ARGS)
{
	IdemDeclared *c;
	IdemTaken  *t;

	check_may_work("inbox_reject()");
	t = taken_arg(fcinfo, &c);
	claim_now(c, t);
	t->attempts++;
	idem_taken_bury(c, t, NULL, PG_ARGISNULL(3) ? NULL : text_to_cstring(PG_GETARG_TEXT_PP(3)));
	count(c->name, IDEM_STAT_DEAD);
	PG_RETURN_VOID();
}

/* inbox_renew(consumer, msg_id, token, lease) */
Datum
idem_inbox_renew(PG_FUNCTION_ARGS)
{
	IdemDeclared *c;
	IdemTaken  *t;
	IdemWait	wait = {.state = "leased"};

	check_may_work("inbox_renew()");
	idem_require(fcinfo, 2, "token");
	idem_require(fcinfo, 3, "lease");
	idem_check_span(PG_GETARG_INTERVAL_P(3), "lease");
	t = taken_arg(fcinfo, &c);
	wait.attempts = t->attempts;
	wait.due = idem_time_plus(GetCurrentTimestamp(), PG_GETARG_INTERVAL_P(3));
	wait.token = PG_GETARG_UUID_P(2);
	wait.not_yet_since = t->not_yet_since;
	idem_taken_park(c, t, &wait);
	PG_RETURN_VOID();
}

/*
 * inbox_notice(consumer integer) returns void
 *		Something of a consumer may be due when this transaction commits.
 */
Datum
idem_inbox_notice(PG_FUNCTION_ARGS)
{
	idem_backlog_added(PG_GETARG_INT32(0), IDEM_MARK_DUE, PG_INT64_MIN);
	PG_RETURN_VOID();
}

/*
 * idem_work_record_lost
 *		Count attempts that ended with their transaction.
 *
 * Caller provides a transaction.  False if there is nothing left to do.
 */
bool
idem_work_record_lost(void)
{
	IdemLostAttempt lost;
	IdemDeclared *c;
	IdemTaken  *t;

	if (!idem_backlog_next_lost(&lost))
		return false;
	c = idem_declared_by_id(lost.consumer);
	t = c == NULL ? NULL : idem_take_seq(c, lost.seq);

	/* Somebody who has it again counts for himself. */
	if (t != NULL)
	{
		idem_taken_failed(c, t, NULL, "the transaction that processed it did not end well", -1);
		count(c->name, t->buried ? IDEM_STAT_DEAD : IDEM_STAT_RETRIED);
	}
	return true;
}

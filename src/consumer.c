/*-------------------------------------------------------------------------
 *
 * consumer.c
 *		Consumers: their numbers, their retention, their figures.
 *
 * Nobody has to declare a consumer.  Its claims bear a number instead of its
 * name, to keep them small; the first claim of a new name makes a number in
 * its own transaction.  That must not make two such claims wait for each
 * other, so several numbers may stand for one name: the number serves
 * retention and figures only, never the decision who claimed what.
 *
 * idem.consumer holds what was declared; see declared.c.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "commands/sequence.h"
#include "commands/trigger.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/inval.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "catalog.h"
#include "consumer.h"
#include "guc.h"
#include "launcher.h"
#include "unique.h"

static HTAB *consumers = NULL;
static uint64 consumers_generation = 0;
static IdemConsumer *latest = NULL;

/* Numbers that vanish if our transaction rolls back. */
static slist_head uncommitted = SLIST_STATIC_INIT(uncommitted);

PG_FUNCTION_INFO_V1(idem_consumer_changed);

/* Keep the numbers we made, or forget them.  Must not fail. */
static void
settle_uncommitted(bool keep)
{
	slist_mutable_iter iter;

	slist_foreach_modify(iter, &uncommitted)
	{
		if (!keep)
			slist_container(IdemConsumer, uncommitted, iter.cur)->id = 0;
		slist_delete_current(&iter);
	}
}

static void
on_xact_end(XactEvent event, void *arg pg_attribute_unused())
{
	/* After PREPARE nobody knows how it ends. */
	if (event == XACT_EVENT_COMMIT)
		settle_uncommitted(true);
	else if (event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
		settle_uncommitted(false);
}

static void
on_subxact_end(SubXactEvent event, SubTransactionId me pg_attribute_unused(),
			   SubTransactionId parent pg_attribute_unused(),
			   void *arg pg_attribute_unused())
{
	/* Numbers made outside the subtransaction are just looked up again. */
	if (event == SUBXACT_EVENT_ABORT_SUB)
		settle_uncommitted(false);
}

void
idem_consumer_init(void)
{
	RegisterXactCallback(on_xact_end, NULL);
	RegisterSubXactCallback(on_subxact_end, NULL);
}

/* Start with an empty memory if a table has changed under it. */
static void
check_generation(void)
{
	HASHCTL		ctl = {
		.keysize = IDEM_MAX_NAME + 1,
		.entrysize = sizeof(IdemConsumer),
		.hcxt = TopMemoryContext,
	};

	if (consumers != NULL && consumers_generation == idem_catalog_generation())
		return;

	if (consumers != NULL)
	{
		slist_init(&uncommitted);
		latest = NULL;
		hash_destroy(consumers);
		consumers = NULL;
	}

	/* Look the tables up now, so that the next change is noticed. */
	(void) idem_rel(IDEM_REL_CONSUMER);
	(void) idem_rel(IDEM_REL_INBOX_CONSUMER);
	consumers_generation = idem_catalog_generation();
	consumers = hash_create("idem consumers", 64, &ctl,
							HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	idem_launcher_nudge();
}

/*
 * idem_consumer
 *		What we remember of a consumer; good until the next call.
 *
 * The name has passed idem_name_arg().
 */
IdemConsumer *
idem_consumer(const text *name)
{
	const char *data = VARDATA_ANY(name);
	int			len = VARSIZE_ANY_EXHDR(name);
	char		buf[IDEM_MAX_NAME + 1];
	bool		found;

	check_generation();
	if (latest != NULL && strncmp(latest->name, data, len) == 0 &&
		latest->name[len] == '\0')
		return latest;

	/* Names come from callers, so the memory has a limit. */
	if (hash_get_num_entries(consumers) >= 10000)
	{
		slist_init(&uncommitted);
		latest = NULL;
		hash_destroy(consumers);
		consumers = NULL;
		check_generation();
	}

	memcpy(buf, data, len);
	buf[len] = '\0';
	latest = hash_search(consumers, buf, HASH_ENTER, &found);
	if (!found)
		memset((char *) latest + sizeof(latest->name), 0,
			   sizeof(IdemConsumer) - sizeof(latest->name));
	return latest;
}

/*
 * Find a row of one of our small tables by its name column, and hand its
 * columns to the caller.
 */
static bool
fetch_by_name(IdemRel rel, IdemRel index, AttrNumber attno, const char *name,
			  Snapshot snapshot, Datum *values, bool *isnull)
{
	Relation	heap = idem_rel_open(rel, AccessShareLock);
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tup;

	ScanKeyInit(&key, attno, BTEqualStrategyNumber, F_TEXTEQ,
				CStringGetTextDatum(name));
	scan = systable_beginscan(heap, idem_rel(index), true, snapshot, 1, &key);
	tup = systable_getnext(scan);
	if (HeapTupleIsValid(tup))
		heap_deform_tuple(heap_copytuple(tup), RelationGetDescr(heap),
						  values, isnull);
	systable_endscan(scan);
	table_close(heap, NoLock);
	return HeapTupleIsValid(tup);
}

/*
 * idem_consumer_id
 *		The number that stands for a consumer in its claims.
 *
 * Makes one if there is none, as part of the current transaction.
 */
int32
idem_consumer_id(IdemConsumer *consumer)
{
	Datum		values[Natts_inbox_consumer];
	bool		isnull[Natts_inbox_consumer] = {0};
	Relation	heap;
	int32		id;

	if (consumer->id != 0)
		return consumer->id;

	/*
	 * These rows never change, so whatever is committed will do; and reading
	 * them must not count as a dependency under SERIALIZABLE, or the first
	 * claims of two new consumers would fail each other.
	 */
	if (fetch_by_name(IDEM_REL_INBOX_CONSUMER, IDEM_REL_INBOX_CONSUMER_NAME,
					  Anum_inbox_consumer_name, consumer->name, SnapshotSelf,
					  values, isnull))
	{
		id = DatumGetInt32(values[Anum_inbox_consumer_id - 1]);

		/*
		 * It may be one that our own transaction made and that a rollback to
		 * a savepoint made us forget, so it cannot be trusted beyond it.
		 */
		if (TransactionIdIsValid(GetTopTransactionIdIfAny()))
			slist_push_head(&uncommitted, &consumer->uncommitted);
		consumer->id = id;
		return id;
	}

	id = (int32) nextval_internal(idem_rel(IDEM_REL_INBOX_CONSUMER_SEQ), false);
	values[Anum_inbox_consumer_id - 1] = Int32GetDatum(id);
	values[Anum_inbox_consumer_name - 1] = CStringGetTextDatum(consumer->name);
	heap = idem_rel_open(IDEM_REL_INBOX_CONSUMER, RowExclusiveLock);
	idem_insert_row(heap, values, isnull);
	table_close(heap, NoLock);

	slist_push_head(&uncommitted, &consumer->uncommitted);
	consumer->id = id;
	return id;
}

/*
 * idem_consumer_horizon
 *		Nobody can know any more whether a message older than this was claimed.
 *
 * That is the retention, counted back from now; after the retention was
 * made longer, claims that the old one removed are still missing.
 */
TimestampTz
idem_consumer_horizon(IdemConsumer *consumer)
{
	if (!consumer->loaded)
	{
		Datum		values[Natts_consumer];
		bool		isnull[Natts_consumer];
		Snapshot	now = RegisterSnapshot(GetLatestSnapshot());

		consumer->has_retention = false;
		consumer->floor = DT_NOBEGIN;
		if (fetch_by_name(IDEM_REL_CONSUMER, IDEM_REL_CONSUMER_PKEY,
						  Anum_consumer_name, consumer->name, now, values, isnull))
		{
			consumer->has_retention = !isnull[Anum_consumer_retention - 1];
			if (consumer->has_retention)
				consumer->retention =
					*DatumGetIntervalP(values[Anum_consumer_retention - 1]);
			if (!isnull[Anum_consumer_floor - 1])
				consumer->floor = DatumGetTimestampTz(values[Anum_consumer_floor - 1]);
		}
		UnregisterSnapshot(now);
		consumer->loaded = true;
	}

	return Max(consumer->floor,
			   GetCurrentTimestamp() -
			   (consumer->has_retention ?
				idem_span_usecs(&consumer->retention) :
				idem_inbox_retention * USECS_PER_SEC));
}

/*
 * consumer_changed() returns trigger
 *		Makes every session forget what it remembers of consumers.
 */
Datum
idem_consumer_changed(PG_FUNCTION_ARGS)
{
	if (!CALLED_AS_TRIGGER(fcinfo))
		ereport(ERROR,
				(errcode(ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED),
				 errmsg("idem.consumer_changed() must be called as a trigger")));

	CacheInvalidateRelcache(((TriggerData *) fcinfo->context)->tg_relation);
	return PointerGetDatum(NULL);
}

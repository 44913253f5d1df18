/*-------------------------------------------------------------------------
 *
 * sweep.c
 *		Finds expired claims without an index on their time.
 *
 * An index on the time would cost every claim a second index entry, only to
 * find its row once, a week later.  Claims lie in the table roughly in
 * the order in which they came, so it is enough to know of every stretch of
 * the table when something in it expires next.  A stretch is read when that
 * time has come, and then known again; a claim that is written into it
 * meanwhile cannot expire before the shortest retention has passed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "catalog.h"
#include "consumer.h"
#include "guc.h"
#include "inbox.h"
#include "input.h"
#include "statement.h"
#include "sweep.h"

/* A stretch of 1 MB, until there would be too many of them. */
#define STRETCH_BLOCKS	128
#define MAX_STRETCHES	16384

/* A claim that may not go yet is looked at again after so many seconds. */
#define HELD_RETRY		60

typedef struct KeepEntry
{
	int32		id;				/* must be first */
	int64		seconds;
} KeepEntry;

typedef struct DeclaredEntry
{
	char		name[IDEM_MAX_NAME + 1];	/* must be first */
	int64		seconds;
} DeclaredEntry;

int64
idem_sweep_now(void)
{
	return GetCurrentTimestamp() / USECS_PER_SEC;
}

/* Read the retentions that were declared: name -> seconds. */
static HTAB *
load_declared(Snapshot snapshot)
{
	HASHCTL		ctl = {
		.keysize = IDEM_MAX_NAME + 1,
		.entrysize = sizeof(DeclaredEntry),
		.hcxt = CurrentMemoryContext,
	};
	HTAB	   *declared = hash_create("idem declared", 64, &ctl,
									   HASH_ELEM | HASH_STRINGS | HASH_CONTEXT);
	Relation	rel = idem_rel_open(IDEM_REL_CONSUMER, AccessShareLock);
	TableScanDesc scan = table_beginscan(rel, snapshot, 0, NULL);
	HeapTuple	row;

	while ((row = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Datum		values[Natts_consumer];
		bool		isnull[Natts_consumer];
		DeclaredEntry *entry;

		heap_deform_tuple(row, RelationGetDescr(rel), values, isnull);
		if (isnull[Anum_consumer_retention - 1])
			continue;
		entry = hash_search(declared,
							TextDatumGetCString(values[Anum_consumer_name - 1]),
							HASH_ENTER, NULL);

		/* Rounded up: never remove a claim too early. */
		entry->seconds =
			(idem_span_usecs(DatumGetIntervalP(values[Anum_consumer_retention - 1])) +
			 USECS_PER_SEC - 1) / USECS_PER_SEC;
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);
	return declared;
}

/*
 * The claims of messages that are not done yet: retention begins when they
 * are.  Only those that are, or soon will be, old enough to be in danger; they
 * are read again before others can be.
 */
static HTAB *
load_held(int64 least)
{
	static IdemStatement st = {
		.sql = "SELECT claim FROM idem.inbox_message WHERE claimed AND stored_at < $1"
		" UNION ALL SELECT claim FROM idem.inbox_parked WHERE claimed AND stored_at < $1"
		" UNION ALL SELECT claim FROM idem.dead_letter WHERE claimed AND state = 'dead'",
		.nargs = 1,
		.types = {TIMESTAMPTZOID}
	};
	static HTAB *held = NULL;
	static TimestampTz good_until = 0;
	static int64 good_for = 0;
	int64		lifetime = Min(60, least / 4) * USECS_PER_SEC;
	TimestampTz now = GetCurrentTimestamp();
	HASHCTL		ctl = {
		.keysize = UUID_LEN,
		.entrysize = UUID_LEN,
		.hcxt = TopMemoryContext,
	};
	Datum		values[1] = {TimestampTzGetDatum(now - least * USECS_PER_SEC + 2 * lifetime + USECS_PER_SEC)};
	HTAB	   *found;
	uint64		n;

	if (held != NULL && now < good_until && least >= good_for)
		return held;
	SPI_connect();
	n = idem_statement_run(&st, values, NULL);
	found = hash_create("idem held claims", Max(n, 16), &ctl,
						HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	for (uint64 i = 0; i < n; i++)
	{
		bool		isnull;
		Datum		claim = SPI_getbinval(SPI_tuptable->vals[i], SPI_tuptable->tupdesc, 1, &isnull);

		(void) hash_search(found, DatumGetUUIDP(claim), HASH_ENTER, NULL);
	}
	SPI_finish();
	if (held != NULL)
		hash_destroy(held);
	held = found;
	good_until = now + lifetime;
	good_for = least;
	return held;
}

/*
 * idem_keep_load
 *		Read how long claims are to be kept, into the current memory context.
 *
 * As of now, whatever snapshot the transaction has.
 */
void
idem_keep_load(IdemKeep *keep)
{
	HASHCTL		ctl = {
		.keysize = sizeof(int32),
		.entrysize = sizeof(KeepEntry),
		.hcxt = CurrentMemoryContext,
	};
	Snapshot	snapshot = RegisterSnapshot(GetLatestSnapshot());
	HTAB	   *declared = load_declared(snapshot);
	Relation	rel = idem_rel_open(IDEM_REL_INBOX_CONSUMER, AccessShareLock);
	TableScanDesc scan = table_beginscan(rel, snapshot, 0, NULL);
	HASH_SEQ_STATUS seq;
	DeclaredEntry *entry;
	HeapTuple	row;

	keep->by_id = hash_create("idem keep", 64, &ctl,
							  HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	keep->other = keep->least = idem_inbox_retention;

	while ((row = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		Datum		values[Natts_inbox_consumer];
		bool		isnull[Natts_inbox_consumer];

		heap_deform_tuple(row, RelationGetDescr(rel), values, isnull);
		entry = hash_search(declared,
							TextDatumGetCString(values[Anum_inbox_consumer_name - 1]),
							HASH_FIND, NULL);
		if (entry != NULL)
		{
			int32		id = DatumGetInt32(values[Anum_inbox_consumer_id - 1]);
			KeepEntry  *kept = hash_search(keep->by_id, &id, HASH_ENTER, NULL);

			kept->seconds = entry->seconds;
		}
	}
	table_endscan(scan);
	table_close(rel, AccessShareLock);

	/* A consumer without claims may make some before we look again. */
	hash_seq_init(&seq, declared);
	while ((entry = hash_seq_search(&seq)) != NULL)
		keep->least = Min(keep->least, entry->seconds);
	hash_destroy(declared);
	UnregisterSnapshot(snapshot);
	keep->held = load_held(keep->least);
}

static int64
keep_seconds(const IdemKeep *keep, int32 id)
{
	KeepEntry  *entry = hash_search(keep->by_id, &id, HASH_FIND, NULL);

	return entry != NULL ? entry->seconds : keep->other;
}

static bool
is_held(const IdemKeep *keep, Datum claim)
{
	return hash_search(keep->held, DatumGetUUIDP(claim), HASH_FIND, NULL) != NULL;
}

/* Is any consumer's retention shorter than it was? */
bool
idem_keep_shorter(const IdemKeep *now, const IdemKeep *before)
{
	HASH_SEQ_STATUS seq;
	KeepEntry  *entry;
	bool		shorter = now->other < before->other;

	hash_seq_init(&seq, now->by_id);
	while ((entry = hash_seq_search(&seq)) != NULL)
		shorter |= entry->seconds < keep_seconds(before, entry->id);
	hash_seq_init(&seq, before->by_id);
	while ((entry = hash_seq_search(&seq)) != NULL)
		shorter |= keep_seconds(now, entry->id) < entry->seconds;
	return shorter;
}

/*
 * idem_sweep_blocks
 *		Remove the expired claims in some blocks; return how many.
 *
 * Stops after "limit" rows.  *next_due becomes the time when the next of
 * those that stay expires, if that is earlier than its value before.  Waits
 * for nobody: a row that somebody else is removing is left to them.  Caller
 * provides a transaction with an active snapshot.
 */
int64
idem_sweep_blocks(BlockNumber start, BlockNumber n, const IdemKeep *keep,
				  int64 limit, int64 *next_due)
{
	Relation	rel = idem_rel_open(IDEM_REL_INBOX_CLAIM, RowExclusiveLock);
	TupleDesc	desc = RelationGetDescr(rel);
	Snapshot	snapshot = GetActiveSnapshot();
	BlockNumber nblocks = RelationGetNumberOfBlocks(rel);
	int64		now = idem_sweep_now();
	int64		removed = 0;
	TableScanDesc scan;
	HeapTuple	row;

	if (start >= nblocks)
	{
		table_close(rel, NoLock);
		return 0;
	}

	/* With a ring of buffers, so that a large table does not push others out. */
	scan = table_beginscan_strat(rel, snapshot, 0, NULL, true, false);
	heap_setscanlimits(scan, start, Min(n, nblocks - start));
	while (removed < limit &&
		   (row = heap_getnext(scan, ForwardScanDirection)) != NULL)
	{
		bool		isnull;
		int32		id = DatumGetInt32(heap_getattr(row, Anum_inbox_claim_consumer,
													desc, &isnull));
		int32		at = DatumGetInt32(heap_getattr(row, Anum_inbox_claim_at,
													desc, &isnull));
		int64		due = at + keep_seconds(keep, id);
		TM_FailureData failure;

		CHECK_FOR_INTERRUPTS();
		if (due >= now)
			*next_due = Min(*next_due, due);
		else if (is_held(keep, heap_getattr(row, Anum_inbox_claim_key, desc, &isnull)))
			*next_due = Min(*next_due, now + HELD_RETRY);
		else if (table_tuple_delete(rel, &row->t_self, GetCurrentCommandId(true),
									snapshot, InvalidSnapshot, false,
									&failure, false) == TM_Ok)
			removed++;
		else
			*next_due = Min(*next_due, now);	/* look again soon */
	}
	table_endscan(scan);
	table_close(rel, NoLock);
	return removed;
}

/*
 * idem_sweep_measure
 *		Adapt to the size that the table has now.
 *
 * What is new was written after the last measurement, and keeps at least as
 * long as the shortest retention.
 */
void
idem_sweep_measure(IdemSweep *sweep, BlockNumber nblocks)
{
	int			wanted;

	if (sweep->stretch == 0)
		sweep->stretch = STRETCH_BLOCKS;

	/* Rather larger stretches than more of them: join them two by two. */
	while (nblocks / sweep->stretch >= MAX_STRETCHES)
	{
		for (int i = 0; i < sweep->nstretches; i += 2)
			sweep->due[i / 2] = i + 1 < sweep->nstretches ?
				Min(sweep->due[i], sweep->due[i + 1]) : sweep->due[i];
		sweep->nstretches = (sweep->nstretches + 1) / 2;
		sweep->stretch *= 2;
	}

	wanted = (nblocks + sweep->stretch - 1) / sweep->stretch;
	if (wanted > sweep->allocated)
	{
		int			size = Max(wanted, 2 * sweep->allocated);

		if (sweep->due == NULL)
			sweep->due = MemoryContextAlloc(TopMemoryContext, size * sizeof(int64));
		else
			sweep->due = repalloc(sweep->due, size * sizeof(int64));
		sweep->allocated = size;
	}
	for (int i = sweep->nstretches; i < wanted; i++)
		sweep->due[i] = sweep->checked_at == 0 ? 0 :
			sweep->checked_at + sweep->keep.least;
	sweep->nstretches = wanted;
	sweep->checked_at = idem_sweep_now();
}

/* Start anew: every stretch has to be read. */
void
idem_sweep_forget(IdemSweep *sweep)
{
	for (int i = 0; i < sweep->nstretches; i++)
		sweep->due[i] = 0;
	sweep->checked_at = 0;
}

/* The first stretch at or after this one whose time has come, or -1. */
int
idem_sweep_next(const IdemSweep *sweep, int from, int64 now)
{
	for (int i = from; i < sweep->nstretches; i++)
	{
		if (sweep->due[i] < now)
			return i;
	}
	return -1;
}

/*-------------------------------------------------------------------------
 *
 * unique.c
 *		Insert a row unless its key is taken.
 *
 * What INSERT ... ON CONFLICT DO NOTHING does, straight on the table and its
 * unique index, with three additions: the caller may choose not to wait for a
 * transaction that holds the key, gets the row that is in the way, and is
 * told that a row exists only when the commit behind it is on disk.
 *
 * Under READ COMMITTED the answer is about now.  Under REPEATABLE READ and
 * SERIALIZABLE a row that was committed after our snapshot is a serialization
 * failure, as it is for ON CONFLICT DO NOTHING.
 *
 * The first columns of the table must be those of the index, in order.  The
 * table's triggers, if somebody adds any, do not fire.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/index.h"
#include "catalog/pg_am.h"
#include "catalog/pg_index.h"
#include "executor/executor.h"
#include "miscadmin.h"
#include "storage/lmgr.h"
#include "utils/rel.h"

#include "compat.h"
#include "durable.h"
#include "unique.h"

/*
 * idem_unique_open
 *		Open a table for idem_unique_insert().
 *
 * wait: wait for a transaction that has inserted the same key.
 * wait_updater: also for one that is changing or removing the row.
 */
void
idem_unique_open(IdemUnique *u, IdemRel which, bool wait, bool wait_updater)
{
	Oid			index;
	List	   *indexes;

	memset(u, 0, sizeof(IdemUnique));
	u->wait = wait;
	u->wait_updater = wait_updater;
	u->heap = idem_rel_open(which, RowExclusiveLock);
	InitDirtySnapshot(u->dirty);

	/*
	 * Only now that we have the lock: REINDEX CONCURRENTLY puts another index
	 * into the place of the old one, and drops that when all who might know
	 * no better have gone.
	 */
	index = idem_primary_key_index(u->heap);
	if (!OidIsValid(index))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("table \"idem.%s\" has no valid primary key",
						RelationGetRelationName(u->heap)),
				 errhint("Restore it with REINDEX; nothing can be claimed without it.")));
	u->index = index_open(index, RowExclusiveLock);

	/* An index that a DBA added must be kept up as well. */
	indexes = RelationGetIndexList(u->heap);
	if (list_length(indexes) > 1)
		u->others = list_delete_oid(indexes, index);
}

/*
 * idem_unique_release
 *		Let go of what a probe holds.
 *
 * Buffers must not stay pinned while we wait for anybody.
 */
void
idem_unique_release(IdemUnique *u)
{
	if (u->existing != NULL)
		ExecClearTuple(u->existing);
	if (u->scan != NULL)
		index_endscan(u->scan);
	u->scan = NULL;
}

/* Find the next row version under the key that is not certainly dead. */
static bool
next_row(IdemUnique *u)
{
	for (;;)
	{
		if (!u->scan->xs_heap_continue &&
			index_getnext_tid(u->scan, ForwardScanDirection) == NULL)
			return false;
		if (u->existing == NULL)
			u->existing = table_slot_create(u->heap, NULL);
		if (index_fetch_heap(u->scan, u->existing))
			return true;
	}
}

/* The header of the row in the way. */
static HeapTupleHeader
existing_header(IdemUnique *u)
{
	bool		should_free;

	/* A buffer slot hands out its own tuple, so there is nothing to free. */
	return ExecFetchSlotHeapTuple(u->existing, false, &should_free)->t_data;
}

/*
 * A row that we may not see, because it was committed after our snapshot,
 * must not decide anything.
 */
static void
check_serializable(IdemUnique *u, HeapTupleHeader row)
{
	if (!IsolationUsesXactSnapshot() ||
		TransactionIdIsCurrentTransactionId(HeapTupleHeaderGetXmin(row)) ||
		table_tuple_satisfies_snapshot(u->heap, u->existing, GetActiveSnapshot()))
		return;

	ereport(ERROR,
			(errcode(ERRCODE_T_R_SERIALIZATION_FAILURE),
			 errmsg("could not serialize access due to concurrent update")));
}

/*
 * idem_unique_probe
 *		Look whether a key is taken.
 *
 * Costs no transaction id.  May wait, as was chosen at opening.
 */
IdemUniqueResult
idem_unique_probe(IdemUnique *u, ScanKey keys, int nkeys)
{
	for (;;)
	{
		TransactionId holder;
		ItemPointerData tid;
		HeapTupleHeader row;

		if (u->scan == NULL)
			u->scan = idem_index_beginscan(u->heap, u->index, &u->dirty, nkeys);
		index_rescan(u->scan, keys, nkeys, NULL, 0);

		if (!next_row(u))
			return IDEM_FREE;

		holder = u->dirty.xmin;
		if (!TransactionIdIsValid(holder) && u->wait_updater)
			holder = u->dirty.xmax;

		if (!TransactionIdIsValid(holder))
		{
			row = existing_header(u);
			check_serializable(u, row);
			idem_ensure_durable(row);
			return IDEM_EXISTS;
		}

		/* A speculative insertion is a matter of microseconds. */
		if (u->dirty.speculativeToken != 0)
		{
			uint32		token = u->dirty.speculativeToken;

			idem_unique_release(u);
			SpeculativeInsertionWait(holder, token);
			continue;
		}

		if (!u->wait)
			return IDEM_IN_FLIGHT;

		tid = u->existing->tts_tid;
		idem_unique_release(u);
		u->waits++;
		XactLockTableWait(holder, u->heap, &tid, XLTW_InsertIndex);
	}
}

/*
 * idem_unique_await_updater
 *		Wait for a transaction that is changing or removing the existing row.
 *
 * False if there is none; otherwise the caller probes again.
 */
bool
idem_unique_await_updater(IdemUnique *u)
{
	TransactionId updater = u->dirty.xmax;
	ItemPointerData tid = u->existing->tts_tid;

	if (!TransactionIdIsValid(updater))
		return false;

	idem_unique_release(u);
	u->waits++;
	XactLockTableWait(updater, u->heap, &tid, XLTW_Update);
	return true;
}

/*
 * idem_index_open
 *		Open the index of a table that begins with these columns.
 *
 * It is looked for under the lock on the table, by what it is and not by its
 * name.  With 0 for the second column, any will do.
 */
Relation
idem_index_open(Relation heap, AttrNumber first, AttrNumber second)
{
	ListCell   *lc;

	foreach(lc, RelationGetIndexList(heap))
	{
		Relation	index = index_open(lfirst_oid(lc), AccessShareLock);
		Form_pg_index form = index->rd_index;

		if (form->indisvalid && index->rd_rel->relam == BTREE_AM_OID &&
			heap_attisnull(index->rd_indextuple, Anum_pg_index_indpred, NULL) &&
			form->indkey.values[0] == first &&
			(second == 0 ||
			 (form->indnkeyatts > 1 && form->indkey.values[1] == second)))
			return index;
		index_close(index, AccessShareLock);
	}
	ereport(ERROR,
			(errcode(ERRCODE_UNDEFINED_OBJECT),
			 errmsg("table \"idem.%s\" lacks an index that is needed",
					RelationGetRelationName(heap)),
			 errhint("Create it anew, as in another database that has the extension.")));
}

/* Enter rows into an index, whatever its kind. */
static void
insert_into_index(Relation heap, Relation index, TupleTableSlot **slots, int n)
{
	IndexInfo  *info = BuildIndexInfo(index);
	EState	   *estate = NULL;
	ExprContext *econtext = NULL;
	ExprState  *predicate = NULL;
	Datum		values[INDEX_MAX_KEYS];
	bool		isnull[INDEX_MAX_KEYS];

	/* Ours are of plain columns, and need none of this. */
	if (info->ii_Predicate != NIL || info->ii_Expressions != NIL)
	{
		estate = CreateExecutorState();
		econtext = GetPerTupleExprContext(estate);
		predicate = ExecPrepareQual(info->ii_Predicate, estate);
	}
	for (int i = 0; info->ii_ReadyForInserts && i < n; i++)
	{
		if (econtext != NULL)
		{
			ResetExprContext(econtext);
			econtext->ecxt_scantuple = slots[i];
			if (!ExecQual(predicate, econtext))
				continue;
		}
		FormIndexDatum(info, slots[i], estate, values, isnull);
		index_insert(index, values, isnull, &slots[i]->tts_tid, heap,
					 info->ii_Unique ? UNIQUE_CHECK_YES : UNIQUE_CHECK_NO,
					 false, info);
	}
	idem_index_insert_cleanup(index, info);
	if (estate != NULL)
		FreeExecutorState(estate);
	pfree(info);
}

/* Enter a new row into some indexes. */
static void
insert_index_entries(Relation heap, List *indexes, HeapTuple tup)
{
	TupleTableSlot *slot = MakeSingleTupleTableSlot(RelationGetDescr(heap),
													&TTSOpsHeapTuple);
	ListCell   *lc;

	ExecStoreHeapTuple(tup, slot, false);
	slot->tts_tid = tup->t_self;
	slot->tts_tableOid = RelationGetRelid(heap);
	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), RowExclusiveLock);

		insert_into_index(heap, index, &slot, 1);
		index_close(index, NoLock);
	}
	ExecDropSingleTupleTableSlot(slot);
}

/*
 * idem_insert_rows
 *		Insert rows into a table about whose keys there is no doubt.
 */
void
idem_insert_rows(Relation heap, HeapTuple *rows, int n)
{
	List	   *indexes = RelationGetIndexList(heap);
	TupleTableSlot **slots = palloc(n * sizeof(TupleTableSlot *));
	TupleDesc	desc = RelationGetDescr(heap);
	ListCell   *lc;

	/* Nobody counts the references to a copy, which costs more than that. */
	if (n > 1)
		desc = CreateTupleDescCopy(desc);
	for (int i = 0; i < n; i++)
	{
		slots[i] = MakeSingleTupleTableSlot(desc, &TTSOpsHeapTuple);
		ExecStoreHeapTuple(rows[i], slots[i], false);
		slots[i]->tts_tableOid = RelationGetRelid(heap);
	}
	if (n == 1)
	{
		heap_insert(heap, rows[0], GetCurrentCommandId(true), 0, NULL);
		slots[0]->tts_tid = rows[0]->t_self;
	}
	else
		heap_multi_insert(heap, slots, n, GetCurrentCommandId(true), 0, NULL);

	foreach(lc, indexes)
	{
		Relation	index = index_open(lfirst_oid(lc), RowExclusiveLock);

		insert_into_index(heap, index, slots, n);
		index_close(index, NoLock);
	}

	for (int i = 0; i < n; i++)
		ExecDropSingleTupleTableSlot(slots[i]);
	if (n > 1)
		FreeTupleDesc(desc);
	pfree(slots);
	list_free(indexes);
}

/*
 * idem_insert_row
 *		Insert a row into a table about whose keys there is no doubt.
 */
void
idem_insert_row(Relation heap, Datum *values, bool *isnull)
{
	HeapTuple	tup = heap_form_tuple(RelationGetDescr(heap), values, isnull);

	simple_heap_insert(heap, tup);
	insert_index_entries(heap, RelationGetIndexList(heap), tup);
	heap_freetuple(tup);
}

/*
 * idem_unique_insert
 *		Insert a row under a key that a probe has just found free.
 *
 * False if somebody else was quicker; the caller probes again.
 */
bool
idem_unique_insert(IdemUnique *u, Datum *values, bool *isnull)
{
	HeapTuple	tup = heap_form_tuple(RelationGetDescr(u->heap), values, isnull);
	TransactionId xid = GetCurrentTransactionId();
	uint32		token;
	bool		unique;

	if (u->info == NULL)
		u->info = BuildIndexInfo(u->index);

	/*
	 * A speculative row can be taken back, and others wait for that decision
	 * only, not for our transaction, so that two of us cannot deadlock here.
	 */
	token = SpeculativeInsertionLockAcquire(xid);
	tup->t_tableOid = RelationGetRelid(u->heap);
	HeapTupleHeaderSetSpeculativeToken(tup->t_data, token);
	heap_insert(u->heap, tup, GetCurrentCommandId(true),
				HEAP_INSERT_SPECULATIVE, NULL);
	unique = index_insert(u->index, values, isnull, &tup->t_self, u->heap,
						  UNIQUE_CHECK_PARTIAL, false, u->info);
	if (unique)
		heap_finish_speculative(u->heap, &tup->t_self);
	else
		heap_abort_speculative(u->heap, &tup->t_self);
	SpeculativeInsertionLockRelease(xid);

	if (unique && u->others != NIL)
		insert_index_entries(u->heap, u->others, tup);
	heap_freetuple(tup);
	return unique;
}

/*
 * idem_unique_close
 *		Close the table; its locks stay until the transaction ends.
 */
void
idem_unique_close(IdemUnique *u)
{
	idem_unique_release(u);
	if (u->existing != NULL)
		ExecDropSingleTupleTableSlot(u->existing);
	index_close(u->index, NoLock);
	table_close(u->heap, NoLock);
}

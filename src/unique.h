/*-------------------------------------------------------------------------
 *
 * unique.h
 *		Insert a row unless its key is taken.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_UNIQUE_H
#define IDEM_UNIQUE_H

#include "access/genam.h"
#include "access/relscan.h"
#include "access/skey.h"
#include "executor/tuptable.h"
#include "nodes/execnodes.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "catalog.h"

typedef enum IdemUniqueResult
{
	IDEM_FREE,					/* no such row */
	IDEM_EXISTS,				/* a committed row, or one of our own */
	IDEM_IN_FLIGHT				/* another transaction is at it */
} IdemUniqueResult;

/*
 * An open table and the unique index that decides.  After IDEM_EXISTS and
 * IDEM_IN_FLIGHT, "existing" holds the other row until the next call.
 */
typedef struct IdemUnique
{
	Relation	heap;
	Relation	index;
	TupleTableSlot *existing;
	uint64		waits;			/* how often we waited for another transaction */

	/* private */
	bool		wait;
	bool		wait_updater;
	SnapshotData dirty;
	IndexScanDesc scan;
	IndexInfo  *info;
	List	   *others;			/* indexes that somebody added */
} IdemUnique;

extern void idem_unique_open(IdemUnique *u, IdemRel which,
							 bool wait, bool wait_updater);
extern IdemUniqueResult idem_unique_probe(IdemUnique *u, ScanKey keys, int nkeys);
extern bool idem_unique_insert(IdemUnique *u, Datum *values, bool *isnull);
extern bool idem_unique_await_updater(IdemUnique *u);
extern void idem_unique_release(IdemUnique *u);
extern void idem_unique_close(IdemUnique *u);

extern Relation idem_index_open(Relation heap, AttrNumber first,
								AttrNumber second);
extern void idem_insert_rows(Relation heap, HeapTuple *rows, int n);
extern void idem_insert_row(Relation heap, Datum *values, bool *isnull);

#endif							/* IDEM_UNIQUE_H */

/*-------------------------------------------------------------------------
 *
 * log.c
 *		Reading the outbox: ticks, and rounds between two of them.
 *
 * Numbers are given out in one order and transactions commit in another, so
 * nobody can read "everything after the last number".  A round reads what
 * became visible between two ticks: first what had a number already at tick a
 * but was not committed then (phase 1, by transaction), then what has got its
 * number since (phase 2).  Each phase goes by number, and can be cut into
 * pages anywhere, since both ticks stand still.
 *
 * The caller provides a transaction with an active snapshot, a short one for
 * every page.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/tuptable.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "storage/bufmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/xid8.h"

#include "catalog.h"
#include "compat.h"
#include "log.h"
#include "outbox.h"
#include "statement.h"
#include "unique.h"
#include "wake.h"

#define LAST_SEQ " COALESCE(pg_catalog.pg_sequence_last_value('idem.outbox_seq'), 0)"

/* One of the index scans that are merged into a page. */
typedef struct LogScan
{
	IndexScanDesc scan;
	TupleTableSlot *slot;
	int64		seq;			/* of the row in the slot */
} LogScan;

/* The segments, and the scans over them that have still rows to give. */
typedef struct LogPage
{
	Relation	heaps[IDEM_SEGMENTS];	/* NULL: nothing in there */
	Relation	indexes[IDEM_SEGMENTS];
	LogScan    *scans;
	int			nscans;
} LogPage;

/*
 * idem_log_last_seq
 *		The last number that was given out; 0 if none was.
 *
 * Selecting from the sequence would not do: while nextval() writes WAL, the
 * row holds a number that lies 32 ahead, and a query reads it unlocked.
 */
int64
idem_log_last_seq(void)
{
	static IdemStatement st = {
		.sql = "SELECT " LAST_SEQ
	};
	bool		isnull;
	int64		result;

	SPI_connect();
	idem_statement_run(&st, NULL, NULL);
	result = DatumGetInt64(SPI_getbinval(SPI_tuptable->vals[0],
										 SPI_tuptable->tupdesc, 1, &isnull));
	SPI_finish();
	return result;
}

static bool
find_xid(const uint64 *xids, int n, uint64 xid)
{
	int			low = 0;
	int			high = n;

	while (low < high)
	{
		int			mid = (low + high) / 2;

		if (xids[mid] < xid)
			low = mid + 1;
		else
			high = mid;
	}
	return low < n && xids[low] == xid;
}

/* Had this transaction committed at that tick? */
static bool
tick_sees_xid(const IdemTick *tick, uint64 xid)
{
	if (xid < tick->xmin)
		return true;
	if (xid >= tick->xmax)
		return false;
	return !find_xid(tick->xip, tick->nxip, xid);
}

/*
 * Was a row committed at that tick?  Transaction ids of adopted rows mean
 * nothing here: they may be of another cluster.
 */
static bool
tick_sees(const IdemTick *tick, uint64 xid, int64 seq)
{
	if (seq <= tick->adopted)
		return true;
	return !tick->all && tick_sees_xid(tick, xid);
}

/* Read xmin:xmax:xip,xip... */
static void
parse_snapshot(IdemTick *tick, const char *s)
{
	char	   *end;
	int			room = 1;

	for (const char *p = s; *p; p++)
		room += *p == ',';
	tick->xip = palloc(room * sizeof(uint64));
	tick->nxip = 0;
	tick->xmin = strtou64(s, &end, 10);
	tick->xmax = strtou64(end + 1, &end, 10);
	while (*end != '\0' && *(end + 1) != '\0')
		tick->xip[tick->nxip++] = strtou64(end + 1, &end, 10);
}

/* Before the first tick nothing had been committed. */
static IdemTick *
tick_zero(void)
{
	IdemTick   *tick = palloc0(sizeof(IdemTick));

	tick->all = true;
	return tick;
}

/* A tick from a row of outbox_tick, in the caller's context. */
static IdemTick *
tick_from_row(HeapTuple row, TupleDesc desc, MemoryContext context)
{
	/* in the context of SPI, which goes */
	char	   *snapshot = SPI_getvalue(row, desc, 2);
	MemoryContext old = MemoryContextSwitchTo(context);
	IdemTick   *tick = palloc0(sizeof(IdemTick));
	bool		isnull;

	tick->id = DatumGetInt64(SPI_getbinval(row, desc, 1, &isnull));
	tick->all = snapshot == NULL;
	if (snapshot != NULL)
		parse_snapshot(tick, snapshot);
	tick->xid = U64FromFullTransactionId(DatumGetFullTransactionId(SPI_getbinval(row, desc, 3, &isnull)));
	tick->seq_before = DatumGetInt64(SPI_getbinval(row, desc, 4, &isnull));
	tick->seq_after = DatumGetInt64(SPI_getbinval(row, desc, 5, &isnull));
	tick->at = DatumGetTimestampTz(SPI_getbinval(row, desc, 6, &isnull));
	tick->adopted_id = DatumGetInt64(SPI_getbinval(row, desc, 7, &isnull));
	tick->adopted = DatumGetInt64(SPI_getbinval(row, desc, 8, &isnull));
	MemoryContextSwitchTo(old);
	return tick;
}

static IdemTick *
run_tick_query(IdemStatement *st, Datum *values)
{
	MemoryContext caller = CurrentMemoryContext;
	IdemTick   *tick = NULL;

	SPI_connect();
	if (idem_statement_run(st, values, NULL) > 0)
		tick = tick_from_row(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, caller);
	SPI_finish();
	return tick;
}

#define TICK_COLUMNS "id, snapshot, xid, seq_before, seq_after, at"
/* ... and of the newest tick up to this one that adopted everything */
#define ADOPTED(column) " (SELECT e." column " FROM idem.outbox_tick e" \
	" WHERE e.snapshot IS NULL AND e.id <= t.id ORDER BY e.id DESC LIMIT 1)"
#define TICK "t.id, t.snapshot, t.xid, t.seq_before, t.seq_after, t.at," \
	ADOPTED("id") "," ADOPTED("seq_before")

/* The newest tick; NULL if there is none. */
IdemTick *
idem_tick_newest(void)
{
	static IdemStatement st = {
		.sql = "SELECT " TICK " FROM idem.outbox_tick t ORDER BY t.id DESC LIMIT 1"
	};

	return run_tick_query(&st, NULL);
}

/* A tick by its number, of which 0 is the time before the first. */
IdemTick *
idem_tick_get(int64 id)
{
	static IdemStatement st = {
		.sql = "SELECT " TICK " FROM idem.outbox_tick t WHERE t.id = $1",
		.nargs = 1,
		.types = {INT8OID}
	};
	Datum		values[1] = {Int64GetDatum(id)};
	IdemTick   *tick;

	if (id == 0)
		return tick_zero();
	tick = run_tick_query(&st, values);
	if (tick == NULL)
		ereport(ERROR,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("tick " INT64_FORMAT " of the outbox does not exist", id),
				 errhint("Rows of idem.outbox_tick must not be removed by hand.")));
	return tick;
}

/*
 * idem_tick_take
 *		Take a tick, and write it down under this number.
 *
 * Caller has started a transaction, without a snapshot yet, and commits it:
 * when that commit is on disk, so is everything that the tick sees.  The order
 * of the four steps is what all reading rests on.  A writer takes its
 * transaction id before its number, so one with an id above ours has a number
 * above seq_before.
 */
IdemTick *
idem_tick_take(int64 id)
{
	static IdemStatement insert = {
		.sql = "INSERT INTO idem.outbox_tick AS t (" TICK_COLUMNS ")"
		" SELECT $1, pg_catalog.pg_current_snapshot(), $2, $3,"
		LAST_SEQ ", pg_catalog.clock_timestamp() RETURNING " TICK,
		.nargs = 3,
		.types = {INT8OID, XID8OID, INT8OID}
	};
	Datum		values[3];
	IdemTick   *tick;

	PushActiveSnapshot(GetTransactionSnapshot());
	values[0] = Int64GetDatum(id);
	values[2] = Int64GetDatum(idem_log_last_seq());
	PopActiveSnapshot();
	values[1] = FullTransactionIdGetDatum(GetTopFullTransactionId());

	/* The statement has its snapshot before it reads the sequence. */
	PushActiveSnapshot(GetTransactionSnapshot());
	tick = run_tick_query(&insert, values);
	PopActiveSnapshot();
	return tick;
}

/*
 * idem_reader_init
 *		Go on reading at a position.
 *
 * The reader's ticks live in a context of its own, below the current one.
 */
void
idem_reader_init(IdemReader *reader, const IdemPosition *pos)
{
	MemoryContext old;

	memset(reader, 0, sizeof(IdemReader));
	reader->context = AllocSetContextCreate(CurrentMemoryContext,
											"idem reader",
											ALLOCSET_DEFAULT_SIZES);
	reader->pos = *pos;
	old = MemoryContextSwitchTo(reader->context);
	reader->a = idem_tick_get(pos->a);
	MemoryContextSwitchTo(old);
}

/* Was everything that is older than tick b adopted since tick a? */
static bool
adopted_between(const IdemTick *a, const IdemTick *b)
{
	return b->adopted_id > a->id;
}

/*
 * Which transactions committed between the ticks, and began before them?  What
 * has been adopted meanwhile is all there, whatever has become of it.
 */
static void
find_late(IdemReader *reader)
{
	IdemTick   *a = reader->a;
	IdemTick   *b = reader->b;
	uint64		above = a->xid > a->xmax ? a->xid - a->xmax : 0;
	bool		all = adopted_between(a, b);

	reader->nlate = 0;
	reader->late = NULL;
	if (a->all)
		return;
	reader->late = MemoryContextAllocHuge(reader->context,
										  (a->nxip + above + 1) * sizeof(uint64));
	for (int i = 0; i < a->nxip; i++)
	{
		if (all || tick_sees_xid(b, a->xip[i]))
			reader->late[reader->nlate++] = a->xip[i];
	}
	for (uint64 xid = a->xmax; xid < a->xid; xid++)
	{
		if (all || tick_sees_xid(b, xid))
			reader->late[reader->nlate++] = xid;
	}
}

/*
 * idem_reader_begin_round
 *		Make sure that a round is under way; false if there is nothing newer.
 */
bool
idem_reader_begin_round(IdemReader *reader, int64 newest_tick)
{
	MemoryContext old;

	if (reader->b != NULL)
		return true;
	if (reader->pos.b == 0)
	{
		if (newest_tick <= reader->pos.a)
			return false;
		reader->pos.b = newest_tick;
		reader->pos.phase = IDEM_PHASE_LATE;
		reader->pos.seq = 0;
	}

	old = MemoryContextSwitchTo(reader->context);
	reader->b = idem_tick_get(reader->pos.b);
	MemoryContextSwitchTo(old);
	find_late(reader);
	return true;
}

/* Everything up to tick b is done; the next round begins there. */
static void
end_round(IdemReader *reader)
{
	IdemTick   *a = reader->a;

	reader->a = reader->b;
	reader->b = NULL;
	if (a->xip != NULL)
		pfree(a->xip);
	pfree(a);
	if (reader->late != NULL)
		pfree(reader->late);
	reader->late = NULL;
	reader->nlate = 0;
	reader->pos.a = reader->pos.b;
	reader->pos.b = 0;
	reader->pos.phase = IDEM_PHASE_LATE;
	reader->pos.seq = 0;
}

/*
 * idem_reader_stop
 *		Read no more.  Nothing else can be done with this reader.
 */
void
idem_reader_stop(IdemReader *reader)
{
	reader->b = NULL;
	reader->pos.b = 0;
}

/* Open the segments that hold anything, with the index wanted. */
static void
open_segments(LogPage *page, AttrNumber first, AttrNumber second)
{
	memset(page, 0, sizeof(LogPage));
	for (int i = 0; i < IDEM_SEGMENTS; i++)
	{
		Relation	heap = idem_rel_open(IDEM_REL_OUTBOX_0 + i, AccessShareLock);

		if (RelationGetNumberOfBlocks(heap) == 0)
		{
			table_close(heap, AccessShareLock);
			continue;
		}
		page->heaps[i] = heap;
		page->indexes[i] = idem_index_open(heap, first, second);
	}
}

static void
close_scan(LogScan *s)
{
	ExecDropSingleTupleTableSlot(s->slot);
	index_endscan(s->scan);
}

static void
close_page(LogPage *page)
{
	for (int i = 0; i < page->nscans; i++)
		close_scan(&page->scans[i]);
	for (int i = 0; i < IDEM_SEGMENTS; i++)
	{
		if (page->heaps[i] == NULL)
			continue;
		index_close(page->indexes[i], AccessShareLock);
		table_close(page->heaps[i], AccessShareLock);
	}
}

static bool
next_row(LogScan *s)
{
	bool		isnull;

	if (!index_getnext_slot(s->scan, ForwardScanDirection, s->slot))
		return false;
	s->seq = DatumGetInt64(slot_getattr(s->slot, Anum_outbox_seq, &isnull));
	return true;
}

/* Add a scan to the page, if it finds anything. */
static void
add_scan(LogPage *page, int segment, ScanKey keys, int nkeys)
{
	LogScan    *s = &page->scans[page->nscans];

	s->slot = table_slot_create(page->heaps[segment], NULL);
	s->scan = idem_index_beginscan(page->heaps[segment], page->indexes[segment],
								   GetActiveSnapshot(), nkeys);
	index_rescan(s->scan, keys, nkeys, NULL, 0);
	if (next_row(s))
		page->nscans++;
	else
		close_scan(s);
}

/* The scan with the lowest number, or NULL. */
static LogScan *
first_scan(LogPage *page)
{
	LogScan    *first = NULL;

	for (int i = 0; i < page->nscans; i++)
	{
		if (first == NULL || page->scans[i].seq < first->seq)
			first = &page->scans[i];
	}
	return first;
}

static void
advance(LogPage *page, LogScan *s)
{
	if (next_row(s))
		return;
	close_scan(s);
	*s = page->scans[--page->nscans];
}

/* Numbers above "after", up to "upto". */
static void
seq_keys(ScanKey keys, AttrNumber column, int64 after, int64 upto)
{
	ScanKeyInit(&keys[0], column, BTGreaterStrategyNumber, F_INT8GT,
				Int64GetDatum(after));
	ScanKeyInit(&keys[1], column, BTLessEqualStrategyNumber, F_INT8LE,
				Int64GetDatum(upto));
}

/* Open the scans of the current phase. */
static void
open_phase(IdemReader *reader, LogPage *page)
{
	ScanKeyData keys[3];

	if (reader->pos.phase == IDEM_PHASE_NEW)
	{
		open_segments(page, Anum_outbox_seq, 0);
		page->scans = palloc(IDEM_SEGMENTS * sizeof(LogScan));
		seq_keys(keys, 1, Max(reader->pos.seq, reader->a->seq_before),
				 reader->b->seq_after);
		for (int i = 0; i < IDEM_SEGMENTS; i++)
		{
			if (page->heaps[i] != NULL)
				add_scan(page, i, keys, 2);
		}
		return;
	}

	open_segments(page, Anum_outbox_xid, Anum_outbox_seq);
	page->scans = MemoryContextAllocHuge(CurrentMemoryContext,
										 (Size) IDEM_SEGMENTS * reader->nlate * sizeof(LogScan));
	seq_keys(&keys[1], 2, Max(reader->pos.seq, reader->a->adopted),
			 reader->a->seq_before);
	for (int i = 0; i < IDEM_SEGMENTS; i++)
	{
		for (int j = 0; page->heaps[i] != NULL && j < reader->nlate; j++)
		{
			FullTransactionId xid = FullTransactionIdFromU64(reader->late[j]);

			ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_XID8EQ,
						FullTransactionIdGetDatum(xid));
			add_scan(page, i, keys, 3);
		}
	}
}

/* A text column in UTF-8; NULL if it is null. */
static char *
text_column(TupleTableSlot *slot, AttrNumber column)
{
	bool		isnull;
	Datum		value = slot_getattr(slot, column, &isnull);
	char	   *s;

	if (isnull)
		return NULL;
	s = TextDatumGetCString(value);
	return pg_server_to_any(s, strlen(s), PG_UTF8);
}

/* Copy a message out of its row. */
static IdemMessage *
copy_message(TupleTableSlot *slot)
{
	IdemMessage *m = palloc0(sizeof(IdemMessage));
	bool		isnull;
	Datum		value;
	bytea	   *body;

	m->seq = DatumGetInt64(slot_getattr(slot, Anum_outbox_seq, &isnull));
	m->enqueued_at = DatumGetTimestampTz(slot_getattr(slot, Anum_outbox_enqueued_at, &isnull));
	value = slot_getattr(slot, Anum_outbox_deliver_at, &isnull);
	m->deliver_at = isnull ? 0 : DatumGetTimestampTz(value);
	m->id = *DatumGetUUIDP(slot_getattr(slot, Anum_outbox_msg_id, &isnull));
	m->topic = text_column(slot, Anum_outbox_topic);
	m->key = text_column(slot, Anum_outbox_key);
	m->content_type = text_column(slot, Anum_outbox_content_type);
	m->headers = text_column(slot, Anum_outbox_headers);
	body = DatumGetByteaPP(slot_getattr(slot, Anum_outbox_body, &isnull));
	m->body_len = VARSIZE_ANY_EXHDR(body);
	m->body = palloc(m->body_len + 1);
	memcpy(m->body, VARDATA_ANY(body), m->body_len);
	if ((Pointer) body != DatumGetPointer(slot_getattr(slot, Anum_outbox_body, &isnull)))
		pfree(body);
	return m;
}

/* Is this row part of the round? */
static bool
in_round(IdemReader *reader, TupleTableSlot *slot, int64 seq)
{
	bool		isnull;
	Datum		value;
	uint64		xid;

	/* Phase 1 asks for transactions that are in. */
	if (reader->pos.phase == IDEM_PHASE_LATE)
		return true;
	value = slot_getattr(slot, Anum_outbox_xid, &isnull);
	xid = U64FromFullTransactionId(DatumGetFullTransactionId(value));
	if (!tick_sees(reader->b, xid, seq))
		return false;
	/* What came after the adoption is new, and tick a cannot judge it. */
	return (adopted_between(reader->a, reader->b) && seq > reader->b->adopted) ||
		!tick_sees(reader->a, xid, seq);
}

/*
 * idem_reader_page
 *		Read the next messages of the round under way, in order.
 *
 * Returns a list of IdemMessage, in the current context; *at tells where they
 * stand, but for the number.  If a phase or the round has ended, reader->pos
 * says so already.
 */
List *
idem_reader_page(IdemReader *reader, int max_messages, int64 max_bytes,
				 IdemPosition *at)
{
	LogPage		page;
	LogScan    *s;
	List	   *result = NIL;
	int64		bytes = 0;
	bool		full = false;

	if (reader->pos.phase == IDEM_PHASE_LATE && reader->nlate == 0)
	{
		reader->pos.phase = IDEM_PHASE_NEW;
		reader->pos.seq = 0;
	}

	*at = reader->pos;
	open_phase(reader, &page);
	while (!full && (s = first_scan(&page)) != NULL)
	{
		int64		seq = s->seq;

		CHECK_FOR_INTERRUPTS();
		if (in_round(reader, s->slot, seq))
		{
			IdemMessage *m = copy_message(s->slot);

			result = lappend(result, m);
			bytes += m->body_len;
			full = list_length(result) >= max_messages || bytes >= max_bytes;
		}
		reader->pos.seq = seq;
		advance(&page, s);
	}
	close_page(&page);

	if (!full && reader->pos.phase == IDEM_PHASE_LATE)
	{
		reader->pos.phase = IDEM_PHASE_NEW;
		reader->pos.seq = 0;
	}
	else if (!full)
		end_round(reader);
	return result;
}

/*
 * idem_log_message
 *		Read one message by its number; NULL if it is not there (any more).
 */
IdemMessage *
idem_log_message(int64 seq)
{
	LogPage		page;
	ScanKeyData keys[2];
	IdemMessage *m = NULL;

	open_segments(&page, Anum_outbox_seq, 0);
	page.scans = palloc(IDEM_SEGMENTS * sizeof(LogScan));
	seq_keys(keys, 1, seq - 1, seq);
	for (int i = 0; i < IDEM_SEGMENTS; i++)
	{
		if (page.heaps[i] != NULL)
			add_scan(&page, i, keys, 2);
	}
	if (page.nscans > 0)
		m = copy_message(page.scans[0].slot);
	close_page(&page);
	return m;
}

/* Has this transaction, which has ended, left anything in the log? */
static bool
has_written(LogPage *page, uint64 xid)
{
	ScanKeyData key;
	bool		result;

	ScanKeyInit(&key, 1, BTEqualStrategyNumber, F_XID8EQ,
				FullTransactionIdGetDatum(FullTransactionIdFromU64(xid)));
	for (int i = 0; i < IDEM_SEGMENTS && page->nscans == 0; i++)
	{
		if (page->heaps[i] != NULL)
			add_scan(page, i, &key, 1);
	}
	result = page->nscans > 0;
	if (result)
		close_scan(&page->scans[--page->nscans]);
	return result;
}

/* Those that were under way at a tick, and perhaps still are. */
static void
list_pending(IdemTick *tick)
{
	tick->pending = MemoryContextAllocHuge(GetMemoryChunkContext(tick),
										   (tick->nxip + (tick->xid - Min(tick->xmax, tick->xid)) + 1) *
										   sizeof(uint64));
	for (int i = 0; i < tick->nxip; i++)
		tick->pending[tick->npending++] = tick->xip[i];
	for (uint64 xid = tick->xmax; xid < tick->xid; xid++)
		tick->pending[tick->npending++] = xid;
}

/*
 * idem_tick_is_due
 *		Is there anything that a new tick would see, and the newest does not?
 *
 * Either a number was given out since, or a transaction that was under way
 * has ended and left something.  Those that left nothing are forgotten, so
 * that a database busy with other things does not make us tick.
 */
bool
idem_tick_is_due(IdemTick *newest)
{
	LogPage		page;
	LogScan		scan;
	bool		due = false;
	int			kept = 0;

	if (newest == NULL)
		return idem_log_last_seq() > 0;
	/* One above seq_before may be of a transaction that began after the tick. */
	if (idem_log_last_seq() > newest->seq_before)
		return true;
	if (newest->all)
		return false;
	if (newest->pending == NULL)
		list_pending(newest);
	if (newest->npending == 0)
		return false;

	open_segments(&page, Anum_outbox_xid, Anum_outbox_seq);
	page.scans = &scan;
	for (int i = 0; i < newest->npending; i++)
	{
		uint64		xid = newest->pending[i];

		if (due || XidInMVCCSnapshot((TransactionId) xid, GetActiveSnapshot()))
			newest->pending[kept++] = xid;
		else
			due = has_written(&page, xid);
	}
	newest->npending = kept;
	close_page(&page);
	return due;
}

/*-------------------------------------------------------------------------
 *
 * take.c
 *		Taking messages that wait for a consumer.
 *
 * A message is taken by locking its row, in the transaction in which it is
 * processed; rows that others have locked are passed over.  Its end is the end
 * of the row.  What cannot be processed now moves to inbox_parked and comes
 * back when it is due.
 *
 * With order by key, a message is taken only if no earlier one of its key
 * waits, whoever is at that: the scan begins at or before the first that is
 * visible, and a key that it has met and not taken is closed for the rest of
 * it.  Messages behind a parked one are parked as well, so that nobody has to
 * read past them again and again.
 *
 * Caller provides a transaction and the rights of the tables' owner.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/hsearch.h"
#include "utils/memutils.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"

#include "backlog.h"
#include "catalog.h"
#include "compat.h"
#include "consumer.h"
#include "fault.h"
#include "statement.h"
#include "take.h"
#include "unique.h"
/* With order by key, look no further than this for one whose key is free. */
#define MAX_LOOK		10000

/* Where this session was last, beyond what others are at. */
typedef struct Cursor
{
	int32		consumer;		/* must be first */
	int64		resume;
	uint32		generation;
	int			looks;			/* since it looked from the mark on */
} Cursor;

/* So often does a session go on where it was before it moves the mark. */
#define LOOKS_PER_MARK	64

static HTAB *cursors = NULL;

static Cursor *
cursor_of(int32 consumer)
{
	HASHCTL		ctl = {.keysize = sizeof(int32), .entrysize = sizeof(Cursor)};
	Cursor	   *cursor;
	bool		found;

	if (cursors == NULL)
		cursors = hash_create("idem cursors", 16, &ctl, HASH_ELEM | HASH_BLOBS);
	cursor = hash_search(cursors, &consumer, HASH_ENTER, &found);
	if (!found)
	{
		cursor->resume = 0;
		cursor->generation = 0;
		cursor->looks = 0;
	}
	return cursor;
}

/* Fill in what follows from the columns that both tables have. */
static void
read_columns(IdemTaken *t)
{
	t->seq = DatumGetInt64(t->values[Anum_message_seq - 1]);
	t->claim = *DatumGetUUIDP(t->values[Anum_message_claim - 1]);
	t->claimed = DatumGetBool(t->values[Anum_message_claimed - 1]);
	t->replayed = DatumGetBool(t->values[Anum_message_replayed - 1]);
	t->stored_at = DatumGetTimestampTz(t->values[Anum_message_stored_at - 1]);
}

/* A copy of the row in a slot, in the current context. */
static IdemTaken *
taken_from_slot(TupleTableSlot *slot)
{
	IdemTaken  *t = palloc0(sizeof(IdemTaken));
	HeapTuple	row = ExecCopySlotHeapTuple(slot);

	heap_deform_tuple(row, slot->tts_tupleDescriptor, t->values, t->isnull);
	t->tid = slot->tts_tid;
	read_columns(t);
	return t;
}

/* The value of a column of type text, or NULL. */
char *
idem_taken_text(const IdemTaken *t, int column)
{
	return t->isnull[column - 1] ? NULL : TextDatumGetCString(t->values[column - 1]);
}

/* A key that a scan has met, as a hash: two that collide wait for each other. */
typedef struct ClosedKey
{
	uint64		hash;			/* must be first */
	bool		barred;			/* one stays: no later one is set aside, */
	bool		barred_late;	/* or no later one of those is parked */
} ClosedKey;

static ClosedKey *
close_key(HTAB *closed, Datum key, bool *found)
{
	text	   *value = DatumGetTextPP(key);
	uint64		hash = hash_bytes_extended((unsigned char *) VARDATA_ANY(value),
										   VARSIZE_ANY_EXHDR(value), 0);
	ClosedKey  *entry = hash_search(closed, &hash, HASH_ENTER, found);

	if (!*found)
		entry->barred = entry->barred_late = false;
	return entry;
}

/* Does anything of a key, or of any key, wait in inbox_parked? */
static bool
key_is_parked(const IdemDeclared *c, Datum key, bool isnull, int64 seq)
{
	static IdemStatement any = {
		.sql = "SELECT FROM idem.inbox_parked WHERE consumer = $1 AND key IS NOT NULL"
		" AND state <> 'delayed' LIMIT 1",
		.nargs = 1,
		.types = {INT4OID}
	};
	static IdemStatement one = {
		.sql = "SELECT FROM idem.inbox_parked WHERE consumer = $1 AND key = $2"
		" AND state <> 'delayed' AND seq < $3 LIMIT 1",
		.nargs = 3,
		.types = {INT4OID, TEXTOID, INT8OID}
	};
	Datum		values[3] = {Int32GetDatum(c->id), key, Int64GetDatum(seq)};
	bool		result;

	SPI_connect();
	result = idem_statement_run(isnull ? &any : &one, values, NULL) > 0;
	SPI_finish();
	return result;
}

/*
 * Park a message behind one of its key, if nobody is at that right now: whoever
 * is, might be gone before ours can be seen to wait for it.  False if it stays.
 */
static bool
park_behind(const IdemDeclared *c, IdemTaken *t)
{
	static IdemStatement st = {
		.sql = "SELECT FROM idem.inbox_parked WHERE consumer = $1 AND key = $2"
		" AND state <> 'delayed' AND seq < $3 ORDER BY seq DESC LIMIT 1"
		" FOR KEY SHARE SKIP LOCKED",
		.nargs = 3,
		.types = {INT4OID, TEXTOID, INT8OID}
	};
	Datum		values[3] = {Int32GetDatum(c->id), t->values[Anum_message_key - 1],
	Int64GetDatum(t->seq)};
	IdemWait	wait = {.state = "behind"};
	bool		waits;

	SPI_connect();
	waits = idem_statement_run(&st, values, NULL) > 0;
	SPI_finish();
	if (waits)
		idem_taken_park(c, t, &wait);
	return waits;
}

/* Lock a row, unless somebody else has it or it is gone. */
static bool
lock_row(Relation heap, TupleTableSlot *slot, Snapshot snapshot)
{
	TM_FailureData failure;
	ItemPointerData tid = slot->tts_tid;

	return table_tuple_lock(heap, &tid, snapshot, slot, GetCurrentCommandId(true),
							LockTupleExclusive, LockWaitSkip, 0, &failure) == TM_Ok;
}

static bool
is_mine(int64 seq, const int64 *mine, int nmine)
{
	for (int i = 0; i < nmine; i++)
	{
		if (mine[i] == seq)
			return true;
	}
	return false;
}

/* Take messages that wait for their first try. */
static List *
take_pending(const IdemDeclared *c, int max, List *taken)
{
	Relation	heap = idem_rel_open(IDEM_REL_INBOX_MESSAGE, RowExclusiveLock);
	Relation	index = idem_index_open(heap, Anum_message_consumer, Anum_message_seq);
	TupleTableSlot *slot = table_slot_create(heap, NULL);
	TupleTableSlot *locked = table_slot_create(heap, NULL);
	Cursor	   *cursor = cursor_of(c->id);
	HTAB	   *closed = NULL;
	List	   *behind = NIL;
	IdemLook	look;
	int64		from;
	int64		first = -1;
	int			seen = 0;
	int64	   *mine;
	int			nmine = idem_backlog_mine(c->id, &mine);
	bool		any_parked = false;
	ScanKeyData keys[2];
	IndexScanDesc scan;
	Snapshot	snapshot;
	ListCell   *lc;

	idem_backlog_look(&look, c->id, IDEM_MARK_SEQ);
	from = idem_backlog_resume(&look, cursor->resume, &cursor->generation);
	if (c->ordered || ++cursor->looks >= LOOKS_PER_MARK)
	{
		from = look.from;
		cursor->looks = 0;
	}
	PushActiveSnapshot(GetTransactionSnapshot());
	snapshot = GetActiveSnapshot();
	if (c->ordered)
	{
		HASHCTL		ctl = {
			.keysize = sizeof(uint64),
			.entrysize = sizeof(ClosedKey),
			.hcxt = CurrentMemoryContext,
		};

		closed = hash_create("idem closed keys", 64, &ctl,
							 HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
		/* not before our snapshot: what is parked meanwhile, that still sees here */
		any_parked = key_is_parked(c, (Datum) 0, true, 0);
	}

	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_INT4EQ, Int32GetDatum(c->id));
	ScanKeyInit(&keys[1], 2, BTGreaterEqualStrategyNumber, F_INT8GE, Int64GetDatum(from));
	scan = idem_index_beginscan(heap, index, snapshot, 2);
	index_rescan(scan, keys, 2, NULL, 0);
	while (list_length(taken) < max && seen < MAX_LOOK &&
		   index_getnext_slot(scan, ForwardScanDirection, slot))
	{
		bool		isnull;
		int64		seq = DatumGetInt64(slot_getattr(slot, Anum_message_seq, &isnull));
		Datum		key = slot_getattr(slot, Anum_message_key, &isnull);
		IdemTaken  *t;

		CHECK_FOR_INTERRUPTS();
		seen++;
		if (first < 0)
			first = seq;
		locked->tts_tid = slot->tts_tid;
		if (c->ordered && !isnull)
		{
			bool		found;
			ClosedKey  *closed_key = close_key(closed, key, &found);

			/*
			 * Behind one that is parked, it will be for a while.  But if an
			 * earlier one is not parked with it, it must not be either: it
			 * would be promoted before that one.
			 */
			if (any_parked && !closed_key->barred && key_is_parked(c, key, false, seq))
			{
				if (lock_row(heap, locked, snapshot))
					behind = lappend(behind, taken_from_slot(slot));
				else
					closed_key->barred = true;
				continue;
			}
			closed_key->barred = true;
			if (found)
				continue;
		}
		if (is_mine(seq, mine, nmine) || !lock_row(heap, locked, snapshot))
			continue;
		t = taken_from_slot(slot);
		idem_backlog_took(&look, seq);
		cursor->resume = seq + 1;
		taken = lappend(taken, t);
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	ExecDropSingleTupleTableSlot(locked);
	index_close(index, AccessShareLock);
	table_close(heap, NoLock);
	PopActiveSnapshot();

	IDEM_FAULT("take-scanned");
	cursor->resume = Min(cursor->resume, idem_backlog_missed(&look));
	/* A transaction's old snapshot says nothing about what came since. */
	if (!IsolationUsesXactSnapshot() && first >= 0 && from == look.from)
		idem_backlog_looked(&look, IDEM_MARK_SEQ, first);
	foreach(lc, behind)
	{
		IdemTaken  *t = lfirst(lc);
		bool		found;
		ClosedKey  *closed_key = close_key(closed, t->values[Anum_message_key - 1], &found);

		if (!closed_key->barred_late && !park_behind(c, t))
			closed_key->barred_late = true;
	}
	/* There is more, which we were kept from reaching by what is parked now. */
	if (seen >= MAX_LOOK && behind != NIL)
		idem_backlog_added(c->id, IDEM_MARK_SEQ, PG_INT64_MAX - 1);
	if (closed != NULL)
		hash_destroy(closed);
	return taken;
}

#define PARKED_COLUMNS "p.consumer, p.seq, p.claim, p.claimed, p.replayed, p.stored_at," \
	" p.enqueued_at, p.msg_id, p.topic, p.key, p.content_type, p.headers, p.source, p.type," \
	" p.body, p.attempts, p.not_yet_since, p.state"

/* Copy the rows that a query for PARKED_COLUMNS has found, into a context. */
static List *
parked_rows(List *taken, MemoryContext context)
{
	MemoryContext old = MemoryContextSwitchTo(context);

	for (uint64 i = 0; i < SPI_processed; i++)
	{
		HeapTuple	row = SPI_tuptable->vals[i];
		TupleDesc	desc = SPI_tuptable->tupdesc;
		IdemTaken  *t = palloc0(sizeof(IdemTaken));
		bool		isnull;
		Datum		value;

		for (int col = 0; col < Natts_message; col++)
		{
			Form_pg_attribute att = TupleDescAttr(desc, col);

			value = SPI_getbinval(row, desc, col + 1, &t->isnull[col]);
			if (!t->isnull[col])
				t->values[col] = datumCopy(value, att->attbyval, att->attlen);
		}
		read_columns(t);
		t->parked = true;
		t->attempts = DatumGetInt32(SPI_getbinval(row, desc, 16, &isnull));
		value = SPI_getbinval(row, desc, 17, &isnull);
		t->not_yet_since = isnull ? 0 : DatumGetTimestampTz(value);
		t->running = strcmp(SPI_getvalue(row, desc, 18), "running") == 0;
		t->was_running = t->running || strcmp(SPI_getvalue(row, desc, 18), "leased") == 0;
		taken = lappend(taken, t);
	}
	MemoryContextSwitchTo(old);
	return taken;
}

/* When the first parked message is due, as far as is visible now. */
static TimestampTz
first_due(const IdemDeclared *c, int64 from)
{
	static IdemStatement st = {
		.sql = "SELECT due FROM idem.inbox_parked WHERE consumer = $1 AND due >= $2"
		" ORDER BY due LIMIT 1",
		.nargs = 2,
		.types = {INT4OID, TIMESTAMPTZOID}
	};
	Datum		values[2] = {Int32GetDatum(c->id), TimestampTzGetDatum(from)};
	TimestampTz result = DT_NOEND;
	bool		isnull;

	SPI_connect();
	if (idem_statement_run(&st, values, NULL) > 0)
		result = DatumGetTimestampTz(SPI_getbinval(SPI_tuptable->vals[0],
												   SPI_tuptable->tupdesc, 1, &isnull));
	SPI_finish();
	return result;
}

/*
 * Take parked messages that are due.  *next_due becomes the time when the
 * first of those that are left is.
 */
static List *
take_parked(const IdemDeclared *c, int max, TimestampTz *next_due)
{
	static IdemStatement st = {
		.sql = "SELECT " PARKED_COLUMNS " FROM idem.inbox_parked p"
		" WHERE p.consumer = $1 AND p.due >= $2 AND p.due <= $3 AND p.seq <> ALL ($6)"
		" AND (NOT $5 OR p.key IS NULL OR p.state = 'delayed' OR NOT EXISTS ("
		"SELECT FROM idem.inbox_parked b WHERE b.consumer = p.consumer AND b.key = p.key"
		" AND b.state <> 'delayed' AND b.seq < p.seq))"
		" ORDER BY p.due LIMIT $4 FOR UPDATE OF p SKIP LOCKED",
		.nargs = 6,
		.types = {INT4OID, TIMESTAMPTZOID, TIMESTAMPTZOID, INT4OID, BOOLOID, INT8ARRAYOID}
	};
	MemoryContext context = CurrentMemoryContext;
	TimestampTz now = GetCurrentTimestamp();
	Datum		values[6];
	int64	   *mine;
	int			nmine;
	Datum	   *elements;
	IdemLook	look;
	List	   *taken = NIL;

	idem_backlog_look(&look, c->id, IDEM_MARK_DUE);
	*next_due = look.from;
	if (*next_due > now)
		return NIL;
	*next_due = first_due(c, look.from);
	if (!IsolationUsesXactSnapshot())
		idem_backlog_looked(&look, IDEM_MARK_DUE, *next_due);
	if (*next_due > now)
		return NIL;

	values[0] = Int32GetDatum(c->id);
	values[1] = TimestampTzGetDatum(*next_due);
	values[2] = TimestampTzGetDatum(now);
	values[3] = Int32GetDatum(max);
	values[4] = BoolGetDatum(c->ordered);
	nmine = idem_backlog_mine(c->id, &mine);
	elements = palloc((nmine + 1) * sizeof(Datum));
	for (int i = 0; i < nmine; i++)
		elements[i] = Int64GetDatum(mine[i]);
	values[5] = PointerGetDatum(construct_array(elements, nmine, INT8OID, sizeof(int64),
												FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
	SPI_connect();
	idem_statement_run(&st, values, NULL);
	taken = parked_rows(NIL, context);
	SPI_finish();
	return taken;
}

/*
 * One that was written down as taken, and is free: that attempt has failed.
 * Was it the last?
 */
static bool
bury_if_worn_out(const IdemDeclared *c, IdemTaken *t)
{
	IdemStat	stat = {0};
	const char *why = t->running ? "the server or the worker ended while it was processed" :
		"the lease ran out";

	if (!t->was_running)
		return false;
	t->attempts++;
	t->running = false;
	if (t->attempts < c->max_attempts)
		return false;
	idem_taken_bury(c, t, NULL, why);
	idem_stat_count(&stat, IDEM_STAT_CONSUMER, c->name, IDEM_STAT_DEAD, 1);
	return true;
}

/*
 * idem_take
 *		Lock messages of a consumer that can be processed now.
 *
 * A list of IdemTaken in the current context, in the order in which they came;
 * those that are tried again come first.  *next_due tells when to look again
 * for one that is parked; it may be in the past, if others are at those.
 */
List *
idem_take(const IdemDeclared *c, int max, TimestampTz *next_due)
{
	List	   *taken = NIL;
	ListCell   *lc;

	foreach(lc, take_parked(c, max, next_due))
	{
		if (!bury_if_worn_out(c, lfirst(lc)))
			taken = lappend(taken, lfirst(lc));
	}
	if (list_length(taken) < max)
		taken = take_pending(c, max, taken);
	return taken;
}

/*
 * idem_take_leased
 *		Lock a message that is leased under this token; NULL if none is.
 */
IdemTaken *
idem_take_leased(const IdemDeclared *c, const char *msg_id, const pg_uuid_t *token)
{
	static IdemStatement st = {
		.sql = "SELECT " PARKED_COLUMNS " FROM idem.inbox_parked p"
		" WHERE p.claim = idem.inbox_key($1, $2) AND p.consumer = $3 AND p.token = $4"
		" AND p.state = 'leased' FOR UPDATE",
		.nargs = 4,
		.types = {TEXTOID, TEXTOID, INT4OID, UUIDOID}
	};
	MemoryContext context = CurrentMemoryContext;
	Datum		values[4] = {CStringGetTextDatum(c->name), CStringGetTextDatum(msg_id),
	Int32GetDatum(c->id), UUIDPGetDatum(token)};
	List	   *taken;

	SPI_connect();
	idem_statement_run(&st, values, NULL);
	taken = parked_rows(NIL, context);
	SPI_finish();
	return taken == NIL ? NULL : linitial(taken);
}

/*
 * idem_take_seq
 *		Lock a message by its number; NULL if it is gone or somebody has it.
 */
IdemTaken *
idem_take_seq(const IdemDeclared *c, int64 seq)
{
	static IdemStatement parked = {
		.sql = "SELECT " PARKED_COLUMNS " FROM idem.inbox_parked p"
		" WHERE p.consumer = $1 AND p.seq = $2 FOR UPDATE SKIP LOCKED",
		.nargs = 2,
		.types = {INT4OID, INT8OID}
	};
	MemoryContext context = CurrentMemoryContext;
	Datum		values[2] = {Int32GetDatum(c->id), Int64GetDatum(seq)};
	IdemTaken  *t = NULL;
	List	   *found;
	Relation	heap;
	Relation	index;
	TupleTableSlot *slot;
	IndexScanDesc scan;
	ScanKeyData keys[2];

	SPI_connect();
	idem_statement_run(&parked, values, NULL);
	found = parked_rows(NIL, context);
	SPI_finish();
	if (found != NIL)
		return linitial(found);

	heap = idem_rel_open(IDEM_REL_INBOX_MESSAGE, RowExclusiveLock);
	index = idem_index_open(heap, Anum_message_consumer, Anum_message_seq);
	slot = table_slot_create(heap, NULL);
	ScanKeyInit(&keys[0], 1, BTEqualStrategyNumber, F_INT4EQ, Int32GetDatum(c->id));
	ScanKeyInit(&keys[1], 2, BTEqualStrategyNumber, F_INT8EQ, Int64GetDatum(seq));
	PushActiveSnapshot(GetTransactionSnapshot());
	scan = idem_index_beginscan(heap, index, GetActiveSnapshot(), 2);
	index_rescan(scan, keys, 2, NULL, 0);
	if (index_getnext_slot(scan, ForwardScanDirection, slot))
	{
		TupleTableSlot *locked = table_slot_create(heap, NULL);

		locked->tts_tid = slot->tts_tid;
		if (lock_row(heap, locked, GetActiveSnapshot()))
			t = taken_from_slot(slot);
		ExecDropSingleTupleTableSlot(locked);
	}
	index_endscan(scan);
	ExecDropSingleTupleTableSlot(slot);
	PopActiveSnapshot();
	index_close(index, AccessShareLock);
	table_close(heap, NoLock);
	return t;
}

/*-------------------------------------------------------------------------
 *
 * backlog.c
 *		What all processes know of the work that waits for consumers.
 *
 * Whoever looks for work must not begin at the start of an index: under a
 * held snapshot all that was processed since is still in there.  So there is
 * a mark per consumer, in shared memory, below which nothing was left when
 * somebody looked last.
 *
 * Numbers become visible in another order than they were given out.  So
 * whoever commits a message takes the mark down to it, after the commit has
 * become visible: as "incoming", which the next one to look folds in before it
 * takes its snapshot.  What commits after that snapshot is therefore either
 * still in "incoming", or was folded in by somebody else meanwhile; in that
 * case the mark stays where it is.
 *
 * All of this is lost with the server, and then begins at zero.  It also
 * remembers which messages the transactions of this session have taken: an
 * attempt that ends with its transaction counts all the same.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "catalog/pg_control.h"
#include "common/controldata_utils.h"
#include "lib/ilist.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "storage/spin.h"
#include "utils/memutils.h"

#include "backlog.h"
#include "guc.h"
#include "wake.h"
#include "worker.h"

#define MAX_LOST		1024

/* So many of the times that a mark was taken down are remembered. */
#define FOLDS			32

/* After a crash, for so long nothing runs that was not written down before. */
#define CAUTION_USECS	USECS_PER_MINUTE

struct IdemBacklog
{
	slock_t		mutex;
	Oid			database;		/* InvalidOid: free */
	int32		consumer;
	IdemMark	marks[IDEM_MARKS];
	uint32		folds[IDEM_MARKS];	/* how often something was folded in, */
	int64		folded[IDEM_MARKS][FOLDS];	/* and what it was, the last times */
	uint32		generation;		/* how often below what had been taken */
	int64		taken;			/* highest number that was taken */
	bool		ready;			/* there may be something to do */
	TimestampTz next_due;		/* when there will be */
	int			running;		/* handlers, */
	int			concurrency;	/* and how many may; 0: not known */
	char		reason[256];	/* why none run, or "" */
};

typedef struct BacklogShared
{
	LWLock	   *lock;			/* for taking places, and the lost attempts */
	TimestampTz cautious_until;
	int			nlost;
	IdemLostAttempt lost[MAX_LOST];
	int			nplaces;
	IdemBacklog places[FLEXIBLE_ARRAY_MEMBER];
} BacklogShared;

/* What this transaction has added, per consumer and mark; lowest only. */
typedef struct Addition
{
	slist_node	node;
	int32		consumer;
	IdemMarkKind kind;
	int64		at;
} Addition;

/* A message that this transaction has taken. */
typedef struct Taken
{
	slist_node	node;
	int32		consumer;
	int64		seq;
	pg_uuid_t	claim;
	SubTransactionId taken_in;
	SubTransactionId settled_in;	/* 0: not settled */
} Taken;

static BacklogShared *shared = NULL;
static slist_head additions = SLIST_STATIC_INIT(additions);
static slist_head takings = SLIST_STATIC_INIT(takings);

static bool handling = false;
static pg_uuid_t handled;
static int32 handled_consumer;
static int64 handled_seq;

/* The last error that this session reported while it had taken something. */
static int	failed_with = 0;
static emit_log_hook_type next_emit_log = NULL;

static Size
shared_size(void)
{
	return add_size(offsetof(BacklogShared, places),
					mul_size(idem_max_consumers, sizeof(IdemBacklog)));
}

void
idem_backlog_request(void)
{
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("idem_backlog", 1);
}

/* Did the server end in good order?  This is the postmaster, before recovery. */
static bool
ended_well(void)
{
	bool		crc_ok;
	ControlFileData *control = get_controlfile(DataDir, &crc_ok);
	bool		result = crc_ok && (control->state == DB_SHUTDOWNED ||
									control->state == DB_SHUTDOWNED_IN_RECOVERY);

	pfree(control);
	return result;
}

void
idem_backlog_startup(void)
{
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("idem_backlog", shared_size(), &found);
	if (!found)
	{
		memset(shared, 0, shared_size());
		shared->lock = &GetNamedLWLockTranche("idem_backlog")->lock;
		shared->nplaces = idem_max_consumers;
		for (int i = 0; i < shared->nplaces; i++)
			SpinLockInit(&shared->places[i].mutex);
		if (!ended_well())
			shared->cautious_until = GetCurrentTimestamp() + CAUTION_USECS;
	}
	LWLockRelease(AddinShmemInitLock);
}

/* Has the server crashed lately, so that a message may have done it? */
bool
idem_backlog_cautious(void)
{
	return shared != NULL && GetCurrentTimestamp() < shared->cautious_until;
}

static IdemBacklog *
find_place(int32 consumer)
{
	for (int i = 0; i < shared->nplaces; i++)
	{
		if (shared->places[i].database == MyDatabaseId &&
			shared->places[i].consumer == consumer)
			return &shared->places[i];
	}
	return NULL;
}

/*
 * idem_backlog
 *		The place of a consumer of this database; NULL if there is none for it.
 */
IdemBacklog *
idem_backlog(int32 consumer)
{
	IdemBacklog *b;

	if (shared == NULL)
		return NULL;
	LWLockAcquire(shared->lock, LW_SHARED);
	b = find_place(consumer);
	LWLockRelease(shared->lock);
	if (b != NULL)
		return b;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	b = find_place(consumer);
	for (int i = 0; i < shared->nplaces && b == NULL; i++)
	{
		if (shared->places[i].database == InvalidOid)
		{
			b = &shared->places[i];
			memset((char *) b + offsetof(IdemBacklog, database), 0,
				   sizeof(IdemBacklog) - offsetof(IdemBacklog, database));
			b->marks[IDEM_MARK_SEQ].incoming = PG_INT64_MAX;
			b->marks[IDEM_MARK_DUE].low = PG_INT64_MIN;
			b->marks[IDEM_MARK_DUE].incoming = PG_INT64_MAX;
			b->ready = true;
			b->consumer = consumer;
			b->database = MyDatabaseId;
		}
	}
	LWLockRelease(shared->lock);
	return b;
}

static int
compare_ids(const void *a, const void *b)
{
	int32		x = *(const int32 *) a;
	int32		y = *(const int32 *) b;

	return (x > y) - (x < y);
}

/*
 * idem_backlog_keep
 *		Free the places of consumers of this database that are gone.
 *
 * Of all others, that is; the numbers are sorted here.
 */
void
idem_backlog_keep(int32 *consumers, int n)
{
	if (shared == NULL)
		return;
	qsort(consumers, n, sizeof(int32), compare_ids);
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < shared->nplaces; i++)
	{
		IdemBacklog *b = &shared->places[i];

		if (b->database == MyDatabaseId && b->running == 0 &&
			bsearch(&b->consumer, consumers, n, sizeof(int32), compare_ids) == NULL)
			b->database = InvalidOid;
	}
	LWLockRelease(shared->lock);
}

/* A database is gone. */
void
idem_backlog_forget(Oid database)
{
	if (shared == NULL)
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < shared->nplaces; i++)
	{
		if (shared->places[i].database == database)
			shared->places[i].database = InvalidOid;
	}
	for (int i = shared->nlost - 1; i >= 0; i--)
	{
		if (shared->lost[i].database == database)
			shared->lost[i] = shared->lost[--shared->nlost];
	}
	LWLockRelease(shared->lock);
}

/*
 * idem_backlog_added
 *		This transaction adds something to what waits: say so when it commits.
 */
void
idem_backlog_added(int32 consumer, IdemMarkKind kind, int64 at)
{
	slist_iter	iter;
	Addition   *a;

	if (shared == NULL)
		return;
	slist_foreach(iter, &additions)
	{
		a = slist_container(Addition, node, iter.cur);
		if (a->consumer == consumer && a->kind == kind)
		{
			a->at = Min(a->at, at);
			return;
		}
	}
	/* the commit must not fail for want of a place */
	(void) idem_backlog(consumer);
	a = MemoryContextAlloc(TopTransactionContext, sizeof(Addition));
	a->consumer = consumer;
	a->kind = kind;
	a->at = at;
	slist_push_head(&additions, &a->node);
}

/*
 * Take a mark down, and have somebody look.  Is there anybody to be woken for
 * that?  Those who are at it look again before they sleep.
 */
static bool
come_in(int32 consumer, IdemMarkKind kind, int64 at)
{
	IdemBacklog *b;
	bool		wake;

	if (shared == NULL)
		return false;
	LWLockAcquire(shared->lock, LW_SHARED);
	b = find_place(consumer);
	LWLockRelease(shared->lock);
	if (b == NULL)
		return false;
	SpinLockAcquire(&b->mutex);
	b->marks[kind].incoming = Min(b->marks[kind].incoming, at);
	if (kind == IDEM_MARK_SEQ)
		b->ready = true;
	else
		b->next_due = Min(b->next_due, at);
	wake = b->running < Max(b->concurrency, 1);
	SpinLockRelease(&b->mutex);
	return wake;
}

/* Things may have come of which nobody knows: look at everything. */
void
idem_backlog_unknown(void)
{
	if (shared == NULL)
		return;
	LWLockAcquire(shared->lock, LW_SHARED);
	for (int i = 0; i < shared->nplaces; i++)
	{
		IdemBacklog *b = &shared->places[i];

		if (b->database != MyDatabaseId)
			continue;
		SpinLockAcquire(&b->mutex);
		b->marks[IDEM_MARK_SEQ].incoming = 0;
		b->marks[IDEM_MARK_DUE].incoming = PG_INT64_MIN;
		b->ready = true;
		SpinLockRelease(&b->mutex);
	}
	LWLockRelease(shared->lock);
	idem_wake_handler();
}

/* What came in is below the mark now.  Caller holds the spinlock. */
static void
fold(IdemBacklog *b, IdemMarkKind kind)
{
	IdemMark   *mark = &b->marks[kind];

	if (mark->incoming == PG_INT64_MAX)
		return;
	if (kind == IDEM_MARK_SEQ && mark->incoming <= b->taken)
		b->generation++;
	mark->low = Min(mark->low, mark->incoming);
	b->folded[kind][b->folds[kind]++ % FOLDS] = mark->incoming;
	mark->incoming = PG_INT64_MAX;
}

/* What this transaction has added itself, nobody else knows of yet. */
static int64
own_lowest(int32 consumer, IdemMarkKind kind)
{
	slist_iter	iter;

	slist_foreach(iter, &additions)
	{
		Addition   *a = slist_container(Addition, node, iter.cur);

		if (a->consumer == consumer && a->kind == kind)
			return a->at;
	}
	return PG_INT64_MAX;
}

/*
 * idem_backlog_look
 *		Begin to look; the caller takes its snapshot after this.
 */
void
idem_backlog_look(IdemLook *look, int32 consumer, IdemMarkKind kind)
{
	IdemBacklog *b = idem_backlog(consumer);

	look->backlog = b;
	look->consumer = consumer;
	look->from = kind == IDEM_MARK_SEQ ? 0 : PG_INT64_MIN;
	look->folds = 0;
	if (b == NULL)
		return;
	SpinLockAcquire(&b->mutex);
	fold(b, kind);
	look->from = b->marks[kind].low;
	look->folds = b->folds[kind];
	SpinLockRelease(&b->mutex);
	look->from = Min(look->from, own_lowest(consumer, kind));
}

/*
 * What others have folded in since this look began may be invisible to it,
 * wherever the mark was.  Caller holds the spinlock.
 */
static int64
folded_since(const IdemLook *look, IdemMarkKind kind)
{
	const IdemBacklog *b = look->backlog;
	uint32		n = b->folds[kind] - look->folds;
	int64		lowest = PG_INT64_MAX;

	if (n > FOLDS)
		return PG_INT64_MIN;
	for (uint32 i = 1; i <= n; i++)
		lowest = Min(lowest, b->folded[kind][(b->folds[kind] - i) % FOLDS]);
	return lowest;
}

/*
 * idem_backlog_looked
 *		Nothing was visible below this.
 *
 * To be called only if the snapshot was taken after idem_backlog_look().
 */
void
idem_backlog_looked(IdemLook *look, IdemMarkKind kind, int64 low)
{
	IdemBacklog *b = look->backlog;

	if (b == NULL)
		return;
	SpinLockAcquire(&b->mutex);
	low = Min(low, folded_since(look, kind));
	/* The place may be somebody else's by now. */
	if (low > b->marks[kind].low && b->consumer == look->consumer && b->database == MyDatabaseId)
		b->marks[kind].low = low;
	SpinLockRelease(&b->mutex);
}

/*
 * idem_backlog_missed
 *		The lowest number that this look may have passed without seeing it.
 */
int64
idem_backlog_missed(IdemLook *look)
{
	IdemBacklog *b = look->backlog;
	int64		missed;

	if (b == NULL)
		return PG_INT64_MAX;
	SpinLockAcquire(&b->mutex);
	missed = folded_since(look, IDEM_MARK_SEQ);
	SpinLockRelease(&b->mutex);
	return missed;
}

/*
 * idem_backlog_resume
 *		May a process go on where it was, beyond what others are at?
 *
 * It may, unless something has come in or been given back behind it.
 */
int64
idem_backlog_resume(IdemLook *look, int64 resume, uint32 *generation)
{
	IdemBacklog *b = look->backlog;
	bool		same;

	if (b == NULL)
		return look->from;
	SpinLockAcquire(&b->mutex);
	same = *generation == b->generation;
	*generation = b->generation;
	SpinLockRelease(&b->mutex);
	/* nor may we have added something there ourselves */
	resume = Min(resume, own_lowest(look->consumer, IDEM_MARK_SEQ));
	return same ? Max(resume, look->from) : look->from;
}

void
idem_backlog_took(IdemLook *look, int64 seq)
{
	IdemBacklog *b = look->backlog;

	if (b == NULL)
		return;
	SpinLockAcquire(&b->mutex);
	b->taken = Max(b->taken, seq);
	SpinLockRelease(&b->mutex);
}

/* Begin to run a handler, unless there are enough of them; false if so. */
bool
idem_backlog_enter(IdemBacklog *b, int concurrency)
{
	bool		ok;

	SpinLockAcquire(&b->mutex);
	b->concurrency = concurrency;
	ok = b->running < concurrency;
	if (ok)
		b->running++;
	SpinLockRelease(&b->mutex);
	return ok;
}

void
idem_backlog_leave(IdemBacklog *b)
{
	SpinLockAcquire(&b->mutex);
	b->running--;
	SpinLockRelease(&b->mutex);
}

/* May there be something to do?  Whoever asks and hears yes, looks. */
bool
idem_backlog_ready(IdemBacklog *b, TimestampTz now)
{
	bool		ready;

	SpinLockAcquire(&b->mutex);
	ready = b->ready || b->next_due <= now;
	if (ready)
	{
		b->ready = false;
		b->next_due = DT_NOEND;
	}
	SpinLockRelease(&b->mutex);
	return ready;
}

void
idem_backlog_set_ready(IdemBacklog *b)
{
	SpinLockAcquire(&b->mutex);
	b->ready = true;
	SpinLockRelease(&b->mutex);
}

/* Look again at this time, or before. */
void
idem_backlog_set_due(IdemBacklog *b, TimestampTz due)
{
	SpinLockAcquire(&b->mutex);
	b->next_due = Min(b->next_due, due);
	SpinLockRelease(&b->mutex);
}

TimestampTz
idem_backlog_next_due(IdemBacklog *b)
{
	TimestampTz due;

	SpinLockAcquire(&b->mutex);
	due = b->ready ? 0 : b->next_due;
	SpinLockRelease(&b->mutex);
	return due;
}

void
idem_backlog_set_reason(IdemBacklog *b, const char *reason)
{
	SpinLockAcquire(&b->mutex);
	strlcpy(b->reason, reason, sizeof(b->reason));
	SpinLockRelease(&b->mutex);
}

/* How many handlers run; "reason", of 256 bytes, becomes why none do, or "". */
int
idem_backlog_describe(IdemBacklog *b, char *reason)
{
	int			running;

	SpinLockAcquire(&b->mutex);
	running = b->running;
	strlcpy(reason, b->reason, sizeof(b->reason));
	SpinLockRelease(&b->mutex);
	return running;
}

/*
 * idem_backlog_lose
 *		An attempt at a message has ended without anything written about it.
 */
void
idem_backlog_lose(int32 consumer, int64 seq)
{
	if (shared == NULL)
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	/* If that is full, the attempt does not count; the message stays. */
	if (shared->nlost < MAX_LOST)
	{
		IdemLostAttempt *lost = &shared->lost[shared->nlost++];

		lost->database = MyDatabaseId;
		lost->consumer = consumer;
		lost->seq = seq;
	}
	LWLockRelease(shared->lock);
	(void) come_in(consumer, IDEM_MARK_SEQ, seq);
	(void) come_in(consumer, IDEM_MARK_DUE, PG_INT64_MIN);
}

/* Take one out that belongs to this database; false if there is none. */
bool
idem_backlog_next_lost(IdemLostAttempt *lost)
{
	bool		found = false;

	if (shared == NULL)
		return false;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (int i = 0; i < shared->nlost && !found; i++)
	{
		if (shared->lost[i].database == MyDatabaseId)
		{
			*lost = shared->lost[i];
			found = true;
			memmove(&shared->lost[i], &shared->lost[i + 1],
					(--shared->nlost - i) * sizeof(IdemLostAttempt));
		}
	}
	LWLockRelease(shared->lock);
	return found;
}

/* This transaction has taken a message. */
void
idem_backlog_taken(int32 consumer, int64 seq, const pg_uuid_t *claim)
{
	Taken	   *t = MemoryContextAllocZero(TopTransactionContext, sizeof(Taken));

	t->consumer = consumer;
	t->seq = seq;
	t->claim = *claim;
	t->taken_in = GetCurrentSubTransactionId();
	slist_push_head(&takings, &t->node);
}

static Taken *
find_taken(int32 consumer, int64 seq)
{
	slist_iter	iter;

	slist_foreach(iter, &takings)
	{
		Taken	   *t = slist_container(Taken, node, iter.cur);

		if (t->consumer == consumer && t->seq == seq && t->settled_in == 0)
			return t;
	}
	return NULL;
}

/*
 * idem_backlog_mine
 *		The numbers of the messages that this transaction has taken and not
 *		settled, or has its handler at: our own locks do not keep us out.
 */
int
idem_backlog_mine(int32 consumer, int64 **seqs)
{
	slist_iter	iter;
	int			n = 0;
	int			i = 0;

	slist_foreach(iter, &takings)
		n++;
	*seqs = palloc((n + 1) * sizeof(int64));
	slist_foreach(iter, &takings)
	{
		Taken	   *t = slist_container(Taken, node, iter.cur);

		if (t->consumer == consumer && t->settled_in == 0)
			(*seqs)[i++] = t->seq;
	}
	if (handling && handled_consumer == consumer)
		(*seqs)[i++] = handled_seq;
	return i;
}

/* The message that a handler is running for; with a claim of NULL: none. */
void
idem_backlog_set_handled(int32 consumer, int64 seq, const pg_uuid_t *claim)
{
	handling = claim != NULL;
	handled_consumer = consumer;
	handled_seq = seq;
	if (claim != NULL)
		handled = *claim;
}

/* Is this process at this message right now? */
bool
idem_backlog_is_handled(const pg_uuid_t *claim)
{
	slist_iter	iter;

	if (handling && memcmp(&handled, claim, UUID_LEN) == 0)
		return true;
	slist_foreach(iter, &takings)
	{
		Taken	   *t = slist_container(Taken, node, iter.cur);

		if (t->settled_in == 0 && memcmp(&t->claim, claim, UUID_LEN) == 0)
			return true;
	}
	return false;
}

/* It has said so now; false if it never had the message. */
bool
idem_backlog_settled(int32 consumer, int64 seq)
{
	Taken	   *t = find_taken(consumer, seq);

	if (t == NULL)
		return false;
	t->settled_in = GetCurrentSubTransactionId();
	return true;
}

static void
on_emit_log(ErrorData *edata)
{
	if (next_emit_log)
		next_emit_log(edata);
	if (edata->elevel == ERROR && !slist_is_empty(&takings))
		failed_with = edata->sqlerrcode;
}

/*
 * idem_backlog_counts
 *		Does a failure with this error count as an attempt?
 *
 * Not if it says no more than that others were at work at the same time.
 */
bool
idem_backlog_counts(int sqlstate)
{
	return sqlstate != ERRCODE_T_R_SERIALIZATION_FAILURE &&
		sqlstate != ERRCODE_T_R_DEADLOCK_DETECTED &&
		sqlstate != ERRCODE_LOCK_NOT_AVAILABLE;
}

/*
 * idem_backlog_give_back
 *		A message that was taken is free again, after this error or none (0).
 */
void
idem_backlog_give_back(int32 consumer, int64 seq, int sqlstate)
{
	if (idem_backlog_counts(sqlstate))
		idem_backlog_lose(consumer, seq);
	else
	{
		(void) come_in(consumer, IDEM_MARK_SEQ, seq);
		(void) come_in(consumer, IDEM_MARK_DUE, PG_INT64_MIN);
	}
}

static void
on_xact_end(XactEvent event, void *arg pg_attribute_unused())
{
	slist_iter	iter;
	bool		wake = false;

	if (event == XACT_EVENT_PRE_COMMIT || event == XACT_EVENT_PRE_PREPARE ||
		(slist_is_empty(&additions) && slist_is_empty(&takings)))
		return;
	if (event == XACT_EVENT_COMMIT)
	{
		slist_foreach(iter, &additions)
		{
			Addition   *a = slist_container(Addition, node, iter.cur);

			wake |= come_in(a->consumer, a->kind, a->at);
		}
		if (wake)
			idem_wake_handler();
	}

	/*
	 * Messages that were taken are free again, if the transaction has not
	 * settled them; by rolling back, it has unmade that, too.  One that keeps
	 * them till its end has tried.
	 */
	slist_foreach(iter, &takings)
	{
		Taken	   *t = slist_container(Taken, node, iter.cur);

		if (event == XACT_EVENT_ABORT || (event == XACT_EVENT_COMMIT && t->settled_in == 0))
			idem_backlog_give_back(t->consumer, t->seq, failed_with);
	}
	if (event != XACT_EVENT_PREPARE && !slist_is_empty(&takings))
		idem_wake_maintenance();
	slist_init(&additions);
	slist_init(&takings);
	failed_with = 0;
}

static void
on_subxact_end(SubXactEvent event, SubTransactionId me, SubTransactionId parent,
			   void *arg pg_attribute_unused())
{
	slist_mutable_iter iter;

	if (event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB)
		return;
	slist_foreach_modify(iter, &takings)
	{
		Taken	   *t = slist_container(Taken, node, iter.cur);

		if (event == SUBXACT_EVENT_COMMIT_SUB)
		{
			if (t->taken_in == me)
				t->taken_in = parent;
			if (t->settled_in == me)
				t->settled_in = parent;
		}
		else if (t->taken_in == me)
		{
			slist_delete_current(&iter);
			idem_backlog_give_back(t->consumer, t->seq, failed_with);
		}
		else if (t->settled_in == me)
			t->settled_in = 0;
	}
}

/* Called once in every process. */
void
idem_backlog_init(void)
{
	RegisterXactCallback(on_xact_end, NULL);
	RegisterSubXactCallback(on_subxact_end, NULL);
	next_emit_log = emit_log_hook;
	emit_log_hook = on_emit_log;
}

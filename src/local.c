/*-------------------------------------------------------------------------
 *
 * local.c
 *		Delivery to consumers in this database.
 *
 * The relay hands each message of the outbox to all consumers that have
 * subscribed to its topic.  The messages are stored for them in the same
 * transaction in which the position moves past them, so that each gets each
 * message exactly once.  Their position is that of the server with the empty
 * name.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "executor/spi.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/memutils.h"
#include "utils/snapmgr.h"

#include "backlog.h"
#include "declared.h"
#include "fault.h"
#include "inbox.h"
#include "local.h"
#include "parked.h"
#include "replay.h"
#include "statement.h"
#include "store.h"

#define LOCAL			""

/* So much is handed over in one transaction. */
#define PAGE_MESSAGES	1000
#define PAGE_BYTES		(4 * 1024 * 1024)

static bool wanted = false;		/* is there anybody to deliver to? */
static bool holding = false;	/* not at home here */
static bool positioned = false;
static IdemReader reader;
static int64 position_id = 0;
static List *replays = NIL;		/* of IdemReplay */
static MemoryContext replays_context = NULL;
static MemoryContext page_context = NULL;

/* A replay under way: the first of the list. */
static int64 replaying = 0;
static IdemReader replay_reader;
static int64 replay_position_id = 0;

static bool
any_subscription(void)
{
	ListCell   *lc;

	foreach(lc, idem_declared_all())
	{
		if (((IdemDeclared *) lfirst(lc))->topics != NIL)
			return true;
	}
	return false;
}

static int64
lowest_first_seq(void)
{
	int64		first = PG_INT64_MAX;
	ListCell   *lc;

	foreach(lc, idem_declared_all())
	{
		IdemDeclared *c = lfirst(lc);

		if (c->topics != NIL)
			first = Min(first, c->first_seq);
	}
	return first;
}

/* Find out where to go on, as soon as there is a tick. */
static void
find_position(int64 newest_tick)
{
	MemoryContext old;
	IdemPosition pos = {0};
	ListCell   *lc;

	if (positioned || !wanted || holding)
		return;
	if (!idem_position_load(LOCAL, 0, &pos, &position_id))
	{
		int64		first = lowest_first_seq();

		if (newest_tick == 0)
			return;
		pos.a = idem_position_start(first);
		if (pos.a == 0)
		{
			pos.b = newest_tick;
			pos.phase = IDEM_PHASE_NEW;
			pos.seq = Max(first - 1, 0);
		}
		/* Whoever begins in the past gets that from here. */
		foreach(lc, replays)
		{
			IdemReplay *replay = lfirst(lc);

			if (replay->fresh)
			{
				idem_replay_finish(replay->id);
				replays = foreach_delete_current(replays, lc);
			}
		}
	}
	old = MemoryContextSwitchTo(TopMemoryContext);
	idem_reader_init(&reader, &pos);
	MemoryContextSwitchTo(old);
	positioned = true;
}

/*
 * idem_local_orders
 *		Read anew who wants what.  Caller provides a transaction.
 */
void
idem_local_orders(int64 newest_tick, bool held)
{
	MemoryContext old;
	ListCell   *lc;
	bool		found = false;

	if (replays_context == NULL)
	{
		replays_context = AllocSetContextCreate(TopMemoryContext, "idem local replays",
												ALLOCSET_SMALL_SIZES);
		page_context = AllocSetContextCreate(TopMemoryContext, "idem local page",
											 ALLOCSET_DEFAULT_SIZES);
	}
	holding = held;
	idem_declared_forget();
	wanted = any_subscription();
	MemoryContextReset(replays_context);
	old = MemoryContextSwitchTo(replays_context);
	replays = idem_replays_load(LOCAL);
	MemoryContextSwitchTo(old);

	/* Somebody may have cancelled the one under way. */
	foreach(lc, replays)
		found |= ((IdemReplay *) lfirst(lc))->id == replaying;
	if (replaying != 0 && !found)
	{
		MemoryContextDelete(replay_reader.context);
		replaying = 0;
	}

	find_position(newest_tick);
}

/* Does a consumer that begins in the past wait for that first? */
static bool
is_waiting(const IdemDeclared *c)
{
	ListCell   *lc;

	foreach(lc, replays)
	{
		IdemReplay *replay = lfirst(lc);

		if (replay->fresh && replay->tick == 0 && strcmp(replay->consumer, c->name) == 0)
			return true;
	}
	return false;
}

/* Messages are in UTF-8; what is stored is in the database's encoding. */
static text *
server_text(const char *utf8)
{
	return utf8 == NULL ? NULL :
		cstring_to_text(pg_any_to_server(utf8, strlen(utf8), PG_UTF8));
}

static void
make_store(const IdemDeclared *c, const IdemMessage *m, IdemToStore *store)
{
	memset(store, 0, sizeof(IdemToStore));
	store->msg_id = cstring_to_text(DatumGetCString(DirectFunctionCall1(uuid_out,
																		UUIDPGetDatum(&m->id))));
	idem_inbox_message_key(c->name, store->msg_id, &store->claim);
	store->enqueued_at = m->enqueued_at;
	store->deliver_at = m->deliver_at;
	store->topic = server_text(m->topic);
	store->key = server_text(m->key);
	store->content_type = server_text(m->content_type);
	store->headers = server_text(m->headers);
	store->body = (bytea *) cstring_to_text_with_len(m->body, m->body_len);
}

/* Hand a page to a consumer. */
static void
hand_over(const IdemDeclared *c, List *messages, const IdemReplay *replay)
{
	IdemToStore *list = palloc(list_length(messages) * sizeof(IdemToStore));
	int			n = 0;
	ListCell   *lc;

	foreach(lc, messages)
	{
		IdemMessage *m = lfirst(lc);

		if (replay != NULL && (m->enqueued_at < replay->since || m->enqueued_at >= replay->until))
			continue;
		/* A replay may reach back to before the subscription. */
		if (!idem_declared_takes(c, m->topic, replay != NULL ? PG_INT64_MAX : m->seq))
			continue;
		make_store(c, m, &list[n]);
		list[n].replayed = replay != NULL && !replay->fresh;
		if (list[n].replayed)
			list[n].deliver_at = 0;
		n++;
	}
	if (n > 0)
		idem_store(c, list, n);
	pfree(list);
}

/* Read a page and hand it over; caller provides a transaction and commits it. */
static void
deliver_page(void)
{
	IdemPosition at;
	List	   *messages = idem_reader_page(&reader, PAGE_MESSAGES, PAGE_BYTES, &at);
	ListCell   *lc;

	if (messages != NIL)
	{
		foreach(lc, idem_declared_all())
		{
			IdemDeclared *c = lfirst(lc);

			if (c->topics != NIL && !is_waiting(c))
				hand_over(c, messages, NULL);
		}
	}
	idem_position_record(LOCAL, 0, &reader.pos, ++position_id);
	IDEM_FAULT("local-handing-over");
}

/* Go on with the first replay; true if something was read. */
static bool
deliver_replay(void)
{
	IdemReplay *replay;
	IdemDeclared *c;
	IdemPosition at;
	List	   *messages;

	if (replays == NIL)
		return false;
	replay = linitial(replays);
	if (replaying == 0)
	{
		IdemPosition pos = {0};
		MemoryContext old;

		if (replay->tick == 0)
		{
			/* What is old and what is new is defined between two rounds only. */
			if (reader.b != NULL || reader.pos.b != 0)
				return false;
			if (reader.pos.a == 0)
			{
				idem_replay_finish(replay->id);
				replays = list_delete_first(replays);
				return false;
			}
			idem_replay_begin(replay, reader.pos.a);
		}
		replay_position_id = 0;
		if (!idem_position_load(LOCAL, replay->id, &pos, &replay_position_id))
		{
			pos.b = replay->tick;
			pos.phase = IDEM_PHASE_NEW;
			pos.seq = Max(replay->from_seq - 1, 0);
		}
		old = MemoryContextSwitchTo(TopMemoryContext);
		idem_reader_init(&replay_reader, &pos);
		MemoryContextSwitchTo(old);
		replaying = replay->id;
	}

	c = idem_declared(replay->consumer);
	(void) idem_reader_begin_round(&replay_reader, 0);
	messages = idem_reader_page(&replay_reader, PAGE_MESSAGES, PAGE_BYTES, &at);
	if (c != NULL)
		hand_over(c, messages, replay);
	if (c == NULL || replay_reader.pos.b == 0)
	{
		idem_replay_finish(replay->id);
		replays = list_delete_first(replays);
		MemoryContextDelete(replay_reader.context);
		replaying = 0;
	}
	else
		idem_position_record(LOCAL, replay->id, &replay_reader.pos, ++replay_position_id);
	return true;
}

/*
 * idem_local_read
 *		Hand over a page of what is new, and one of what is replayed.
 *
 * No transaction may be open.  True if something was read; *hungry is set if
 * there is somebody who would like more.  An error leaves nothing behind, but
 * what is in memory is ahead then: call idem_local_reset().
 */
bool
idem_local_read(int64 newest_tick, bool *hungry)
{
	bool		fed = false;
	MemoryContext old;

	if (!wanted || holding)
		return false;
	if (!positioned)
	{
		StartTransactionCommand();
		PushActiveSnapshot(GetTransactionSnapshot());
		find_position(newest_tick);
		PopActiveSnapshot();
		CommitTransactionCommand();
		*hungry |= !positioned;
		if (!positioned)
			return false;
	}
	if (reader.b == NULL && reader.pos.b == 0 && newest_tick <= reader.pos.a && replays == NIL)
	{
		*hungry = true;
		return false;
	}

	SetCurrentStatementStartTimestamp();
	StartTransactionCommand();
	PushActiveSnapshot(GetTransactionSnapshot());
	pgstat_report_activity(STATE_RUNNING, "handing messages to consumers");
	MemoryContextReset(page_context);
	old = MemoryContextSwitchTo(page_context);
	if (idem_reader_begin_round(&reader, newest_tick))
	{
		deliver_page();
		fed = true;
	}
	fed |= deliver_replay();
	MemoryContextSwitchTo(old);
	PopActiveSnapshot();
	CommitTransactionCommand();
	pgstat_report_activity(STATE_IDLE, NULL);
	*hungry |= !fed;
	return fed;
}

/* Has everything up to there been handed over?  For emptying the outbox. */
bool
idem_local_has_passed(int64 last_seq, uint64 last_xid, int64 adopted_id)
{
	IdemTick   *a;
	ListCell   *lc;

	if (!wanted && !positioned)
		return true;
	if (!positioned)
		return false;
	a = reader.a;
	if (a->id != reader.pos.a || a->id < adopted_id || (a->all ? last_seq > a->seq_before : last_xid >= a->xmin))
		return false;
	foreach(lc, replays)
	{
		IdemReplay *replay = lfirst(lc);

		if (last_seq >= (replay->id == replaying ? replay_reader.pos.seq : replay->from_seq))
			return false;
	}
	return true;
}

/*
 * idem_local_forget
 *		Remove positions that were overtaken; returns the oldest tick needed.
 *
 * Caller provides a transaction.
 */
int64
idem_local_forget(void)
{
	int64		needed = PG_INT64_MAX;
	ListCell   *lc;

	if (!positioned)
		return wanted ? 0 : needed;
	needed = reader.pos.a;
	idem_position_forget(LOCAL, 0, position_id);
	if (replaying != 0)
		idem_position_forget(LOCAL, replaying, replay_position_id);
	foreach(lc, replays)
	{
		IdemReplay *replay = lfirst(lc);

		if (replay->tick != 0)
			needed = Min(needed, replay->tick);
	}
	return needed;
}

/*
 * idem_local_reset
 *		A transaction has failed: what is in memory may be ahead of it.
 */
void
idem_local_reset(void)
{
	if (positioned)
		MemoryContextDelete(reader.context);
	if (replaying != 0)
		MemoryContextDelete(replay_reader.context);
	positioned = false;
	replaying = 0;
	replays = NIL;
	wanted = false;				/* until the orders are read again */
}

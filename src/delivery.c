/*-------------------------------------------------------------------------
 *
 * delivery.c
 *		The messages on their way to one server.
 *
 * A window over the log: what was read stands in a queue in its order, leaves
 * for the courier, and goes when it and all before it are settled; that is
 * the position.  What the server does not take is parked, together with what
 * comes after it under the same key, so that one stuck key stops nobody else.
 * A server that takes nothing at all parks nothing.
 *
 * The courier says what happened; what to do about it is decided here.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "common/hashfn.h"
#include "common/pg_prng.h"
#include "miscadmin.h"
#include "utils/memutils.h"

#include "clock.h"
#include "delivery.h"
#include "parked.h"
#include "replay.h"
#include "route.h"

/* So many failures in a row say that it is the server, not the messages. */
#define FAILURES_MEAN_DOWN	5

/* So often is a message tried while the server seems down, then parked. */
#define MAX_PROBES			3

/* What has been with so many couriers when they died is sent alone. */
#define KILLS_MEAN_SUSPECT	2

/* Do not put more than this on the line at once. */
#define MAX_ON_LINE			(4 * 1024 * 1024)

/* The memory of messages that were read together. */
typedef struct DeliveryPage
{
	MemoryContext context;
	int			refs;
} DeliveryPage;

typedef enum EntryState
{
	ENTRY_QUEUED,
	ENTRY_SENT,
	ENTRY_DONE
} EntryState;

/* What is to be written about an entry. */
typedef enum EntryFate
{
	FATE_NONE,
	FATE_PARK,
	FATE_BURY
} EntryFate;

typedef struct DeliveryEntry
{
	dlist_node	node;
	DeliveryPage *page;			/* NULL: only marks a position */
	IdemMessage *m;
	IdemParked	parked;
	bool		was_parked;		/* it has a row in relay_parked */
	IdemPosition after;			/* the position when this is settled */
	EntryState	state;
	EntryFate	fate;
	uint64		ticket;
	uint64		key_hash;		/* 0: no key */
	int			probes;
	int			kills;
	uint32		code;
	char	   *error;
	bool		answered;		/* delivered, and the answer is to be kept */
} DeliveryEntry;

typedef struct ParkedKey
{
	uint64		hash;
	int			count;
} ParkedKey;

IdemDelivery *
idem_delivery_create(const char *name)
{
	MemoryContext context = AllocSetContextCreate(TopMemoryContext,
												  "idem delivery",
												  ALLOCSET_DEFAULT_SIZES);
	IdemDelivery *d = MemoryContextAllocZero(context, sizeof(IdemDelivery));
	HASHCTL		ctl = {.keysize = sizeof(uint64), .entrysize = sizeof(ParkedKey)};

	strlcpy(d->name, name, NAMEDATALEN);
	d->context = context;
	d->next_ticket = 1;
	dlist_init(&d->entries);
	dlist_init(&d->retries);
	dlist_init(&d->settled);
	ctl.hcxt = context;
	d->parked_keys = hash_create("idem parked keys", 64, &ctl,
								 HASH_ELEM | HASH_BLOBS | HASH_CONTEXT);
	d->stat = idem_relay_stat_attach(name);
	return d;
}

/* The server has another name; who renamed it has done so in our tables. */
void
idem_delivery_rename(IdemDelivery *d, const char *name)
{
	strlcpy(d->name, name, NAMEDATALEN);
	idem_relay_stat_rename(d->stat, name);
}

void
idem_delivery_drop(IdemDelivery *d)
{
	if (d->link != NULL)
		idem_link_close(d->link);
	idem_relay_stat_detach(d->stat);
	MemoryContextDelete(d->context);
}

void
idem_delivery_set_state(IdemDelivery *d, IdemServerState state, const char *reason)
{
	if (reason == NULL)
		reason = "";

	/* Trouble is worth a line when it begins or changes, not every time. */
	if ((state == IDEM_SERVER_BACKING_OFF || state == IDEM_SERVER_BLOCKED) &&
		strcmp(d->logged, reason) != 0)
	{
		ereport(LOG, (errmsg("idem: server \"%s\" is %s: %s", d->name,
							 state == IDEM_SERVER_BLOCKED ? "blocked" : "down",
							 reason)));
		strlcpy(d->logged, reason, sizeof(d->logged));
	}
	if (d->reason != reason)
		strlcpy(d->reason, reason, sizeof(d->reason));
	d->state = state;
	SpinLockAcquire(&d->stat->mutex);
	d->stat->state = d->state;
	strlcpy(d->stat->reason, d->reason, sizeof(d->stat->reason));
	d->stat->courier = d->link != NULL ? d->link->pid : 0;
	SpinLockRelease(&d->stat->mutex);
}

/* A pause before the next try: it doubles, and varies. */
static int
next_backoff(IdemDelivery *d, int last_ms)
{
	int			ms = last_ms == 0 ? d->server->retry_min_ms :
	(int) Min((int64) last_ms * 2, d->server->retry_max_ms);

	return Max(1, (int) (ms * (0.5 + pg_prng_double(&pg_global_prng_state) / 2)));
}

/* Leave the server alone for a while; nothing is parked for that. */
static void
back_off(IdemDelivery *d, IdemServerState state, const char *reason,
		 uint32 retry_after_ms)
{
	int			ms;

	/* Of the many messages that come back at once, the first decides. */
	if ((d->state == IDEM_SERVER_BACKING_OFF || d->state == IDEM_SERVER_BLOCKED) &&
		d->until > idem_clock() && state != IDEM_SERVER_BLOCKED)
		return;
	d->backoff_ms = d->backoff_ms == 0 ? d->server->retry_min_ms :
		(int) Min((int64) d->backoff_ms * 2, d->server->retry_max_ms);
	ms = state == IDEM_SERVER_BLOCKED ? d->server->retry_max_ms :
		next_backoff(d, d->backoff_ms / 2);
	d->until = TimestampTzPlusMilliseconds(idem_clock(),
										   Max(ms, (int) Min(retry_after_ms, 3600000)));
	d->probing = true;
	idem_relay_stat_error(d->stat, reason);
	idem_delivery_set_state(d, state, reason);
}

static uint64
hash_key(const char *key)
{
	uint64		hash;

	if (key == NULL)
		return 0;
	hash = hash_bytes_extended((const unsigned char *) key, strlen(key), 0);
	return hash == 0 ? 1 : hash;
}

static void
count_parked_key(IdemDelivery *d, uint64 hash, int n)
{
	ParkedKey  *entry;
	bool		found;

	if (hash == 0 || d->server->order == IDEM_ORDER_NONE)
		return;
	entry = hash_search(d->parked_keys, &hash, HASH_ENTER, &found);
	if (!found)
		entry->count = 0;
	entry->count += n;
	if (entry->count <= 0)
		hash_search(d->parked_keys, &hash, HASH_REMOVE, NULL);
}

static bool
key_is_parked(IdemDelivery *d, uint64 hash)
{
	return hash != 0 && hash_get_num_entries(d->parked_keys) > 0 &&
		hash_search(d->parked_keys, &hash, HASH_FIND, NULL) != NULL;
}

/*
 * idem_delivery_position
 *		Find out where to go on.  Caller provides a transaction.
 */
void
idem_delivery_position(IdemDelivery *d, int64 newest_tick)
{
	MemoryContext old = MemoryContextSwitchTo(d->context);
	IdemPosition pos = {0};
	ListCell   *lc;
	uint64		room = 1;

	if (!idem_position_load(d->name, 0, &pos, &d->position_id))
	{
		int64		first = PG_INT64_MAX;

		foreach(lc, d->routes)
			first = Min(first, ((IdemRoute *) lfirst(lc))->first_seq);
		if (first == PG_INT64_MAX || newest_tick == 0)
		{
			MemoryContextSwitchTo(old);
			return;
		}
		pos.a = idem_position_start(first);
		if (pos.a == 0)
		{
			/* Nobody has asked for what came before. */
			pos.b = newest_tick;
			pos.phase = IDEM_PHASE_NEW;
			pos.seq = Max(first - 1, 0);
		}

		/* New routes that begin in the past get that from here. */
		foreach(lc, d->replays)
		{
			IdemReplay *replay = lfirst(lc);

			if (replay->route != 0)
			{
				idem_replay_finish(replay->id);
				d->replays = foreach_delete_current(d->replays, lc);
			}
		}
	}
	else
		d->round_is_open = pos.b != 0;
	idem_reader_init(&d->reader, &pos);
	d->done = pos;
	foreach(lc, idem_parked_keys(d->name))
		count_parked_key(d, hash_key(lfirst(lc)), 1);
	while (room < (uint64) d->server->window_messages * 2)
		room *= 2;
	d->ring = palloc0(room * sizeof(DeliveryEntry *));
	d->ring_mask = room - 1;
	d->positioned = true;
	MemoryContextSwitchTo(old);
}

/*
 * So many messages are held in memory: those that are sent, and as many that
 * can go out as soon as these are answered.
 */
static int
most_entries(IdemDelivery *d)
{
	return 2 * d->server->window_messages;
}

/* Is there room for more, and is it the time for it? */
bool
idem_delivery_wants(IdemDelivery *d)
{
	return d->positioned && d->state == IDEM_SERVER_RUNNING &&
		d->nentries < most_entries(d) &&
		d->nbytes < d->server->window_bytes;
}

static DeliveryPage *
new_page(IdemDelivery *d)
{
	DeliveryPage *page = MemoryContextAlloc(d->context, sizeof(DeliveryPage));

	page->context = AllocSetContextCreate(d->context, "idem page",
										  ALLOCSET_DEFAULT_SIZES);
	page->refs = 0;
	return page;
}

static void
release_page(DeliveryPage *page)
{
	if (page->refs > 0)
		return;
	MemoryContextDelete(page->context);
	pfree(page);
}

static DeliveryEntry *
new_entry(IdemDelivery *d, DeliveryPage *page, IdemMessage *m)
{
	DeliveryEntry *e = MemoryContextAllocZero(d->context, sizeof(DeliveryEntry));

	e->page = page;
	e->m = m;
	if (page != NULL)
	{
		page->refs++;
		e->key_hash = hash_key(m->key);
		e->parked.seq = m->seq;
		e->parked.key = m->key;
		d->nbytes += m->body_len;
	}
	return e;
}

static void
free_entry(IdemDelivery *d, DeliveryEntry *e)
{
	if (e->page != NULL)
	{
		d->nbytes -= e->m->body_len;
		e->page->refs--;
		release_page(e->page);
	}
	if (e->error != NULL)
		pfree(e->error);
	pfree(e);
}

/*
 * This message is not for now: it is settled by parking it, which is written
 * in the transaction that moves the position past it.
 */
static void
park(IdemDelivery *d, DeliveryEntry *e, IdemParkedState state, TimestampTz due)
{
	if (!e->was_parked && e->fate != FATE_PARK && state != IDEM_PARKED_DELAYED)
		count_parked_key(d, e->key_hash, 1);
	e->parked.state = state;
	e->parked.due = due;
	e->fate = FATE_PARK;
	e->state = ENTRY_DONE;
}

/* Put a message that a route takes into a queue. */
static void
add_message(IdemDelivery *d, dlist_head *queue, DeliveryPage *page, IdemMessage *m,
			const IdemRoute *route, const IdemPosition *at)
{
	DeliveryEntry *e = new_entry(d, page, m);
	MemoryContext old = MemoryContextSwitchTo(page->context);

	e->after = *at;
	e->after.seq = m->seq;
	e->parked.route = route->id;
	e->parked.destination = idem_route_destination(route, m->topic, m->key);
	MemoryContextSwitchTo(old);
	if (m->deliver_at != 0 && m->deliver_at > GetCurrentTimestamp())
		park(d, e, IDEM_PARKED_DELAYED, m->deliver_at);
	else if (key_is_parked(d, e->key_hash))
		park(d, e, IDEM_PARKED_BEHIND, 0);
	dlist_push_tail(queue, &e->node);
	d->nentries++;
}

/* The position may move past what nobody wanted, too. */
static void
add_mark(IdemDelivery *d, dlist_head *queue, const IdemPosition *pos)
{
	DeliveryEntry *mark = new_entry(d, NULL, NULL);

	mark->after = *pos;
	mark->state = ENTRY_DONE;
	dlist_push_tail(queue, &mark->node);
	d->nentries++;
}

static bool
route_takes(const IdemRoute *route, const IdemMessage *m)
{
	return m->seq >= route->first_seq && m->seq <= route->last_seq &&
		m->enqueued_at >= route->since && idem_route_match(route->pattern, m->topic);
}

/* Is this a new route that has not got to the present yet? */
static bool
route_is_waiting(IdemDelivery *d, const IdemRoute *route)
{
	ListCell   *lc;

	foreach(lc, d->replays)
	{
		IdemReplay *replay = lfirst(lc);

		if (replay->route == route->id && replay->tick == 0)
			return true;
	}
	return false;
}

static List *
read_page(IdemDelivery *d, IdemReader *reader, int max, DeliveryPage *page, IdemPosition *at)
{
	MemoryContext old = MemoryContextSwitchTo(page->context);
	List	   *messages = idem_reader_page(reader, Min(d->server->batch_messages, max),
											d->server->window_bytes - d->nbytes, at);

	MemoryContextSwitchTo(old);
	return messages;
}

/*
 * idem_delivery_read
 *		Read a page of the log into the queue.  Caller provides a transaction.
 */
void
idem_delivery_read(IdemDelivery *d, int64 newest_tick)
{
	DeliveryPage *page;
	ListCell   *lc;
	ListCell   *lc2;
	IdemPosition at;

	if (!idem_reader_begin_round(&d->reader, newest_tick))
		return;

	page = new_page(d);
	foreach(lc, read_page(d, &d->reader, most_entries(d) - d->nentries, page, &at))
	{
		IdemMessage *m = lfirst(lc);

		foreach(lc2, d->routes)
		{
			IdemRoute  *route = lfirst(lc2);

			if (route_takes(route, m) && !route_is_waiting(d, route))
				add_message(d, &d->entries, page, m, route, &at);
		}
	}
	add_mark(d, &d->entries, &d->reader.pos);
	release_page(page);
}

/* Go on with the first replay that was ordered, if now is the time for it. */
static bool
begin_replay(IdemDelivery *d)
{
	IdemReplay *orders;
	IdemReplaying *r;
	MemoryContext old;

	if (d->replays == NIL)
		return false;
	orders = linitial(d->replays);
	if (orders->tick == 0)
	{
		/* What is old and what is new is defined between two rounds only. */
		if (d->reader.b != NULL || d->reader.pos.b != 0)
			return false;
		if (d->reader.pos.a == 0)
		{
			idem_replay_finish(orders->id);
			d->replays = list_delete_first(d->replays);
			return false;
		}
		idem_replay_begin(orders, d->reader.pos.a);
	}

	old = MemoryContextSwitchTo(d->context);
	r = palloc0(sizeof(IdemReplaying));
	r->orders = *orders;
	dlist_init(&r->entries);
	if (!idem_position_load(d->name, orders->id, &r->done, &r->position_id))
	{
		r->done.b = orders->tick;
		r->done.phase = IDEM_PHASE_NEW;
		r->done.seq = Max(orders->from_seq - 1, 0);
	}
	idem_reader_init(&r->reader, &r->done);
	MemoryContextSwitchTo(old);
	d->replaying = r;
	return true;
}

/*
 * idem_delivery_read_replay
 *		Read a page of what is to be sent again; false if there is none.
 *
 * Caller provides a transaction.
 */
bool
idem_delivery_read_replay(IdemDelivery *d)
{
	IdemReplaying *r;
	DeliveryPage *page;
	IdemPosition at;
	ListCell   *lc;
	ListCell   *lc2;
	int			before = d->nentries;
	int			room;
	bool		any_parked;

	if (d->replaying == NULL && !begin_replay(d))
		return false;
	r = d->replaying;

	/* Half of the window, so that what is new gets through, too. */
	room = (d->server->window_messages + 1) / 2 - r->nentries;
	if (r->reader.pos.b == 0 || room <= 0)
		return false;
	(void) idem_reader_begin_round(&r->reader, 0);

	page = new_page(d);
	any_parked = idem_parked_exists(d->name, 0, 0);
	foreach(lc, read_page(d, &r->reader, room, page, &at))
	{
		IdemMessage *m = lfirst(lc);

		if (m->enqueued_at < r->orders.since || m->enqueued_at >= r->orders.until)
			continue;
		foreach(lc2, d->routes)
		{
			IdemRoute  *route = lfirst(lc2);

			/* What is parked is sent anyway. */
			if (route_takes(route, m) &&
				(r->orders.route == 0 || r->orders.route == route->id) &&
				!(any_parked && idem_parked_exists(d->name, m->seq, route->id)))
				add_message(d, &r->entries, page, m, route, &at);
		}
	}
	add_mark(d, &r->entries, &r->reader.pos);
	r->nentries += d->nentries - before;
	release_page(page);
	return true;
}

/*
 * idem_delivery_set_replays
 *		What is to be replayed has changed; somebody may have cancelled it.
 */
void
idem_delivery_set_replays(IdemDelivery *d, List *replays)
{
	bool		wanted = false;
	ListCell   *lc;

	d->replays = replays;
	if (d->replaying == NULL)
		return;
	foreach(lc, replays)
		wanted |= ((IdemReplay *) lfirst(lc))->id == d->replaying->orders.id;
	/* What was read is sent; that is no more than a window. */
	if (!wanted)
	{
		idem_reader_stop(&d->replaying->reader);
		d->replaying->dirty = true;
	}
}

/*
 * idem_delivery_read_due
 *		Fetch parked messages whose time has come.  Caller provides a transaction.
 */
void
idem_delivery_read_due(IdemDelivery *d)
{
	List	   *due;
	ListCell   *lc;
	DeliveryPage *page;
	MemoryContext old;

	/* Those under way are still in the table: one batch after the other. */
	if (d->nretries > 0 || !dlist_is_empty(&d->settled))
		return;

	page = new_page(d);
	old = MemoryContextSwitchTo(page->context);
	due = idem_parked_due(d->name, Min(d->server->batch_messages, d->server->window_messages));
	foreach(lc, due)
	{
		IdemParked *parked = lfirst(lc);
		IdemMessage *m;
		DeliveryEntry *e;

		/* The others are still due when these are settled. */
		if (d->nretries > 0 && d->nbytes >= d->server->window_bytes)
			break;
		m = idem_log_message(parked->seq);
		if (m == NULL)
			m = idem_kept_message(parked->seq);
		if (m == NULL)
		{
			/* No other message has to suffer for that. */
			ereport(WARNING,
					(errcode(ERRCODE_DATA_CORRUPTED),
					 errmsg("idem: message " INT64_FORMAT " for server \"%s\" is not in the outbox any more",
							parked->seq, d->name)));
			idem_dead_letter_lost(d->name, parked);
			if (parked->state != IDEM_PARKED_DELAYED)
				count_parked_key(d, hash_key(parked->key), -1);
			continue;
		}
		e = new_entry(d, page, m);
		e->parked = *parked;
		e->was_parked = parked->state != IDEM_PARKED_DELAYED;
		if (parked->state == IDEM_PARKED_DELIVERED)
		{
			e->state = ENTRY_DONE;
			dlist_push_tail(&d->settled, &e->node);
			continue;
		}
		if (parked->state == IDEM_PARKED_DELAYED && key_is_parked(d, e->key_hash))
		{
			park(d, e, IDEM_PARKED_BEHIND, 0);
			dlist_push_tail(&d->settled, &e->node);
			continue;
		}
		if (parked->state == IDEM_PARKED_DELAYED)
			count_parked_key(d, e->key_hash, 1);
		e->was_parked = true;
		dlist_push_tail(&d->retries, &e->node);
		d->nretries++;
	}
	MemoryContextSwitchTo(old);
	release_page(page);
	d->next_due = d->nretries > 0 ? 0 : idem_parked_next_due(d->name);
}

/*
 * idem_delivery_recount
 *		Count parked keys anew, when all there is to know is in the table.
 *
 * A safety net: a key must not wait for a message that is gone.  Caller
 * provides a transaction.
 */
void
idem_delivery_recount(IdemDelivery *d)
{
	HASH_SEQ_STATUS seq;
	ParkedKey  *entry;
	ListCell   *lc;

	if (!d->positioned || d->nentries > 0 || d->nretries > 0 ||
		!dlist_is_empty(&d->settled) || hash_get_num_entries(d->parked_keys) == 0)
		return;
	idem_parked_promote(d->name);
	d->next_due = 0;
	hash_seq_init(&seq, d->parked_keys);
	while ((entry = hash_seq_search(&seq)) != NULL)
		hash_search(d->parked_keys, &entry->hash, HASH_REMOVE, NULL);
	foreach(lc, idem_parked_keys(d->name))
		count_parked_key(d, hash_key(lfirst(lc)), 1);
}

/* Hand one message to the courier; false if there is no room for it. */
static bool
send_entry(IdemDelivery *d, DeliveryEntry *e)
{
	uint64		slot = d->next_ticket & d->ring_mask;

	bool		suspect = e->kills >= KILLS_MEAN_SUSPECT;

	if (d->nsent >= d->server->window_messages ||
		d->ring[slot] != NULL || idem_link_pending(d->link) > MAX_ON_LINE ||
		((d->probing || d->alone || suspect) && d->nsent > 0))
		return false;
	d->alone = suspect;
	e->ticket = d->next_ticket++;
	e->state = ENTRY_SENT;
	d->ring[slot] = e;
	d->nsent++;
	idem_link_send(d->link, e->ticket, e->m, e->parked.destination,
				   e->parked.attempts + 1);
	return true;
}

/* Send what is queued, in order. */
void
idem_delivery_send(IdemDelivery *d)
{
	dlist_iter	iter;

	if (d->link == NULL || !d->link->ready || d->state != IDEM_SERVER_RUNNING ||
		d->replace_by != 0)
		return;
	dlist_foreach(iter, &d->retries)
	{
		DeliveryEntry *e = dlist_container(DeliveryEntry, node, iter.cur);

		if (e->state == ENTRY_QUEUED && !send_entry(d, e))
			return;
	}
	if (d->unsent == NULL && !dlist_is_empty(&d->entries))
		d->unsent = dlist_head_node(&d->entries);
	while (d->unsent != NULL)
	{
		DeliveryEntry *e = dlist_container(DeliveryEntry, node, d->unsent);

		if (e->state == ENTRY_QUEUED && !send_entry(d, e))
			return;
		/* stay at the last one: more will be put behind it */
		if (!dlist_has_next(&d->entries, d->unsent))
			break;
		d->unsent = dlist_next_node(&d->entries, d->unsent);
	}
	if (d->replaying == NULL)
		return;
	dlist_foreach(iter, &d->replaying->entries)
	{
		DeliveryEntry *e = dlist_container(DeliveryEntry, node, iter.cur);

		if (e->state == ENTRY_QUEUED && !send_entry(d, e))
			return;
	}
}

/* The same key may not overtake: park what is queued behind a parked one. */
static void
park_behind(IdemDelivery *d, DeliveryEntry *first)
{
	dlist_head *queues[] = {&d->retries, &d->entries,
	d->replaying ? &d->replaying->entries : NULL};

	if (first->key_hash == 0 || d->server->order == IDEM_ORDER_NONE)
		return;
	for (int i = 0; i < 3 && queues[i] != NULL; i++)
	{
		dlist_iter	iter;

		dlist_foreach(iter, queues[i])
		{
			DeliveryEntry *e = dlist_container(DeliveryEntry, node, iter.cur);

			if (e != first && e->state == ENTRY_QUEUED && e->page != NULL &&
				e->key_hash == first->key_hash)
				park(d, e, IDEM_PARKED_BEHIND, 0);
		}
	}
}

static void
note_error(IdemDelivery *d, DeliveryEntry *e, uint32 code, const char *text)
{
	e->code = code;
	if (e->error != NULL)
		pfree(e->error);
	e->error = MemoryContextStrdup(d->context, text);
	idem_relay_stat_error(d->stat, text);
}

static void
bury(IdemDelivery *d, DeliveryEntry *e)
{
	ereport(LOG,
			(errmsg("idem: message " INT64_FORMAT " for server \"%s\" is a dead letter: %s",
					e->m->seq, d->name, e->error != NULL ? e->error : "")));
	e->fate = FATE_BURY;
	e->state = ENTRY_DONE;
	SpinLockAcquire(&d->stat->mutex);
	d->stat->dead++;
	SpinLockRelease(&d->stat->mutex);
}

/* It failed, and that counts: try again later, or give it up. */
static void
fail_attempt(IdemDelivery *d, DeliveryEntry *e, uint32 retry_after_ms)
{
	int			ms = d->server->retry_min_ms;

	e->parked.attempts++;
	if (!e->was_parked && key_is_parked(d, e->key_hash))
	{
		park(d, e, IDEM_PARKED_BEHIND, 0);
		return;
	}
	/* Only a server that takes others can say that it is the message. */
	if (e->parked.attempts >= d->server->max_attempts &&
		d->has_delivered && d->failures < FAILURES_MEAN_DOWN)
	{
		bury(d, e);
		return;
	}
	for (int i = 1; i < e->parked.attempts && ms < d->server->retry_max_ms; i++)
		ms *= 2;
	ms = Max(next_backoff(d, Min(ms, d->server->retry_max_ms) / 2),
			 (int) Min(retry_after_ms, 3600000));
	park(d, e, IDEM_PARKED_RETRY,
		 TimestampTzPlusMilliseconds(GetCurrentTimestamp(), ms));
	park_behind(d, e);
	SpinLockAcquire(&d->stat->mutex);
	d->stat->retried++;
	SpinLockRelease(&d->stat->mutex);
}

static void
count_unknown(IdemDelivery *d)
{
	SpinLockAcquire(&d->stat->mutex);
	d->stat->unknown++;
	SpinLockRelease(&d->stat->mutex);
}

/* Nobody knows whether it arrived. */
static void
settle_unknown(IdemDelivery *d, DeliveryEntry *e)
{
	count_unknown(d);
	if (d->server->on_unknown == IDEM_UNKNOWN_HOLD)
	{
		park(d, e, IDEM_PARKED_HELD, 0);
		park_behind(d, e);
	}
	else
		e->state = ENTRY_QUEUED;
}

/* Decide what becomes of a message now that its outcome is known. */
static void
settle(IdemDelivery *d, DeliveryEntry *e, IdemFrame *frame, TimestampTz now)
{
	d->ring[e->ticket & d->ring_mask] = NULL;
	d->nsent--;
	if (frame->outcome != IDEM_DELIVERED)
		d->unsent = NULL;		/* it may be queued again */

	switch (frame->outcome)
	{
		case IDEM_DELIVERED:
			e->state = ENTRY_DONE;
			d->has_delivered = true;
			d->unflushed++;
			d->failures = 0;
			d->backoff_ms = 0;
			d->probing = false;
			if (d->logged[0] != '\0')
				ereport(LOG, (errmsg("idem: server \"%s\" is up again", d->name)));
			d->logged[0] = '\0';
			idem_relay_stat_sent(d->stat, e->m->enqueued_at, now);
			if (d->server->keep_answer && frame->type == 'o')
			{
				e->answered = true;
				e->code = frame->code;
				if (e->error != NULL)
					pfree(e->error);
				e->error = frame->text == NULL ? NULL :
					MemoryContextStrdup(d->context, frame->text);
			}
			break;

		case IDEM_TRANSIENT:
			note_error(d, e, frame->code, frame->text);
			if (++d->failures < FAILURES_MEAN_DOWN || e->was_parked ||
				++e->probes > MAX_PROBES)
				fail_attempt(d, e, frame->retry_after_ms);
			else
			{
				e->state = ENTRY_QUEUED;
				back_off(d, IDEM_SERVER_BACKING_OFF, frame->text,
						 frame->retry_after_ms);
			}
			break;

		case IDEM_PERMANENT:
			note_error(d, e, frame->code, frame->text);
			e->parked.attempts++;
			bury(d, e);
			break;

		case IDEM_REFUSED:
			e->state = ENTRY_QUEUED;
			back_off(d, IDEM_SERVER_BLOCKED, frame->text, frame->retry_after_ms);
			break;

		case IDEM_UNKNOWN:
			note_error(d, e, frame->code, frame->text);
			settle_unknown(d, e);
			if (e->state != ENTRY_QUEUED || d->state != IDEM_SERVER_RUNNING)
				break;
			/* One that is never answered must not be all that is ever tried. */
			if (e->was_parked || ++e->probes > MAX_PROBES)
			{
				d->failures++;
				fail_attempt(d, e, frame->retry_after_ms);
			}
			else
				back_off(d, IDEM_SERVER_BACKING_OFF, frame->text, frame->retry_after_ms);
			break;

		case IDEM_RETURNED:
			/* What was parked is read anew when its turn has come. */
			e->state = ENTRY_QUEUED;
			if (e->was_parked || key_is_parked(d, e->key_hash))
				park(d, e, IDEM_PARKED_BEHIND, 0);
			else if (d->state == IDEM_SERVER_RUNNING && ++e->probes > MAX_PROBES)
				back_off(d, IDEM_SERVER_BACKING_OFF, "courier returns messages and does not say why", 0);
			break;
	}
}

/* Take what is settled from the head of a queue; the position follows. */
static void
pop_queue(IdemDelivery *d, dlist_head *queue, IdemPosition *done, bool *dirty)
{
	while (!dlist_is_empty(queue))
	{
		DeliveryEntry *e = dlist_head_element(DeliveryEntry, node, queue);

		if (e->state != ENTRY_DONE)
			break;
		if (d->unsent == &e->node)
			d->unsent = NULL;
		dlist_delete(&e->node);
		d->nentries--;

		/* Several routes may take a message: it is done with the last. */
		if (dlist_is_empty(queue) || e->page == NULL ||
			dlist_head_element(DeliveryEntry, node, queue)->page == NULL ||
			dlist_head_element(DeliveryEntry, node, queue)->m != e->m)
		{
			*done = e->after;
			*dirty = true;
		}
		if (e->fate == FATE_NONE && !e->answered)
			free_entry(d, e);
		else
			dlist_push_tail(&d->settled, &e->node);
	}
}

static void
pop_settled(IdemDelivery *d)
{
	dlist_mutable_iter iter;

	pop_queue(d, &d->entries, &d->done, &d->dirty);
	if (d->replaying != NULL)
	{
		int			before = d->nentries;

		pop_queue(d, &d->replaying->entries, &d->replaying->done, &d->replaying->dirty);
		d->replaying->nentries -= before - d->nentries;
	}
	dlist_foreach_modify(iter, &d->retries)
	{
		DeliveryEntry *e = dlist_container(DeliveryEntry, node, iter.cur);

		if (e->state != ENTRY_DONE)
			continue;
		dlist_delete(&e->node);
		d->nretries--;
		dlist_push_tail(&d->settled, &e->node);
	}
}

static int
levels_to_elevel(uint32 level)
{
	return level == 0 ? DEBUG1 : level == 1 ? LOG : WARNING;
}

/*
 * The courier is gone.  What it had is unknown, and suspected of having killed
 * it; one that did so all alone is a dead letter.
 */
static void
lose_courier(IdemDelivery *d, const char *reason)
{
	dlist_head *lists[] = {&d->retries, &d->entries,
	d->replaying ? &d->replaying->entries : NULL};
	bool		alone = d->alone && d->nsent == 1;

	d->unsent = NULL;
	for (int i = 0; i < 3 && lists[i] != NULL; i++)
	{
		dlist_iter	iter;

		dlist_foreach(iter, lists[i])
		{
			DeliveryEntry *e = dlist_container(DeliveryEntry, node, iter.cur);

			if (e->state != ENTRY_SENT)
				continue;
			d->ring[e->ticket & d->ring_mask] = NULL;
			d->nsent--;
			note_error(d, e, 0, reason);
			e->kills++;
			if (alone && e->kills > KILLS_MEAN_SUSPECT)
			{
				e->parked.attempts++;
				bury(d, e);
			}
			else
				settle_unknown(d, e);
		}
	}
	d->alone = false;
	back_off(d, IDEM_SERVER_BACKING_OFF, reason, 0);
	d->probing = false;
	idem_link_close(d->link);
	d->link = NULL;
	pop_settled(d);
}

/*
 * idem_delivery_receive
 *		Read what the courier says, and act on it.
 */
void
idem_delivery_receive(IdemDelivery *d)
{
	IdemFrame	frame;
	TimestampTz now;

	if (d->link == NULL)
		return;
	idem_link_fill(d->link);
	now = GetCurrentTimestamp();
	while (idem_link_next(d->link, &frame))
	{
		DeliveryEntry *e;

		switch (frame.type)
		{
			case 'd':
				frame.outcome = IDEM_DELIVERED;
				/* FALLTHROUGH */
			case 'o':
				e = d->ring[frame.ticket & d->ring_mask];
				if (e != NULL && e->ticket == frame.ticket && e->state == ENTRY_SENT)
					settle(d, e, &frame, now);
				break;
			case 's':
				if (frame.state == IDEM_LINK_DOWN)
					back_off(d, IDEM_SERVER_BACKING_OFF, frame.text, frame.retry_after_ms);
				else if (frame.state == IDEM_LINK_BLOCKED)
					back_off(d, IDEM_SERVER_BLOCKED, frame.text, frame.retry_after_ms);
				break;
			case 'l':
				ereport(levels_to_elevel(frame.code),
						(errmsg("idem: courier of server \"%s\": %s", d->name, frame.text)));
				break;
		}
		if (frame.text != NULL)
			pfree(frame.text);
	}
	pop_settled(d);
	if (d->link->broken)
	{
		char	   *reason = idem_link_epitaph(d->link);

		lose_courier(d, reason);
		pfree(reason);
	}
}

bool
idem_delivery_needs_record(IdemDelivery *d)
{
	return d->dirty || !dlist_is_empty(&d->settled) ||
		(d->replaying != NULL && d->replaying->dirty);
}

static bool
replay_is_over(IdemReplaying *r)
{
	return r->reader.pos.b == 0 && dlist_is_empty(&r->entries);
}

/*
 * idem_delivery_record
 *		Write down how far we are, and what became of what was not delivered.
 *
 * Caller provides a transaction, and calls idem_delivery_recorded() when it
 * has committed.  Until then everything stays as it is in memory.
 */
void
idem_delivery_record(IdemDelivery *d)
{
	dlist_iter	iter;

	dlist_foreach(iter, &d->settled)
	{
		DeliveryEntry *e = dlist_container(DeliveryEntry, node, iter.cur);

		if (e->answered)
			idem_answer_put(d->name, &e->parked, e->code, e->error);
		if (e->fate == FATE_BURY)
			idem_dead_letter_put(d->name, e->m, &e->parked, e->code, e->error);
		if (e->fate == FATE_PARK)
			idem_parked_put(d->name, e->m, &e->parked, e->code, e->error);
		else if (e->was_parked)
			idem_parked_remove(d->name, &e->parked);
	}
	if (d->dirty)
		idem_position_record(d->name, 0, &d->done, d->position_id + 1);
	if (d->replaying != NULL && replay_is_over(d->replaying))
		idem_replay_finish(d->replaying->orders.id);
	else if (d->replaying != NULL && d->replaying->dirty)
		idem_position_record(d->name, d->replaying->orders.id, &d->replaying->done,
							 d->replaying->position_id + 1);
}

static void
end_replay(IdemDelivery *d)
{
	ListCell   *lc;

	foreach(lc, d->replays)
	{
		if (((IdemReplay *) lfirst(lc))->id == d->replaying->orders.id)
			d->replays = foreach_delete_current(d->replays, lc);
	}
	MemoryContextDelete(d->replaying->reader.context);
	pfree(d->replaying);
	d->replaying = NULL;
}

/* What idem_delivery_record() wrote has been committed. */
void
idem_delivery_recorded(IdemDelivery *d)
{
	if (d->dirty)
		d->position_id++;
	d->dirty = false;
	if (d->replaying != NULL)
	{
		if (d->replaying->dirty)
			d->replaying->position_id++;
		d->replaying->dirty = false;
		if (replay_is_over(d->replaying))
			end_replay(d);
	}
	while (!dlist_is_empty(&d->settled))
	{
		DeliveryEntry *e = dlist_container(DeliveryEntry, node,
										   dlist_pop_head_node(&d->settled));

		if (e->was_parked && e->fate != FATE_PARK)
			count_parked_key(d, e->key_hash, -1);
		free_entry(d, e);
		d->next_due = 0;
	}
}

/*
 * idem_delivery_hang_up
 *		End the courier, if there is one.
 *
 * What it has not answered is unknown.  If there is nothing of that kind, this
 * is no trouble, and the next courier begins at once.
 */
void
idem_delivery_hang_up(IdemDelivery *d)
{
	if (d->link == NULL)
		return;
	if (d->nsent > 0)
	{
		lose_courier(d, "courier was ended before it had answered");
		return;
	}
	idem_link_close(d->link);
	d->link = NULL;
	d->probing = false;
	idem_delivery_set_state(d, d->state, d->reason);
}

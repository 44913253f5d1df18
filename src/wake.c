/*-------------------------------------------------------------------------
 *
 * wake.c
 *		How sessions that enqueue meet the relay of their database.
 *
 * A few words of shared memory per database: whether its relay sleeps, and
 * which segment of the log is in use.  A commit wakes the relay only if that
 * sleeps, so that under load nobody signals anybody.
 *
 * All of this is a hint.  A wake-up that gets lost costs one poll interval,
 * and a message may lie in any segment.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/xact.h"
#include "miscadmin.h"
#include "port/atomics.h"
#include "port/pg_bitutils.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lwlock.h"
#include "storage/proc.h"
#include "storage/shmem.h"

#include "compat.h"
#include "guc.h"
#include "wake.h"
#include "worker.h"

typedef struct WakeSlot
{
	pg_atomic_uint32 database;	/* InvalidOid: never used */
	pg_atomic_uint32 sleeping;
	pg_atomic_uint32 segment;
	pg_atomic_uint32 orders;	/* servers, routes or the like have changed */
	int			procno;			/* of the relay, or -1 */
	pg_atomic_uint32 handlers_asleep;	/* a bit for each */
	int			handlers[IDEM_MAX_HANDLERS];	/* their numbers, or -1 */
} WakeSlot;

typedef struct WakeShared
{
	LWLock	   *lock;			/* for taking a slot */
	int			nslots;
	WakeSlot	slots[FLEXIBLE_ARRAY_MEMBER];
} WakeShared;

static WakeShared *shared = NULL;
static WakeSlot *my_slot = NULL;
static bool enqueued = false;
static bool ordered = false;
static bool expects_handlers = false;

static Size
shared_size(void)
{
	return add_size(offsetof(WakeShared, slots),
					mul_size(idem_max_databases, sizeof(WakeSlot)));
}

void
idem_wake_request(void)
{
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("idem_wake", 1);
}

/* The slot of this database, or NULL if it has none yet. */
static WakeSlot *
find_slot(void)
{
	if (shared == NULL)
		return NULL;
	if (my_slot != NULL &&
		pg_atomic_read_u32(&my_slot->database) == MyDatabaseId)
		return my_slot;
	my_slot = NULL;
	for (int i = 0; i < shared->nslots; i++)
	{
		if (pg_atomic_read_u32(&shared->slots[i].database) == MyDatabaseId)
		{
			my_slot = &shared->slots[i];
			break;
		}
	}
	return my_slot;
}

static void
set_latch(WakeSlot *slot)
{
	int			procno = slot->procno;

	if (procno >= 0)
		SetLatch(&GetPGProcByNumber(procno)->procLatch);
}

/*
 * idem_wake_now
 *		Wake the relay of this database, if it sleeps.
 *
 * What it is to find must be visible before.
 */
void
idem_wake_now(void)
{
	WakeSlot   *slot = find_slot();

	if (slot == NULL)
		return;
	pg_memory_barrier();
	if (pg_atomic_read_u32(&slot->sleeping) != 0 &&
		pg_atomic_exchange_u32(&slot->sleeping, 0) != 0)
		set_latch(slot);
}

static void
on_xact_end(XactEvent event, void *arg pg_attribute_unused())
{
	WakeSlot   *slot;

	if (!(enqueued || ordered || expects_handlers) || event == XACT_EVENT_PRE_COMMIT ||
		event == XACT_EVENT_PRE_PREPARE)
		return;
	if (event == XACT_EVENT_COMMIT)
	{
		slot = ordered ? find_slot() : NULL;
		if (slot != NULL)
		{
			/* one that waits for something else than messages listens, too */
			pg_atomic_write_u32(&slot->orders, 1);
			set_latch(slot);
		}
		else
			idem_wake_now();
		if (expects_handlers)
			idem_worker_expect_handlers();
	}
	enqueued = false;
	ordered = false;
	expects_handlers = false;
}

void
idem_wake_startup(void)
{
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("idem_wake", shared_size(), &found);
	if (!found)
	{
		shared->lock = &GetNamedLWLockTranche("idem_wake")->lock;
		shared->nslots = idem_max_databases;
		for (int i = 0; i < shared->nslots; i++)
		{
			WakeSlot   *slot = &shared->slots[i];

			pg_atomic_init_u32(&slot->database, InvalidOid);
			pg_atomic_init_u32(&slot->sleeping, 0);
			pg_atomic_init_u32(&slot->segment, 0);
			pg_atomic_init_u32(&slot->orders, 0);
			slot->procno = -1;
			pg_atomic_init_u32(&slot->handlers_asleep, 0);
			for (int j = 0; j < IDEM_MAX_HANDLERS; j++)
				slot->handlers[j] = -1;
		}
	}
	LWLockRelease(AddinShmemInitLock);
}

/* Called once, while the postmaster loads us. */
void
idem_wake_init(void)
{
	RegisterXactCallback(on_xact_end, NULL);
}

/* The segment to write to. */
int
idem_wake_segment(void)
{
	WakeSlot   *slot = find_slot();

	return slot == NULL ? 0 : (int) pg_atomic_read_u32(&slot->segment);
}

/* This transaction has enqueued something: wake the relay when it commits. */
void
idem_wake_enqueued(void)
{
	enqueued = true;
}

/* This transaction has changed what the relay is to do. */
void
idem_wake_orders(void)
{
	ordered = true;
}

/* This transaction has given a consumer a handler. */
void
idem_wake_expect_handlers(void)
{
	expects_handlers = true;
}

static void
detach(int code pg_attribute_unused(), Datum arg pg_attribute_unused())
{
	if (my_slot == NULL)
		return;
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	pg_atomic_write_u32(&my_slot->sleeping, 0);
	my_slot->procno = -1;
	LWLockRelease(shared->lock);
}

/* Does any worker of its database still use this slot? */
static bool
in_use(const WakeSlot *slot)
{
	bool		used = slot->procno >= 0;

	for (int i = 0; i < IDEM_MAX_HANDLERS; i++)
		used |= slot->handlers[i] >= 0;
	return used;
}

/*
 * Find the slot of this database, or take one.
 *
 * There are as many slots as databases with workers; one that belonged to a
 * database that has no workers any more may be taken over.  Caller holds the
 * lock exclusively.
 */
static void
take_slot(void)
{
	if (find_slot() != NULL)
		return;
	for (int pass = 0; pass < 2 && my_slot == NULL; pass++)
	{
		for (int i = 0; i < shared->nslots && my_slot == NULL; i++)
		{
			WakeSlot   *slot = &shared->slots[i];

			if (!in_use(slot) &&
				(pass > 0 ||
				 pg_atomic_read_u32(&slot->database) == InvalidOid))
				my_slot = slot;
		}
	}
	if (my_slot != NULL)
	{
		pg_atomic_write_u32(&my_slot->segment, 0);
		pg_atomic_write_u32(&my_slot->database, MyDatabaseId);
	}
}

/*
 * idem_wake_attach
 *		Make this process the relay that is woken.
 */
void
idem_wake_attach(void)
{
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	take_slot();
	if (my_slot != NULL)
	{
		my_slot->procno = idem_my_procno();
		before_shmem_exit(detach, (Datum) 0);
	}
	LWLockRelease(shared->lock);
}

static void
detach_handler(int code pg_attribute_unused(), Datum arg)
{
	int			me = DatumGetInt32(arg);

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	pg_atomic_fetch_and_u32(&my_slot->handlers_asleep, ~((uint32) 1 << me));
	my_slot->handlers[me] = -1;
	LWLockRelease(shared->lock);
}

/* Make this process one of those that are woken to run handlers. */
void
idem_wake_handler_attach(int me)
{
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	take_slot();
	if (my_slot != NULL)
	{
		my_slot->handlers[me] = idem_my_procno();
		before_shmem_exit(detach_handler, Int32GetDatum(me));
	}
	LWLockRelease(shared->lock);
}

/* As idem_wake_prepare_sleep(). */
void
idem_wake_handler_sleeps(int me)
{
	if (my_slot != NULL)
		pg_atomic_fetch_or_u32(&my_slot->handlers_asleep, (uint32) 1 << me);
}

void
idem_wake_handler_awake(int me)
{
	if (my_slot != NULL)
		pg_atomic_fetch_and_u32(&my_slot->handlers_asleep, ~((uint32) 1 << me));
}

/*
 * idem_wake_handler
 *		Wake one of the processes that run handlers, if any sleeps.
 *
 * What it is to find must be visible before.
 */
void
idem_wake_handler(void)
{
	WakeSlot   *slot = find_slot();
	uint32		asleep;

	if (slot == NULL)
		return;
	pg_memory_barrier();
	while ((asleep = pg_atomic_read_u32(&slot->handlers_asleep)) != 0)
	{
		int			i = pg_rightmost_one_pos32(asleep);
		uint32		bit = (uint32) 1 << i;

		if (pg_atomic_fetch_and_u32(&slot->handlers_asleep, ~bit) & bit)
		{
			int			procno = slot->handlers[i];

			if (procno >= 0)
				SetLatch(&GetPGProcByNumber(procno)->procLatch);
			return;
		}
	}
}

/*
 * idem_wake_prepare_sleep
 *		Announce that the relay is about to sleep.
 *
 * After this the caller looks once more whether there is anything to do:
 * whoever commits later sees the announcement.
 */
void
idem_wake_prepare_sleep(void)
{
	if (my_slot == NULL)
		return;
	pg_atomic_write_u32(&my_slot->sleeping, 1);
	pg_memory_barrier();
}

void
idem_wake_awake(void)
{
	if (my_slot != NULL)
		pg_atomic_write_u32(&my_slot->sleeping, 0);
}

void
idem_wake_set_segment(int segment)
{
	if (my_slot != NULL)
		pg_atomic_write_u32(&my_slot->segment, segment);
}

/* Has anybody changed what the relay is to do, since we asked last? */
bool
idem_wake_orders_pending(void)
{
	return my_slot != NULL &&
		pg_atomic_read_u32(&my_slot->orders) != 0 &&
		pg_atomic_exchange_u32(&my_slot->orders, 0) != 0;
}

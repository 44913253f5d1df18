/*-------------------------------------------------------------------------
 *
 * relay_stat.c
 *		What the relay says of its servers, in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "funcapi.h"
#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/builtins.h"
#include "utils/memutils.h"
#include "utils/syscache.h"

#include "guc.h"
#include "relay_stat.h"
#include "server.h"

typedef struct RelayStatShared
{
	LWLock	   *lock;			/* for taking and freeing entries */
	int			nentries;
	IdemServerStat entries[FLEXIBLE_ARRAY_MEMBER];
} RelayStatShared;

static RelayStatShared *shared = NULL;

static const char *const state_names[] = {
	[IDEM_SERVER_STARTING] = "starting",
	[IDEM_SERVER_RUNNING] = "running",
	[IDEM_SERVER_PAUSED] = "paused",
	[IDEM_SERVER_BACKING_OFF] = "backing off",
	[IDEM_SERVER_BLOCKED] = "blocked",
	[IDEM_SERVER_HOLDING] = "holding",
};

PG_FUNCTION_INFO_V1(idem_relay_stat);

static Size
shared_size(void)
{
	return add_size(offsetof(RelayStatShared, entries),
					mul_size(idem_max_servers, sizeof(IdemServerStat)));
}

void
idem_relay_stat_request(void)
{
	RequestAddinShmemSpace(shared_size());
	RequestNamedLWLockTranche("idem_relay_stat", 1);
}

void
idem_relay_stat_startup(void)
{
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("idem_relay_stat", shared_size(), &found);
	if (!found)
	{
		memset(shared, 0, shared_size());
		shared->lock = &GetNamedLWLockTranche("idem_relay_stat")->lock;
		shared->nentries = idem_max_servers;
		for (int i = 0; i < shared->nentries; i++)
			SpinLockInit(&shared->entries[i].mutex);
	}
	LWLockRelease(AddinShmemInitLock);
}

/* Find the place of a server, or take a free one; NULL if there is none. */
static IdemServerStat *
take_place(const char *server)
{
	IdemServerStat *stat = NULL;

	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	for (int pass = 0; pass < 2 && stat == NULL; pass++)
	{
		for (int i = 0; i < shared->nentries && stat == NULL; i++)
		{
			IdemServerStat *e = &shared->entries[i];

			if (pass == 0 ? e->database == MyDatabaseId && strcmp(e->server, server) == 0 :
				e->database == InvalidOid)
				stat = e;
		}
	}
	if (stat != NULL && stat->database == InvalidOid)
	{
		memset((char *) stat + offsetof(IdemServerStat, database), 0,
			   sizeof(IdemServerStat) - offsetof(IdemServerStat, database));
		stat->database = MyDatabaseId;
		strlcpy(stat->server, server, NAMEDATALEN);
	}
	LWLockRelease(shared->lock);
	return stat;
}

/*
 * Give back the places of servers that went together with their database or
 * with the extension: no relay was there any more to do so.
 */
static void
free_orphans(void)
{
	for (int i = 0; i < shared->nentries; i++)
	{
		IdemServerStat *e = &shared->entries[i];
		Oid			database;
		char		server[NAMEDATALEN];
		bool		gone;

		LWLockAcquire(shared->lock, LW_SHARED);
		database = e->database;
		strlcpy(server, e->server, NAMEDATALEN);
		LWLockRelease(shared->lock);

		if (database == MyDatabaseId)
			gone = !OidIsValid(idem_server_oid(server));
		else
			gone = OidIsValid(database) &&
				!SearchSysCacheExists1(DATABASEOID, ObjectIdGetDatum(database));
		if (!gone)
			continue;
		LWLockAcquire(shared->lock, LW_EXCLUSIVE);
		if (e->database == database && strcmp(e->server, server) == 0)
			e->database = InvalidOid;
		LWLockRelease(shared->lock);
	}
}

/*
 * idem_relay_stat_attach
 *		The place for the figures of a server of this database.
 *
 * They survive a restart of the relay.  If all places are taken, they are
 * kept for the relay alone and nobody sees them.  Caller provides a transaction.
 */
IdemServerStat *
idem_relay_stat_attach(const char *server)
{
	IdemServerStat *stat = take_place(server);

	if (stat == NULL)
	{
		free_orphans();
		stat = take_place(server);
	}
	if (stat == NULL)
	{
		ereport(WARNING,
				(errcode(ERRCODE_CONFIGURATION_LIMIT_EXCEEDED),
				 errmsg("idem has no room for the figures of server \"%s\"", server),
				 errhint("Increase idem.max_servers.")));
		stat = MemoryContextAllocZero(TopMemoryContext, sizeof(IdemServerStat));
		SpinLockInit(&stat->mutex);
	}
	return stat;
}

void
idem_relay_stat_rename(IdemServerStat *stat, const char *server)
{
	SpinLockAcquire(&stat->mutex);
	strlcpy(stat->server, server, NAMEDATALEN);
	SpinLockRelease(&stat->mutex);
}

/* The server is gone. */
void
idem_relay_stat_detach(IdemServerStat *stat)
{
	if (stat < shared->entries || stat >= shared->entries + shared->nentries)
	{
		pfree(stat);
		return;
	}
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	stat->database = InvalidOid;
	LWLockRelease(shared->lock);
}

void
idem_relay_stat_error(IdemServerStat *stat, const char *error)
{
	TimestampTz now = GetCurrentTimestamp();

	SpinLockAcquire(&stat->mutex);
	strlcpy(stat->last_error, error, sizeof(stat->last_error));
	stat->last_error_at = now;
	SpinLockRelease(&stat->mutex);
}

/* One more has arrived. */
void
idem_relay_stat_sent(IdemServerStat *stat, TimestampTz enqueued_at, TimestampTz now)
{
	int64		second = now / USECS_PER_SEC;
	int64		latency = (now - enqueued_at) / 10;

	SpinLockAcquire(&stat->mutex);
	stat->sent++;
	stat->last_sent_at = now;
	stat->samples[stat->nsamples++ % IDEM_LATENCY_SAMPLES] =
		(uint32) Min(Max(latency, 0), PG_UINT32_MAX);
	if (second - stat->rate_second > IDEM_RATE_SECONDS || second < stat->rate_second)
	{
		memset(stat->rate, 0, sizeof(stat->rate));
		stat->rate_second = second;
	}
	while (stat->rate_second < second)
		stat->rate[++stat->rate_second % IDEM_RATE_SECONDS] = 0;
	stat->rate[second % IDEM_RATE_SECONDS]++;
	SpinLockRelease(&stat->mutex);
}

static int
compare_uint32(const void *a, const void *b)
{
	uint32		x = *(const uint32 *) a;
	uint32		y = *(const uint32 *) b;

	return x < y ? -1 : x > y;
}

/* Per second, over the last whole seconds. */
static double
rate_of(const IdemServerStat *s)
{
	int64		now = GetCurrentTimestamp() / USECS_PER_SEC;
	double		sum = 0;

	for (int64 t = now - IDEM_RATE_SECONDS + 1; t < now; t++)
	{
		if (t <= s->rate_second && t > s->rate_second - IDEM_RATE_SECONDS && t >= 0)
			sum += s->rate[t % IDEM_RATE_SECONDS];
	}
	return sum / (IDEM_RATE_SECONDS - 1);
}

static void
put_row(ReturnSetInfo *rsinfo, IdemServerStat *s)
{
	Datum		values[17] = {0};
	bool		nulls[17] = {0};
	int			n = Min(s->nsamples, IDEM_LATENCY_SAMPLES);

	values[0] = CStringGetTextDatum(s->server);
	values[1] = CStringGetTextDatum(state_names[s->state]);
	values[2] = CStringGetTextDatum(s->reason);
	nulls[2] = s->reason[0] == '\0';
	values[3] = Int32GetDatum(s->courier);
	nulls[3] = s->courier == 0;
	values[4] = Int64GetDatum(s->sent);
	values[5] = Int64GetDatum(s->retried);
	values[6] = Int64GetDatum(s->unknown);
	values[7] = Int64GetDatum(s->dead);
	values[8] = Int32GetDatum(s->in_flight);
	values[9] = TimestampTzGetDatum(s->tick_at);
	nulls[9] = s->tick_at == 0;
	values[10] = Int64GetDatum(s->seq);
	values[11] = CStringGetTextDatum(s->last_error);
	nulls[11] = s->last_error_at == 0;
	values[12] = TimestampTzGetDatum(s->last_error_at);
	nulls[12] = s->last_error_at == 0;
	values[13] = TimestampTzGetDatum(s->last_sent_at);
	nulls[13] = s->last_sent_at == 0;
	values[14] = Float8GetDatum(rate_of(s));
	nulls[15] = nulls[16] = n == 0;
	if (n > 0)
	{
		qsort(s->samples, n, sizeof(uint32), compare_uint32);
		values[15] = Float8GetDatum(s->samples[n / 2] / 100.0);
		values[16] = Float8GetDatum(s->samples[(n * 99) / 100] / 100.0);
	}
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/* relay_stat() returns setof record: see relay.sql */
Datum
idem_relay_stat(PG_FUNCTION_ARGS)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;

	InitMaterializedSRF(fcinfo, 0);
	if (shared == NULL)
		return (Datum) 0;
	for (int i = 0; i < shared->nentries; i++)
	{
		IdemServerStat *stat = &shared->entries[i];
		IdemServerStat copy;

		LWLockAcquire(shared->lock, LW_SHARED);
		SpinLockAcquire(&stat->mutex);
		copy = *stat;
		SpinLockRelease(&stat->mutex);
		LWLockRelease(shared->lock);
		if (copy.database == MyDatabaseId)
			put_row(rsinfo, &copy);
	}
	return (Datum) 0;
}

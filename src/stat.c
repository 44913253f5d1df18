/*-------------------------------------------------------------------------
 *
 * stat.c
 *		Counters in shared memory.
 *
 * A table of fixed size, one entry per consumer (and, where they are known,
 * type and source of the message) or scope and database.  Nobody declares
 * these names, so whatever does not fit is counted in one entry "(other)".
 * Counting is an atomic addition without a lock; what a transaction counted
 * stays counted if it rolls back.  The figures are written to a file at a
 * clean shutdown and read at the next start; a crash sets them to zero.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <unistd.h>

#include "funcapi.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "pgstat.h"
#include "port/atomics.h"
#include "port/pg_crc32c.h"
#include "storage/fd.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"
#include "utils/builtins.h"
#include "utils/hsearch.h"
#include "utils/timestamp.h"

#include "guc.h"
#include "input.h"
#include "stat.h"

#define STAT_FILE	PGSTAT_STAT_PERMANENT_DIRECTORY "/idem.stat"
#define STAT_MAGIC	0x69646d31
#define STAT_LABEL	127

typedef struct IdemStatKey
{
	Oid			database;
	IdemStatKind kind;
	char		name[IDEM_MAX_NAME + 1];
	char		type[STAT_LABEL + 1];
	char		source[STAT_LABEL + 1];
} IdemStatKey;

typedef struct IdemStatEntry
{
	IdemStatKey key;			/* must be first */
	TimestampTz since;			/* counting since then */
	pg_atomic_uint64 count[IDEM_STAT_COLUMNS];
} IdemStatEntry;

/* An entry as it is written to the file. */
typedef struct IdemStatRecord
{
	IdemStatKey key;
	TimestampTz since;
	uint64		count[IDEM_STAT_COLUMNS];
} IdemStatRecord;

typedef struct IdemStatHeader
{
	uint32		magic;
	uint32		record_size;
	uint32		nrecords;
} IdemStatHeader;

typedef struct IdemStatShared
{
	LWLock	   *lock;			/* protects the hash and the generation */
	pg_atomic_uint32 generation;	/* grows when entries are removed */
	bool		ended_well;		/* the file said so */
	IdemStatEntry other[IDEM_STAT_KINDS];		/* what did not fit, per kind */
} IdemStatShared;

static IdemStatShared *shared = NULL;
static HTAB *entries = NULL;

PG_FUNCTION_INFO_V1(idem_stat_rows);
PG_FUNCTION_INFO_V1(idem_stat_reset);

/* Reserve shared memory; called while the postmaster sizes it. */
void
idem_stat_request(void)
{
	RequestAddinShmemSpace(MAXALIGN(sizeof(IdemStatShared)));
	RequestAddinShmemSpace(hash_estimate_size(idem_stat_entries,
											  sizeof(IdemStatEntry)));
	RequestNamedLWLockTranche("idem_stat", 1);
}

static void
clear_entry(IdemStatEntry *entry)
{
	entry->since = GetCurrentTimestamp();
	for (int i = 0; i < IDEM_STAT_COLUMNS; i++)
		pg_atomic_init_u64(&entry->count[i], 0);
}

/*
 * Find or make an entry; NULL if there is no room for another one.
 * Caller holds the lock exclusively.
 */
static IdemStatEntry *
enter(const IdemStatKey *key)
{
	IdemStatEntry *entry;
	bool		found;

	entry = hash_search(entries, key, HASH_FIND, NULL);
	if (entry != NULL || hash_get_num_entries(entries) >= idem_stat_entries)
		return entry;
	entry = hash_search(entries, key, HASH_ENTER_NULL, &found);
	if (entry != NULL)
		clear_entry(entry);
	return entry;
}

/*
 * Does the rest of the file consist of whole records, with the right checksum
 * at its end?  Leaves the file where it was.
 */
static bool
file_is_sound(FILE *file, uint32 nrecords)
{
	long		start = ftell(file);
	IdemStatRecord record;
	pg_crc32c	crc;
	pg_crc32c	stored;
	bool		sound;

	INIT_CRC32C(crc);
	for (uint32 i = 0; i < nrecords; i++)
	{
		if (fread(&record, sizeof(record), 1, file) != 1)
			return false;
		COMP_CRC32C(crc, &record, sizeof(record));
	}
	FIN_CRC32C(crc);
	sound = fread(&stored, sizeof(stored), 1, file) == 1 &&
		EQ_CRC32C(stored, crc) && fgetc(file) == EOF;
	return fseek(file, start, SEEK_SET) == 0 && sound;
}

/* Read what the last clean shutdown left; a file that is not ours is no harm. */
static void
read_figures(void)
{
	FILE	   *file = AllocateFile(STAT_FILE, PG_BINARY_R);
	IdemStatHeader header;
	IdemStatRecord record;

	if (file == NULL)
		return;

	if (fread(&header, sizeof(header), 1, file) == 1 &&
		header.magic == STAT_MAGIC && header.record_size == sizeof(record) &&
		file_is_sound(file, header.nrecords))
	{
		shared->ended_well = true;
		while (header.nrecords-- > 0 &&
			   fread(&record, sizeof(record), 1, file) == 1)
		{
			IdemStatEntry *entry = NULL;

			if (OidIsValid(record.key.database))
				entry = enter(&record.key);
			if (entry == NULL)
				entry = &shared->other[record.key.kind];
			entry->since = record.since;
			for (int i = 0; i < IDEM_STAT_COLUMNS; i++)
				pg_atomic_fetch_add_u64(&entry->count[i], record.count[i]);
		}
	}
	else
		ereport(LOG,
				(errcode(ERRCODE_DATA_CORRUPTED),
				 errmsg("ignoring file \"%s\": it is not intact", STAT_FILE)));
	FreeFile(file);
	unlink(STAT_FILE);
}

static bool
write_entry(FILE *file, IdemStatEntry *entry, pg_crc32c *crc)
{
	IdemStatRecord record;

	memset(&record, 0, sizeof(record));
	record.key = entry->key;
	record.since = entry->since;
	for (int i = 0; i < IDEM_STAT_COLUMNS; i++)
		record.count[i] = pg_atomic_read_u64(&entry->count[i]);
	COMP_CRC32C(*crc, &record, sizeof(record));
	return fwrite(&record, sizeof(record), 1, file) == 1;
}

/* Runs in the postmaster when it exits. */
static void
write_figures(int code, Datum arg pg_attribute_unused())
{
	HASH_SEQ_STATUS seq;
	IdemStatEntry *entry;
	FILE	   *file;
	IdemStatHeader header = {
		.magic = STAT_MAGIC,
		.record_size = sizeof(IdemStatRecord),
	};
	pg_crc32c	crc;
	bool		ok;

	if (code != 0 || shared == NULL)
		return;

	file = AllocateFile(STAT_FILE ".tmp", PG_BINARY_W);
	header.nrecords = 2 + hash_get_num_entries(entries);
	INIT_CRC32C(crc);
	ok = file != NULL &&
		fwrite(&header, sizeof(header), 1, file) == 1 &&
		write_entry(file, &shared->other[IDEM_STAT_CONSUMER], &crc) &&
		write_entry(file, &shared->other[IDEM_STAT_SCOPE], &crc);

	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
		ok = ok && write_entry(file, entry, &crc);
	FIN_CRC32C(crc);
	ok = ok && fwrite(&crc, sizeof(crc), 1, file) == 1;

	if (file != NULL && FreeFile(file) != 0)
		ok = false;
	if (!ok)
	{
		ereport(LOG,
				(errcode_for_file_access(),
				 errmsg("could not write file \"%s\": %m", STAT_FILE ".tmp")));
		unlink(STAT_FILE ".tmp");
		return;
	}
	(void) durable_rename(STAT_FILE ".tmp", STAT_FILE, LOG);
}

/* Attach to shared memory, or set it up. */
void
idem_stat_startup(void)
{
	HASHCTL		ctl = {
		.keysize = sizeof(IdemStatKey),
		.entrysize = sizeof(IdemStatEntry),
	};
	bool		found;

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	shared = ShmemInitStruct("idem_stat", sizeof(IdemStatShared), &found);
	entries = ShmemInitHash("idem_stat_entries", idem_stat_entries,
							idem_stat_entries, &ctl, HASH_ELEM | HASH_BLOBS);
	if (!found)
	{
		memset(shared, 0, sizeof(IdemStatShared));
		shared->lock = &GetNamedLWLockTranche("idem_stat")->lock;
		pg_atomic_init_u32(&shared->generation, 1);
		for (int kind = 0; kind < IDEM_STAT_KINDS; kind++)
		{
			clear_entry(&shared->other[kind]);
			shared->other[kind].key.kind = kind;
			strlcpy(shared->other[kind].key.name, "(other)", IDEM_MAX_NAME);
		}
		read_figures();
	}
	LWLockRelease(AddinShmemInitLock);

	if (!IsUnderPostmaster)
		on_shmem_exit(write_figures, (Datum) 0);
}

/* Did the server end in good order, rather than by a crash? */
bool
idem_stat_ended_well(void)
{
	return shared->ended_well;
}

/*
 * idem_stat_count
 *		Add to a counter of a consumer or scope of this database.
 *
 * Without shared memory (idem was not preloaded) nothing is counted.
 */
void
idem_stat_count(IdemStat *stat, IdemStatKind kind, const char *name,
				IdemStatColumn column, uint64 n)
{
	idem_stat_count_from(stat, kind, name, NULL, NULL, column, n);
}

/* The same, apart for a type and source of messages; NULL: not known. */
void
idem_stat_count_from(IdemStat *stat, IdemStatKind kind, const char *name,
					 const char *type, const char *source,
					 IdemStatColumn column, uint64 n)
{
	uint32		generation;

	if (shared == NULL || n == 0)
		return;

	generation = pg_atomic_read_u32(&shared->generation);
	if (stat->entry == NULL || stat->generation != generation)
	{
		IdemStatKey key;

		memset(&key, 0, sizeof(key));
		key.database = MyDatabaseId;
		key.kind = kind;
		strlcpy(key.name, name, sizeof(key.name));
		if (type != NULL)
			strlcpy(key.type, type, pg_mbcliplen(type, strlen(type), STAT_LABEL) + 1);
		if (source != NULL)
			strlcpy(key.source, source, pg_mbcliplen(source, strlen(source), STAT_LABEL) + 1);

		LWLockAcquire(shared->lock, LW_SHARED);
		stat->entry = hash_search(entries, &key, HASH_FIND, NULL);
		stat->generation = pg_atomic_read_u32(&shared->generation);
		LWLockRelease(shared->lock);
		if (stat->entry == NULL)
		{
			LWLockAcquire(shared->lock, LW_EXCLUSIVE);
			stat->entry = enter(&key);
			stat->generation = pg_atomic_read_u32(&shared->generation);
			LWLockRelease(shared->lock);
		}
		if (stat->entry == NULL)
			stat->entry = &shared->other[kind];
	}
	pg_atomic_fetch_add_u64(&stat->entry->count[column], n);
}

static void
put_row(ReturnSetInfo *rsinfo, IdemStatEntry *entry)
{
	Datum		values[4 + IDEM_STAT_COLUMNS];
	bool		nulls[4 + IDEM_STAT_COLUMNS] = {0};

	values[0] = CStringGetTextDatum(entry->key.name);
	values[1] = CStringGetTextDatum(entry->key.type);
	nulls[1] = entry->key.type[0] == '\0';
	values[2] = CStringGetTextDatum(entry->key.source);
	nulls[2] = entry->key.source[0] == '\0';
	for (int i = 0; i < IDEM_STAT_COLUMNS; i++)
		values[3 + i] = Int64GetDatum((int64) pg_atomic_read_u64(&entry->count[i]));
	values[3 + IDEM_STAT_COLUMNS] = TimestampTzGetDatum(entry->since);
	tuplestore_putvalues(rsinfo->setResult, rsinfo->setDesc, values, nulls);
}

/*
 * stat_rows(kind) returns setof (name, type, source, counters ..., reset_at)
 *		The entries of this database, and "(other)" once it was needed.
 */
Datum
idem_stat_rows(PG_FUNCTION_ARGS)
{
	IdemStatKind kind = Min(Max(PG_GETARG_INT32(0), 0), IDEM_STAT_KINDS - 1);
	HASH_SEQ_STATUS seq;
	IdemStatEntry *entry;
	bool		other_used = false;

	InitMaterializedSRF(fcinfo, 0);
	if (shared == NULL)
		return (Datum) 0;

	LWLockAcquire(shared->lock, LW_SHARED);
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (entry->key.database == MyDatabaseId && entry->key.kind == kind)
			put_row((ReturnSetInfo *) fcinfo->resultinfo, entry);
	}
	entry = &shared->other[kind];
	for (int i = 0; i < IDEM_STAT_COLUMNS; i++)
		other_used |= pg_atomic_read_u64(&entry->count[i]) > 0;
	if (other_used)
		put_row((ReturnSetInfo *) fcinfo->resultinfo, entry);
	LWLockRelease(shared->lock);

	return (Datum) 0;
}

/*
 * idem_stat_forget
 *		Remove the entries of a database.
 */
void
idem_stat_forget(Oid database)
{
	HASH_SEQ_STATUS seq;
	IdemStatEntry *entry;

	if (shared == NULL)
		return;

	/*
	 * Somebody may still hold a pointer to an entry that goes.  Its memory
	 * stays in the table, so the worst is one count in the wrong place.
	 */
	LWLockAcquire(shared->lock, LW_EXCLUSIVE);
	hash_seq_init(&seq, entries);
	while ((entry = hash_seq_search(&seq)) != NULL)
	{
		if (entry->key.database == database)
			hash_search(entries, &entry->key, HASH_REMOVE, NULL);
	}
	pg_atomic_fetch_add_u32(&shared->generation, 1);
	LWLockRelease(shared->lock);
}

/*
 * stat_reset()
 *		Forget the figures of this database, and "(other)".
 */
Datum
idem_stat_reset(PG_FUNCTION_ARGS pg_attribute_unused())
{
	if (shared == NULL)
		PG_RETURN_VOID();

	idem_stat_forget(MyDatabaseId);
	clear_entry(&shared->other[IDEM_STAT_CONSUMER]);
	clear_entry(&shared->other[IDEM_STAT_SCOPE]);
	PG_RETURN_VOID();
}

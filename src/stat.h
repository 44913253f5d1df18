/*-------------------------------------------------------------------------
 *
 * stat.h
 *		Counters in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STAT_H
#define IDEM_STAT_H

typedef enum IdemStatKind
{
	IDEM_STAT_CONSUMER,
	IDEM_STAT_SCOPE,
	IDEM_STAT_TOPIC
} IdemStatKind;

#define IDEM_STAT_KINDS	(IDEM_STAT_TOPIC + 1)

/* What is counted; the meaning of a column depends on the kind. */
typedef enum IdemStatColumn
{
	IDEM_STAT_CLAIMS = 0,
	IDEM_STAT_DUPLICATES,
	IDEM_STAT_WAITS,
	IDEM_STAT_IN_FLIGHT,
	IDEM_STAT_EXPIRED,
	IDEM_STAT_STORED,
	IDEM_STAT_BUSINESS_DUPLICATES,
	IDEM_STAT_PROCESSED,
	IDEM_STAT_RETRIED,
	IDEM_STAT_DEAD,
	IDEM_STAT_BUSY_USECS,

	IDEM_STAT_STARTED = 0,
	IDEM_STAT_REPLAYED,
	IDEM_STAT_CONFLICTS,
	IDEM_STAT_KEY_IN_FLIGHT,
	IDEM_STAT_TAKEN_OVER,

	IDEM_STAT_ENQUEUED = 0,
	IDEM_STAT_DEDUPED,

	IDEM_STAT_COLUMNS = 11
} IdemStatColumn;

/* A place to count, remembered by who counts; zero it to begin with. */
typedef struct IdemStat
{
	struct IdemStatEntry *entry;
	uint32		generation;
} IdemStat;

extern void idem_stat_request(void);
extern void idem_stat_startup(void);
extern void idem_stat_forget(Oid database);
extern bool idem_stat_ended_well(void);
extern void idem_stat_count_from(IdemStat *stat, IdemStatKind kind, const char *name,
								 const char *type, const char *source,
								 IdemStatColumn column, uint64 n);
extern void idem_stat_count(IdemStat *stat, IdemStatKind kind, const char *name,
							IdemStatColumn column, uint64 n);

#endif							/* IDEM_STAT_H */

/*-------------------------------------------------------------------------
 *
 * relay_stat.h
 *		What the relay says of its servers, in shared memory.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_STAT_H
#define IDEM_RELAY_STAT_H

#include "storage/spin.h"
#include "utils/timestamp.h"

typedef enum IdemServerState
{
	IDEM_SERVER_STARTING,
	IDEM_SERVER_RUNNING,
	IDEM_SERVER_PAUSED,
	IDEM_SERVER_BACKING_OFF,
	IDEM_SERVER_BLOCKED,
	IDEM_SERVER_HOLDING
} IdemServerState;

#define IDEM_LATENCY_SAMPLES	512
#define IDEM_RATE_SECONDS		10

/* Written by the relay alone, under the lock; read by everybody. */
typedef struct IdemServerStat
{
	slock_t		mutex;
	Oid			database;		/* InvalidOid: free */
	char		server[NAMEDATALEN];
	IdemServerState state;
	char		reason[256];
	int			courier;		/* pid, or 0 */
	int64		sent;
	int64		retried;
	int64		unknown;
	int64		dead;
	int			in_flight;
	TimestampTz tick_at;		/* of the position */
	int64		seq;
	char		last_error[256];
	TimestampTz last_error_at;
	TimestampTz last_sent_at;
	uint32		samples[IDEM_LATENCY_SAMPLES];	/* commit to answer, in 10 us */
	uint32		nsamples;
	int64		rate_second;	/* the newest second in "rate" */
	uint32		rate[IDEM_RATE_SECONDS];
} IdemServerStat;

extern void idem_relay_stat_request(void);
extern void idem_relay_stat_startup(void);
extern IdemServerStat *idem_relay_stat_attach(const char *server);
extern void idem_relay_stat_rename(IdemServerStat *stat, const char *server);
extern void idem_relay_stat_detach(IdemServerStat *stat);
extern void idem_relay_stat_error(IdemServerStat *stat, const char *error);
extern void idem_relay_stat_sent(IdemServerStat *stat, TimestampTz enqueued_at, TimestampTz now);

#endif							/* IDEM_RELAY_STAT_H */

/*-------------------------------------------------------------------------
 *
 * guc.h
 *		The settings of idem.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_GUC_H
#define IDEM_GUC_H

typedef enum IdemLoneClaim
{
	IDEM_LONE_ALLOW,
	IDEM_LONE_WARN,
	IDEM_LONE_ERROR
} IdemLoneClaim;

extern int	idem_claim_outside_transaction;
extern int	idem_inbox_retention;
extern int	idem_key_ttl;
extern int	idem_handler_workers;
extern bool idem_maintenance;
extern int	idem_maintenance_naptime;
extern int	idem_maintenance_delay;
extern int	idem_max_consumers;
extern int	idem_max_databases;
extern bool idem_relay;
extern int	idem_max_servers;
extern int	idem_outbox_segment_rows;
extern char *idem_secrets_dir;
extern char *idem_site;
extern int	idem_outbox_retention;
extern int	idem_outbox_max_payload;
extern char *idem_traceparent;
extern int	idem_stat_entries;

extern void idem_guc_init(void);
extern bool idem_guc_is_traceparent(const char *s);

#endif							/* IDEM_GUC_H */

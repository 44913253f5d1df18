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
extern bool idem_maintenance;
extern int	idem_maintenance_naptime;
extern int	idem_maintenance_delay;
extern int	idem_max_databases;
extern char *idem_secrets_dir;
extern int	idem_stat_entries;

extern void idem_guc_init(void);

#endif							/* IDEM_GUC_H */

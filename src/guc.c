/*-------------------------------------------------------------------------
 *
 * guc.c
 *		The settings of idem, all of them.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <limits.h>

#include "miscadmin.h"
#include "utils/guc.h"

#include "guc.h"

int			idem_claim_outside_transaction = IDEM_LONE_WARN;
int			idem_inbox_retention = 7 * 24 * 3600;
int			idem_key_ttl = 24 * 3600;
bool		idem_maintenance = true;
int			idem_maintenance_naptime = 60;
int			idem_maintenance_delay = 10;
int			idem_max_databases = 64;
char	   *idem_secrets_dir = NULL;
int			idem_stat_entries = 1000;

static const struct config_enum_entry lone_claim_options[] = {
	{"allow", IDEM_LONE_ALLOW, false},
	{"warn", IDEM_LONE_WARN, false},
	{"error", IDEM_LONE_ERROR, false},
	{NULL, 0, false}
};

/*
 * idem_guc_init
 *		Define the settings.
 *
 * Those that size shared memory can be defined as such only while the
 * postmaster loads us; otherwise they have no effect, but must exist, lest a
 * correct configuration file draw warnings.
 */
void
idem_guc_init(void)
{
	GucContext	start_only = process_shared_preload_libraries_in_progress ?
		PGC_POSTMASTER : PGC_SIGHUP;

	DefineCustomEnumVariable("idem.claim_outside_transaction",
							 "What to do about a claim that commits by itself, without any work.",
							 "A warning is given once per session.",
							 &idem_claim_outside_transaction,
							 IDEM_LONE_WARN, lone_claim_options,
							 PGC_USERSET, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.inbox_retention",
							"How long claims of a consumer without a retention of its own are kept.",
							NULL,
							&idem_inbox_retention,
							7 * 24 * 3600, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.key_ttl",
							"How long an idempotency key is kept if key_begin() names no ttl.",
							NULL,
							&idem_key_ttl,
							24 * 3600, 1, INT_MAX,
							PGC_USERSET, GUC_UNIT_S, NULL, NULL, NULL);

	DefineCustomBoolVariable("idem.maintenance",
							 "Removes expired claims and keys in the background.",
							 NULL,
							 &idem_maintenance,
							 true,
							 PGC_SIGHUP, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.maintenance_naptime",
							"Time between two runs of the maintenance worker.",
							NULL,
							&idem_maintenance_naptime,
							60, 1, 86400,
							PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.maintenance_delay",
							"Pause of the maintenance worker between two batches.",
							NULL,
							&idem_maintenance_delay,
							10, 0, 10000,
							PGC_SIGHUP, GUC_UNIT_MS, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.max_databases",
							"Number of databases that can have workers of idem.",
							NULL,
							&idem_max_databases,
							64, 1, 10000,
							start_only, 0, NULL, NULL, NULL);

	DefineCustomStringVariable("idem.secrets_dir",
							   "Directory of the files that hold the secrets of servers.",
							   "Options of servers name files below it; nothing else can be read.",
							   &idem_secrets_dir,
							   "",
							   PGC_SIGHUP, GUC_SUPERUSER_ONLY, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.stat_entries",
							"Number of consumers and scopes that are counted apart.",
							"Those beyond it are counted together as (other).",
							&idem_stat_entries,
							1000, 10, 1000000,
							start_only, 0, NULL, NULL, NULL);

	MarkGUCPrefixReserved("idem");
}

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

#include "fault.h"
#include "guc.h"
#include "worker.h"

int			idem_claim_outside_transaction = IDEM_LONE_WARN;
int			idem_inbox_retention = 7 * 24 * 3600;
int			idem_key_ttl = 24 * 3600;
int			idem_handler_workers = 2;
bool		idem_maintenance = true;
int			idem_maintenance_naptime = 60;
int			idem_maintenance_delay = 10;
int			idem_max_consumers = 256;
int			idem_max_databases = 64;
bool		idem_relay = true;
int			idem_max_servers = 64;
int			idem_outbox_segment_rows = 1000000;
char	   *idem_secrets_dir = NULL;
char	   *idem_site = NULL;
int			idem_outbox_retention = 24 * 3600;
int			idem_outbox_max_payload = 8 * 1024 * 1024;
char	   *idem_traceparent = NULL;
int			idem_stat_entries = 1000;

static const struct config_enum_entry lone_claim_options[] = {
	{"allow", IDEM_LONE_ALLOW, false},
	{"warn", IDEM_LONE_WARN, false},
	{"error", IDEM_LONE_ERROR, false},
	{NULL, 0, false}
};

/* Two, 32, 16 and two hexadecimal digits, joined by hyphens. */
bool
idem_guc_is_traceparent(const char *s)
{
	static const char form[] = "00-00000000000000000000000000000000-0000000000000000-00";

	if (strlen(s) != sizeof(form) - 1)
		return false;
	for (int i = 0; s[i]; i++)
	{
		if (form[i] == '-' ? s[i] != '-' : strchr("0123456789abcdef", s[i]) == NULL)
			return false;
	}
	return true;
}

static bool
check_traceparent(char **value, void **extra pg_attribute_unused(),
				  GucSource source pg_attribute_unused())
{
	return *value == NULL || **value == '\0' || idem_guc_is_traceparent(*value);
}

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

	DefineCustomIntVariable("idem.handler_workers",
							"Number of processes per database that run handlers of consumers.",
							NULL,
							&idem_handler_workers,
							2, 0, IDEM_MAX_HANDLERS,
							PGC_SIGHUP, 0, NULL, NULL, NULL);

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

	DefineCustomIntVariable("idem.max_consumers",
							"Number of declared consumers of all databases whose work is tracked.",
							"For those beyond it, handlers do not run.",
							&idem_max_consumers,
							256, 1, 100000,
							start_only, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.max_databases",
							"Number of databases that can have workers of idem.",
							NULL,
							&idem_max_databases,
							64, 1, 10000,
							start_only, 0, NULL, NULL, NULL);

	DefineCustomBoolVariable("idem.relay",
							 "Delivers messages of the outbox in the background.",
							 NULL,
							 &idem_relay,
							 true,
							 PGC_SIGHUP, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.max_servers",
							"Number of servers of all databases whose figures are shown.",
							NULL,
							&idem_max_servers,
							64, 1, 10000,
							start_only, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.outbox_segment_rows",
							"Number of messages after which the outbox goes on to its next table.",
							NULL,
							&idem_outbox_segment_rows,
							1000000, 1, INT_MAX,
							PGC_SIGHUP, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.outbox_max_payload",
							"Largest payload that may be enqueued.",
							NULL,
							&idem_outbox_max_payload,
							8 * 1024 * 1024, 1, 48 * 1024 * 1024,
							PGC_SUSET, GUC_UNIT_BYTE, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.outbox_retention",
							"How long messages are kept in the outbox after they were enqueued.",
							"They can be replayed for so long; what is not sent is kept longer.",
							&idem_outbox_retention,
							24 * 3600, 1, INT_MAX,
							PGC_SIGHUP, GUC_UNIT_S, NULL, NULL, NULL);

	DefineCustomStringVariable("idem.secrets_dir",
							   "Directory of the files that hold the secrets of servers.",
							   "Options of servers name files below it; nothing else can be read.",
							   &idem_secrets_dir,
							   "",
							   PGC_SIGHUP, GUC_SUPERUSER_ONLY, NULL, NULL, NULL);

	DefineCustomStringVariable("idem.site",
							   "Names this place, so that the relay of a physical copy elsewhere holds.",
							   "Give a copy another site before it is started.",
							   &idem_site,
							   "",
							   PGC_SIGHUP, 0, NULL, NULL, NULL);

	DefineCustomIntVariable("idem.stat_entries",
							"Number of consumers and scopes that are counted apart.",
							"Those beyond it are counted together as (other).",
							&idem_stat_entries,
							1000, 10, 1000000,
							start_only, 0, NULL, NULL, NULL);

	DefineCustomStringVariable("idem.traceparent",
							   "W3C trace context of messages that are enqueued without one.",
							   NULL,
							   &idem_traceparent,
							   "",
							   PGC_USERSET, 0, check_traceparent, NULL, NULL);

#ifdef IDEM_FAULTS
	DefineCustomStringVariable("idem.fault",
							   "Where something goes wrong, and what; for tests.",
							   NULL,
							   &idem_fault_setting,
							   "",
							   PGC_SUSET, 0, NULL, NULL, NULL);
#endif

	MarkGUCPrefixReserved("idem");
}

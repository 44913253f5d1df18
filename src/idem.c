/*-------------------------------------------------------------------------
 *
 * idem.c
 *		Where the server meets the extension.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "storage/ipc.h"

#include "backlog.h"
#include "consumer.h"
#include "database.h"
#include "guc.h"
#include "launcher.h"
#include "relay_stat.h"
#include "stat.h"
#include "wake.h"
#include "worker.h"

PG_MODULE_MAGIC;

extern PGDLLEXPORT void _PG_init(void);

static shmem_request_hook_type next_shmem_request = NULL;
static shmem_startup_hook_type next_shmem_startup = NULL;

static void
on_shmem_request(void)
{
	if (next_shmem_request)
		next_shmem_request();
	idem_stat_request();
	idem_worker_request();
	idem_wake_request();
	idem_relay_stat_request();
	idem_backlog_request();
}

static void
on_shmem_startup(void)
{
	if (next_shmem_startup)
		next_shmem_startup();
	idem_stat_startup();
	idem_worker_startup();
	idem_wake_startup();
	idem_relay_stat_startup();
	idem_backlog_startup();
}

/*
 * Claims, keys and versions need nothing but this library.  Counters and
 * workers need shared memory, and so shared_preload_libraries.
 */
void
_PG_init(void)
{
	idem_guc_init();
	idem_consumer_init();
	idem_backlog_init();
	if (!process_shared_preload_libraries_in_progress)
		return;

	next_shmem_request = shmem_request_hook;
	shmem_request_hook = on_shmem_request;
	next_shmem_startup = shmem_startup_hook;
	shmem_startup_hook = on_shmem_startup;
	idem_wake_init();
	idem_database_hooks();
	idem_launcher_register();
}

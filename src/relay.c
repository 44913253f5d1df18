/*-------------------------------------------------------------------------
 *
 * relay.c
 *		Delivers what is in the outbox.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"

#include "relay.h"
#include "wake.h"
#include "worker.h"

#define POLL_MS		10000

/* Entry point of the relay. */
void
idem_relay_main(Datum arg)
{
	IdemDatabase *db = idem_worker_start(arg, IDEM_WORKER_RELAY);

	idem_wake_attach();
	idem_worker_succeeded(db, IDEM_WORKER_RELAY);
	while (idem_worker_may_run(db, IDEM_WORKER_RELAY))
	{
		pgstat_report_activity(STATE_IDLE, NULL);
		idem_wake_prepare_sleep();
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 POLL_MS, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		idem_wake_awake();
		CHECK_FOR_INTERRUPTS();
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
	}
	proc_exit(0);
}

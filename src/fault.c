/*-------------------------------------------------------------------------
 *
 * fault.c
 *		Places at which tests make something go wrong.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <signal.h>

#include "miscadmin.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"

#include "fault.h"

char	   *idem_fault_setting = NULL;

/* What is to happen at this place, or NULL. */
static const char *
action_at(const char *place)
{
	size_t		len = strlen(place);

	if (idem_fault_setting == NULL || strncmp(idem_fault_setting, place, len) != 0 ||
		idem_fault_setting[len] != ':')
		return NULL;
	return idem_fault_setting + len + 1;
}

/*
 * idem_fault
 *		Do what idem.fault says about this place.
 *
 *	error	raises an error
 *	exit	ends the process in good order
 *	kill	ends it at once, as a crash would
 *	wait	stays here until the setting says something else
 */
void
idem_fault(const char *place)
{
	const char *action = action_at(place);

	if (action == NULL)
		return;
	if (strcmp(action, "error") == 0)
		ereport(ERROR,
				(errcode(ERRCODE_SYSTEM_ERROR),
				 errmsg("fault at %s", place)));
	if (strcmp(action, "exit") == 0)
		proc_exit(1);
	if (strcmp(action, "kill") == 0)
		kill(MyProcPid, SIGKILL);

	ereport(LOG, (errmsg("waiting at %s", place)));
	while ((action = action_at(place)) != NULL && strcmp(action, "wait") == 0)
	{
		(void) WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH,
						 100, PG_WAIT_EXTENSION);
		ResetLatch(MyLatch);
		if (ConfigReloadPending)
		{
			ConfigReloadPending = false;
			ProcessConfigFile(PGC_SIGHUP);
		}
		if (ShutdownRequestPending)
			break;
	}
}

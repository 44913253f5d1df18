/*-------------------------------------------------------------------------
 *
 * launcher.h
 *		The process that keeps the workers of all databases running.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_LAUNCHER_H
#define IDEM_LAUNCHER_H

#include "worker.h"

extern void idem_launcher_register(void);
extern void idem_launcher_nudge(void);
extern void idem_worker_describe(IdemWorkerKind kind, const char **state,
								 const char **reason, int *pid);
extern PGDLLEXPORT void idem_launcher_main(Datum arg);

#endif							/* IDEM_LAUNCHER_H */

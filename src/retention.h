/*-------------------------------------------------------------------------
 *
 * retention.h
 *		Removes what is older than it has to be.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RETENTION_H
#define IDEM_RETENTION_H

#include "fmgr.h"

extern PGDLLEXPORT void idem_maintenance_main(Datum arg);

extern int32 idem_max_rows_arg(FunctionCallInfo fcinfo);

#endif							/* IDEM_RETENTION_H */

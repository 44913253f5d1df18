/*-------------------------------------------------------------------------
 *
 * retention.h
 *		Removes what is older than it has to be.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RETENTION_H
#define IDEM_RETENTION_H

extern PGDLLEXPORT void idem_maintenance_main(Datum arg);

#endif							/* IDEM_RETENTION_H */

/*-------------------------------------------------------------------------
 *
 * database.h
 *		Keeps workers out of the way of commands on databases and extensions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_DATABASE_H
#define IDEM_DATABASE_H

extern void idem_database_hooks(void);

#endif							/* IDEM_DATABASE_H */

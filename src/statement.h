/*-------------------------------------------------------------------------
 *
 * statement.h
 *		Constant SQL statements, planned once per session.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STATEMENT_H
#define IDEM_STATEMENT_H

#include "executor/spi.h"

#define IDEM_STATEMENT_MAX_ARGS 20

typedef struct IdemStatement
{
	const char *sql;
	int			nargs;
	Oid			types[IDEM_STATEMENT_MAX_ARGS];
	SPIPlanPtr	plan;			/* filled in at first use */
} IdemStatement;

/* Who we were before we became the owner of our tables. */
typedef struct IdemCaller
{
	Oid			user;
	int			context;
	int			guc_level;
} IdemCaller;

extern uint64 idem_statement_run(IdemStatement *st, Datum *values,
								 const char *nulls);

extern void idem_become_owner(IdemCaller *caller);
extern void idem_become_caller(const IdemCaller *caller);

#endif							/* IDEM_STATEMENT_H */

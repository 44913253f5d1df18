/*-------------------------------------------------------------------------
 *
 * statement.c
 *		Constant SQL statements, planned once per session.
 *
 * For work that is not on a hot path.  The functions that use it are SECURITY
 * DEFINER with a pinned search_path, so that neither a caller's rights nor
 * its operators have a part in it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "statement.h"

/*
 * idem_statement_run
 *		Run a statement and return how many rows it returned or changed.
 *
 * Caller has done SPI_connect() and finds result rows in SPI_tuptable.
 */
uint64
idem_statement_run(IdemStatement *st, Datum *values, const char *nulls)
{
	int			rc;

	if (st->plan == NULL)
	{
		SPIPlanPtr	plan = SPI_prepare(st->sql, st->nargs, st->types);

		if (plan == NULL || SPI_keepplan(plan) != 0)
			elog(ERROR, "could not prepare \"%s\": %s", st->sql,
				 SPI_result_code_string(SPI_result));
		st->plan = plan;
	}

	rc = SPI_execute_plan(st->plan, values, nulls, false, 0);
	if (rc < 0)
		elog(ERROR, "could not run \"%s\": %s", st->sql,
			 SPI_result_code_string(rc));
	return SPI_processed;
}

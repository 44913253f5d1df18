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

#include "access/htup_details.h"
#include "catalog/pg_class.h"
#include "miscadmin.h"
#include "utils/guc.h"
#include "utils/syscache.h"

#include "catalog.h"
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

/*
 * Run statements as the owner of our tables, with a search_path that nobody
 * has a hand in.  After an error the end of the transaction puts it all back.
 */
void
idem_become_owner(IdemCaller *caller)
{
	HeapTuple	tup = SearchSysCache1(RELOID, ObjectIdGetDatum(idem_rel(IDEM_REL_CONSUMER)));
	Oid			owner;

	if (!HeapTupleIsValid(tup))
		elog(ERROR, "cache lookup failed for relation \"idem.consumer\"");
	owner = ((Form_pg_class) GETSTRUCT(tup))->relowner;
	ReleaseSysCache(tup);

	GetUserIdAndSecContext(&caller->user, &caller->context);
	SetUserIdAndSecContext(owner, caller->context | SECURITY_LOCAL_USERID_CHANGE);
	caller->guc_level = NewGUCNestLevel();
	(void) set_config_option("search_path", "pg_catalog, pg_temp",
							 PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
	SPI_connect();
}

void
idem_become_caller(const IdemCaller *caller)
{
	SPI_finish();
	AtEOXact_GUC(true, caller->guc_level);
	SetUserIdAndSecContext(caller->user, caller->context);
}

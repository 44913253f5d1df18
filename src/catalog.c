/*-------------------------------------------------------------------------
 *
 * catalog.c
 *		The extension's own tables, found by name and remembered by oid.
 *
 * The schema's name is fixed, so a name leads to one table only.  Whatever
 * else is remembered about the contents of these tables is good for as long
 * as idem_catalog_generation() stays the same.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/table.h"
#include "catalog/namespace.h"
#include "commands/extension.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"

#include "catalog.h"

static const char *const rel_names[IDEM_NUM_RELS] = {
	[IDEM_REL_CONSUMER] = "consumer",
	[IDEM_REL_CONSUMER_PKEY] = "consumer_pkey",
	[IDEM_REL_INBOX_CLAIM] = "inbox_claim",
	[IDEM_REL_INBOX_CONSUMER] = "inbox_consumer",
	[IDEM_REL_INBOX_CONSUMER_NAME] = "inbox_consumer_name",
	[IDEM_REL_INBOX_CONSUMER_SEQ] = "inbox_consumer_id_seq",
	[IDEM_REL_INBOX_MESSAGE] = "inbox_message",
	[IDEM_REL_INBOX_PARKED] = "inbox_parked",
	[IDEM_REL_INBOX_SEQ] = "inbox_seq",
	[IDEM_REL_KEY] = "key",
	[IDEM_REL_OUTBOX_0] = "outbox_0",
	[IDEM_REL_OUTBOX_0 + 1] = "outbox_1",
	[IDEM_REL_OUTBOX_0 + 2] = "outbox_2",
	[IDEM_REL_OUTBOX_0 + 3] = "outbox_3",
	[IDEM_REL_OUTBOX_0 + 4] = "outbox_4",
	[IDEM_REL_OUTBOX_0 + 5] = "outbox_5",
	[IDEM_REL_OUTBOX_0 + 6] = "outbox_6",
	[IDEM_REL_OUTBOX_0 + 7] = "outbox_7",
	[IDEM_REL_OUTBOX_DEDUP] = "outbox_dedup",
	[IDEM_REL_OUTBOX_SEQ] = "outbox_seq",
	[IDEM_REL_ROUTE] = "route",
	[IDEM_REL_VERSION] = "version",
};

static Oid	rel_oids[IDEM_NUM_RELS];
static uint64 generation = 1;
static bool watching = false;

/* Forget everything when one of our tables changes, or nobody knows what did. */
static void
on_relcache_change(Datum arg pg_attribute_unused(), Oid relid)
{
	for (int i = 0; i < IDEM_NUM_RELS; i++)
	{
		if (OidIsValid(rel_oids[i]) &&
			(relid == InvalidOid || relid == rel_oids[i]))
		{
			memset(rel_oids, 0, sizeof(rel_oids));
			generation++;
			return;
		}
	}
}

/*
 * idem_rel
 *		The oid of one of our tables, indexes or sequences.
 */
Oid
idem_rel(IdemRel which)
{
	if (!OidIsValid(rel_oids[which]))
	{
		if (!watching)
		{
			CacheRegisterRelcacheCallback(on_relcache_change, (Datum) 0);
			watching = true;
		}
		rel_oids[which] = get_relname_relid(rel_names[which],
											get_namespace_oid("idem", false));
		if (!OidIsValid(rel_oids[which]))
			ereport(ERROR,
					(errcode(ERRCODE_UNDEFINED_TABLE),
					 errmsg("relation \"idem.%s\" does not exist",
							rel_names[which]),
					 errhint("Create the extension anew; its tables must not be dropped one by one.")));
	}
	return rel_oids[which];
}

/*
 * idem_rel_open
 *		Open one of our tables.
 *
 * An oid found before we have the lock may be that of a table that is gone;
 * once we have waited for the lock, we have heard of it.
 */
Relation
idem_rel_open(IdemRel which, LOCKMODE lockmode)
{
	Relation	rel = try_table_open(idem_rel(which), lockmode);

	if (rel == NULL)
		rel = table_open(idem_rel(which), lockmode);
	return rel;
}

/* Whether this database has the extension.  Needs a transaction. */
bool
idem_installed(void)
{
	return OidIsValid(get_extension_oid("idem", true));
}

uint64
idem_catalog_generation(void)
{
	return generation;
}

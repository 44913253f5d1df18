/*-------------------------------------------------------------------------
 *
 * catalog.h
 *		The extension's own tables, found by name and remembered by oid.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CATALOG_H
#define IDEM_CATALOG_H

#include "storage/lockdefs.h"
#include "utils/relcache.h"

typedef enum IdemRel
{
	IDEM_REL_CONSUMER,
	IDEM_REL_CONSUMER_PKEY,
	IDEM_REL_INBOX_CLAIM,
	IDEM_REL_INBOX_CONSUMER,
	IDEM_REL_INBOX_CONSUMER_NAME,
	IDEM_REL_INBOX_CONSUMER_SEQ,
	IDEM_REL_INBOX_MESSAGE,
	IDEM_REL_INBOX_PARKED,
	IDEM_REL_INBOX_SEQ,
	IDEM_REL_KEY,
	IDEM_REL_OUTBOX_0,
	IDEM_REL_OUTBOX_LAST = IDEM_REL_OUTBOX_0 + 7,
	IDEM_REL_OUTBOX_DEDUP,
	IDEM_REL_OUTBOX_SEQ,
	IDEM_REL_ROUTE,
	IDEM_REL_VERSION
} IdemRel;

#define IDEM_NUM_RELS (IDEM_REL_VERSION + 1)

extern Oid	idem_rel(IdemRel which);
extern Relation idem_rel_open(IdemRel which, LOCKMODE lockmode);
extern bool idem_installed(void);
extern uint64 idem_catalog_generation(void);

#endif							/* IDEM_CATALOG_H */

/*-------------------------------------------------------------------------
 *
 * inbox.h
 *		The register of claims.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_INBOX_H
#define IDEM_INBOX_H

#include "utils/timestamp.h"
#include "utils/uuid.h"

/* Columns of idem.inbox_claim, as in inbox.sql. */
#define Anum_inbox_claim_key		1
#define Anum_inbox_claim_consumer	2
#define Anum_inbox_claim_at			3
#define Natts_inbox_claim			3

typedef enum IdemClaimStatus
{
	IDEM_CLAIM_CLAIMED,
	IDEM_CLAIM_DUPLICATE,
	IDEM_CLAIM_IN_FLIGHT,
	IDEM_CLAIM_EXPIRED,
	IDEM_NUM_CLAIM_STATUS
} IdemClaimStatus;

extern void idem_inbox_message_key(const char *consumer, const text *id, pg_uuid_t *key);
extern void idem_inbox_business_key(const char *consumer, const text *id, pg_uuid_t *key);
extern IdemClaimStatus idem_inbox_claim_key(const char *consumer, pg_uuid_t *key,
											bool wait, const TimestampTz *sent_at);

extern bool idem_inbox_is_known(pg_uuid_t *key);

#endif							/* IDEM_INBOX_H */

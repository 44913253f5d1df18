/*-------------------------------------------------------------------------
 *
 * inbox.h
 *		The register of claims, as its retention needs to know it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_INBOX_H
#define IDEM_INBOX_H

/* Columns of idem.inbox_claim, as in inbox.sql. */
#define Anum_inbox_claim_key		1
#define Anum_inbox_claim_consumer	2
#define Anum_inbox_claim_at			3
#define Natts_inbox_claim			3

#endif							/* IDEM_INBOX_H */

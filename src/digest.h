/*-------------------------------------------------------------------------
 *
 * digest.h
 *		Keys of 16 bytes that stand for something longer.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_DIGEST_H
#define IDEM_DIGEST_H

#include "utils/uuid.h"

extern void idem_digest(const void *head, int headlen, const void *tail,
						int taillen, pg_uuid_t *key);

#endif							/* IDEM_DIGEST_H */

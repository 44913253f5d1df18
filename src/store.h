/*-------------------------------------------------------------------------
 *
 * store.h
 *		Storing messages for a consumer, to be processed later.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_STORE_H
#define IDEM_STORE_H

#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "declared.h"

/* A message to store, in the database's encoding; NULL means absent. */
typedef struct IdemToStore
{
	pg_uuid_t	claim;
	bool		claimed;
	bool		replayed;
	TimestampTz enqueued_at;
	TimestampTz deliver_at;		/* 0: at once */
	text	   *msg_id;
	text	   *topic;
	text	   *key;
	text	   *content_type;
	text	   *headers;
	text	   *source;
	text	   *type;
	bytea	   *body;
} IdemToStore;

extern void idem_store(const IdemDeclared *c, const IdemToStore *list, int n);

#endif							/* IDEM_STORE_H */

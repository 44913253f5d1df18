/*-------------------------------------------------------------------------
 *
 * digest.c
 *		Keys of 16 bytes that stand for something longer.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "common/cryptohash.h"
#include "common/sha2.h"

#include "digest.h"

/* SHA-256 of both parts, one after the other, cut to 16 bytes. */
void
idem_digest(const void *head, int headlen, const void *tail, int taillen,
			pg_uuid_t *key)
{
	pg_cryptohash_ctx *ctx = pg_cryptohash_create(PG_SHA256);
	uint8		digest[PG_SHA256_DIGEST_LENGTH];

	if (pg_cryptohash_init(ctx) < 0 ||
		pg_cryptohash_update(ctx, head, headlen) < 0 ||
		pg_cryptohash_update(ctx, tail, taillen) < 0 ||
		pg_cryptohash_final(ctx, digest, sizeof(digest)) < 0)
		elog(ERROR, "could not compute SHA-256: %s", pg_cryptohash_error(ctx));
	pg_cryptohash_free(ctx);
	memcpy(key->data, digest, UUID_LEN);
}


--
-- The inbox: claims.  Their cost is high, so that in a WHERE clause cheaper
-- conditions come first.
--
CREATE TABLE idem.inbox_claim (
	key uuid NOT NULL,
	consumer integer NOT NULL,
	claimed_at integer NOT NULL,
	CONSTRAINT inbox_claim_pkey PRIMARY KEY (key)
) USING heap;
COMMENT ON TABLE idem.inbox_claim IS
	'claims, one row each; read them through idem.inbox';
COMMENT ON COLUMN idem.inbox_claim.key IS
	'hash of consumer and message id, see idem.inbox_key()';
COMMENT ON COLUMN idem.inbox_claim.consumer IS
	'number of the consumer in idem.inbox_consumer';
COMMENT ON COLUMN idem.inbox_claim.claimed_at IS
	'seconds since 2000-01-01 00:00 UTC';
SELECT pg_catalog.pg_extension_config_dump('idem.inbox_claim', '');

CREATE TYPE idem.claim_status AS ENUM ('claimed', 'duplicate', 'in_flight', 'expired');
COMMENT ON TYPE idem.claim_status IS 'what came of a claim';

CREATE FUNCTION idem.inbox_try_claim(consumer text, msg_id text) RETURNS boolean
	AS 'MODULE_PATHNAME', 'idem_inbox_try_claim' LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;
COMMENT ON FUNCTION idem.inbox_try_claim(text, text) IS
	'claim a message for a consumer; true for exactly one committed caller';

CREATE FUNCTION idem.inbox_try_claim(consumer text, msg_id uuid) RETURNS boolean
	AS 'MODULE_PATHNAME', 'idem_inbox_try_claim_uuid' LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;
COMMENT ON FUNCTION idem.inbox_try_claim(text, uuid) IS
	'claim a message for a consumer; true for exactly one committed caller';

CREATE FUNCTION idem.inbox_claim(consumer text, msg_id text,
		wait boolean DEFAULT true, sent_at timestamptz DEFAULT NULL,
		OUT status idem.claim_status, OUT first_seen timestamptz)
	AS 'MODULE_PATHNAME', 'idem_inbox_claim' LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;
COMMENT ON FUNCTION idem.inbox_claim(text, text, boolean, timestamptz) IS
	'claim a message for a consumer, and say what is known of it otherwise';

CREATE FUNCTION idem.inbox_claim_batch(consumer text, msg_ids text[])
	RETURNS TABLE (msg_id text, status idem.claim_status)
	AS 'MODULE_PATHNAME', 'idem_inbox_claim_batch' LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;
COMMENT ON FUNCTION idem.inbox_claim_batch(text, text[]) IS
	'claim many messages at once; one row per element, in the same order';

CREATE FUNCTION idem.inbox_key(consumer text, msg_id text) RETURNS uuid
	AS 'MODULE_PATHNAME', 'idem_inbox_key' LANGUAGE C IMMUTABLE PARALLEL SAFE;
COMMENT ON FUNCTION idem.inbox_key(text, text) IS
	'the key under which a claim is kept';

CREATE VIEW idem.inbox AS
	SELECT n.name AS consumer, c.key,
		   timestamptz '2000-01-01 00:00:00+00'
			   + pg_catalog.make_interval(secs => c.claimed_at) AS claimed_at
	FROM idem.inbox_claim c LEFT JOIN idem.inbox_consumer n ON n.id = c.consumer;
COMMENT ON VIEW idem.inbox IS 'all claims';

CREATE FUNCTION idem.inbox_lookup(consumer text, msg_id text)
	RETURNS TABLE (claimed_at timestamptz, key uuid)
	LANGUAGE sql STABLE PARALLEL SAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp
	AS $$
		SELECT i.claimed_at, i.key FROM idem.inbox i
		WHERE i.key = idem.inbox_key($1, $2)
	$$;
COMMENT ON FUNCTION idem.inbox_lookup(text, text) IS
	'look up a claim by consumer and message id; no row if there is none';

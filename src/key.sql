
--
-- Idempotency keys.  Without sequential scans: one key must not lock out all
-- others under SERIALIZABLE, nor a plan for an empty table outlive its time.
--
CREATE TABLE idem.key (
	scope text COLLATE "C" NOT NULL,
	key text COLLATE "C" NOT NULL,
	fingerprint bytea,
	completed boolean NOT NULL,
	started_at timestamptz NOT NULL,
	expires_at timestamptz NOT NULL,
	ttl interval NOT NULL,
	lease_until timestamptz,
	token uuid,
	code integer,
	headers jsonb,
	body text,
	CONSTRAINT key_pkey PRIMARY KEY (scope, key)
) USING heap;
CREATE INDEX key_expires_at ON idem.key (expires_at);
COMMENT ON TABLE idem.key IS 'idempotency keys and stored outcomes';
SELECT pg_catalog.pg_extension_config_dump('idem.key', '');

CREATE TYPE idem.key_status AS ENUM ('started', 'in_flight', 'completed', 'mismatch');
COMMENT ON TYPE idem.key_status IS 'what key_begin() found';

CREATE FUNCTION idem.key_begin(scope text, key text,
		fingerprint bytea DEFAULT NULL, ttl interval DEFAULT NULL,
		wait boolean DEFAULT true, lease interval DEFAULT NULL,
		OUT status idem.key_status, OUT token uuid,
		OUT code integer, OUT headers jsonb, OUT body text)
	AS 'MODULE_PATHNAME', 'idem_key_begin' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off;
COMMENT ON FUNCTION idem.key_begin(text, text, bytea, interval, boolean, interval) IS
	'begin a command under an idempotency key, or get its stored outcome';

CREATE FUNCTION idem.key_complete(scope text, key text, code integer DEFAULT NULL,
		headers jsonb DEFAULT NULL, body text DEFAULT NULL, token uuid DEFAULT NULL)
	RETURNS void
	AS 'MODULE_PATHNAME', 'idem_key_complete' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off;
COMMENT ON FUNCTION idem.key_complete(text, text, integer, jsonb, text, uuid) IS
	'store the outcome of a command under its key';

CREATE FUNCTION idem.key_release(scope text, key text, token uuid DEFAULT NULL)
	RETURNS boolean
	AS 'MODULE_PATHNAME', 'idem_key_release' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off;
COMMENT ON FUNCTION idem.key_release(text, text, uuid) IS
	'give a key in flight back, so that the command can be tried again';

CREATE FUNCTION idem.fingerprint(request jsonb) RETURNS bytea
	AS 'MODULE_PATHNAME', 'idem_fingerprint' LANGUAGE C IMMUTABLE PARALLEL SAFE;
COMMENT ON FUNCTION idem.fingerprint(jsonb) IS
	'fingerprint of a request in which the order of object keys does not matter';


--
-- Version guards.  Without sequential scans, as for keys.
--
CREATE TABLE idem.version (
	consumer text COLLATE "C" NOT NULL,
	entity text COLLATE "C" NOT NULL,
	version bigint NOT NULL,
	advanced_at timestamptz NOT NULL,
	CONSTRAINT version_pkey PRIMARY KEY (consumer, entity)
) USING heap WITH (fillfactor = 90);
COMMENT ON TABLE idem.version IS 'the last version of each entity that was applied';
SELECT pg_catalog.pg_extension_config_dump('idem.version', '');

CREATE TYPE idem.version_status AS ENUM ('applied', 'duplicate', 'stale', 'gap');
COMMENT ON TYPE idem.version_status IS 'what version_advance() found';

CREATE FUNCTION idem.version_advance(consumer text, entity text, version bigint,
		mode text DEFAULT 'newer')
	RETURNS idem.version_status
	AS 'MODULE_PATHNAME', 'idem_version_advance' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off;
COMMENT ON FUNCTION idem.version_advance(text, text, bigint, text) IS
	'move an entity to a version, unless that is not newer, or not the next one';

CREATE FUNCTION idem.version_reset(consumer text, entity text DEFAULT NULL)
	RETURNS bigint
	AS 'MODULE_PATHNAME', 'idem_version_reset' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off;
COMMENT ON FUNCTION idem.version_reset(text, text) IS
	'forget the version of one entity, or of all of a consumer';

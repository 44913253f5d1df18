
--
-- The outbox: a log of messages.  Rows are added, never changed, and removed
-- by emptying a whole table; they lie in several tables in turn for that.
--
CREATE SEQUENCE idem.outbox_seq AS bigint CACHE 1;
COMMENT ON SEQUENCE idem.outbox_seq IS 'numbers of messages';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_seq', '');

CREATE TABLE idem.outbox_0 (
	seq bigint NOT NULL,
	xid xid8 NOT NULL,
	enqueued_at timestamptz NOT NULL,
	deliver_at timestamptz,
	msg_id uuid NOT NULL,
	topic text COLLATE "C" NOT NULL,
	key text COLLATE "C",
	content_type text COLLATE "C",
	headers text COLLATE "C",
	body bytea NOT NULL
) USING heap;
CREATE INDEX outbox_0_seq ON idem.outbox_0 (seq);
CREATE INDEX outbox_0_xid ON idem.outbox_0 (xid, seq);
COMMENT ON TABLE idem.outbox_0 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_0', '');

CREATE TABLE idem.outbox_1 (LIKE idem.outbox_0) USING heap;
CREATE INDEX outbox_1_seq ON idem.outbox_1 (seq);
CREATE INDEX outbox_1_xid ON idem.outbox_1 (xid, seq);
COMMENT ON TABLE idem.outbox_1 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_1', '');

CREATE TABLE idem.outbox_2 (LIKE idem.outbox_0) USING heap;
CREATE INDEX outbox_2_seq ON idem.outbox_2 (seq);
CREATE INDEX outbox_2_xid ON idem.outbox_2 (xid, seq);
COMMENT ON TABLE idem.outbox_2 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_2', '');

CREATE TABLE idem.outbox_3 (LIKE idem.outbox_0) USING heap;
CREATE INDEX outbox_3_seq ON idem.outbox_3 (seq);
CREATE INDEX outbox_3_xid ON idem.outbox_3 (xid, seq);
COMMENT ON TABLE idem.outbox_3 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_3', '');

CREATE TABLE idem.outbox_4 (LIKE idem.outbox_0) USING heap;
CREATE INDEX outbox_4_seq ON idem.outbox_4 (seq);
CREATE INDEX outbox_4_xid ON idem.outbox_4 (xid, seq);
COMMENT ON TABLE idem.outbox_4 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_4', '');

CREATE TABLE idem.outbox_5 (LIKE idem.outbox_0) USING heap;
CREATE INDEX outbox_5_seq ON idem.outbox_5 (seq);
CREATE INDEX outbox_5_xid ON idem.outbox_5 (xid, seq);
COMMENT ON TABLE idem.outbox_5 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_5', '');

CREATE TABLE idem.outbox_6 (LIKE idem.outbox_0) USING heap;
CREATE INDEX outbox_6_seq ON idem.outbox_6 (seq);
CREATE INDEX outbox_6_xid ON idem.outbox_6 (xid, seq);
COMMENT ON TABLE idem.outbox_6 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_6', '');

CREATE TABLE idem.outbox_7 (LIKE idem.outbox_0) USING heap;
CREATE INDEX outbox_7_seq ON idem.outbox_7 (seq);
CREATE INDEX outbox_7_xid ON idem.outbox_7 (xid, seq);
COMMENT ON TABLE idem.outbox_7 IS
	'messages; read them through idem.outbox';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_7', '');

CREATE VIEW idem.outbox AS
	SELECT * FROM idem.outbox_0
	UNION ALL
	SELECT * FROM idem.outbox_1
	UNION ALL
	SELECT * FROM idem.outbox_2
	UNION ALL
	SELECT * FROM idem.outbox_3
	UNION ALL
	SELECT * FROM idem.outbox_4
	UNION ALL
	SELECT * FROM idem.outbox_5
	UNION ALL
	SELECT * FROM idem.outbox_6
	UNION ALL
	SELECT * FROM idem.outbox_7;
COMMENT ON VIEW idem.outbox IS 'all messages that are still kept';

CREATE TABLE idem.outbox_dedup (
	key uuid NOT NULL,
	msg_id uuid NOT NULL,
	enqueued_at integer NOT NULL,
	CONSTRAINT outbox_dedup_pkey PRIMARY KEY (key)
) USING heap;
CREATE INDEX outbox_dedup_at ON idem.outbox_dedup (enqueued_at);
COMMENT ON TABLE idem.outbox_dedup IS
	'hashes of the dedup_keys and given ids of messages';
COMMENT ON COLUMN idem.outbox_dedup.enqueued_at IS
	'seconds since 2000-01-01 00:00 UTC';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_dedup', '');

CREATE FUNCTION idem.outbox_enqueue(topic text, payload "any", key text DEFAULT NULL,
		headers jsonb DEFAULT NULL, msg_id uuid DEFAULT NULL, dedup_key text DEFAULT NULL,
		deliver_at timestamptz DEFAULT NULL, content_type text DEFAULT NULL)
	RETURNS uuid
	AS 'MODULE_PATHNAME', 'idem_outbox_enqueue' LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;
COMMENT ON FUNCTION idem.outbox_enqueue(text, "any", text, jsonb, uuid, text, timestamptz, text) IS
	'enqueue a message; it exists exactly if this transaction commits; returns its id';

CREATE FUNCTION idem.outbox_enqueue_batch(topic text, payloads anyarray, keys text[] DEFAULT NULL,
		headers jsonb[] DEFAULT NULL, content_type text DEFAULT NULL)
	RETURNS uuid[]
	AS 'MODULE_PATHNAME', 'idem_outbox_enqueue_batch' LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;
COMMENT ON FUNCTION idem.outbox_enqueue_batch(text, anyarray, text[], jsonb[], text) IS
	'enqueue many messages of a topic, in the order of the array; returns their ids';

CREATE FUNCTION idem.outbox_capture() RETURNS trigger
	AS 'MODULE_PATHNAME', 'idem_outbox_capture' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION idem.outbox_capture() IS
	'trigger that enqueues each row inserted into a table';

CREATE VIEW idem.stat_outbox AS
	SELECT name AS topic, c1 AS enqueued, c2 AS duplicates, since
	FROM idem.stat_rows(2);
COMMENT ON VIEW idem.stat_outbox IS 'counters per topic';

CREATE FUNCTION idem.outbox_purge(max_rows integer DEFAULT 10000) RETURNS bigint
	AS 'MODULE_PATHNAME', 'idem_outbox_purge' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off;
COMMENT ON FUNCTION idem.outbox_purge(integer) IS
	'remove dedup_keys and given ids that are older than idem.outbox_retention by hand; returns how many';


--
-- Work: messages that wait for a consumer.  What waits for its first try lies
-- in inbox_message, rows of which are added and removed, never changed; what
-- waits for anything else, in inbox_parked.
--
CREATE TYPE idem.message AS (
	consumer text,
	msg_id text,
	topic text,
	key text,
	headers jsonb,
	payload jsonb,
	body bytea,
	content_type text,
	source text,
	type text,
	attempt integer,
	replayed boolean,
	enqueued_at timestamptz,
	token uuid
);
COMMENT ON TYPE idem.message IS
	'a message as handlers and applications get it; payload is null if it is not JSON';

CREATE TYPE idem.store_status AS ENUM ('stored', 'duplicate', 'business_duplicate', 'expired');
COMMENT ON TYPE idem.store_status IS 'what came of a message that was to be stored';

CREATE SEQUENCE idem.inbox_seq AS bigint CACHE 1;
COMMENT ON SEQUENCE idem.inbox_seq IS 'numbers of messages that wait for consumers';
SELECT pg_catalog.pg_extension_config_dump('idem.inbox_seq', '');

CREATE TABLE idem.inbox_message (
	consumer integer NOT NULL,
	seq bigint NOT NULL,
	claim uuid NOT NULL,
	claimed boolean NOT NULL,
	replayed boolean NOT NULL,
	stored_at timestamptz NOT NULL,
	enqueued_at timestamptz NOT NULL,
	msg_id text COLLATE "C" NOT NULL,
	topic text COLLATE "C",
	key text COLLATE "C",
	content_type text COLLATE "C",
	headers text COLLATE "C",
	source text COLLATE "C",
	type text COLLATE "C",
	body bytea NOT NULL
) USING heap;
CREATE INDEX inbox_message_seq ON idem.inbox_message (consumer, seq);
COMMENT ON TABLE idem.inbox_message IS
	'messages that wait for a consumer to process them';
COMMENT ON COLUMN idem.inbox_message.consumer IS 'number of the consumer in idem.consumer';
COMMENT ON COLUMN idem.inbox_message.claim IS 'key of the claim that belongs to it';
COMMENT ON COLUMN idem.inbox_message.claimed IS
	'is that claim there already, or made when the message is processed?';
SELECT pg_catalog.pg_extension_config_dump('idem.inbox_message', '');

CREATE TABLE idem.inbox_parked (
	LIKE idem.inbox_message,
	state text NOT NULL,
	attempts integer NOT NULL DEFAULT 0,
	due timestamptz,
	token uuid,
	not_yet_since timestamptz,
	sqlstate text,
	first_error text,
	last_error text,
	parked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
	CONSTRAINT inbox_parked_pkey PRIMARY KEY (consumer, seq)
) USING heap;
CREATE INDEX inbox_parked_due ON idem.inbox_parked (consumer, due) WHERE due IS NOT NULL;
CREATE INDEX inbox_parked_key ON idem.inbox_parked (consumer, key, seq) WHERE key IS NOT NULL AND state <> 'delayed';
CREATE INDEX inbox_parked_claim ON idem.inbox_parked (claim);
COMMENT ON TABLE idem.inbox_parked IS
	'messages that a consumer has not processed yet, and will later';
COMMENT ON COLUMN idem.inbox_parked.state IS
	'retry: tried again when due; leased: somebody has it until then; running: it was being processed when last heard of; behind: waits for an earlier one of its key; delayed: takes no part in the order until due';
SELECT pg_catalog.pg_extension_config_dump('idem.inbox_parked', '');

CREATE FUNCTION idem.inbox_store(consumer text, msg_id text, payload "any", key text DEFAULT NULL,
		headers jsonb DEFAULT NULL, dedup_key text DEFAULT NULL, source text DEFAULT NULL,
		type text DEFAULT NULL, sent_at timestamptz DEFAULT NULL, content_type text DEFAULT NULL,
		topic text DEFAULT NULL)
	RETURNS idem.store_status
	AS 'MODULE_PATHNAME', 'idem_inbox_store' LANGUAGE C VOLATILE PARALLEL UNSAFE COST 1000;
COMMENT ON FUNCTION idem.inbox_store(text, text, "any", text, jsonb, text, text, text, timestamptz, text, text) IS
	'store a message, to be processed later, unless it has been claimed or stored before';

CREATE FUNCTION idem.inbox_next(consumer text, max integer DEFAULT 1, lease interval DEFAULT NULL)
	RETURNS SETOF idem.message
	AS 'MODULE_PATHNAME', 'idem_inbox_next' LANGUAGE C VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off COST 1000 ROWS 1;
COMMENT ON FUNCTION idem.inbox_next(text, integer, interval) IS
	'take messages to process in this transaction, or with a lease in a later one';

CREATE FUNCTION idem.inbox_done(consumer text, msg_id text, token uuid DEFAULT NULL, result jsonb DEFAULT NULL)
	RETURNS void
	AS 'MODULE_PATHNAME', 'idem_inbox_done' LANGUAGE C VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off COST 1000;
COMMENT ON FUNCTION idem.inbox_done(text, text, uuid, jsonb) IS
	'a message that was taken has been processed';

CREATE FUNCTION idem.inbox_retry(consumer text, msg_id text, token uuid DEFAULT NULL, error text DEFAULT NULL,
		delay interval DEFAULT NULL)
	RETURNS void
	AS 'MODULE_PATHNAME', 'idem_inbox_retry' LANGUAGE C VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off COST 1000;
COMMENT ON FUNCTION idem.inbox_retry(text, text, uuid, text, interval) IS
	'a message that was taken could not be processed, and is to be tried again; that counts as an attempt';

CREATE FUNCTION idem.inbox_reject(consumer text, msg_id text, token uuid DEFAULT NULL, error text DEFAULT NULL)
	RETURNS void
	AS 'MODULE_PATHNAME', 'idem_inbox_reject' LANGUAGE C VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off COST 1000;
COMMENT ON FUNCTION idem.inbox_reject(text, text, uuid, text) IS
	'a message that was taken can never be processed: it becomes a dead letter';

CREATE FUNCTION idem.inbox_renew(consumer text, msg_id text, token uuid, lease interval) RETURNS void
	AS 'MODULE_PATHNAME', 'idem_inbox_renew' LANGUAGE C VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off COST 1000;
COMMENT ON FUNCTION idem.inbox_renew(text, text, uuid, interval) IS
	'keep a leased message for longer';

-- Outcomes that handlers and inbox_done() leave.
CREATE TABLE idem.inbox_outcome (
	claim uuid NOT NULL,
	consumer integer NOT NULL,
	msg_id text COLLATE "C" NOT NULL,
	result jsonb NOT NULL,
	at timestamptz NOT NULL DEFAULT clock_timestamp(),
	CONSTRAINT inbox_outcome_pkey PRIMARY KEY (claim)
) USING heap;
CREATE INDEX inbox_outcome_at ON idem.inbox_outcome (consumer, at);
COMMENT ON TABLE idem.inbox_outcome IS
	'what processing messages came to; kept as long as claims';
SELECT pg_catalog.pg_extension_config_dump('idem.inbox_outcome', '');

-- What has become of a message.
CREATE FUNCTION idem.inbox_status(consumer text, msg_id text)
	RETURNS TABLE (state text, attempts integer, due timestamptz, error text, result jsonb, stored_at timestamptz)
	LANGUAGE plpgsql STABLE PARALLEL SAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	AS $$
	#variable_conflict use_column
	DECLARE
		wanted uuid := idem.inbox_key(inbox_status.consumer, inbox_status.msg_id);
		c idem.consumer;
	BEGIN
		SELECT * INTO c FROM idem.consumer n WHERE n.name = inbox_status.consumer;
		RETURN QUERY SELECT p.state, p.attempts, p.due, p.last_error, NULL::jsonb, p.stored_at
			FROM idem.inbox_parked p WHERE p.claim = wanted;
		IF FOUND THEN RETURN; END IF;
		RETURN QUERY SELECT 'pending', 0, NULL::timestamptz, NULL, NULL::jsonb, m.stored_at
			FROM idem.inbox_message m WHERE m.consumer = c.id AND m.claim = wanted LIMIT 1;
		IF FOUND THEN RETURN; END IF;
		RETURN QUERY SELECT d.state, d.attempts, NULL::timestamptz, d.reason, NULL::jsonb, d.enqueued_at
			FROM idem.dead_letter d
			WHERE d.claim = wanted AND d.origin = 'consumer' AND d.state IN ('dead', 'discarded') ORDER BY d.id DESC LIMIT 1;
		IF FOUND THEN RETURN; END IF;
		RETURN QUERY SELECT 'done', NULL::integer, NULL::timestamptz, NULL, o.result, i.claimed_at
			FROM idem.inbox i LEFT JOIN idem.inbox_outcome o ON o.claim = i.key WHERE i.key = wanted;
	END
	$$;
COMMENT ON FUNCTION idem.inbox_status(text, text) IS
	'what has become of a message of a consumer; no row if nothing is known of it';

CREATE FUNCTION idem.inbox_notice(consumer integer) RETURNS void
	AS 'MODULE_PATHNAME', 'idem_inbox_notice' LANGUAGE C STRICT VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION idem.inbox_notice(integer) IS
	'have those who run handlers look at a consumer when this transaction commits';

-- For building a projection anew: forget what waits, and if wanted what was.
CREATE FUNCTION idem.consumer_reset(name text, claims boolean DEFAULT false) RETURNS bigint
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
	AS $$
	#variable_conflict use_column
	DECLARE
		c idem.consumer;
		n bigint;
		total bigint;
	BEGIN
		IF consumer_reset.name IS NULL OR claims IS NULL THEN
			RAISE EXCEPTION '% must not be null', CASE WHEN consumer_reset.name IS NULL THEN 'name' ELSE 'claims' END
				USING ERRCODE = 'null_value_not_allowed';
		END IF;
		SELECT * INTO c FROM idem.consumer k WHERE k.name = consumer_reset.name;
		IF NOT FOUND THEN
			RAISE EXCEPTION 'consumer "%" does not exist', consumer_reset.name
				USING ERRCODE = 'undefined_object', HINT = 'Create it with idem.consumer_create().';
		END IF;
		DELETE FROM idem.inbox_message m WHERE m.consumer = c.id;
		GET DIAGNOSTICS total = ROW_COUNT;
		DELETE FROM idem.inbox_parked p WHERE p.consumer = c.id;
		GET DIAGNOSTICS n = ROW_COUNT;
		DELETE FROM idem.inbox_outcome o WHERE o.consumer = c.id;
		IF claims THEN
			DELETE FROM idem.inbox_claim i
			WHERE i.consumer IN (SELECT k.id FROM idem.inbox_consumer k WHERE k.name = c.name);
		END IF;
		RETURN total + n;
	END
	$$;
COMMENT ON FUNCTION idem.consumer_reset(text, boolean) IS
	'discard what waits for a consumer, and with claims also the memory of what it has processed; returns how many messages waited';

CREATE FUNCTION idem.consumer_work(OUT consumer integer, OUT running integer, OUT reason text)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME', 'idem_consumer_work' LANGUAGE C VOLATILE PARALLEL SAFE;
COMMENT ON FUNCTION idem.consumer_work() IS
	'how many handlers run for each consumer, and why none; read it through idem.consumer_status';

CREATE FUNCTION idem.handler_workers(OUT worker integer, OUT state text, OUT reason text, OUT pid integer)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME', 'idem_handler_workers_rows' LANGUAGE C VOLATILE PARALLEL SAFE;
COMMENT ON FUNCTION idem.handler_workers() IS
	'the processes that run handlers in this database';

CREATE VIEW idem.consumer_status AS
	SELECT c.name AS consumer,
		   CASE WHEN c.handler IS NULL THEN 'fetched'
				WHEN w.running IS NULL THEN h.state
				WHEN k.reason IS NOT NULL THEN 'blocked'
				ELSE 'running' END AS state,
		   CASE WHEN c.handler IS NULL THEN NULL
				WHEN w.running IS NULL THEN h.reason
				ELSE k.reason END AS reason,
		   coalesce(k.running, 0) AS running,
		   m.pending, m.oldest_pending, p.parked, p.retrying, p.leased, p.behind, p.delayed, p.next_due,
		   d.dead, c.owner, c.handler, c.topics, c.ordering, c.concurrency
	FROM idem.consumer c
		 LEFT JOIN idem.consumer_work() k ON k.consumer = c.id
		 CROSS JOIN (SELECT true AS running FROM idem.handler_workers() s WHERE s.state = 'running'
					 UNION ALL SELECT NULL LIMIT 1) w
		 LEFT JOIN LATERAL (SELECT s.state, s.reason FROM idem.handler_workers() s LIMIT 1) h ON true
		 CROSS JOIN LATERAL (SELECT count(*) AS pending, min(q.stored_at) AS oldest_pending
							 FROM idem.inbox_message q WHERE q.consumer = c.id) m
		 CROSS JOIN LATERAL (SELECT count(*) AS parked, count(*) FILTER (WHERE q.state IN ('retry', 'running')) AS retrying,
									count(*) FILTER (WHERE q.state = 'leased') AS leased,
									count(*) FILTER (WHERE q.state = 'behind') AS behind,
									count(*) FILTER (WHERE q.state = 'delayed') AS delayed, min(q.due) AS next_due
							 FROM idem.inbox_parked q WHERE q.consumer = c.id) p
		 CROSS JOIN LATERAL (SELECT count(*) AS dead FROM idem.dead_letter q
							 WHERE q.origin = 'consumer' AND q.name = c.name AND q.state = 'dead') d;
COMMENT ON VIEW idem.consumer_status IS
	'each consumer that is declared: what waits for it, who processes it, and what is wrong';

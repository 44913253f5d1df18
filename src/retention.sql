
--
-- Retention.
--
CREATE FUNCTION idem.inbox_purge(max_rows integer DEFAULT 10000) RETURNS bigint
	AS 'MODULE_PATHNAME', 'idem_inbox_purge' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER SET search_path = pg_catalog, pg_temp;
COMMENT ON FUNCTION idem.inbox_purge(integer) IS
	'remove expired claims by hand; returns how many';

CREATE FUNCTION idem.key_purge(max_rows integer DEFAULT 10000) RETURNS bigint
	AS 'MODULE_PATHNAME', 'idem_key_purge' LANGUAGE C
	VOLATILE PARALLEL UNSAFE SECURITY DEFINER
	SET search_path = pg_catalog, pg_temp SET enable_seqscan = off;
COMMENT ON FUNCTION idem.key_purge(integer) IS
	'remove expired idempotency keys by hand; returns how many';

CREATE FUNCTION idem.worker_status(
		OUT what text, OUT state text, OUT reason text, OUT pid integer,
		OUT last_run timestamptz, OUT removed_last bigint, OUT removed_total bigint,
		OUT backlog bigint, OUT oldest_due timestamptz)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME', 'idem_worker_status' LANGUAGE C VOLATILE PARALLEL SAFE;
COMMENT ON FUNCTION idem.worker_status() IS
	'what the workers of this database do; read it through idem.retention_status';

CREATE VIEW idem.retention_status AS
	SELECT w.what, w.state, w.reason, w.pid, w.last_run, w.removed_last,
		   w.removed_total,
		   CASE w.what WHEN 'key' THEN k.backlog ELSE w.backlog END AS backlog,
		   CASE w.what WHEN 'key' THEN now() - k.oldest ELSE now() - w.oldest_due END AS behind
	FROM idem.worker_status() w,
		 (SELECT count(*) AS backlog, min(e.expires_at) AS oldest
		  FROM (SELECT expires_at FROM idem.key WHERE expires_at < now()
				ORDER BY expires_at LIMIT 10000) e) k
	WHERE w.what <> 'relay';
COMMENT ON VIEW idem.retention_status IS
	'what retention has removed, what it has still to remove, and what is wrong';


--
-- Counters.
--
CREATE FUNCTION idem.stat_rows(kind integer,
		OUT name text, OUT type text, OUT source text,
		OUT c1 bigint, OUT c2 bigint, OUT c3 bigint, OUT c4 bigint, OUT c5 bigint,
		OUT c6 bigint, OUT c7 bigint, OUT c8 bigint, OUT c9 bigint, OUT c10 bigint, OUT c11 bigint,
		OUT since timestamptz)
	RETURNS SETOF record
	AS 'MODULE_PATHNAME', 'idem_stat_rows' LANGUAGE C STRICT VOLATILE PARALLEL SAFE;
COMMENT ON FUNCTION idem.stat_rows(integer) IS
	'counters as they are kept; read them through the stat_ views';

CREATE VIEW idem.stat_consumer AS
	SELECT name AS consumer, type, source, c1 AS claims, c2 AS duplicates,
		   c3 AS waits, c4 AS in_flight, c5 AS expired,
		   c6 AS stored, c7 AS business_duplicates, c8 AS processed, c9 AS retried, c10 AS dead,
		   round(c11 / 1000.0 / nullif(c8 + c9 + c10, 0), 3) AS avg_ms, since
	FROM idem.stat_rows(0);
COMMENT ON VIEW idem.stat_consumer IS 'counters per consumer';

CREATE VIEW idem.stat_key AS
	SELECT name AS scope, c1 AS started, c2 AS replayed, c3 AS conflicts,
		   c4 AS in_flight, c5 AS taken_over, since
	FROM idem.stat_rows(1);
COMMENT ON VIEW idem.stat_key IS 'counters per scope of idempotency keys';

CREATE FUNCTION idem.stat_reset() RETURNS void
	AS 'MODULE_PATHNAME', 'idem_stat_reset' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION idem.stat_reset() IS 'set the counters of this database to zero';

-- The contestants' tables, and a server that throws everything away.

-- What one writes without idem, at its shortest.
CREATE TABLE bare_outbox (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	topic text,
	key text,
	payload jsonb,
	enqueued_at timestamptz
);

CREATE SERVER bin FOREIGN DATA WRAPPER idem OPTIONS (url 'discard://');
SELECT idem.route_add('orders.**', 'bin');

-- backlog(n, bytes): enqueue n messages of so many bytes while nobody sends
CREATE PROCEDURE backlog(server text, n integer, bytes integer) LANGUAGE plpgsql AS $$
DECLARE
	body text := format('{"text":"%s"}', repeat('x', bytes - 11));
BEGIN
	PERFORM idem.relay_pause(server);
	COMMIT;
	FOR i IN 1..n BY 1000 LOOP
		PERFORM idem.outbox_enqueue_batch('orders.created', array_fill(body::json, ARRAY[1000]),
			ARRAY(SELECT (i + j)::text FROM generate_series(1, 1000) j));
		COMMIT;
	END LOOP;
END
$$;

-- sent(server): how many it has sent since the start
CREATE FUNCTION sent(server text) RETURNS bigint LANGUAGE sql VOLATILE
	RETURN coalesce((SELECT r.sent FROM idem.relay_status r WHERE r.server = sent.server), 0);

-- drained(server, n): wait until it has sent so many since the start
CREATE PROCEDURE drained(server text, n bigint) LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '120 seconds';
BEGIN
	WHILE sent(server) < n LOOP
		IF clock_timestamp() > deadline THEN
			RAISE EXCEPTION 'server % has sent % of %', server, sent(server), n;
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.002);
	END LOOP;
END
$$;

-- drain(server, n): let it send; messages per second
CREATE PROCEDURE drain(server text, n integer, OUT rate float8) LANGUAGE plpgsql AS $$
DECLARE
	before bigint := sent(server);
	start timestamptz := clock_timestamp();
BEGIN
	PERFORM idem.relay_resume(server);
	COMMIT;
	CALL drained(server, before + n);
	rate := n / extract(epoch FROM clock_timestamp() - start);
END
$$;

-- trickle(n): messages that find an idle relay, one every 30 to 50 ms.  What is
-- in them is when that was; the result is for each, how many microseconds after
-- it was about to be committed the relay took a tick.
CREATE PROCEDURE trickle(n integer, INOUT awake float8[]) LANGUAGE plpgsql AS $$
DECLARE
	start timestamptz;
	seen timestamptz;
BEGIN
	FOR i IN 1..n LOOP
		PERFORM pg_sleep(0.02 + 0.02 * random());
		PERFORM idem.outbox_enqueue('orders.created', json_build_object('at', extract(epoch FROM clock_timestamp())));
		start := clock_timestamp();
		COMMIT;
		PERFORM pg_sleep(0.01);
		SELECT min(at) INTO seen FROM idem.outbox_tick WHERE at >= start;
		awake := awake || (extract(epoch FROM coalesce(seen, clock_timestamp()) - start) * 1e6)::float8;
		COMMIT;
	END LOOP;
END
$$;

-- other_bytes(): what the extension's tables take up, but for the log
CREATE FUNCTION other_bytes() RETURNS bigint LANGUAGE sql VOLATILE
	RETURN (SELECT sum(pg_total_relation_size(oid)) FROM pg_class
		WHERE relnamespace = 'idem'::regnamespace AND relkind = 'r' AND relname !~ '^outbox_\d+$');

-- log_bytes(): what a message takes up in the log
CREATE FUNCTION log_bytes() RETURNS float8 LANGUAGE sql VOLATILE
	RETURN (SELECT sum(pg_total_relation_size(oid)) FROM pg_class
		WHERE relnamespace = 'idem'::regnamespace AND relkind = 'r' AND relname ~ '^outbox_\d+$')::float8 /
		(SELECT count(*) FROM idem.outbox);

-- relay_is(on): wait until the relay runs and has seen everything, or has ended
CREATE PROCEDURE relay_is(running boolean) LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '60 seconds';
BEGIN
	LOOP
		EXIT WHEN NOT running AND NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem relay');
		EXIT WHEN running AND EXISTS (SELECT FROM idem.relay_status WHERE state = 'running' AND unsent_at_most = 0);
		IF clock_timestamp() > deadline THEN
			RAISE EXCEPTION 'the relay does not come to rest';
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.01);
	END LOOP;
END
$$;

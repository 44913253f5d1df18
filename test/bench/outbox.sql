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

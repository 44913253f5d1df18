-- The work that consumers do: one row for each message, in both contestants.

CREATE TABLE effect (
	n bigint,
	began float8,						-- seconds since 1970
	at timestamptz DEFAULT clock_timestamp()
);

CREATE FUNCTION effect(n bigint, began float8 = NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect (n, began) VALUES (effect.n, effect.began);
END
$$;

CREATE FUNCTION handle(m idem.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO effect (n, began) VALUES ((m.payload ->> 'n')::bigint, (m.payload ->> 'began')::float8);
END
$$;

CREATE SEQUENCE numbers;

-- store_idem(n): store so many messages, in one statement
CREATE FUNCTION store_idem(many integer) RETURNS bigint LANGUAGE sql VOLATILE AS $$
	SELECT count(idem.inbox_store('bench', i::text, json_build_object('n', i)))
	FROM (SELECT nextval('numbers') AS i FROM generate_series(1, many)) s
$$;

-- stored_and_processed(who, n): store n messages, 100 per transaction, while they
-- are processed; messages per second, until the last of them is
CREATE PROCEDURE stored_and_processed(who text, n integer, INOUT rate float8) LANGUAGE plpgsql AS $$
DECLARE
	start timestamptz := clock_timestamp();
	deadline timestamptz := start + interval '300 seconds';
	done bigint;
BEGIN
	TRUNCATE effect;
	COMMIT;
	start := clock_timestamp();
	FOR i IN 1..n / 100 LOOP
		EXECUTE format('SELECT store_%s(100)', who);
		COMMIT;
	END LOOP;
	LOOP
		SELECT count(*) INTO done FROM effect;
		EXIT WHEN done >= n / 100 * 100;
		IF clock_timestamp() > deadline THEN
			RAISE EXCEPTION '%: % of % messages were processed', who, done, n;
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.05);
	END LOOP;
	SELECT count(*) / extract(epoch FROM max(at) - start), count(DISTINCT effect.n) INTO rate, done FROM effect;
	IF who = 'idem' AND done <> n / 100 * 100 THEN
		RAISE EXCEPTION 'idem: a message was processed twice';
	END IF;
	COMMIT;
END
$$;

-- handlers_run(n): wait until so many processes run handlers
CREATE PROCEDURE handlers_run(n integer) LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz := clock_timestamp() + interval '60 seconds';
BEGIN
	WHILE (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idem handler') <> n LOOP
		IF clock_timestamp() > deadline THEN
			RAISE EXCEPTION 'there are not % processes that run handlers', n;
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.02);
	END LOOP;
END
$$;

-- enqueue_slowly(n): messages that find everything idle, one every 30 to 50 ms
CREATE PROCEDURE enqueue_slowly(n integer) LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz;
BEGIN
	TRUNCATE effect;
	COMMIT;
	FOR i IN 1..n LOOP
		PERFORM pg_sleep(0.03 + 0.02 * random());
		PERFORM idem.outbox_enqueue('work.due',
			json_build_object('n', i, 'began', extract(epoch FROM clock_timestamp())));
		COMMIT;
	END LOOP;
	deadline := clock_timestamp() + interval '60 seconds';
	WHILE (SELECT count(*) FROM effect) < n LOOP
		IF clock_timestamp() > deadline THEN
			RAISE EXCEPTION 'messages are not processed';
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.05);
	END LOOP;
END
$$;

-- backlog_drained(n): store n messages while nobody processes them, and then have
-- them processed; messages per second.  What others store meanwhile counts, too.
CREATE PROCEDURE backlog_drained(n integer, INOUT rate float8) LANGUAGE plpgsql AS $$
DECLARE
	deadline timestamptz;
BEGIN
	PERFORM idem.consumer_alter('bench', reset => ARRAY['handler']);
	COMMIT;
	FOR i IN 1..n / 1000 LOOP
		PERFORM store_idem(1000);
		COMMIT;
	END LOOP;
	TRUNCATE effect;
	PERFORM idem.consumer_alter('bench', handler => 'handle');
	COMMIT;
	deadline := clock_timestamp() + interval '300 seconds';
	WHILE (SELECT count(*) FROM effect) < n LOOP
		IF clock_timestamp() > deadline THEN
			RAISE EXCEPTION 'the backlog is not processed';
		END IF;
		COMMIT;
		PERFORM pg_sleep(0.05);
	END LOOP;
	SELECT n / extract(epoch FROM max(at) - min(at)) INTO rate FROM (SELECT at FROM effect ORDER BY at LIMIT backlog_drained.n) e;
	COMMIT;
END
$$;

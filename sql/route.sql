-- Routes: which topics go to which server.
CREATE EXTENSION idem;
SET client_min_messages = error;
CREATE FUNCTION attempt(sql text) RETURNS TABLE (state text, message text, detail text, hint text)
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE sql;
	RETURN QUERY SELECT 'ok', NULL, NULL, NULL;
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT,
		detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN NEXT;
END $$;
CREATE SERVER bus FOREIGN DATA WRAPPER idem OPTIONS (url 'discard://');
CREATE SERVER hook FOREIGN DATA WRAPPER idem OPTIONS (url 'discard://');
CREATE FOREIGN DATA WRAPPER regress_idem_other;
CREATE SERVER other FOREIGN DATA WRAPPER regress_idem_other;

-- patterns
SELECT pattern, topic, idem.route_matches(pattern, topic) FROM (VALUES
	('a', 'a'), ('a', 'b'), ('a', 'aa'), ('aa', 'a'), ('a.b', 'a.b'), ('a.b', 'axb'),
	('*', 'a'), ('*', ''), ('*', 'a.b'), ('**', ''), ('**', 'a.b'), ('***', 'a.b'),
	('orders.*', 'orders.created'), ('orders.*', 'orders.'), ('orders.*', 'orders'), ('orders.*', 'orders.eu.created'),
	('orders.**', 'orders.eu.created'), ('orders.**', 'orders'), ('*.created', 'orders.created'), ('*.created', 'a.b.created'),
	('**.created', 'a.b.created'), ('**created', 'created'), ('a*c', 'abc'), ('a*c', 'ac'), ('a*c', 'a.c'), ('a**c', 'a.c'),
	('**.a.*', 'x.a.b.a.c'), ('*a*b', 'xaxxab'), ('*.*', 'a.b'), ('*.*', 'a.b.c'), ('%', 'a'), ('a?', 'ab'), ('[a]', 'a')
) v (pattern, topic);
-- the same as a regular expression says, whatever the pattern
WITH topics AS (
	SELECT string_agg(substr('ab.', 1 + (n / (3 ^ i)::int) % 3, 1), '') AS topic
	FROM generate_series(0, 728) n, generate_series(0, 5) i GROUP BY n),
patterns AS (
	SELECT string_agg(substr('ab.*', 1 + (n / (4 ^ i)::int) % 4, 1), '') AS pattern
	FROM generate_series(0, 1023) n, generate_series(0, 4) i GROUP BY n)
SELECT count(*), count(*) FILTER (WHERE idem.route_matches(pattern, topic) <>
	(topic ~ ('^' || replace(replace(replace(replace(pattern, '.', '\.'), '**', '#'), '*', '[^.]*'), '#', '.*') || '$'))) AS wrong
FROM topics, patterns WHERE pattern ~ '\*';
SELECT idem.route_matches(repeat('*a', 100) || 'b', repeat('a', 1000)),
	idem.route_matches(repeat('**a', 80) || 'b', repeat('a', 1000));

-- from where on
SELECT idem.route_add('orders.*', 'bus') > 0;
SELECT nextval('idem.outbox_seq');
SELECT idem.route_add('orders.*', 'hook', 'x/{topic}/{key}') > 0;
SELECT idem.route_add('**', 'bus', destination => '', start_from => 'oldest') > 0;
SELECT setval('idem.outbox_seq', 100);
SELECT idem.route_add('late', 'bus', 'fixed', 'now') > 0;
SELECT pattern, server, destination, state, first_seq, last_seq FROM idem.routes ORDER BY id;

-- to where
SELECT d, idem.route_destination(d, 't.{key}', 'k'), idem.route_destination(d, 't') FROM (VALUES
	(''), ('fixed'), ('{topic}'), ('{key}'), ('a/{topic}/{key}/z'), ('{key}{key}{topic}')) v (d);
\pset format unaligned
\pset tuples_only
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', '{topic}{key}{topic}') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', '{Topic}') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', '{topic') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', 'topic}') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', '{{topic}}') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', E'a\nb') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', repeat('x', 1025)) $$);

-- null, empty, too long, out of range
SELECT * FROM attempt($$ SELECT idem.route_add(NULL, 'bus') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', start_from => NULL) $$);
SELECT * FROM attempt($$ SELECT idem.route_drop(NULL) $$);
SELECT * FROM attempt($$ SELECT idem.route_drop(1, NULL) $$);
SELECT * FROM attempt($$ SELECT idem.route_matches(NULL, 't') $$);
SELECT * FROM attempt($$ SELECT idem.route_matches('t', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.route_destination(NULL, 't') $$);
SELECT * FROM attempt($$ SELECT idem.route_destination('d', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.route_add('', 'bus') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', '') $$);
SELECT * FROM attempt($$ SELECT idem.route_add(repeat('t', 256), 'bus') $$);
SELECT * FROM attempt($$ SELECT idem.route_add(E't\t', 'bus') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', start_from => 'whenever') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'bus', start_from => 'infinity') $$);

-- what does not exist, or exists already
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'nobody') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'other') $$);
SELECT * FROM attempt($$ SELECT idem.route_add('late', 'bus', 'fixed') $$);
SELECT * FROM attempt($$ SELECT idem.route_drop(0) $$);

-- read only
BEGIN READ ONLY;
SELECT * FROM attempt($$ SELECT idem.route_add('t', 'hook') $$);
SELECT * FROM attempt($$ SELECT idem.route_drop(1) $$);
COMMIT;

-- dropped: what is enqueued is still delivered
SELECT setval('idem.outbox_seq', 200);
SELECT idem.route_drop(id) FROM idem.routes WHERE pattern = 'late';
SELECT setval('idem.outbox_seq', 300);
SELECT idem.route_drop(id) FROM idem.routes WHERE pattern = 'late';
SELECT idem.route_add('late', 'bus', 'fixed') > 0;
SELECT idem.route_drop(id, discard => true) FROM idem.routes WHERE pattern = 'orders.*';
SELECT pattern, server, destination, state, first_seq, last_seq FROM idem.routes ORDER BY id;

-- who may
BEGIN;
SELECT idem.roles_create();
CREATE VIEW ids AS SELECT id, pattern FROM idem.route;
GRANT SELECT ON ids TO PUBLIC;
SET LOCAL ROLE idem_producer;
SELECT * FROM attempt($$ SELECT idem.route_add('p', 'bus') $$);
SELECT * FROM attempt($$ SELECT idem.route_drop(1) $$);
SELECT * FROM attempt($$ SELECT * FROM idem.routes $$);
SELECT * FROM attempt($$ SELECT idem.route_matches('a', 'b') $$);
SET LOCAL ROLE idem_consumer;
SELECT * FROM attempt($$ SELECT idem.route_add('p', 'bus') $$);
SELECT * FROM attempt($$ SELECT idem.route_drop(1) $$);
SET LOCAL ROLE idem_operator;
SELECT * FROM attempt($$ SELECT idem.route_add('p', 'bus') $$);
SELECT * FROM attempt($$ SELECT idem.route_drop(id) FROM ids WHERE pattern = 'late' $$);
SELECT * FROM attempt($$ INSERT INTO idem.route (pattern, server, destination, first_seq) VALUES ('a', 'b', 'c', 1) $$);
RESET ROLE;
GRANT USAGE ON FOREIGN SERVER bus TO idem_operator;
SET LOCAL ROLE idem_operator;
SET LOCAL search_path = public;
SELECT idem.route_add('p', 'bus') > 0;
SELECT current_user, current_setting('search_path');
SELECT idem.route_drop(id) FROM idem.routes WHERE pattern = 'p';
SELECT pattern, state FROM idem.routes WHERE pattern = 'p';
ROLLBACK;

\pset tuples_only off
\pset format aligned
DELETE FROM idem.route;
DROP SERVER bus, hook, other;
DROP FOREIGN DATA WRAPPER regress_idem_other;
DROP FUNCTION attempt;
DROP EXTENSION idem;

-- Input that cannot be meant gets an error with its SQLSTATE.
CREATE EXTENSION idem;
SET idem.claim_outside_transaction = allow;
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
\pset format unaligned
\pset tuples_only

-- null
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim(NULL, 'm') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim('c', NULL::text) $$);
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim('c', NULL::uuid) $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim(NULL, 'm') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim('c', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim('c', 'm', wait => NULL) $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim_batch('c', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim_batch('c', ARRAY['a', NULL]) $$);
SELECT * FROM attempt($$ SELECT idem.key_begin(NULL, 'k') $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', 'k', wait => NULL) $$);
SELECT * FROM attempt($$ SELECT idem.key_complete('s', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.key_release(NULL, 'k') $$);
SELECT * FROM attempt($$ SELECT idem.version_advance(NULL, 'e', 1) $$);
SELECT * FROM attempt($$ SELECT idem.version_advance('c', NULL, 1) $$);
SELECT * FROM attempt($$ SELECT idem.version_advance('c', 'e', NULL) $$);
SELECT * FROM attempt($$ SELECT idem.version_advance('c', 'e', 1, NULL) $$);
SELECT * FROM attempt($$ SELECT idem.version_reset(NULL) $$);
SELECT * FROM attempt($$ SELECT idem.consumer_create(NULL) $$);
SELECT * FROM attempt($$ SELECT idem.consumer_alter(NULL, retention => '1 day') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_purge(NULL) $$);
SELECT * FROM attempt($$ SELECT idem.key_purge(NULL) $$);

-- empty
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim('', 'm') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim('c', '') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim_batch('c', ARRAY['a', '']) $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', '') $$);
SELECT * FROM attempt($$ SELECT idem.version_advance('c', '', 1) $$);
SELECT * FROM attempt($$ SELECT idem.consumer_create('') $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', 'k', ''::bytea) $$);

-- too long
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim(repeat('c', 255), repeat('m', 1024)) $$);
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim(repeat('c', 256), 'm') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim('c', repeat('m', 1025)) $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim_batch('c', ARRAY['a', repeat('m', 1025)]) $$);
SELECT * FROM attempt($$ SELECT idem.key_begin(repeat('s', 255), repeat('k', 1024)) $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', repeat('k', 1025)) $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', 'k', convert_to(repeat('f', 1025), 'UTF8')) $$);
SELECT * FROM attempt($$ SELECT idem.version_advance(repeat('c', 255), repeat('e', 1024), 1) $$);
SELECT * FROM attempt($$ SELECT idem.version_advance('c', repeat('e', 1025), 1) $$);

-- badly encoded: refused by the server before we see it
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim('c', convert_from('\xff', 'UTF8')) $$);

-- values out of range
SELECT * FROM attempt($$ SELECT idem.consumer_create('c', retention => '0 seconds') $$);
SELECT * FROM attempt($$ SELECT idem.consumer_create('c', retention => '-1 day') $$);
SELECT * FROM attempt($$ SELECT idem.consumer_create('c', retention => '101 years') $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', 'k', ttl => '0') $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', 'k', ttl => '1000000 years') $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', 'k', lease => '-1 s') $$);
SELECT * FROM attempt($$ SELECT idem.version_advance('c', 'e', 1, 'newest') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_purge(0) $$);
SELECT * FROM attempt($$ SELECT idem.key_purge(0) $$);

-- nothing of this has left a trace
SELECT count(*) FROM idem.key WHERE scope = 's';
SELECT count(*) FROM idem.consumer;

-- what does not exist, or exists already
SELECT * FROM attempt($$ SELECT idem.consumer_alter('nobody', retention => '1 day') $$);
SELECT idem.consumer_create('c');
SELECT * FROM attempt($$ SELECT idem.consumer_create('c') $$);
SELECT * FROM attempt($$ SELECT idem.key_complete('s', 'never begun') $$);
SELECT * FROM attempt($$ SELECT idem.consumer_changed() $$);

-- read only
BEGIN READ ONLY;
SELECT * FROM attempt($$ SELECT idem.inbox_try_claim('c', 'm') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim('c', 'm') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_claim_batch('c', ARRAY['m']) $$);
SELECT * FROM attempt($$ SELECT idem.key_begin('s', 'k') $$);
SELECT * FROM attempt($$ SELECT idem.key_release('s', 'k') $$);
SELECT * FROM attempt($$ SELECT idem.version_advance('c', 'e', 1) $$);
SELECT * FROM attempt($$ SELECT idem.consumer_create('d') $$);
SELECT * FROM attempt($$ SELECT idem.inbox_purge() $$);
COMMIT;

\pset tuples_only off
\pset format aligned
DROP FUNCTION attempt;
DROP EXTENSION idem;

-- Idempotency keys: every status and error.
CREATE EXTENSION idem;

-- in one transaction
BEGIN;
SELECT status, token FROM idem.key_begin('pay', 'k1', '\x01');
SELECT idem.key_complete('pay', 'k1', 201, '{"Location": "/payments/1"}', '{"id" : 1 }');
COMMIT;
-- the same request gets the outcome exactly as it was
SELECT * FROM idem.key_begin('pay', 'k1', '\x01');
-- another request under the same key is a conflict and gets nothing
SELECT * FROM idem.key_begin('pay', 'k1', '\x02');
SELECT * FROM idem.key_begin('pay', 'k1');
-- another scope is another key
SELECT status FROM idem.key_begin('refund', 'k1', '\x01');

-- an outcome without a body, or with an empty one
BEGIN;
SELECT status FROM idem.key_begin('pay', 'k2');
SELECT idem.key_complete('pay', 'k2', 204);
COMMIT;
SELECT status, code, headers IS NULL AS no_headers, body IS NULL AS no_body FROM idem.key_begin('pay', 'k2');
BEGIN;
SELECT status FROM idem.key_begin('pay', 'k3');
SELECT idem.key_complete('pay', 'k3', 200, '{}', '');
COMMIT;
SELECT status, code, headers, body = '' AS empty FROM idem.key_begin('pay', 'k3');
-- a large one, byte for byte
BEGIN;
SELECT status FROM idem.key_begin('pay', 'k4');
SELECT idem.key_complete('pay', 'k4', 200, NULL, (SELECT string_agg(md5(i::text), E'\r\n\t ü') FROM generate_series(1, 30000) i));
COMMIT;
SELECT status, length(body), body = (SELECT string_agg(md5(i::text), E'\r\n\t ü') FROM generate_series(1, 30000) i) AS same
FROM idem.key_begin('pay', 'k4');

-- rolled back: as if it never was
BEGIN;
SELECT status FROM idem.key_begin('pay', 'k5');
ROLLBACK;
SELECT status FROM idem.key_begin('pay', 'k5');

-- a failure that is not to be remembered is released
BEGIN;
SELECT status FROM idem.key_begin('pay', 'k6');
SELECT idem.key_release('pay', 'k6');
SELECT status FROM idem.key_begin('pay', 'k6');
SELECT idem.key_release('pay', 'k6');
COMMIT;
SELECT idem.key_release('pay', 'k6');
SELECT status FROM idem.key_begin('pay', 'k6');

-- within one transaction the key is in flight for itself
BEGIN;
SELECT status FROM idem.key_begin('pay', 'k7', '\x01');
SELECT status FROM idem.key_begin('pay', 'k7', '\x01');
SELECT status FROM idem.key_begin('pay', 'k7', '\x02');
SELECT idem.key_complete('pay', 'k7', 200);
SELECT status, code FROM idem.key_begin('pay', 'k7', '\x01');
COMMIT;

-- committed without completion: in flight until its ttl, and visible as stuck
SELECT status FROM idem.key_begin('stuck', 's1', ttl => '1 hour');
SELECT status FROM idem.key_begin('stuck', 's1', wait => false);
SELECT what, name, key, attempts, reason, fix FROM idem.stuck WHERE name = 'stuck';
-- (in a transaction, lest a maintenance worker see it first)
BEGIN;
UPDATE idem.key SET expires_at = now() - interval '1 s' WHERE scope = 'stuck';
SELECT status FROM idem.key_begin('stuck', 's1');
COMMIT;
SELECT idem.key_release('stuck', 's1');
SELECT count(*) FROM idem.stuck WHERE name = 'stuck';

-- in two transactions, with a lease and a token
CREATE TEMP TABLE a AS SELECT * FROM idem.key_begin('lease', 'l1', '\x01', lease => '1 hour');
SELECT status, token IS NOT NULL AS has_token FROM a;
SELECT status, token FROM idem.key_begin('lease', 'l1', '\x01', lease => '1 hour');
SELECT status FROM idem.key_begin('lease', 'l1', '\x02', lease => '1 hour');
SELECT count(*) FROM idem.stuck WHERE name = 'lease';
\set VERBOSITY sqlstate
SELECT idem.key_complete('lease', 'l1', 200);
SELECT idem.key_release('lease', 'l1');
SELECT idem.key_complete('lease', 'l1', 200, token => gen_random_uuid());
SELECT idem.key_release('lease', 'l1', token => gen_random_uuid());
\set VERBOSITY default
SELECT idem.key_complete('lease', 'l1', 200, token => token) FROM a;
SELECT status, code, token FROM idem.key_begin('lease', 'l1', '\x01');

-- a lease that ran out is taken over; the old holder changes nothing any more
DROP TABLE a;
CREATE TEMP TABLE a AS SELECT * FROM idem.key_begin('lease', 'l2', '\x01', lease => '1 hour');
UPDATE idem.key SET lease_until = now() - interval '1 s' WHERE scope = 'lease' AND key = 'l2';
SELECT name, key, reason, fix LIKE 'SELECT idem.key_release(''lease'', ''l2'', ''%'');' AS fix FROM idem.stuck WHERE name = 'lease';
SELECT status FROM idem.key_begin('lease', 'l2', '\x02', lease => '1 hour');
CREATE TEMP TABLE b AS SELECT * FROM idem.key_begin('lease', 'l2', '\x01', lease => '1 hour');
SELECT a.status, b.status, a.token <> b.token AS other_token FROM a, b;
SELECT idem.key_complete('lease', 'l2', 200, token => token) FROM a;
SELECT idem.key_release('lease', 'l2', token => token) FROM a;
SELECT completed, code FROM idem.key WHERE scope = 'lease' AND key = 'l2';
SELECT idem.key_complete('lease', 'l2', 201, token => token) FROM b;
SELECT status, code FROM idem.key_begin('lease', 'l2', '\x01');
SELECT idem.key_complete('lease', 'l2', 200, token => token) FROM a;
SELECT idem.key_complete('lease', 'l2', 200);
SELECT idem.key_release('lease', 'l2');

-- a lease that ran out and was not taken over may still be used
DROP TABLE a, b;
CREATE TEMP TABLE a AS SELECT * FROM idem.key_begin('lease', 'l3', lease => '1 hour');
UPDATE idem.key SET lease_until = now() - interval '1 s' WHERE scope = 'lease' AND key = 'l3';
SELECT idem.key_release('lease', 'l3', token) FROM a;
-- released, so that the late finisher has nothing to finish
SELECT idem.key_complete('lease', 'l3', 200, token => token) FROM a;

-- the time to live, and the outcome that outlives it until it is purged
SELECT status FROM idem.key_begin('ttl', 't1');
SELECT expires_at - started_at AS default_ttl FROM idem.key WHERE scope = 'ttl';
SELECT idem.key_complete('ttl', 't1', 200);
SELECT status FROM idem.key_begin('ttl', 't2', ttl => '2 days');
SELECT expires_at - started_at AS ttl FROM idem.key WHERE scope = 'ttl' AND key = 't2';
SET idem.key_ttl = '1h';
SELECT status FROM idem.key_begin('ttl', 't3');
SELECT expires_at - started_at AS session_ttl FROM idem.key WHERE scope = 'ttl' AND key = 't3';
RESET idem.key_ttl;
BEGIN;
UPDATE idem.key SET expires_at = now() - interval '1 s' WHERE scope = 'ttl' AND key = 't1';
SELECT status, code FROM idem.key_begin('ttl', 't1');
SELECT idem.key_purge();
COMMIT;
SELECT status FROM idem.key_begin('ttl', 't1');

-- fingerprints: the order of keys and white space do not matter, values do
SELECT idem.fingerprint('{"a": 1, "b": [1, 2]}') = idem.fingerprint('{ "b":[1,2], "a":1 }') AS same,
	   idem.fingerprint('{"a": 1, "b": [1, 2]}') = idem.fingerprint('{"a": 1, "b": [2, 1]}') AS other,
	   length(idem.fingerprint('{}'));
SELECT idem.fingerprint('{"a": 1}') = sha256('{"a": 1}') AS sha256;
SELECT idem.fingerprint(NULL);

-- a lease that is longer than the ttl protects the key for as long
SELECT status FROM idem.key_begin('ttl', 't4', ttl => '1 hour', lease => '2 hours');
SELECT expires_at = lease_until AS kept FROM idem.key WHERE scope = 'ttl' AND key = 't4';

DROP TABLE a;
DROP EXTENSION idem;

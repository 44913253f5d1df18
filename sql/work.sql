-- Messages that are stored first and processed later, by the application.
CREATE EXTENSION IF NOT EXISTS idem;
-- SQLSTATEs only: that is what callers go by
\set VERBOSITY sqlstate

SELECT idem.consumer_create('app', max_attempts => 3, backoff => '0.001 s', backoff_max => '0.002 s');

-- what is stored once is not stored again, nor what was claimed
SELECT idem.inbox_store('app', 'm1', '{"n": 1}');
SELECT idem.inbox_store('app', 'm1', '{"n": 1}');
BEGIN;
SELECT idem.inbox_try_claim('app', 'm1') AS stored, idem.inbox_try_claim('app', 'c1') AS new;
COMMIT;
SELECT idem.inbox_store('app', 'c1', '{}');
SELECT idem.inbox_store('app', 'm2', '{"n": 2}', dedup_key => 'k'), idem.inbox_store('app', 'm3', '{"n": 3}', dedup_key => 'k'),
	idem.inbox_store('app', 'm3', '{"n": 3}', dedup_key => 'k') AS id_first;
SELECT idem.inbox_store('app', 'old', '{}', sent_at => now() - interval '30 days');
BEGIN;
SELECT idem.inbox_store('app', 'rolled back', '{}');
ROLLBACK;
SELECT state, attempts, error FROM idem.inbox_status('app', 'm1');
SELECT state FROM idem.inbox_status('app', 'c1');
SELECT state FROM idem.inbox_status('app', 'rolled back');
SELECT state FROM idem.inbox_status('nobody', 'm1');

-- hostile arguments
SELECT idem.inbox_store('nobody', 'm', '{}');
SELECT idem.inbox_store(NULL, 'm', '{}');
SELECT idem.inbox_store('app', NULL, '{}');
SELECT idem.inbox_store('app', 'm', NULL::jsonb);
SELECT idem.inbox_store('app', '', '{}');
SELECT idem.inbox_store('app', repeat('x', 1025), '{}');
SELECT idem.inbox_store('app', 'm', '{}', key => repeat('x', 1025));
SELECT idem.inbox_store('app', 'm', '{}', source => E'a\nb');
SELECT idem.inbox_store('app', 'm', '{}', headers => '[1]');
SELECT * FROM idem.inbox_next('nobody');
SELECT * FROM idem.inbox_next('app', 0);
SELECT * FROM idem.inbox_next('app', NULL);
SELECT * FROM idem.inbox_next('app', 1, '-1 s');
SELECT idem.inbox_done('app', 'm1');
SELECT idem.inbox_done('app', 'm1', gen_random_uuid());
SELECT idem.inbox_retry('app', 'm1');
SELECT idem.inbox_reject('app', 'm1');
SELECT idem.inbox_renew('app', 'm1', gen_random_uuid(), '1 s');
SELECT idem.inbox_renew('app', 'm1', NULL, '1 s');
BEGIN READ ONLY;
SELECT * FROM idem.inbox_next('app');
ROLLBACK;

-- take, and say what came of it
BEGIN;
SELECT consumer, msg_id, topic, key, headers, payload, convert_from(body, 'UTF8') AS body, content_type, source, type, attempt, replayed, token
FROM idem.inbox_next('app', 1);
-- not the same one again
SELECT msg_id FROM idem.inbox_next('app', 10);
SELECT msg_id FROM idem.inbox_next('app', 10);
SELECT idem.inbox_done('app', 'm1', result => '{"ok": true}');
-- only once
SAVEPOINT s;
SELECT idem.inbox_done('app', 'm1');
ROLLBACK TO s;
SELECT idem.inbox_retry('app', 'm2', error => 'not now', delay => '0');
COMMIT;
SELECT state, result FROM idem.inbox_status('app', 'm1');
SELECT state, attempts, error FROM idem.inbox_status('app', 'm2');
BEGIN;
SELECT msg_id, attempt FROM idem.inbox_next('app', 10);
SELECT idem.inbox_reject('app', 'm2', error => 'never');
COMMIT;
SELECT state, attempts, error FROM idem.inbox_status('app', 'm2');
SELECT idem.inbox_store('app', 'm2', '{}') AS dead_is_known;

-- a savepoint takes back what was said
SELECT idem.inbox_store('app', 's1', '1');
BEGIN;
SELECT msg_id FROM idem.inbox_next('app');
SAVEPOINT s;
SELECT idem.inbox_retry('app', 's1', delay => '1 day');
ROLLBACK TO s;
SELECT idem.inbox_done('app', 's1');
COMMIT;
SELECT state FROM idem.inbox_status('app', 's1');
SELECT count(*) FROM idem.inbox_message;
-- and the taking
SELECT idem.inbox_store('app', 's2', '1');
BEGIN;
SAVEPOINT s;
SELECT msg_id FROM idem.inbox_next('app');
ROLLBACK TO s;
SELECT idem.inbox_done('app', 's2');
ROLLBACK;
BEGIN;
SELECT msg_id FROM idem.inbox_next('app');
SELECT idem.inbox_done('app', 's2');
COMMIT;

-- dead letters: a dry run, redrive, twice, discard
SELECT name, msg_id, attempts, reason, sqlstate, state FROM idem.dead_letter;
SELECT id AS dead FROM idem.dead_letter WHERE msg_id = 'm2' \gset
UPDATE idem.inbox_claim SET claimed_at = 1 WHERE key = idem.inbox_key('app', 'm2');
SELECT outcome FROM idem.dead_letter_redrive(ARRAY[:dead], true);
SELECT state FROM idem.inbox_status('app', 'm2');
SELECT outcome FROM idem.dead_letter_redrive(ARRAY[:dead]);
SELECT outcome FROM idem.dead_letter_redrive(ARRAY[:dead, 0]) ORDER BY 1;
SELECT claimed_at > now() - interval '1 minute' AS kept FROM idem.inbox_lookup('app', 'm2');
SELECT state, attempts FROM idem.inbox_status('app', 'm2');
BEGIN;
SELECT msg_id, attempt, payload FROM idem.inbox_next('app');
SELECT idem.inbox_reject('app', 'm2', error => 'still never');
COMMIT;
SELECT idem.dead_letter_discard(ARRAY[max(id)], 'gave up') FROM idem.dead_letter;
SELECT state, settled_by IS NOT NULL AS by, note FROM idem.dead_letter ORDER BY id;
SELECT state FROM idem.inbox_status('app', 'm2');
SELECT outcome FROM idem.dead_letter_redrive((SELECT ARRAY[max(id)] FROM idem.dead_letter));
SELECT idem.dead_letter_discard(ARRAY[1], NULL);

-- after max_attempts
SELECT idem.inbox_store('app', 'bad', '1');
DO $$
BEGIN
	FOR i IN 1 .. 3 LOOP
		WHILE NOT EXISTS (SELECT FROM idem.inbox_next('app')) LOOP
			PERFORM pg_sleep(0.01);
		END LOOP;
		PERFORM idem.inbox_retry('app', 'bad', error => 'try ' || i);
	END LOOP;
END $$;
SELECT msg_id, attempts, reason, first_error, state FROM idem.dead_letter WHERE msg_id = 'bad';

-- a lease
SELECT idem.inbox_store('app', 'l1', '1');
SELECT msg_id, token FROM idem.inbox_next('app', lease => '1 hour') \gset l_
SELECT state, attempts FROM idem.inbox_status('app', 'l1');
SELECT * FROM idem.inbox_next('app');
SELECT idem.inbox_done('app', 'l1', gen_random_uuid());
SELECT idem.inbox_renew('app', 'l1', :'l_token', '2 hours');
SELECT due > now() + interval '1.5 hours' AS longer FROM idem.inbox_status('app', 'l1');
SELECT idem.inbox_done('app', 'l1', :'l_token', '"done"');
SELECT idem.inbox_done('app', 'l1', :'l_token');
SELECT state, result FROM idem.inbox_status('app', 'l1');
-- one that runs out
SELECT idem.inbox_store('app', 'l2', '1');
SELECT token FROM idem.inbox_next('app', lease => '0.001 s') \gset l_
DO $$ BEGIN
	WHILE clock_timestamp() <= (SELECT due FROM idem.inbox_status('app', 'l2')) LOOP
		PERFORM pg_sleep(0.001);
	END LOOP;
END $$;
SELECT msg_id, attempt, token <> :'l_token' AS another, token AS l_now FROM idem.inbox_next('app', lease => '1 hour') \gset
SELECT :'msg_id' AS msg_id, :attempt AS attempt, :'another' AS another;
SELECT idem.inbox_done('app', 'l2', :'l_token');
SELECT idem.inbox_renew('app', 'l2', :'l_token', '1 hour');
SELECT idem.inbox_reject('app', 'l2', :'l_now');

-- what came from the outbox claims when it is taken, and keeps that claim
SELECT idem.inbox_store('app', 'u1', '1');
UPDATE idem.inbox_message SET claimed = false;
DELETE FROM idem.inbox_claim WHERE key = idem.inbox_key('app', 'u1');
BEGIN;
SELECT msg_id FROM idem.inbox_next('app');
SELECT idem.inbox_retry('app', 'u1', delay => '0');
COMMIT;
SELECT msg_id, attempt FROM idem.inbox_next('app', lease => '1 hour');
SELECT state FROM idem.inbox_status('app', 'u1');
SELECT idem.consumer_reset('app');

-- key order: one of each key, and none behind one that waits
SELECT idem.consumer_create('byk', ordering => 'key');
SELECT idem.inbox_store('byk', k || i, to_jsonb(i), key => k) FROM generate_series(1, 3) i, unnest(ARRAY['a', 'b']) k ORDER BY i, k;
SELECT idem.inbox_store('byk', 'none', '0');
BEGIN;
SELECT msg_id FROM idem.inbox_next('byk', 10);
SELECT msg_id FROM idem.inbox_next('byk', 10);
SELECT idem.inbox_retry('byk', 'a1', delay => '1 hour'), idem.inbox_done('byk', 'b1'), idem.inbox_done('byk', 'none');
SELECT msg_id FROM idem.inbox_next('byk', 10);
SELECT idem.inbox_done('byk', 'b2');
COMMIT;
SELECT state FROM idem.inbox_status('byk', 'a2');
UPDATE idem.inbox_parked SET due = now() WHERE msg_id = 'a1';
SELECT idem.inbox_notice(id) FROM idem.consumer WHERE name = 'byk';
BEGIN;
SELECT msg_id FROM idem.inbox_next('byk', 10) ORDER BY 1;
SELECT idem.inbox_done('byk', 'a1'), idem.inbox_done('byk', 'b3');
SELECT msg_id FROM idem.inbox_next('byk', 10);
SELECT idem.inbox_done('byk', 'a2');
SELECT msg_id FROM idem.inbox_next('byk', 10);
SELECT idem.inbox_done('byk', 'a3');
COMMIT;
SELECT count(*) FROM idem.inbox_parked;

-- payloads
SELECT idem.consumer_create('raw');
SELECT idem.inbox_store('raw', 'big', jsonb_build_object('x', repeat('y', 1024 * 1024)), key => 'K', headers => '{"h": "1"}',
	source => 'shop', type => 'order', sent_at => '2026-01-01 00:00+00', topic => 'order.new') AS too_old;
SELECT idem.inbox_store('raw', 'big', jsonb_build_object('x', repeat('y', 1024 * 1024)), key => 'K', headers => '{"h": "1"}',
	source => 'shop', type => 'order', topic => 'order.new');
SELECT idem.inbox_store('raw', 'text', 'no json'::text, content_type => 'text/plain');
SELECT idem.inbox_store('raw', 'bytes', '\x00ff'::bytea);
SELECT idem.inbox_store('raw', 'liar', '\xff'::bytea, content_type => 'application/json');
SELECT idem.inbox_store('raw', 'nul', '\x7b7d0041'::bytea, content_type => 'application/json');
SELECT idem.inbox_store('raw', 'escape', '{"a": "\u0000"}'::json);
SELECT idem.inbox_store('raw', 'deep', convert_to(repeat('[', 100000), 'UTF8'), content_type => 'application/json');
BEGIN;
SELECT msg_id, topic, key, headers, source, type, content_type, payload IS NULL AS no_json, length(body),
	length(payload ->> 'x') AS x FROM idem.inbox_next('raw', 100);
COMMIT;

-- declarations
SELECT idem.consumer_create('app');
SELECT idem.consumer_create('x', 'no_such_function');
SELECT idem.consumer_create('x', 99999999::regproc);
SELECT idem.consumer_create('x', 0::regproc);
SELECT idem.consumer_create('x', 'pg_catalog.now');
SELECT idem.consumer_create('x', max_attempts => 0);
SELECT idem.consumer_create('x', concurrency => 0);
SELECT idem.consumer_create('x', ordering => 'random');
SELECT idem.consumer_create('x', backoff => '-1 s');
SELECT idem.consumer_create('x', never_retry => '{22P0}');
SELECT idem.consumer_create('x', topics => ARRAY[NULL]);
SELECT idem.consumer_create('x', topics => ARRAY['']);
SELECT idem.consumer_create('x', start_from => 'never');
CREATE FUNCTION wrong(m idem.message) RETURNS integer LANGUAGE sql AS 'SELECT 1';
SELECT idem.consumer_create('x', 'wrong');
SELECT idem.consumer_alter('nobody');
SELECT idem.consumer_alter('app', max_attempts => 5, reset => '{max_attempts}');
SELECT idem.consumer_alter('app', reset => '{nothing}');
SELECT idem.consumer_alter('app', owner => 'no_such_role');
SELECT idem.consumer_alter('app', max_attempts => 5, never_retry => '{22,23505}');
SELECT max_attempts, never_retry, backoff FROM idem.consumer WHERE name = 'app';
SELECT idem.consumer_alter('app', reset => '{max_attempts,never_retry,backoff}');
SELECT max_attempts, never_retry, backoff FROM idem.consumer WHERE name = 'app';
SELECT idem.inbox_store('app', 'waits', '1');
SELECT idem.consumer_drop('app');
SELECT idem.consumer_reset('app', NULL);
SELECT idem.consumer_reset('nobody');
SELECT idem.consumer_reset('app');
SELECT idem.inbox_store('app', 'waits', '1') AS claim_is_kept;
SELECT idem.consumer_reset('app', true);
SELECT idem.inbox_store('app', 'waits', '1');
SELECT idem.consumer_drop('app', discard => true);
SELECT idem.consumer_drop('app');
SELECT idem.consumer_drop('byk'), idem.consumer_drop('raw', true);
SELECT count(*) FROM idem.inbox_message;

-- a deputy cannot set a handler for somebody else
CREATE ROLE regress_idem_clerk;
CREATE FUNCTION right_one(m idem.message) RETURNS void LANGUAGE sql AS '';
GRANT USAGE ON SCHEMA idem TO regress_idem_clerk;
GRANT EXECUTE ON FUNCTION idem.consumer_alter(text, regproc, text[], interval, integer, interval, interval, integer, text, interval, text[], interval, name, text[]) TO regress_idem_clerk;
SELECT idem.consumer_create('boss');
SET ROLE regress_idem_clerk;
SELECT idem.consumer_alter('boss', concurrency => 2);
SELECT idem.consumer_alter('boss', 'right_one');
SELECT idem.consumer_alter('boss', owner => 'regress_idem_clerk');
RESET ROLE;
SELECT concurrency, handler FROM idem.consumer WHERE name = 'boss';
SELECT idem.consumer_drop('boss');
DROP FUNCTION wrong, right_one;
DROP OWNED BY regress_idem_clerk;
DROP ROLE regress_idem_clerk;

-- Claims: what each function answers.
CREATE EXTENSION idem;
SET idem.claim_outside_transaction = allow;

-- once true, then false
SELECT idem.inbox_try_claim('billing', 'm1');
SELECT idem.inbox_try_claim('billing', 'm1');
-- consumers do not share
SELECT idem.inbox_try_claim('shipping', 'm1');

-- a claim goes with its transaction
BEGIN;
SELECT idem.inbox_try_claim('billing', 'm2') AS first, idem.inbox_try_claim('billing', 'm2') AS again;
SELECT idem.inbox_try_claim('billing', 'm2');
ROLLBACK;
SELECT idem.inbox_try_claim('billing', 'm2');

-- and with its savepoint
BEGIN;
SAVEPOINT s;
SELECT idem.inbox_try_claim('billing', 'm3');
ROLLBACK TO s;
SELECT idem.inbox_try_claim('billing', 'm3');
SAVEPOINT t;
RELEASE t;
COMMIT;
SELECT idem.inbox_try_claim('billing', 'm3');

-- the first claim of a consumer, rolled back to a savepoint and made again
BEGIN;
SAVEPOINT s;
SELECT idem.inbox_try_claim('new-consumer', 'm1');
ROLLBACK TO s;
SELECT idem.inbox_try_claim('new-consumer', 'm1');
SELECT idem.inbox_try_claim('new-consumer', 'm2');
COMMIT;
SELECT consumer, count(*) FROM idem.inbox GROUP BY consumer ORDER BY consumer;

-- a uuid and its text form are the same id; other spellings are text
SELECT idem.inbox_try_claim('billing', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid);
SELECT idem.inbox_try_claim('billing', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::text);
SELECT idem.inbox_try_claim('billing', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12');
SELECT idem.inbox_try_claim('billing', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12'::uuid);
SELECT idem.inbox_try_claim('billing', 'A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11'::text);
SELECT idem.inbox_try_claim('billing', 'a0eebc99-9c0b-4ef8-bb6d_6bb9bd380a11'::text);
SELECT idem.inbox_try_claim('billing', 'a0eebc999c0b4ef8bb6d6bb9bd380a11'::text);

-- nobody can make two different ids meet by moving the border between names
SELECT idem.inbox_try_claim('ab', 'c'), idem.inbox_try_claim('a', 'bc');

-- the work in the same statement
CREATE TABLE effect (id text);
WITH c AS (SELECT idem.inbox_try_claim('billing', 'm4') AS mine)
INSERT INTO effect SELECT 'm4' FROM c WHERE mine;
WITH c AS (SELECT idem.inbox_try_claim('billing', 'm4') AS mine)
INSERT INTO effect SELECT 'm4' FROM c WHERE mine;
SELECT count(*) FROM effect;

-- inbox_claim says more
SELECT status, first_seen FROM idem.inbox_claim('billing', 'm5');
SELECT status, first_seen BETWEEN now() - interval '1 minute' AND now() AS seen_now
FROM idem.inbox_claim('billing', 'm5');
SELECT status FROM idem.inbox_claim('billing', 'm5', wait => false);
-- sent within the retention, and before it
SELECT status FROM idem.inbox_claim('billing', 'm6', sent_at => now() - interval '6 days');
SELECT status, first_seen FROM idem.inbox_claim('billing', 'm7', sent_at => now() - interval '8 days');
-- an expired claim was refused, not made
SELECT status FROM idem.inbox_claim('billing', 'm7');
-- what is known is a better answer than "expired"
SELECT status FROM idem.inbox_claim('billing', 'm7', sent_at => now() - interval '8 days');
SELECT status FROM idem.inbox_claim('billing', 'm8', sent_at => '-infinity');
SELECT status FROM idem.inbox_claim('billing', 'm9', sent_at => 'infinity');

-- batches: one row per element, in order, a repeated id is claimed once
SELECT * FROM idem.inbox_claim_batch('billing', ARRAY['b3', 'b1', 'b3', 'm1', 'b2', 'b1']);
SELECT * FROM idem.inbox_claim_batch('billing', '{}');
SELECT * FROM idem.inbox_claim_batch('billing', '{{b4,b5},{b6,b4}}');
-- a batch and a single claim mean the same
SELECT idem.inbox_try_claim('billing', 'b2');
-- uuids in a batch as well
SELECT status FROM idem.inbox_claim_batch('billing', ARRAY['a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11']);
-- more than one page of everything
SELECT status, count(*) FROM idem.inbox_claim_batch('bulk',
	ARRAY(SELECT 'id-' || i % 4000 FROM generate_series(1, 5000) i)) GROUP BY status ORDER BY status;

-- a duplicate takes no transaction id
BEGIN;
SELECT idem.inbox_try_claim('billing', 'm1');
SELECT status FROM idem.inbox_claim('billing', 'm1');
SELECT status FROM idem.inbox_claim_batch('billing', ARRAY['m1', 'm2']);
SELECT pg_current_xact_id_if_assigned() IS NULL AS no_xid;
COMMIT;

-- many in one transaction
BEGIN;
SELECT count(*) FILTER (WHERE mine) AS claimed, count(*) FILTER (WHERE NOT mine) AS duplicate
FROM (SELECT idem.inbox_try_claim('bulk2', (i % 100000)::text) AS mine
	  FROM generate_series(1, 100010) i) c;
COMMIT;

-- look a claim up
SELECT claimed_at BETWEEN now() - interval '1 hour' AND now() AS found FROM idem.inbox_lookup('billing', 'm1');
SELECT * FROM idem.inbox_lookup('billing', 'never');
SELECT idem.inbox_key('billing', 'm1'), idem.inbox_key('billing', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11');

-- read-only transactions
BEGIN READ ONLY;
SELECT idem.inbox_try_claim('billing', 'r1');
ROLLBACK;

-- a forced parallel plan must not run claims in workers
SET min_parallel_table_scan_size = 0;
SET parallel_setup_cost = 0;
SET parallel_tuple_cost = 0;
CREATE TABLE many AS SELECT i::text AS id FROM generate_series(1, 1000) i;
ANALYZE many;
SELECT count(*) FILTER (WHERE mine) FROM (SELECT idem.inbox_try_claim('parallel', id) AS mine FROM many) c;
RESET min_parallel_table_scan_size;
RESET parallel_setup_cost;
RESET parallel_tuple_cost;

-- an index that somebody added is kept up
CREATE INDEX extra ON idem.inbox_claim ((claimed_at / 3600)) WHERE consumer > 0;
SELECT idem.inbox_try_claim('extra', 'x1'), idem.inbox_try_claim('extra', 'x1');
SET enable_seqscan = off;
SELECT count(*) FROM idem.inbox_claim c JOIN idem.inbox_consumer n ON n.id = c.consumer AND n.name = 'extra'
WHERE claimed_at / 3600 > 0 AND consumer > 0;
RESET enable_seqscan;
DROP INDEX idem.extra;

-- hostile names on the way do not matter
CREATE SCHEMA evil;
CREATE FUNCTION evil.eq(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'evil'; END $$;
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq);
SET search_path = evil, pg_catalog;
SELECT idem.inbox_try_claim('hostile', 'h1'), idem.inbox_try_claim('hostile', 'h1');
SELECT idem.version_advance('hostile', 'e', 1), idem.version_advance('hostile', 'e', 2);
SELECT status FROM idem.key_begin('hostile', 'k');
SELECT idem.key_complete('hostile', 'k');
RESET search_path;
DROP SCHEMA evil CASCADE;

DROP TABLE effect, many;
DROP EXTENSION idem;

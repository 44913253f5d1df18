-- Consumers and their retention.
CREATE EXTENSION idem;
SET idem.claim_outside_transaction = allow;

-- before the first claim
SELECT idem.consumer_create('early', retention => '1 day');
SELECT status FROM idem.inbox_claim('early', 'm1', sent_at => now() - interval '2 days');
SELECT status FROM idem.inbox_claim('early', 'm1', sent_at => now() - interval '1 hour');

-- after it
SELECT status FROM idem.inbox_claim('late', 'm1', sent_at => now() - interval '2 days');
SELECT idem.consumer_create('late', retention => '1 day');
SELECT status FROM idem.inbox_claim('late', 'm2', sent_at => now() - interval '2 days');

-- made longer: what the old retention may have removed stays unknown
SELECT idem.consumer_alter('late', retention => '30 days');
SELECT status FROM idem.inbox_claim('late', 'm2', sent_at => now() - interval '2 days');
SELECT status FROM idem.inbox_claim('late', 'm2', sent_at => now() - interval '23 hours');

-- the default again
SELECT idem.consumer_alter('early', reset => ARRAY['retention']);
SELECT name, retention FROM idem.consumer ORDER BY name;

-- suspiciously short
SELECT idem.consumer_create('short', retention => '59 minutes');

-- purge by hand: each consumer's own retention, in steps
SELECT count(*) FROM idem.inbox_claim_batch('short', ARRAY(SELECT i::text FROM generate_series(1, 100) i));
SELECT count(*) FROM idem.inbox_claim_batch('undeclared', ARRAY(SELECT i::text FROM generate_series(1, 100) i));
SELECT idem.inbox_purge();
-- (in a transaction, lest a maintenance worker see it first)
BEGIN;
UPDATE idem.inbox_claim SET claimed_at = claimed_at - 2 * 3600;
SELECT idem.inbox_purge(30);
SELECT idem.inbox_purge(30);
SELECT idem.inbox_purge();
SELECT idem.inbox_purge();
SELECT consumer, count(*) FROM idem.inbox GROUP BY consumer ORDER BY consumer;
UPDATE idem.inbox_claim SET claimed_at = claimed_at - 7 * 24 * 3600;
-- expired but not yet purged is still a duplicate
SELECT idem.inbox_try_claim('undeclared', '1');
SELECT idem.inbox_purge();
SELECT consumer, count(*) FROM idem.inbox GROUP BY consumer ORDER BY consumer;
SELECT idem.inbox_try_claim('undeclared', '1');
COMMIT;

-- a month is 30 days for everybody: what is removed after 360 is not known after 362
SELECT idem.consumer_create('months', retention => '12 months');
UPDATE idem.consumer SET horizon_floor = NULL WHERE name = 'months';
SELECT status FROM idem.inbox_claim('months', 'm1', sent_at => now() - interval '8688 hours');
SELECT idem.consumer_alter('months', retention => '24 months');
SELECT status FROM idem.inbox_claim('months', 'm1', sent_at => now() - interval '8688 hours');
SELECT status FROM idem.inbox_claim('months', 'm1', sent_at => now() - interval '8592 hours');

-- dropped and created anew in one session
DROP EXTENSION idem;
CREATE EXTENSION idem;
SELECT idem.inbox_try_claim('late', 'm2'), idem.inbox_try_claim('late', 'm2');
SELECT consumer, count(*) FROM idem.inbox GROUP BY consumer;
DROP EXTENSION idem;

-- A claim that commits without its work: allowed, warned about or refused.
CREATE EXTENSION idem;
CREATE TABLE effect (id text);
CREATE FUNCTION handle(id text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF idem.inbox_try_claim('c', id) THEN
		INSERT INTO effect VALUES (id);
		RETURN true;
	END IF;
	RETURN false;
END $$;

-- the default is a warning, once per session
SHOW idem.claim_outside_transaction;
SELECT idem.inbox_try_claim('c', '1');
SELECT idem.inbox_try_claim('c', '2');

SET idem.claim_outside_transaction = error;
SELECT idem.inbox_try_claim('c', '3');
SELECT idem.inbox_try_claim('c', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid);
SELECT * FROM idem.inbox_claim('c', '3');
SELECT * FROM idem.inbox_claim_batch('c', ARRAY['3']);
WITH c AS (SELECT idem.inbox_try_claim('c', '3') AS mine) SELECT * FROM c;

-- not alone: in a transaction, with work in the statement, or in a function
BEGIN;
SELECT idem.inbox_try_claim('c', '3');
COMMIT;
WITH c AS (SELECT idem.inbox_try_claim('c', '4') AS mine)
INSERT INTO effect SELECT '4' FROM c WHERE mine;
WITH c AS (SELECT idem.inbox_try_claim('c', '5') AS mine),
	 w AS (INSERT INTO effect SELECT '5' FROM c WHERE mine RETURNING id)
SELECT * FROM w;
SELECT handle('6');
SELECT handle('6');
CREATE FUNCTION handle_all(ids text[]) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
	r record;
	n integer := 0;
BEGIN
	FOR r IN SELECT * FROM idem.inbox_claim_batch('c', ids) LOOP
		IF r.status = 'claimed' THEN
			INSERT INTO effect VALUES (r.msg_id);
			n := n + 1;
		END IF;
	END LOOP;
	RETURN n;
END $$;
SELECT handle_all(ARRAY['a1', 'a2', 'a1']);
CREATE FUNCTION work(id text) RETURNS text LANGUAGE sql AS $$ INSERT INTO effect VALUES (id) RETURNING id $$;
SELECT work('a3') WHERE idem.inbox_try_claim('c', 'a3');
SELECT CASE WHEN idem.inbox_try_claim('c', 'a4') THEN work('a4') END;
DO $$ BEGIN PERFORM idem.inbox_try_claim('c', '7'); INSERT INTO effect VALUES ('7'); END $$;

SET idem.claim_outside_transaction = allow;
SELECT idem.inbox_try_claim('c', '8');
SET idem.claim_outside_transaction = never;

SELECT id FROM effect ORDER BY id;
DROP FUNCTION handle, handle_all, work;
DROP TABLE effect;
DROP EXTENSION idem;

-- What each role may do, tried as that role.
BEGIN;
SELECT plan(36);
SET LOCAL idem.claim_outside_transaction = allow;

SELECT idem.roles_create();
SELECT lives_ok('SELECT idem.roles_create()', 'roles_create can be called again');
CREATE ROLE idem_test_stranger;
CREATE ROLE idem_test_app IN ROLE idem_consumer;
GRANT SELECT ON pg_temp.__tcache__ TO PUBLIC;
GRANT ALL ON ALL TABLES IN SCHEMA pg_temp TO PUBLIC;
GRANT ALL ON ALL SEQUENCES IN SCHEMA pg_temp TO PUBLIC;

-- somebody without any of the roles
SET ROLE idem_test_stranger;
SELECT throws_ok($$ SELECT idem.inbox_try_claim('c', 'm') $$, '42501', NULL, 'a stranger may not claim');
SELECT throws_ok($$ SELECT * FROM idem.inbox_claim $$, '42501', NULL, 'nor read claims');
SELECT throws_ok($$ SELECT * FROM idem.stat_consumer $$, '42501', NULL, 'nor read figures');
RESET ROLE;
GRANT USAGE ON SCHEMA idem TO idem_test_stranger;
SET ROLE idem_test_stranger;
SELECT throws_ok($$ SELECT idem.inbox_try_claim('c', 'm') $$, '42501', NULL, 'not even with USAGE on the schema');
SELECT throws_ok($$ SELECT idem.key_begin('s', 'k') $$, '42501', NULL, 'nor begin a key');
SELECT throws_ok($$ SELECT idem.version_advance('c', 'e', 1) $$, '42501', NULL, 'nor advance a version');
SELECT throws_ok($$ SELECT idem.roles_create() $$, '42501', NULL, 'nor hand out rights');
RESET ROLE;

-- a consumer
SET ROLE idem_test_app;
SELECT ok(idem.inbox_try_claim('c', 'm1'), 'a consumer claims');
SELECT ok(NOT idem.inbox_try_claim('c', 'm1'), 'and is told of a duplicate');
SELECT ok(idem.inbox_try_claim('c', gen_random_uuid()), 'by uuid as well');
SELECT is((idem.inbox_claim('c', 'm2')).status::text, 'claimed', 'inbox_claim');
SELECT is((SELECT status::text FROM idem.inbox_claim_batch('c', ARRAY['m3'])), 'claimed', 'inbox_claim_batch');
SELECT is(idem.version_advance('c', 'e', 1)::text, 'applied', 'version_advance');
SELECT is(idem.version_advance('c', 'e', 2)::text, 'applied', 'version_advance again');
SELECT is((idem.key_begin('s', 'k', idem.fingerprint('{}'))).status::text, 'started', 'key_begin');
SELECT lives_ok($$ SELECT idem.key_complete('s', 'k', 200) $$, 'key_complete');
SELECT is((idem.key_begin('s', 'k', idem.fingerprint('{}'))).code, 200, 'and gets the outcome');
SELECT throws_ok($$ SELECT * FROM idem.inbox_claim $$, '42501', NULL, 'a consumer does not read claims');
SELECT throws_ok($$ DELETE FROM idem.inbox_claim $$, '42501', NULL, 'nor delete them');
SELECT throws_ok($$ SELECT * FROM idem.key $$, '42501', NULL, 'nor read stored outcomes');
SELECT throws_ok($$ SELECT idem.consumer_create('c') $$, '42501', NULL, 'nor declare consumers');
SELECT throws_ok($$ SELECT idem.inbox_purge() $$, '42501', NULL, 'nor purge');
SELECT throws_ok($$ SELECT idem.version_reset('c') $$, '42501', NULL, 'nor reset versions');
RESET ROLE;

-- a producer
SET ROLE idem_producer;
SELECT is((idem.key_begin('s', 'k2')).status::text, 'started', 'a producer begins keys');
SELECT throws_ok($$ SELECT idem.inbox_try_claim('c', 'm') $$, '42501', NULL, 'but does not claim');
RESET ROLE;

-- an operator
SET ROLE idem_operator;
SELECT lives_ok($$ SELECT idem.consumer_create('declared', retention => '2 days') $$, 'an operator declares consumers');
SELECT lives_ok($$ SELECT idem.consumer_alter('declared', retention => '3 days') $$, 'and alters them');
SELECT lives_ok($$ SELECT idem.inbox_purge(), idem.key_purge(), idem.version_reset('c'), idem.stat_reset() $$, 'purges and resets');
SELECT isnt_empty($$ SELECT * FROM idem.inbox_lookup('c', 'm1') $$, 'looks a claim up');
SELECT lives_ok($$ SELECT * FROM idem.inbox, idem.key, idem.stat_consumer, idem.stat_key, idem.retention_status, idem.stuck $$, 'reads everything');
SELECT throws_ok($$ DELETE FROM idem.inbox_claim $$, '42501', NULL, 'but does not delete by hand');
SELECT throws_ok($$ CREATE TRIGGER t AFTER INSERT ON idem.inbox_claim EXECUTE FUNCTION idem.consumer_changed() $$, '42501', NULL, 'nor put a trigger on a table');
RESET ROLE;

-- whatever roles_create() grants
SELECT is_empty($$
	SELECT c.relname, r.rolname, p FROM pg_class c, pg_roles r,
		unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER']) p
	WHERE c.relnamespace = 'idem'::regnamespace AND c.relkind IN ('r', 'v')
	AND r.rolname IN ('idem_producer', 'idem_consumer', 'idem_operator', 'idem_test_stranger')
	AND has_table_privilege(r.oid, c.oid, p)
$$, 'nobody but the owner may write to a table, or put a trigger on it');
SELECT is_empty($$
	SELECT rolname FROM pg_roles WHERE rolname IN ('idem_producer', 'idem_consumer', 'idem_operator')
	AND (rolsuper OR rolcanlogin OR rolcreaterole OR rolcreatedb OR rolbypassrls)
$$, 'the roles are plain groups');
SELECT is_empty($$
	SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'idem'::regnamespace
	AND proname = 'roles_create' AND prosecdef
$$, 'roles_create has no rights but its caller''s');

SELECT * FROM finish();
ROLLBACK;

-- What the extension puts into a database: no more, and with which properties.
BEGIN;
SELECT plan(14);

SELECT set_eq($$
	SELECT p.proname::text FROM pg_proc p WHERE p.pronamespace = 'idem'::regnamespace
$$, ARRAY['consumer_alter', 'consumer_changed', 'consumer_create', 'consumer_drop', 'consumer_reset', 'consumer_work', 'handler_workers',
	'inbox_done', 'inbox_next', 'inbox_notice', 'inbox_reject', 'inbox_renew', 'inbox_retry', 'inbox_status', 'inbox_store',
	'fingerprint', 'inbox_claim', 'inbox_claim_batch', 'inbox_key', 'inbox_lookup',
	'inbox_purge', 'inbox_try_claim', 'key_begin', 'key_complete', 'key_purge',
	'dead_letter_discard', 'dead_letter_redrive', 'key_release', 'outbox_capture', 'outbox_enqueue',
	'outbox_enqueue_batch', 'outbox_purge', 'outbox_replay', 'outbox_replay_cancel', 'outbox_seq_at', 'outbox_status', 'relay_adopt', 'relay_check_server', 'relay_notice', 'relay_pause',
	'relay_resume', 'relay_settle', 'relay_stat', 'relay_whereabouts', 'relay_worker', 'roles_create',
	'route_add', 'route_destination', 'route_drop', 'route_matches',
	'server_check', 'server_validator', 'stat_reset', 'stat_rows', 'version_advance',
	'version_reset', 'worker_status'],
	'the functions are these');
SELECT set_eq($$
	SELECT relname::text FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'v', 'S')
$$, ARRAY['consumer', 'consumer_id_seq', 'consumer_status', 'inbox_message', 'inbox_outcome', 'inbox_parked', 'inbox_seq', 'inbox_consumer', 'inbox_consumer_id_seq', 'inbox_claim', 'inbox', 'key',
	'version', 'outbox', 'outbox_0', 'outbox_1', 'outbox_2', 'outbox_3', 'outbox_4', 'outbox_5',
	'outbox_6', 'outbox_7', 'outbox_dedup', 'outbox_seq', 'outbox_tick', 'relay_position',
	'relay_parked', 'relay_kept', 'relay_answer', 'relay_replay', 'relay_replay_id_seq', 'relay_paused', 'relay_identity', 'relay_status', 'dead_letter',
	'dead_letter_id_seq', 'route', 'route_id_seq', 'routes',
	'stat_consumer', 'stat_key', 'stat_outbox', 'retention_status', 'stuck'],
	'the tables and views are these');

SELECT is_empty($$
	SELECT pg_describe_object(classid, objid, 0) FROM pg_depend
	WHERE refclassid = 'pg_extension'::regclass AND deptype = 'e'
	  AND refobjid = (SELECT oid FROM pg_extension WHERE extname = 'idem')
	  AND classid IN ('pg_proc'::regclass, 'pg_type'::regclass)
	  AND NOT EXISTS (SELECT FROM pg_type t JOIN pg_class c ON c.oid = t.typrelid WHERE t.oid = objid)
	  AND NOT EXISTS (SELECT FROM pg_type t WHERE t.oid = objid AND t.typelem <> 0)
	  AND obj_description(objid, classid::regclass::name) IS NULL
$$, 'every function and type has a comment');
SELECT is_empty($$
	SELECT relname FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'v')
	AND obj_description(oid, 'pg_class') IS NULL
$$, 'every table and view has a comment');

SELECT is_empty($$
	SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'idem'::regnamespace
	AND proname ~ '^(inbox_.*claim|inbox_(done|next|reject|renew|retry|store|notice)|key_|version_|consumer_|inbox_purge|stat_reset|route_add|route_drop|outbox_|relay_pause|relay_resume|relay_settle|relay_adopt|dead_letter_)' AND proname NOT IN ('consumer_changed', 'consumer_work', 'outbox_status', 'outbox_seq_at')
	AND (provolatile <> 'v' OR proparallel <> 'u')
$$, 'whatever changes something is volatile and parallel unsafe');
SELECT is_empty($$
	SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'idem'::regnamespace
	AND prosecdef AND NOT coalesce('search_path=pg_catalog, pg_temp' = ANY (proconfig), false)
$$, 'a security definer has a pinned search_path');
SELECT is_empty($$
	SELECT oid::regprocedure FROM pg_proc p WHERE pronamespace = 'idem'::regnamespace
	AND (proacl IS NULL OR EXISTS (SELECT FROM aclexplode(proacl) WHERE grantee = 0))
$$, 'no function is for everybody');
SELECT is_empty($$
	SELECT relname FROM pg_class WHERE relnamespace = 'idem'::regnamespace
	AND relacl IS NOT NULL AND EXISTS (SELECT FROM aclexplode(relacl) WHERE grantee = 0)
$$, 'no table is for everybody');
SELECT is_empty($$
	SELECT oid::regclass FROM pg_class WHERE relnamespace = 'idem'::regnamespace
	AND relkind = 'r' AND relpersistence <> 'p'
$$, 'no table is unlogged');
SELECT set_eq($$
	SELECT unnest(extconfig)::regclass::text FROM pg_extension WHERE extname = 'idem'
$$, $$
	SELECT oid::regclass::text FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'S')
$$, 'pg_dump takes the rows of every table');
SELECT is((SELECT extrelocatable FROM pg_extension WHERE extname = 'idem'), false, 'not relocatable');
SELECT is((SELECT trusted FROM pg_available_extension_versions WHERE name = 'idem' AND version = '0.1.0'), false, 'not trusted');
SELECT is_empty($$
	SELECT a.attrelid::regclass, a.attname FROM pg_index i
	JOIN pg_attribute a ON a.attrelid = i.indexrelid JOIN pg_class c ON c.oid = i.indexrelid
	WHERE c.relnamespace = 'idem'::regnamespace AND a.atttypid = 'text'::regtype
	AND a.attcollation <> (SELECT oid FROM pg_collation WHERE collname = 'C')
$$, 'no index depends on the collations of the operating system');
SELECT set_eq($$ SELECT name FROM pg_settings WHERE name LIKE 'idem.%' AND name <> 'idem.fault' $$,
	ARRAY['idem.claim_outside_transaction', 'idem.handler_workers', 'idem.inbox_retention', 'idem.key_ttl',
	'idem.maintenance', 'idem.maintenance_naptime', 'idem.maintenance_delay',
	'idem.max_consumers', 'idem.max_databases', 'idem.max_servers', 'idem.outbox_max_payload', 'idem.outbox_retention',
	'idem.outbox_segment_rows', 'idem.relay', 'idem.secrets_dir', 'idem.site', 'idem.stat_entries',
	'idem.traceparent'], 'the settings are these');

SELECT * FROM finish();
ROLLBACK;

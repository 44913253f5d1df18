
--
-- Rights.  Nothing is for everybody; roles_create() makes the usual roles.
--
CREATE FUNCTION idem.roles_create() RETURNS void
	LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
	SET search_path = pg_catalog, pg_temp
	AS $$
	DECLARE
		role text;
	BEGIN
		FOREACH role IN ARRAY ARRAY['idem_producer', 'idem_consumer', 'idem_operator'] LOOP
			IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
				EXECUTE format('CREATE ROLE %I NOLOGIN', role);
			END IF;
		END LOOP;

		GRANT USAGE ON SCHEMA idem TO idem_producer, idem_consumer, idem_operator;
		GRANT EXECUTE ON FUNCTION
			idem.inbox_try_claim(text, text),
			idem.inbox_try_claim(text, uuid),
			idem.inbox_claim(text, text, boolean, timestamptz),
			idem.inbox_claim_batch(text, text[]),
			idem.inbox_store(text, text, "any", text, jsonb, text, text, text, timestamptz, text, text),
			idem.inbox_next(text, integer, interval),
			idem.inbox_done(text, text, uuid, jsonb),
			idem.inbox_retry(text, text, uuid, text, interval),
			idem.inbox_reject(text, text, uuid, text),
			idem.inbox_renew(text, text, uuid, interval),
			idem.inbox_status(text, text),
			idem.version_advance(text, text, bigint, text)
			TO idem_consumer, idem_operator;
		GRANT EXECUTE ON FUNCTION
			idem.key_begin(text, text, bytea, interval, boolean, interval),
			idem.key_complete(text, text, integer, jsonb, text, uuid),
			idem.key_release(text, text, uuid),
			idem.fingerprint(jsonb),
			idem.route_matches(text, text),
			idem.route_destination(text, text, text)
			TO idem_producer, idem_consumer, idem_operator;
		GRANT EXECUTE ON FUNCTION
			idem.outbox_enqueue(text, "any", text, jsonb, uuid, text, timestamptz, text),
			idem.outbox_enqueue_batch(text, anyarray, text[], jsonb[], text),
			idem.outbox_capture()
			TO idem_producer, idem_consumer, idem_operator;
		GRANT EXECUTE ON FUNCTION
			idem.outbox_status(uuid),
			idem.outbox_purge(integer),
			idem.relay_pause(text),
			idem.relay_resume(text),
			idem.relay_adopt(),
			idem.relay_worker(),
			idem.relay_stat(),
			idem.relay_whereabouts(),
			idem.outbox_replay(text, timestamptz, timestamptz, text),
			idem.outbox_replay_cancel(bigint),
			idem.relay_settle(text, uuid, boolean),
			idem.dead_letter_redrive(bigint[], boolean),
			idem.dead_letter_discard(bigint[], text)
			TO idem_operator;
		GRANT SELECT ON
			idem.outbox, idem.outbox_seq, idem.outbox_tick, idem.relay_position, idem.relay_parked,
			idem.relay_kept, idem.relay_replay, idem.relay_answer, idem.relay_paused, idem.relay_identity, idem.relay_status, idem.dead_letter, idem.stat_outbox
			TO idem_operator;
		GRANT EXECUTE ON FUNCTION
			idem.consumer_create(text, regproc, text[], interval, integer, interval, interval, integer, text, text, interval, text[], interval),
			idem.consumer_alter(text, regproc, text[], interval, integer, interval, interval, integer, text, interval, text[], interval, name, text[]),
			idem.consumer_drop(text, boolean),
			idem.consumer_reset(text, boolean),
			idem.consumer_work(),
			idem.handler_workers(),
			idem.inbox_key(text, text),
			idem.inbox_lookup(text, text),
			idem.version_reset(text, text),
			idem.route_add(text, text, text, text),
			idem.route_drop(bigint, boolean),
			idem.server_check(text),
			idem.stat_reset(),
			idem.inbox_purge(integer),
			idem.key_purge(integer)
			TO idem_operator;
		GRANT SELECT ON
			idem.consumer, idem.consumer_status, idem.inbox_message, idem.inbox_parked, idem.inbox_outcome, idem.inbox_seq, idem.inbox_consumer, idem.inbox_claim, idem.inbox,
			idem.key, idem.version, idem.route, idem.routes, idem.stat_consumer, idem.stat_key,
			idem.retention_status, idem.stuck
			TO idem_operator;
		GRANT EXECUTE ON FUNCTION idem.stat_rows(integer), idem.worker_status()
			TO idem_operator;
	END
	$$;
COMMENT ON FUNCTION idem.roles_create() IS
	'create the roles idem_producer, idem_consumer and idem_operator, and grant them their rights in this database';

-- What functions give to PUBLIC, and what default privileges give to whomever.
DO $$
DECLARE
	statement text;
BEGIN
	FOR statement IN
		SELECT pg_catalog.format('REVOKE ALL ON %s FROM %s', o.object,
					CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
		FROM (SELECT 'SCHEMA idem' AS object, nspowner AS owner, nspacl AS acl
			  FROM pg_catalog.pg_namespace WHERE nspname = 'idem'
			  UNION ALL
			  SELECT pg_catalog.format(CASE relkind WHEN 'S' THEN 'SEQUENCE idem.%I' ELSE 'TABLE idem.%I' END, relname), relowner, relacl
			  FROM pg_catalog.pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'v', 'S')
			  UNION ALL
			  SELECT pg_catalog.format('FUNCTION %s', oid::regprocedure), proowner,
					 coalesce(proacl, pg_catalog.acldefault('f', proowner))
			  FROM pg_catalog.pg_proc WHERE pronamespace = 'idem'::regnamespace) o,
			 pg_catalog.aclexplode(o.acl) a
		WHERE a.grantee <> o.owner
		GROUP BY o.object, a.grantee
	LOOP
		EXECUTE statement;
	END LOOP;
END $$;

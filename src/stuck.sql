
--
-- Everything that waits for a person.
--
CREATE VIEW idem.stuck AS
	SELECT 'key' AS what, k.scope AS name, k.key, k.started_at AS since,
		   NULL::integer AS attempts,
		   CASE WHEN k.lease_until IS NULL
				THEN 'begun and committed without a lease, and never completed'
				ELSE 'lease ran out, and nobody has begun it anew' END AS reason,
		   CASE WHEN k.token IS NULL
				THEN pg_catalog.format('SELECT idem.key_release(%L, %L);', k.scope, k.key)
				ELSE pg_catalog.format('SELECT idem.key_release(%L, %L, %L);', k.scope, k.key, k.token)
		   END AS fix
	FROM idem.key k
	WHERE NOT k.completed AND (k.lease_until IS NULL OR k.lease_until < now())
	UNION ALL
	SELECT 'retention', w.state, NULL, NULL, NULL, w.reason,
		   CASE w.state
				WHEN 'not loaded' THEN 'ALTER SYSTEM SET shared_preload_libraries = idem; -- beside what is there; then restart'
				WHEN 'off' THEN 'ALTER SYSTEM SET idem.maintenance = on; SELECT pg_reload_conf();'
		   END
	FROM idem.worker_status() w
	WHERE w.what = 'inbox' AND w.reason IS NOT NULL AND w.state NOT IN ('standby', 'held', 'starting');
COMMENT ON VIEW idem.stuck IS
	'everything that waits for a person, with the SQL to run';


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
	WHERE w.what = 'inbox' AND w.reason IS NOT NULL AND w.state NOT IN ('standby', 'held', 'starting')
	UNION ALL
	SELECT 'server', s.server, NULL, NULL, NULL, s.state || coalesce(': ' || s.reason, ''),
		   CASE s.state
				WHEN 'holding' THEN 'SELECT idem.relay_adopt(); -- if this copy is to send'
				WHEN 'blocked' THEN pg_catalog.format('SELECT idem.relay_resume(%L); -- when that is mended', s.server)
				WHEN 'paused' THEN pg_catalog.format('SELECT idem.relay_resume(%L);', s.server)
		   END
	FROM idem.relay_status s
	WHERE s.state IN ('holding', 'blocked', 'paused')
	UNION ALL
	SELECT 'route', r.server, r.pattern, r.created_at, NULL, 'leads to a server that does not exist',
		   pg_catalog.format('SELECT idem.route_drop(%s, discard => true);', r.id)
	FROM idem.routes r WHERE r.state = 'no server'
	UNION ALL
	SELECT 'unrouted', t.topic, NULL, t.since, NULL, t.enqueued || ' messages of a topic that no route and no consumer takes',
		   pg_catalog.format('SELECT idem.route_add(%L, ''...'', start_from => ''oldest'');', t.topic)
	FROM idem.stat_outbox t
	WHERE t.enqueued > 0 AND t.topic <> '(other)'
	  AND NOT EXISTS (SELECT FROM idem.route r WHERE r.last_seq IS NULL AND idem.route_matches(r.pattern, t.topic))
	  AND NOT EXISTS (SELECT FROM idem.consumer c, pg_catalog.unnest(c.topics) p WHERE idem.route_matches(p, t.topic))
	UNION ALL
	SELECT CASE p.state WHEN 'held' THEN 'unknown' ELSE 'parked' END, p.server, p.key, p.parked_at, p.attempts, p.last_error,
		   CASE p.state WHEN 'held'
				THEN pg_catalog.format('SELECT idem.relay_settle(%L, %L, delivered => true); -- or false: it is sent again', p.server, p.msg_id) END
	FROM idem.relay_parked p WHERE p.state = 'held' OR (p.state = 'retry' AND p.attempts > 1)
	UNION ALL
	SELECT 'consumer', c.consumer, NULL, NULL, NULL, c.reason, NULL
	FROM idem.consumer_status c
	WHERE c.reason IS NOT NULL AND c.state NOT IN ('standby', 'held', 'starting', 'waiting')
	UNION ALL
	SELECT 'retrying', c.name, p.key, p.parked_at, p.attempts, p.last_error, NULL
	FROM idem.inbox_parked p JOIN idem.consumer c ON c.id = p.consumer
	WHERE p.state IN ('retry', 'running') AND p.attempts > 1
	UNION ALL
	SELECT 'dead letter', d.name, d.key, d.dead_at, d.attempts, d.reason,
		   CASE d.state WHEN 'lost'
				THEN pg_catalog.format('SELECT idem.dead_letter_discard(ARRAY[%s], ''...'');', d.id)
				ELSE pg_catalog.format('SELECT * FROM idem.dead_letter_redrive(ARRAY[%s]);', d.id) END
	FROM idem.dead_letter d WHERE d.state IN ('dead', 'lost');
COMMENT ON VIEW idem.stuck IS
	'everything that waits for a person, with the SQL to run';

-- The relay's functions: what they refuse, and what they say without a relay.
\set VERBOSITY terse
CREATE EXTENSION idem;
SELECT idem.relay_pause(NULL);
SELECT idem.relay_pause('nowhere');
SELECT idem.relay_resume('nowhere');
CREATE SERVER regress_bus FOREIGN DATA WRAPPER idem OPTIONS (url 'regress://x');
SELECT idem.relay_pause('regress_bus');
SELECT idem.relay_pause('regress_bus');
SELECT server, by = session_user AS by_me FROM idem.relay_paused;
SELECT idem.relay_resume('regress_bus');
SELECT count(*) FROM idem.relay_paused;
SELECT server, parked FROM idem.relay_status;

-- dead letters
SELECT idem.dead_letter_discard(NULL, 'x');
SELECT idem.dead_letter_discard(ARRAY[1], NULL);
SELECT idem.dead_letter_discard(ARRAY[1], '');
SELECT idem.dead_letter_discard(ARRAY[1], 'not there');
SELECT * FROM idem.dead_letter_redrive(NULL);
SELECT * FROM idem.dead_letter_redrive(ARRAY[1], NULL);
SELECT * FROM idem.dead_letter_redrive(ARRAY[1, 1, 2]);
INSERT INTO idem.dead_letter (origin, name, msg_id, topic, destination, body, enqueued_at, seq, route, attempts)
	VALUES ('server', 'nowhere', gen_random_uuid(), 't', 't', '', now(), 999, 1, 1), ('server', 'regress_bus', gen_random_uuid(), 't', 't', '', now(), 999, 1, 1);
SELECT * FROM idem.dead_letter_redrive(ARRAY[1, 2], dry_run => true) ORDER BY id;
SELECT * FROM idem.dead_letter_redrive(ARRAY[1, 2]) ORDER BY id;
SELECT * FROM idem.dead_letter_redrive(ARRAY[1, 2]) ORDER BY id;
SELECT server, seq, state, due IS NOT NULL AS due FROM idem.relay_parked;
SELECT seq, topic FROM idem.relay_kept;

-- unknown outcomes
SELECT idem.relay_settle('nowhere', gen_random_uuid(), true);
SELECT idem.relay_settle('regress_bus', NULL, true);
SELECT idem.relay_settle('regress_bus', gen_random_uuid(), NULL);
SELECT idem.relay_settle('regress_bus', gen_random_uuid(), true);
UPDATE idem.relay_parked SET state = 'held', due = NULL;
SELECT what, name, fix ~ 'relay_settle' AS fix FROM idem.stuck WHERE what = 'unknown';
SELECT idem.relay_settle('regress_bus', msg_id, true) FROM idem.relay_parked;
SELECT state, due IS NOT NULL AS due FROM idem.relay_parked;

-- replays
SELECT idem.outbox_replay(NULL);
SELECT idem.outbox_replay('nowhere');
SELECT idem.outbox_replay('regress_bus', since => now(), until => now());
SELECT idem.outbox_replay('regress_bus', since => now() - interval '1 hour');
SELECT server, route, from_seq, finished_at IS NULL AS open FROM idem.relay_replay;
SELECT idem.outbox_replay_cancel(NULL);
SELECT idem.outbox_replay_cancel(1);
SELECT idem.outbox_replay_cancel(1);
SELECT idem.outbox_replay_cancel(99);

-- what has become of a message
SELECT idem.route_add('a.*', 'regress_bus');
SELECT idem.outbox_enqueue('a.b', '1'::json) AS id \gset
SELECT server, state FROM idem.outbox_status(:'id');
SELECT idem.outbox_enqueue('b', '1'::json, msg_id => '33333333-3333-4333-8333-333333333333');
SELECT * FROM idem.outbox_status('33333333-3333-4333-8333-333333333333');
SELECT * FROM idem.outbox_status('00000000-0000-7000-8000-000000000000');
SELECT * FROM idem.outbox_status(NULL);
SELECT count(*) FROM idem.relay_whereabouts();
DROP SERVER regress_bus;
DROP SERVER regress_bus CASCADE;
DROP EXTENSION idem;

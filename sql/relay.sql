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
INSERT INTO idem.dead_letter (origin, name, msg_id, topic, body, enqueued_at, seq, route, attempts)
	VALUES ('server', 'nowhere', gen_random_uuid(), 't', '', now(), 999, 1, 1), ('server', 'regress_bus', gen_random_uuid(), 't', '', now(), 999, 1, 1);
SELECT * FROM idem.dead_letter_redrive(ARRAY[1, 2]) ORDER BY id;

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

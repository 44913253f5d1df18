-- Enqueueing: every function, argument and error.
\set VERBOSITY terse
CREATE EXTENSION idem;

-- what is kept is what is sent
SELECT idem.outbox_enqueue('orders.created', '{"id": 1}'::jsonb, key => 'o-1') AS id \gset
SELECT msg_id = :'id' AS same, topic, key, content_type, headers, convert_from(body, 'UTF8') AS body,
	   seq > 0 AS numbered, xid IS NOT NULL AS stamped, deliver_at
FROM idem.outbox;
-- a UUIDv7, with the time in it
SELECT substr(:'id', 15, 1) AS version, substr(:'id', 20, 1) IN ('8', '9', 'a', 'b') AS variant,
	   abs(extract(epoch FROM now()) - ('x' || lpad(replace(substr(:'id', 1, 13), '-', ''), 16, '0'))::bit(64)::bigint / 1000.0) < 60 AS recent;
SELECT count(*) = 1000 AND bool_and(rises) AS rise
FROM (SELECT id > lag(id, 1, '00000000-0000-0000-0000-000000000000') OVER (ORDER BY i) AS rises
	  FROM (SELECT i, idem.outbox_enqueue('ids', '1'::json) AS id FROM generate_series(1, 1000) i) s) t;

-- kinds of payload
TRUNCATE idem.outbox_0;
SELECT count(idem.outbox_enqueue(t, p)) FROM (VALUES ('json', '{"b":1,  "a":2}'::json)) v(t, p);
SELECT count(idem.outbox_enqueue('literal', '{"a": "é"}'));
SELECT count(idem.outbox_enqueue('text', '[1]'::text));
SELECT count(idem.outbox_enqueue('plain', 'not JSON'::text, content_type => 'text/plain'));
SELECT count(idem.outbox_enqueue('bytes', '\x00ff'::bytea));
SELECT count(idem.outbox_enqueue('empty', ''::bytea, content_type => 'application/x-nothing'));
SELECT count(idem.outbox_enqueue('typed', '{}'::jsonb, content_type => 'application/json'));
SELECT count(idem.outbox_enqueue('cloud', '{}'::jsonb, content_type => 'application/cloudevents+json'));
PREPARE bound(text, text) AS SELECT count(idem.outbox_enqueue($1, $2));
EXECUTE bound('bound', '{"a":1}');
SELECT topic, content_type, body, encode(body, 'escape') AS escaped FROM idem.outbox ORDER BY seq;
SELECT idem.outbox_enqueue('t', 'not JSON');
SELECT idem.outbox_enqueue('t', 'not JSON'::text);
SELECT idem.outbox_enqueue('t', 1);
SELECT idem.outbox_enqueue('t', now());
SELECT idem.outbox_enqueue('t', NULL);
SELECT idem.outbox_enqueue('t', NULL::jsonb);

-- headers and trace context
TRUNCATE idem.outbox_0;
SELECT count(idem.outbox_enqueue('h', '1'::json, headers => '{"a": "x", "n": 1.50, "b": true, "q": "\"é\""}'));
SELECT count(idem.outbox_enqueue('h', '1'::json, headers => '{}'));
SET idem.traceparent = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01';
SELECT count(idem.outbox_enqueue('h', '1'::json));
SELECT count(idem.outbox_enqueue('h', '1'::json, headers => '{"x": "y"}'));
SELECT count(idem.outbox_enqueue('h', '1'::json, headers => '{"TraceParent": "mine"}'));
RESET idem.traceparent;
SELECT headers FROM idem.outbox ORDER BY seq;
SET idem.traceparent = 'nonsense';
SELECT idem.outbox_enqueue('h', '1'::json, headers => '[]');
SELECT idem.outbox_enqueue('h', '1'::json, headers => '{"a": null}');
SELECT idem.outbox_enqueue('h', '1'::json, headers => '{"a": {"b": 1}}');
SELECT idem.outbox_enqueue('h', '1'::json, headers => '{"a b": "x"}');
SELECT idem.outbox_enqueue('h', '1'::json, headers => '{"": "x"}');
SELECT idem.outbox_enqueue('h', '1'::json, headers => '{"a": "x\r\ny"}');
SELECT idem.outbox_enqueue('h', '1'::json, headers => jsonb_build_object('a', repeat('x', 70000)));

-- names
SELECT idem.outbox_enqueue(NULL, '1'::json);
SELECT idem.outbox_enqueue('', '1'::json);
SELECT idem.outbox_enqueue(repeat('t', 256), '1'::json);
SELECT idem.outbox_enqueue(E'a\nb', '1'::json);
SELECT idem.outbox_enqueue('t', '1'::json, key => '');
SELECT idem.outbox_enqueue('t', '1'::json, key => repeat('k', 1025));
SELECT idem.outbox_enqueue('t', '1'::json, key => E'a\rb');
SELECT idem.outbox_enqueue('t', '1'::json, dedup_key => '');
SELECT idem.outbox_enqueue('t', '1'::json, content_type => '');
SELECT idem.outbox_enqueue('t', '1'::json, content_type => E'text/plain\n');
SET idem.outbox_max_payload = 10;
SELECT idem.outbox_enqueue('t', '"0123456789"'::json);
RESET idem.outbox_max_payload;
BEGIN READ ONLY;
SELECT idem.outbox_enqueue('t', '1'::json);
ROLLBACK;

-- once: by dedup_key within a topic, and by a given id
TRUNCATE idem.outbox_0;
SELECT idem.outbox_enqueue('d', '1'::json, dedup_key => 'k') AS first \gset
SELECT idem.outbox_enqueue('d', '2'::json, dedup_key => 'k') = :'first' AS same;
SELECT idem.outbox_enqueue('other', '3'::json, dedup_key => 'k') = :'first' AS same;
SELECT idem.outbox_enqueue('d', '4'::json, msg_id => '11111111-1111-4111-8111-111111111111');
SELECT idem.outbox_enqueue('e', '5'::json, msg_id => '11111111-1111-4111-8111-111111111111');
BEGIN;
SELECT count(idem.outbox_enqueue('d', '6'::json, dedup_key => 'rolled back'));
ROLLBACK;
SELECT count(idem.outbox_enqueue('d', '7'::json, dedup_key => 'rolled back'));
BEGIN;
SAVEPOINT s;
SELECT count(idem.outbox_enqueue('d', '8'::json));
ROLLBACK TO s;
SELECT count(idem.outbox_enqueue('d', '9'::json));
COMMIT;
SELECT topic, convert_from(body, 'UTF8') AS body FROM idem.outbox ORDER BY seq;
SELECT topic, enqueued, duplicates FROM idem.stat_outbox WHERE topic IN ('d', 'e', 'other') ORDER BY topic;
UPDATE idem.outbox_dedup SET enqueued_at = 0;
SELECT idem.outbox_purge();
SELECT idem.outbox_purge(0);

-- later
SELECT count(idem.outbox_enqueue('later', '1'::json, deliver_at => '2100-01-01'));
SELECT deliver_at FROM idem.outbox WHERE topic = 'later';

-- many at once, in order
TRUNCATE idem.outbox_0;
SELECT idem.outbox_enqueue_batch('b', ARRAY['{"n": 1}', '{"n": 2}', '{"n": 3}']::jsonb[],
	ARRAY['k1', NULL, 'k3'], ARRAY['{"h": 1}', NULL, '{"h": 3}']::jsonb[]) AS ids \gset
SELECT convert_from(body, 'UTF8') AS body, key, headers, msg_id = (:'ids'::uuid[])[row_number() OVER (ORDER BY seq)] AS mine
FROM idem.outbox ORDER BY seq;
SELECT idem.outbox_enqueue_batch('b', '{}'::jsonb[]);
SELECT cardinality(idem.outbox_enqueue_batch('b', ARRAY['\x01', '\x02']::bytea[]));
SELECT cardinality(idem.outbox_enqueue_batch('b', ARRAY['plain', 'text'], content_type => 'text/plain'));
SELECT idem.outbox_enqueue_batch('b', ARRAY['{}', NULL]::jsonb[]);
SELECT idem.outbox_enqueue_batch('b', NULL::jsonb[]);
SELECT idem.outbox_enqueue_batch('b', ARRAY['{}']::jsonb[], ARRAY['a', 'b']);
SELECT idem.outbox_enqueue_batch('b', ARRAY['nope']);
SELECT idem.outbox_enqueue_batch('b', ARRAY[1, 2]);
SELECT cardinality(idem.outbox_enqueue_batch('b', array_agg(to_jsonb(i)))) FROM generate_series(1, 5000) i;
SELECT count(*), count(DISTINCT seq), count(DISTINCT msg_id) FROM idem.outbox WHERE topic = 'b';

-- an outbox table of one's own
TRUNCATE idem.outbox_0;
CREATE TABLE my_outbox (id uuid, kind text, aggregate int, data jsonb, meta jsonb, note text);
CREATE TRIGGER capture AFTER INSERT ON my_outbox FOR EACH ROW EXECUTE FUNCTION
	idem.outbox_capture('id_column', 'id', 'topic_column', 'kind', 'key_column', 'aggregate', 'payload_column', 'data', 'headers_column', 'meta');
INSERT INTO my_outbox VALUES ('22222222-2222-4222-8222-222222222222', 'order.paid', 7, '{"paid": true}', '{"h": "v"}');
SELECT msg_id, topic, key, convert_from(body, 'UTF8') AS body, headers FROM idem.outbox;
INSERT INTO my_outbox VALUES (NULL, NULL, 7, '{}', NULL);
INSERT INTO my_outbox VALUES (NULL, 't', 7, NULL, NULL);
DROP TRIGGER capture ON my_outbox;
CREATE TRIGGER capture AFTER INSERT ON my_outbox FOR EACH ROW EXECUTE FUNCTION idem.outbox_capture('topic', 'rows');
INSERT INTO my_outbox (aggregate, note) VALUES (8, 'whole row');
SELECT topic, convert_from(body, 'UTF8') AS body FROM idem.outbox WHERE topic = 'rows';
DROP TRIGGER capture ON my_outbox;
CREATE TRIGGER capture AFTER INSERT ON my_outbox FOR EACH ROW EXECUTE FUNCTION idem.outbox_capture('topic', 'rows', 'key_column', 'nothing');
INSERT INTO my_outbox (aggregate) VALUES (9);
DROP TRIGGER capture ON my_outbox;
CREATE TRIGGER capture AFTER INSERT ON my_outbox FOR EACH ROW EXECUTE FUNCTION idem.outbox_capture('topic', 'rows', 'id_column', 'note');
INSERT INTO my_outbox (aggregate) VALUES (9);
DROP TRIGGER capture ON my_outbox;
CREATE TRIGGER capture AFTER INSERT ON my_outbox FOR EACH ROW EXECUTE FUNCTION idem.outbox_capture('topic', 'rows', 'colour', 'note');
INSERT INTO my_outbox (aggregate) VALUES (9);
DROP TRIGGER capture ON my_outbox;
CREATE TRIGGER capture AFTER INSERT ON my_outbox FOR EACH ROW EXECUTE FUNCTION idem.outbox_capture('topic');
INSERT INTO my_outbox (aggregate) VALUES (9);
DROP TRIGGER capture ON my_outbox;
CREATE TRIGGER capture BEFORE INSERT ON my_outbox FOR EACH ROW EXECUTE FUNCTION idem.outbox_capture('topic', 'rows');
INSERT INTO my_outbox (aggregate) VALUES (9);
DROP TABLE my_outbox;

-- an index of the administrator's is kept up
CREATE INDEX extra ON idem.outbox_0 (topic) WHERE topic LIKE 'x%';
SELECT count(idem.outbox_enqueue(t, '1'::json)) FROM unnest(ARRAY['x1', 'y1', 'x2']) t;
SET enable_seqscan = off;
SELECT topic FROM idem.outbox_0 WHERE topic LIKE 'x%' ORDER BY topic;
RESET enable_seqscan;
DROP INDEX idem.extra;

-- nobody may enqueue without the right to
CREATE ROLE regress_nobody;
CREATE ROLE regress_producer;
SELECT idem.roles_create();
GRANT idem_producer TO regress_producer;
SET ROLE regress_nobody;
SELECT idem.outbox_enqueue('t', '1'::json);
SET ROLE regress_producer;
SELECT count(idem.outbox_enqueue('t', '1'::json, dedup_key => 'role'));
SELECT cardinality(idem.outbox_enqueue_batch('t', ARRAY['1']::jsonb[]));
SELECT count(*) FROM idem.outbox;
INSERT INTO idem.outbox_0 SELECT * FROM idem.outbox_0;
SELECT idem.relay_adopt();
RESET ROLE;
DROP OWNED BY idem_producer, idem_consumer, idem_operator;
DROP ROLE regress_nobody, regress_producer, idem_producer, idem_consumer, idem_operator;
DROP EXTENSION idem;

-- Servers and their options.
CREATE EXTENSION idem;
-- (whether our own couriers are installed is not the question here)
SET client_min_messages = error;
CREATE FUNCTION attempt(sql text) RETURNS TABLE (state text, message text, detail text, hint text)
LANGUAGE plpgsql AS $$
BEGIN
	EXECUTE sql;
	RETURN QUERY SELECT 'ok', NULL, NULL, NULL;
EXCEPTION WHEN OTHERS THEN
	GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT,
		detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
	RETURN NEXT;
END $$;
-- try options on a server that is not kept if they are accepted
CREATE FUNCTION options(options text) RETURNS TABLE (state text, message text, detail text, hint text)
LANGUAGE plpgsql AS $$
BEGIN
	RETURN QUERY SELECT * FROM attempt(format('CREATE SERVER t FOREIGN DATA WRAPPER idem OPTIONS (%s)', options));
	DROP SERVER IF EXISTS t;
END $$;
\pset format unaligned
\pset tuples_only

-- all options there are
SELECT * FROM options($$ url 'http://example.com' $$);
SELECT * FROM options($$ url 'HTTPS://example.com:8443/a?b=c:d@e', window_messages '1', window_bytes '64MB',
	retry_min '1ms', retry_max '1h', max_attempts '1', gate 'standby', standbys 'a, "B c"', "order" 'none',
	on_unknown 'hold', keep_answer 'true', public_only 'on', method 'put', connections '8', timeout_ms '30000',
	connect_timeout_ms '1000', bearer_file 'b', "user" 'u', password_file 'sub/p', signing_key_file 's',
	cloudevents 'binary', tls_ca_file 'ca', tls_cert_file 'cert', tls_key_file 'key',
	"header.X-Kind" 'a b', "header.X-Api-Key_file" 'k' $$);
SELECT * FROM options($$ url 'amqps://host/vhost', exchange '', routing_key 'k', on_unroutable 'dead', heartbeat '10',
	connect_timeout_ms '1000', "user" 'u', password_file 'p', tls_ca_file 'ca', tls_cert_file 'cert', tls_key_file 'key',
	gate 'local', "order" 'key', on_unknown 'resend' $$);
SELECT * FROM options($$ url 'kafkas://a:9092,b', "user" 'u', password_file 'p', sasl_mechanism 'scram-sha-256', connect_timeout_ms '1',
	timeout_ms '100', tls_ca_file 'ca', tls_cert_file 'cert', tls_key_file 'key', "kafka.compression.type" 'zstd' $$);
SELECT * FROM options($$ url 'discard://', delay_ms '0', fail_every '3' $$);
SELECT * FROM options($$ url 'other://a,b', "other.acks" 'all', "other.password_file" 'p', any_file 'f', max_attempts '3' $$);

-- the url
SELECT * FROM attempt($$ CREATE SERVER t FOREIGN DATA WRAPPER idem $$);
SELECT * FROM options($$ gate 'local' $$);
SELECT * FROM options($$ url '' $$);
SELECT * FROM options($$ url 'example.com' $$);
SELECT * FROM options($$ url '://example.com' $$);
SELECT * FROM options($$ url '../sh://example.com' $$);
SELECT * FROM options($$ url '1http://example.com' $$);
SELECT * FROM options(format('url %L', repeat('s', 33) || '://h'));
SELECT * FROM options($$ url 'http://exa mple.com' $$);
SELECT * FROM options($$ url E'http://example.com\nx' $$);
SELECT * FROM options($$ url 'http://' $$);
SELECT * FROM options($$ url 'http:///path' $$);
SELECT * FROM options($$ url 'amqp:///vhost' $$);
SELECT * FROM options($$ url 'amqp://user@h/vhost' $$);
SELECT * FROM options($$ url 'http://user:sesame@example.com' $$);
SELECT * FROM options($$ url 'amqp://user@x:sesame@example.com/vhost' $$);
SELECT * FROM options($$ url 'other://:@example.com' $$);

-- options that do not exist, or not there
SELECT * FROM options($$ url 'http://h', colour 'red' $$);
SELECT * FROM options($$ url 'http://h', exchange 'e' $$);
SELECT * FROM options($$ url 'http://h', any_file 'f' $$);
SELECT * FROM options($$ url 'http://h', "http.option" 'f' $$);
SELECT * FROM options($$ url 'amqp://h', method 'POST' $$);
SELECT * FROM options($$ url 'kafka://h', exchange 'e' $$);
SELECT * FROM options($$ url 'kafka://h', "kafka.ssl.key.password" 'sesame' $$);
SELECT * FROM options($$ url 'kafka://u@h' $$);
SELECT * FROM options($$ url 'discard://', "header.a" 'b' $$);
SELECT * FROM options($$ url 'other://', method 'POST' $$);
SELECT * FROM options($$ url 'other://', "other." 'POST' $$);
SELECT * FROM options($$ url 'http://h', "header." 'b' $$);
SELECT * FROM options($$ url 'http://h', "header.a b" 'b' $$);

-- secrets in clear
SELECT * FROM options($$ url 'http://h', password 'sesame' $$);
SELECT * FROM options($$ url 'http://h', bearer 'sesame' $$);
SELECT * FROM options($$ url 'http://h', signing_key 'sesame' $$);
SELECT * FROM options($$ url 'http://h', "header.Authorization" 'sesame' $$);
SELECT * FROM options($$ url 'other://h', "other.password" 'sesame' $$);

-- files
SELECT * FROM options($$ url 'http://h', bearer_file '/etc/passwd' $$);
SELECT * FROM options($$ url 'http://h', bearer_file '../x' $$);
SELECT * FROM options($$ url 'http://h', bearer_file 'a/../../x' $$);
SELECT * FROM options($$ url 'http://h', bearer_file '..' $$);
SELECT * FROM options($$ url 'http://h', bearer_file './x' $$);
SELECT * FROM options($$ url 'http://h', bearer_file 'a//x' $$);
SELECT * FROM options($$ url 'http://h', bearer_file 'a/' $$);
SELECT * FROM options($$ url 'http://h', bearer_file '' $$);
SELECT * FROM options(format('url %L, bearer_file %L', 'http://h', repeat('x', 256)));
SELECT * FROM options($$ url 'http://h', "header.X-Key_file" '../x' $$);
SELECT * FROM options($$ url 'other://h', any_file '../x' $$);
SELECT * FROM options($$ url 'http://h', bearer_file '..data', password_file '.x' $$);

-- values
SELECT * FROM options($$ url 'http://h', window_messages '0' $$);
SELECT * FROM options($$ url 'http://h', window_messages 'many' $$);
SELECT * FROM options($$ url 'http://h', window_bytes '1023' $$);
SELECT * FROM options($$ url 'http://h', window_bytes '8 pounds' $$);
SELECT * FROM options($$ url 'http://h', window_bytes '3GB' $$);
SELECT * FROM options($$ url 'http://h', retry_min '0' $$);
SELECT * FROM options($$ url 'http://h', retry_max '2d' $$);
SELECT * FROM options($$ url 'http://h', retry_min '61s' $$);
SELECT * FROM options($$ url 'http://h', retry_min '2s', retry_max '1s' $$);
SELECT * FROM options($$ url 'http://h', max_attempts '0' $$);
SELECT * FROM options($$ url 'http://h', gate 'open' $$);
SELECT * FROM options($$ url 'http://h', gate 'standby' $$);
SELECT * FROM options($$ url 'http://h', standbys 'a' $$);
SELECT * FROM options($$ url 'http://h', gate 'standby', standbys '' $$);
SELECT * FROM options($$ url 'http://h', gate 'standby', standbys 'a,,b' $$);
SELECT * FROM options($$ url 'http://h', "order" 'time' $$);
SELECT * FROM options($$ url 'http://h', on_unknown 'guess' $$);
SELECT * FROM options($$ url 'http://h', keep_answer 'perhaps' $$);
SELECT * FROM options($$ url 'http://h', public_only '' $$);
SELECT * FROM options($$ url 'http://h', method 'GET' $$);
SELECT * FROM options($$ url 'http://h', connections '0' $$);
SELECT * FROM options($$ url 'http://h', timeout_ms '5s' $$);
SELECT * FROM options($$ url 'http://h', connect_timeout_ms '-1' $$);
SELECT * FROM options($$ url 'http://h', cloudevents 'yes' $$);
SELECT * FROM options($$ url 'http://h', "header.X" E'a\r\nb' $$);
SELECT * FROM options($$ url 'amqp://h', on_unroutable 'shrug' $$);
SELECT * FROM options($$ url 'amqp://h', heartbeat '3601' $$);
SELECT * FROM options($$ url 'discard://', delay_ms '-1' $$);
SELECT * FROM options($$ url 'discard://', fail_every 'x' $$);
SELECT * FROM options(format('url %L, "user" %L', 'http://h', repeat('x', 8193)));

-- changed later
CREATE SERVER s FOREIGN DATA WRAPPER idem OPTIONS (url 'http://h');
SELECT * FROM attempt($$ ALTER SERVER s OPTIONS (DROP url) $$);
SELECT * FROM attempt($$ ALTER SERVER s OPTIONS (ADD colour 'red') $$);
SELECT * FROM attempt($$ ALTER SERVER s OPTIONS (ADD method 'POST') $$);
SELECT * FROM attempt($$ ALTER SERVER s OPTIONS (SET url 'amqp://h') $$);
SELECT * FROM attempt($$ ALTER SERVER s OPTIONS (SET url 'amqp://h', DROP method) $$);
SELECT srvoptions FROM pg_foreign_server WHERE srvname = 's';

-- what else could be made with a foreign-data wrapper
SELECT * FROM attempt($$ ALTER FOREIGN DATA WRAPPER idem OPTIONS (ADD a 'b') $$);
SELECT * FROM attempt($$ CREATE USER MAPPING FOR PUBLIC SERVER s $$);
SELECT * FROM attempt($$ CREATE USER MAPPING FOR PUBLIC SERVER s OPTIONS (password 'sesame') $$);
SELECT * FROM attempt($$ CREATE FOREIGN TABLE t (a int) SERVER s $$);
SELECT * FROM attempt($$ CREATE FOREIGN TABLE t (a int OPTIONS (b 'c')) SERVER s OPTIONS (d 'e') $$);

-- a courier that is not there
SET client_min_messages = notice;
CREATE SERVER far FOREIGN DATA WRAPPER idem OPTIONS (url 'nowhere://h');
SELECT idem.server_check('far');
SELECT * FROM attempt($$ SELECT idem.server_check('nobody') $$);
SELECT * FROM attempt($$ SELECT idem.server_check(NULL) $$);
SET client_min_messages = error;

-- who may
BEGIN;
SELECT idem.roles_create();
SET LOCAL ROLE idem_operator;
SELECT * FROM attempt($$ CREATE SERVER t FOREIGN DATA WRAPPER idem OPTIONS (url 'http://h') $$);
SELECT * FROM attempt($$ ALTER SERVER s OPTIONS (ADD "user" 'u') $$);
SELECT idem.server_check('far');
SET LOCAL ROLE idem_producer;
SELECT * FROM attempt($$ CREATE SERVER t FOREIGN DATA WRAPPER idem OPTIONS (url 'http://h') $$);
SELECT * FROM attempt($$ SELECT idem.server_check('far') $$);
SELECT state FROM attempt($$ SHOW idem.secrets_dir $$);
RESET ROLE;
GRANT USAGE ON FOREIGN DATA WRAPPER idem TO idem_operator;
SET LOCAL ROLE idem_operator;
SELECT * FROM attempt($$ CREATE SERVER t FOREIGN DATA WRAPPER idem OPTIONS (url 'http://h') $$);
SELECT * FROM attempt($$ SET idem.secrets_dir = '/etc' $$);
ROLLBACK;

SELECT * FROM attempt($$ DROP EXTENSION idem $$);
DROP SERVER s, far;
\pset tuples_only off
\pset format aligned
DROP FUNCTION options, attempt;
DROP EXTENSION idem;

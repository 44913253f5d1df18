# Handlers: their effects and the end of a message are one; errors, rights,
# crashes, and what else can go wrong with who runs them.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);
use Handlers;
use Idem;

my $node = handler_cluster('handler', {}, 'max_worker_processes = 20', 'restart_after_crash = on',
	'max_prepared_transactions = 5', 'idem.handler_workers = 2', 'wal_level = replica', 'max_wal_senders = 4');

Handlers::handler_setup();
sql(q(SET ROLE app; SELECT idem.consumer_create('c', 'h', max_attempts => 3, backoff => '0.01 s', timeout => '1 s',
	never_retry => '{22}', not_yet_for => '0.5 s')));

# what becomes of a message
store('c', 'good');
await('a message is processed', q(SELECT state, result FROM idem.inbox_status('c', 'good')), 'done|{"attempt": 1}');
is(sql(q(SELECT attempt, who FROM effect WHERE msg_id = 'good')), '1|app', '... once, as the owner');
store('c', 'once', '{"fail": "P0001", "times": 1}');
await('one that fails once is tried again', q(SELECT state, result FROM idem.inbox_status('c', 'once')), 'done|{"attempt": 2}');
is(sql(q(SELECT attempt FROM effect WHERE msg_id = 'once')), '2', '... and the failed attempt left nothing');
store('c', 'bad', '{"fail": "P0001", "times": 100}');
await('one that always fails becomes a dead letter', q(SELECT attempts, reason, sqlstate, state FROM idem.dead_letter WHERE msg_id = 'bad'), '3|no good|P0001|dead');
store('c', 'never', '{"fail": "22023", "times": 100}');
await('never_retry: at once', q(SELECT attempts, sqlstate FROM idem.dead_letter WHERE msg_id = 'never'), '1|22023');
store('c', 'yet', '{"fail": "ID001", "times": 100}');
await('not yet, for too long', q(SELECT attempts, sqlstate FROM idem.dead_letter WHERE msg_id = 'yet'), '0|ID001');
handler('h_conflict', q(BEGIN
	IF nextval('tries') < 8 THEN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END IF;
	INSERT INTO effect VALUES (m.consumer, m.msg_id, m.attempt); END));
sql(q(SELECT idem.consumer_create('conflict', 'h_conflict', max_attempts => 2)));
store('conflict', 'x');
await('conflicts do not count', q(SELECT attempt FROM effect WHERE msg_id = 'x'), '1');
store('c', 'slow', '{"sleep": 600}');
await('timeout', q(SELECT attempts, sqlstate FROM idem.dead_letter WHERE msg_id = 'slow'), '3|57014');
is(sql(q(SELECT count(*) FROM effect WHERE msg_id IN ('bad', 'never', 'yet', 'slow'))), '0', 'no failure has an effect');
is(sql(q(SELECT stored, processed, dead FROM idem.stat_consumer WHERE consumer = 'c' AND type IS NULL)), '6|2|4', 'they are counted');

# rights, and what one handler leaves to the next
my %attack = (
	'RESET ROLE' => q(EXECUTE 'RESET ROLE'),
	'SET ROLE' => q(EXECUTE 'SET ROLE NONE'),
	'SET SESSION AUTHORIZATION' => q(EXECUTE 'SET SESSION AUTHORIZATION DEFAULT'),
	'set_config' => q(PERFORM set_config('role', 'none', false)),
	'COMMIT' => q(COMMIT),
	'LISTEN' => q(EXECUTE 'LISTEN x'),
	'CREATE ROLE' => q(EXECUTE 'CREATE ROLE evil SUPERUSER'),
	'inbox_done' => q(PERFORM idem.inbox_done('c', m.msg_id)));
my $i = 0;
for my $what (sort keys %attack)
{
	$i++;
	sql("SET ROLE app; CREATE FUNCTION attack$i(m idem.message) RETURNS void LANGUAGE plpgsql AS \$f\$ BEGIN $attack{$what}; INSERT INTO trace VALUES ('$what'); END \$f\$;
		SELECT idem.consumer_create('attack$i', 'attack$i', max_attempts => 1)");
	store("attack$i", 'x');
	await("$what fails", "SELECT count(*) FROM idem.dead_letter WHERE name = 'attack$i'", '1');
}
is(sql('SELECT count(*) FROM trace'), '0', 'no attack got through');

# triggers that are deferred, and defer again, run as the owner
sql(<<'S');
SET ROLE app;
CREATE TABLE late (n integer);
CREATE FUNCTION on_late() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO trace VALUES ('deferred ' || NEW.n || ' ' || current_user);
	IF NEW.n < 3 THEN
		SET CONSTRAINTS ALL DEFERRED;
		INSERT INTO late VALUES (NEW.n + 1);
	END IF;
	BEGIN
		RESET ROLE;
		INSERT INTO trace VALUES ('escaped');
	EXCEPTION WHEN insufficient_privilege OR invalid_parameter_value THEN
		NULL;
	END;
	RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER t AFTER INSERT ON late DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION on_late();
CREATE FUNCTION h_late(m idem.message) RETURNS void LANGUAGE sql AS 'INSERT INTO late VALUES (1)';
SELECT idem.consumer_create('late', 'h_late', max_attempts => 2);
S
store('late', 'x');
await('deferred triggers run as the owner', q(SELECT string_agg(what, ',' ORDER BY what) FROM trace), 'deferred 1 app,deferred 2 app,deferred 3 app');
sql('TRUNCATE trace');

# what is set, held, locked or temporary does not outlive a handler
handler('h_leak', q(
	DECLARE
		n integer;
	BEGIN
		INSERT INTO trace SELECT coalesce(nullif(current_setting('my.secret', true), ''), 'none') || ' ' || current_setting('work_mem')
			|| ' ' || current_setting('search_path');
		INSERT INTO trace SELECT 'cursor' FROM pg_cursors WHERE is_holdable;
		INSERT INTO trace SELECT 'prepared' FROM pg_prepared_statements WHERE name = 'p';
		INSERT INTO trace SELECT 'lock' FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid();
		INSERT INTO trace SELECT 'temp' FROM pg_class WHERE relname = 'left_over' AND pg_my_temp_schema() = relnamespace;
		PERFORM set_config('my.secret', 'x', false), set_config('work_mem', '3MB', false), set_config('search_path', 'pg_temp', false);
		EXECUTE 'DECLARE leaked CURSOR WITH HOLD FOR SELECT 1';
		EXECUTE 'PREPARE p AS SELECT 1';
		PERFORM pg_advisory_lock(42);
		EXECUTE 'CREATE TEMP TABLE left_over (n integer)';
		INSERT INTO public.effect VALUES (m.consumer, m.msg_id);
	END));
sql(q(SET search_path = public; SELECT idem.consumer_create('leak', 'h_leak', max_attempts => 1)));
store('leak', "l$_") for 1 .. 6;
await('all of these are processed', q(SELECT count(*) FROM effect WHERE consumer = 'leak'), '6');
is(sql('SELECT DISTINCT what FROM trace'), 'none ' . sql('SHOW work_mem') . ' public, pg_temp', 'nothing is left to the next one');

# a handler that declares things, and one that takes its own message
handler('h_meta', q(BEGIN
	PERFORM idem.consumer_create('made by ' || m.msg_id);
	PERFORM idem.consumer_alter(m.consumer, max_attempts => 7);
	INSERT INTO trace SELECT 'got ' || n.msg_id FROM idem.inbox_next(m.consumer, 10) n WHERE n.msg_id = m.msg_id;
	INSERT INTO effect VALUES (m.consumer, m.msg_id); END));
sql(q(TRUNCATE trace; SELECT idem.consumer_create('meta', 'h_meta')));
store('meta', 'x');
await('a handler declares consumers', q(SELECT count(*) FROM effect WHERE consumer = 'meta'), '1');
is(sql(q(SELECT max_attempts FROM idem.consumer WHERE name = 'meta')), '7', '... and alters its own');
is(sql('SELECT count(*) FROM trace'), '0', 'a handler does not get its own message');

# a handler that cannot run: visible, nothing is lost, recovers
sql(q(SELECT idem.consumer_create('frail', 'h', backoff => '0.01 s')));
for ([ 'dropped', 'ALTER FUNCTION h(idem.message) RENAME TO h_away', 'ALTER FUNCTION h_away(idem.message) RENAME TO h', '%does not exist' ],
	[ 'without permission', 'GRANT app TO CURRENT_USER; SELECT idem.consumer_alter(\'frail\', owner => \'app\'); REVOKE EXECUTE ON FUNCTION h(idem.message) FROM PUBLIC',
		'GRANT EXECUTE ON FUNCTION h(idem.message) TO PUBLIC', '%may not execute%' ])
{
	my ($what, $break, $mend, $reason) = @$_;
	sql($break);
	store('frail', $what);
	await("$what: blocked", "SELECT state, reason LIKE '$reason', pending FROM idem.consumer_status WHERE consumer = 'frail'", 'blocked|t|1');
	sql($mend);
	await("$what: recovers", "SELECT state FROM idem.inbox_status('frail', '$what')", 'done');
}
sql(q(CREATE ROLE gone; GRANT ALL ON effect TO gone; SELECT idem.consumer_alter('frail', owner => 'gone'); DROP OWNED BY gone; DROP ROLE gone));
store('frail', 'owner');
await('owner dropped: blocked', q(SELECT state, reason LIKE 'owner "gone"%' FROM idem.consumer_status WHERE consumer = 'frail'), 'blocked|t');
sql(q(SELECT idem.consumer_alter('frail', owner => 'app')));
await('owner dropped: recovers', q(SELECT state FROM idem.inbox_status('frail', 'owner')), 'done');

# a stuck key, however long its queue, stops nobody else
sql(q(SELECT idem.consumer_create('keyed', 'h', ordering => 'key', backoff => '1 hour')));
sql(q(BEGIN;
	SELECT idem.inbox_store('keyed', 'stuck', '{"fail": "P0001", "times": 1}', key => 'a');
	SELECT count(idem.inbox_store('keyed', 'a' || i, '{}', key => 'a')) FROM generate_series(1, 10100) i;
	SELECT idem.inbox_store('keyed', 'other', '{}', key => 'b');
	COMMIT));
await('a stuck key stops no other', q(SELECT state FROM idem.inbox_status('keyed', 'other')), 'done');
is(sql(q(SELECT count(*) FROM effect WHERE consumer = 'keyed' AND msg_id LIKE 'a%')), '0', '... but its own');
sql(q(SELECT idem.consumer_drop('keyed', true)));

# PREPARE: what was stored is found, what was taken and rolled back too
sql(q(BEGIN; SELECT idem.inbox_store('c', '2pc', '{}'); PREPARE TRANSACTION 'p'));
store('c', 'after 2pc');
await('others go on', q(SELECT state FROM idem.inbox_status('c', 'after 2pc')), 'done');
sql(q(COMMIT PREPARED 'p'));
await('prepared and committed', q(SELECT state FROM idem.inbox_status('c', '2pc')), 'done');
sql(q(SELECT idem.consumer_create('fetched')));
store('fetched', "f$_") for 1 .. 2;
sql(q(BEGIN; SELECT idem.inbox_done('fetched', msg_id) FROM idem.inbox_next('fetched'); PREPARE TRANSACTION 'p'));
is(sql(q(BEGIN; SELECT msg_id, idem.inbox_done('fetched', msg_id) FROM idem.inbox_next('fetched', 10); COMMIT)), 'f2|', 'what is prepared is taken');
sql(q(ROLLBACK PREPARED 'p'));
is(sql(q(BEGIN; SELECT msg_id, idem.inbox_done('fetched', msg_id) FROM idem.inbox_next('fetched', 10); COMMIT)), 'f1|', 'rolled back, it is there again');

$node->stop;
done_testing();

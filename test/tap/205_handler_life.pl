# Who runs handlers is terminated or killed, there is no room for it, or the
# database goes away, is copied, or fails over: each message is processed once.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);
use Handlers;
use Idem;

my $node = handler_cluster('handler_life', { allows_streaming => 1 }, 'max_worker_processes = 20', 'restart_after_crash = on',
	'max_prepared_transactions = 5', 'idem.handler_workers = 2', 'wal_level = replica', 'max_wal_senders = 4');

Handlers::handler_setup();
sql(q(SET ROLE app; SELECT idem.consumer_create('c', 'h', max_attempts => 3, backoff => '0.01 s', timeout => '1 s',
	never_retry => '{22}', not_yet_for => '0.5 s')));

# terminated again and again: each is processed, once
sql(q(SELECT idem.consumer_create('term', 'h', backoff => '0.01 s', backoff_max => '0.02 s', max_attempts => 1000, concurrency => 2)));
sql(q(SELECT count(idem.inbox_store('term', 't' || i, '{"sleep": 0.01}')) FROM generate_series(1, 300) i));
my $terminated = 0;
my $end = time + 60;
while ($terminated < 50 && time < $end)
{
	# A worker that ends at once has to wait; one that got to work has not.
	$terminated += sql(q(SELECT count(*) FILTER (WHERE pg_terminate_backend(pid)) FROM pg_stat_activity
		WHERE backend_type LIKE 'idem handler%' AND backend_start < clock_timestamp() - interval '0.4 s'));
	usleep(20_000);
}
cmp_ok($terminated, '>=', 50, 'terminated 50 times');
await('all are processed', q(SELECT count(*), count(DISTINCT msg_id) FROM effect WHERE consumer = 'term'), '300|300', 60);

# DROP EXTENSION and DROP DATABASE do not wait for ever for a handler
for my $how ('DROP EXTENSION idem CASCADE', 'DROP DATABASE other WITH (FORCE)')
{
	my $in = $how =~ /EXTENSION/ ? 'other' : 'postgres';
	if ($in eq 'other')
	{
		sql('CREATE DATABASE other');
	}
	$node->safe_psql('other', q(CREATE EXTENSION idem;
		CREATE FUNCTION h(m idem.message) RETURNS void LANGUAGE sql AS 'SELECT pg_sleep(2)';
		SELECT idem.consumer_create('c', 'h');
		SELECT idem.inbox_store('c', 'x', '{}')));
	await("$how: the handler runs", q(SELECT count(*) FROM pg_stat_activity WHERE datname = 'other' AND query LIKE '%message x'), '1');
	my $begin = time;
	$node->safe_psql($in, $how);
	cmp_ok(time - $begin, '<', 20, "$how goes through while a handler runs");
}
await('no worker stays behind', q(SELECT count(*) FROM pg_stat_activity WHERE datname = 'other'), '0');

# poison: kills the server (no more than max_attempts times and a few before), and ends as a dead letter
handler('h_poison', q(BEGIN
	IF m.msg_id = 'poison' THEN EXECUTE format('COPY (SELECT 1) TO PROGRAM %L', 'kill -9 ' || pg_backend_pid()); END IF;
	INSERT INTO effect VALUES (m.consumer, m.msg_id); END));
sql(q(SELECT idem.consumer_create('poison', 'h_poison', max_attempts => 2, backoff => '0.01 s')));
$node->psql('postgres', q(SELECT idem.inbox_store('poison', 'poison', '{}'), idem.inbox_store('poison', 'fine', '{}')));
await('a message that kills the server becomes a dead letter', q(SELECT attempts FROM idem.dead_letter WHERE name = 'poison'), '2', 60);
await('... and what is behind it is processed', q(SELECT count(*) FROM effect WHERE consumer = 'poison'), '1');

# the whole server is killed in the middle of a handler
store('c', 'cut', '{"sleep": 0.9}');
await('it runs', q(SELECT count(*) > 0 FROM pg_stat_activity WHERE query LIKE '%message cut'), 't');
crash($node);
$node->start;
await('killed in the middle: processed after all', q(SELECT state FROM idem.inbox_status('c', 'cut')), 'done');
is(sql(q(SELECT count(*) FROM effect WHERE msg_id = 'cut')), '1', '... once');


# a dump takes what waits along
sql(q(SELECT idem.consumer_create('dumped', ordering => 'key');
	SELECT idem.inbox_store('dumped', 'd' || i, to_jsonb(i), key => 'a') FROM generate_series(1, 3) i));
sql(q(BEGIN; SELECT msg_id FROM idem.inbox_next('dumped'); SELECT idem.inbox_retry('dumped', 'd1', error => 'later', delay => '0'); COMMIT));
sql('CREATE DATABASE restored');
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';
$node->command_ok([ 'pg_dump', '-Fc', '-f', $dump, $node->connstr('postgres') ], 'pg_dump');
$node->command_ok([ 'pg_restore', '-d', $node->connstr('restored'), $dump ], 'pg_restore');
is($node->safe_psql('restored', q(BEGIN;
	SELECT msg_id, attempt FROM idem.inbox_next('dumped', 10); SELECT idem.inbox_done('dumped', 'd1');
	SELECT msg_id, attempt FROM idem.inbox_next('dumped', 10); SELECT idem.inbox_done('dumped', 'd2');
	COMMIT; SELECT idem.inbox_store('dumped', 'd1', '1'), idem.inbox_store('dumped', 'd4', '1'))),
	"d1|2\n\nd2|1\n\nduplicate|stored", 'pending and parked work is in the dump, in its order, and so are claims');
sql('DROP DATABASE restored WITH (FORCE)');

# standby and promotion
$node->backup('b');
my $standby = PostgreSQL::Test::Cluster->new('handler_standby');
$standby->init_from_backup($node, 'b', has_streaming => 1);
$standby->start;
handler('h_here', q(BEGIN INSERT INTO effect VALUES (m.consumer, m.msg_id); END));
sql(q(SELECT idem.consumer_create('here', backoff => '0.01 s')));
store('here', 's1');
sql(q(BEGIN; SELECT msg_id FROM idem.inbox_next('here'); SELECT idem.inbox_retry('here', 's1', delay => '0'); COMMIT));
store('here', 's2');
$node->wait_for_catchup($standby);
is(sqlstate($standby, q(SELECT * FROM idem.inbox_next('here'))), '25006', 'a standby processes nothing');
$node->stop('immediate');
$standby->promote;
$node = work_on($standby);
sql(q(SELECT idem.consumer_alter('here', 'h_here')));
await('promoted: what waited is processed', q(SELECT count(*), count(DISTINCT msg_id) FROM effect WHERE consumer = 'here'), '2|2');

# no room for workers: visible, and recovers
$node->append_conf('postgresql.conf', 'max_worker_processes = 3');
$node->restart;
store('here', 'room');
await('no room: visible', q(SELECT count(*) > 0 FROM idem.handler_workers() WHERE state = 'waiting' AND reason <> ''), 't');
$node->append_conf('postgresql.conf', 'max_worker_processes = 20');
$node->restart;
await('room again: processed', q(SELECT state FROM idem.inbox_status('here', 'room')), 'done');

$node->stop;
done_testing();

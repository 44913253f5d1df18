# Local delivery: every consumer gets each message that was committed exactly
# once, whatever is killed meanwhile, with and without routes beside it.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);
use Handlers;
use Idem;
use FileCourier qw(install_courier bodies file_server);

my $node = handler_cluster('local', {}, "idem.site = 'here'", 'max_worker_processes = 20', 'restart_after_crash = on',
	'idem.handler_workers = 3', 'idem.outbox_retention = 1d');
install_courier($node);

sql(file_server('bus', ''));
sql(<<'S');
SELECT idem.route_add('order.*', 'bus');
CREATE TABLE got (id bigint GENERATED ALWAYS AS IDENTITY, consumer text, msg_id text, key text, n integer, replayed boolean, trace text);
CREATE TABLE ledger (n integer);
CREATE FUNCTION note(m idem.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	INSERT INTO got (consumer, msg_id, key, n, replayed, trace)
	VALUES (m.consumer, m.msg_id, m.key, (m.payload->>'n')::int, m.replayed, m.headers->>'traceparent');
END $$;
CREATE FUNCTION moody(m idem.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM note(m);
	IF random() < 0.2 THEN RAISE 'not in the mood'; END IF;
END $$;
SELECT idem.consumer_create('all', 'note', ARRAY['order.*']);
SELECT idem.consumer_create('keyed', 'moody', ARRAY['order.*'], ordering => 'key', concurrency => 3,
	backoff => '0.005 s', backoff_max => '0.02 s', max_attempts => 1000);
SELECT idem.consumer_create('app', topics => ARRAY['app']);
S

# the server is killed again and again while several sessions enqueue; each
# writes in the same transaction what it has enqueued
my $n = 0;
for my $round (1 .. 4)
{
	my @jobs = map {
		my $first = $n + 1 + 200 * $_;
		start_sql($node, "DO \$\$ BEGIN
			FOR i IN $first .. @{[$first + 199]} LOOP
				PERFORM idem.outbox_enqueue('order.new', jsonb_build_object('n', i), key => '$first-' || i % 7);
				INSERT INTO ledger VALUES (i);
				IF i % 10 = 9 THEN ROLLBACK; ELSE COMMIT; END IF;
			END LOOP;
		END \$\$")
	} 0 .. 1;
	$n += 400;
	my $before = sql('SELECT count(*) FROM got');
	my $end = time + 20;
	usleep(20_000) while sql('SELECT count(*) FROM got') < $before + 50 && time < $end;
	crash($node);
	finish_sql($_) for @jobs;
	$node->start;
}
my $committed = sql('SELECT count(*) FROM ledger');
cmp_ok($committed, '>', 100, "committed: $committed");
for my $consumer (qw(all keyed))
{
	await("$consumer: each message that was committed, once", qq(SELECT count(*), count(DISTINCT n) FROM got WHERE consumer = '$consumer'),
		"$committed|$committed", 60);
	is(sql(qq(SELECT count(*) FROM got g FULL JOIN ledger l USING (n) WHERE consumer = '$consumer' AND l.n IS NULL)), '0', "$consumer: nothing else");
}
is(sql(q(SELECT count(*) FROM (SELECT n < lag(n) OVER (PARTITION BY key ORDER BY id) AS late FROM got WHERE consumer = 'keyed') x WHERE late)),
	'0', 'keyed: in the order of each key, failures or not');
is(sql('SELECT count(*) FROM idem.dead_letter'), '0', 'nothing was given up');
{
	my %seen;
	my $end = time + 30;
	do { usleep(50_000); %seen = (); $seen{$_}++ for bodies('bus') } while (keys %seen < $committed && time < $end);
	is(scalar(keys %seen), $committed, 'what is routed beside it arrives, too');
}

# many messages of a few keys, failures, and as many handlers as there are:
# a moment when two are at one key would show
sql(q(SELECT idem.consumer_create('storm', 'moody', ordering => 'key', concurrency => 3,
	backoff => '0.002 s', backoff_max => '0.01 s', max_attempts => 1000)));
for my $round (1 .. 10)
{
	sql(qq(SELECT count(idem.inbox_store('storm', '$round-' || i, jsonb_build_object('n', $round * 1000 + i), key => (i % 5)::text)) FROM generate_series(1, 100) i));
}
await('storm: each once', q(SELECT count(*), count(DISTINCT n) FROM got WHERE consumer = 'storm'), '1000|1000', 60);
is(sql(q(SELECT count(*) FROM (SELECT n < lag(n) OVER (PARTITION BY key ORDER BY id) AS late FROM got WHERE consumer = 'storm') x WHERE late)),
	'0', 'storm: in the order of each key');

# one that begins in the past
sql(q(SELECT idem.consumer_create('old', 'note', ARRAY['order.*'], start_from => 'oldest')));
sql(q(SELECT idem.consumer_create('new', 'note', ARRAY['order.*'])));
sql(q(SELECT idem.outbox_enqueue('order.new', jsonb_build_object('n', 100000))));
await('from the oldest on', q(SELECT count(*), count(DISTINCT msg_id), bool_or(replayed) FROM got WHERE consumer = 'old'), ($committed + 1) . '|' . ($committed + 1) . '|f', 60);
await('from now on', q(SELECT count(*) FROM got WHERE consumer = 'new'), '1');

# a replay, while live messages flow
sql(q(SELECT idem.consumer_reset('old'); DELETE FROM got WHERE consumer = 'old'));
sql(q(SELECT idem.outbox_replay(consumer => 'old')));
sql(qq(SELECT count(idem.outbox_enqueue('order.new', jsonb_build_object('n', 200000 + i))) FROM generate_series(1, 50) i)) for 1 .. 2;
await('replayed: each once more, marked so', q(SELECT count(*), count(DISTINCT msg_id) FROM got WHERE consumer = 'old' AND replayed), ($committed + 1) . '|' . ($committed + 1), 60);
await('live ones flow beside it', q(SELECT count(*), count(DISTINCT msg_id) FROM got WHERE consumer = 'old' AND NOT replayed), '100|100');
is(sql(q(SELECT count(*) FROM got WHERE consumer = 'all' AND replayed)), '0', 'no other consumer gets the replay');

# not before its time
sql(q(SELECT idem.outbox_enqueue('order.new', '{"n": 300000}'::jsonb, deliver_at => now() + interval '1.5 s')));
sql(q(SELECT idem.outbox_enqueue('order.new', '{"n": 300001}'::jsonb)));
await('what is delayed', q(SELECT string_agg(n::text, ' ' ORDER BY id) FROM got WHERE consumer = 'new' AND n >= 300000), '300001 300000');
is(sql(q(SELECT count(*) FROM idem.inbox_message m JOIN idem.consumer c ON c.id = m.consumer WHERE c.name = 'new')), '0', 'nothing is left of it');

# a handler enqueues: one transaction, and the trace goes on
sql(<<'S');
CREATE FUNCTION forward(m idem.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
	PERFORM idem.outbox_enqueue('step.two', jsonb_build_object('n', m.payload->'n'));
	IF m.attempt = 1 THEN RAISE 'once more'; END IF;
END $$;
SELECT idem.consumer_create('one', 'forward', ARRAY['step.one'], backoff => '0.01 s');
SELECT idem.consumer_create('two', 'note', ARRAY['step.two']);
S
my $trace = '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01';
sql(qq(SELECT idem.outbox_enqueue('step.one', '{"n": 1}'::jsonb, headers => '{"traceparent": "$trace"}')));
await('what a handler enqueues comes once, in the same trace', q(SELECT count(*), max(trace) FROM got WHERE consumer = 'two'), "1|$trace");

# an application fetches: tried again, it is not taken for a duplicate
my $id = sql(q(SELECT idem.outbox_enqueue('app', '{"n": 1}'::jsonb)));
await('it waits', qq(SELECT state FROM idem.inbox_status('app', '$id')), 'pending');
sql(qq(BEGIN; SELECT msg_id FROM idem.inbox_next('app'); SELECT idem.inbox_retry('app', '$id', delay => '0'); COMMIT));
is(sql(q(SELECT attempt FROM idem.inbox_next('app', lease => '0.001 s'))), '2', 'tried again');
await('a lease that ran out', qq(BEGIN; SELECT attempt FROM idem.inbox_next('app'); SELECT idem.inbox_done('app', '$id'); COMMIT), "3\n");
is(sql(qq(SELECT state FROM idem.inbox_status('app', '$id'))), 'done', 'and done');

# a client that goes away has tried
$id = sql(q(SELECT idem.outbox_enqueue('app', '{"n": 2}'::jsonb)));
await('it waits', qq(SELECT state FROM idem.inbox_status('app', '$id')), 'pending');
$node->psql('postgres', q(BEGIN; SELECT msg_id FROM idem.inbox_next('app'); SELECT pg_terminate_backend(pg_backend_pid())));
await('a client that was terminated has tried', qq(SELECT attempts FROM idem.inbox_status('app', '$id')), '1');

$node->stop;
done_testing();

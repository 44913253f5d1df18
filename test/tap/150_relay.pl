# The relay: what is committed arrives, in order, whatever happens.
use strict;
use warnings;
use Cwd 'abs_path';
use File::Basename;
use File::Copy;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);
use Idem;

# The courier goes where the server looks for it.
my ($postgres) = grep { -x } map { "$_/postgres" } split /:/, $ENV{PATH};
my $bindir = dirname($postgres);
copy(dirname(abs_path($0)) . '/../courier/idem-courier-file', "$bindir/idem-courier-file") or die $!;
chmod 0755, "$bindir/idem-courier-file";

my $node = cluster('relay', {}, 'max_prepared_transactions = 10', "idem.site = 'here'",
	'max_worker_processes = 20', 'max_connections = 60');
my $dir = PostgreSQL::Test::Utils::tempdir;
my ($file, $mode) = ("$dir/messages", "$dir/mode");

sub sql { return $node->safe_psql('postgres', $_[0]) }

# lines(): what has arrived, as [id, destination, key, attempt, body]
sub lines
{
	open(my $f, '<', $file) or return ();
	my @lines = map { chomp; [ split /\t/, $_, 5 ] } <$f>;
	return @lines;
}
sub bodies { return map { $_->[4] } lines() }

# await($what, $condition): poll, for a while at most
sub await
{
	my ($what, $condition) = @_;
	my $end = time + ($PostgreSQL::Test::Utils::timeout_default // 180) / 6;
	my $result;
	usleep(20_000) while !($result = $condition->()) && time < $end;
	ok($result, $what) or diag(sql('SELECT * FROM idem.relay_status'), "\n", join("\n", bodies()));
	return $result;
}
sub await_bodies
{
	my ($what, @expected) = @_;
	await($what, sub { "@{[bodies()]}" eq "@expected" });
	is_deeply([ bodies() ], \@expected, "$what: exactly these");
}
sub await_sql
{
	my ($what, $query, $expected) = @_;
	await($what, sub { sql($query) eq $expected }) or diag(sql($query));
}
sub set_mode
{
	open(my $f, '>', $mode) or die $!;
	print $f "$_[0]\n";
	close $f;
}
sub truncate_file { truncate($file, 0) if -e $file }

sql(qq(CREATE SERVER bus FOREIGN DATA WRAPPER idem OPTIONS (url 'file://x', "file.path" '$file', "file.mode" '$mode', retry_min '20ms', retry_max '200ms', max_attempts '5')));
sql(q(SELECT idem.route_add('orders.**', 'bus', 'to/{topic}')));

# What is there.
sql(q(SELECT idem.outbox_enqueue('orders.created', '{"n":1}'::json, key => 'a')));
await_bodies('a message arrives', '{"n":1}');
is((lines())[0][1], 'to/orders.created', 'at its destination');
is((lines())[0][2], 'a', 'with its key');
is((lines())[0][0], sql('SELECT msg_id FROM idem.outbox'), 'and its id');
sql(q(SELECT idem.outbox_enqueue('invoices.created', '{"n":0}'::json)));
sql(q(BEGIN; SELECT idem.outbox_enqueue('orders.created', '{"n":-1}'::json); ROLLBACK));
sql(q(SELECT idem.outbox_enqueue_batch('orders.x', ARRAY['{"n":2}', '{"n":3}'], ARRAY['a', 'a'])));
await_bodies('what has no route or was rolled back does not', '{"n":1}', '{"n":2}', '{"n":3}');
await_sql('the status says so', q(SELECT state, unsent_at_most, sent, dead, in_flight FROM idem.relay_status), 'running|0|3|0|0');
is(sql(q(SELECT string_agg(DISTINCT s.state, ',') FROM idem.outbox o, idem.outbox_status(o.msg_id) s)), 'delivered', 'and that of each message');

# Numbers are not given out in the order of commits.
truncate_file();
my $late = $node->background_psql('postgres');
$late->query_safe(q(BEGIN; SELECT idem.outbox_enqueue('orders.late', '"late"'::json)));
sql(q(SELECT idem.outbox_enqueue('orders.early', '"early"'::json)));
await_bodies('a later one that is committed does not wait', '"early"');
$late->query_safe('COMMIT');
await_bodies('and the earlier one is not skipped', '"early"', '"late"');

# A transaction may be older than one whose message precedes its own.
truncate_file();
$late->query_safe('BEGIN; SELECT pg_current_xact_id()');
sql(q(SELECT idem.outbox_enqueue('orders.k', '"first"'::json, key => 'k')));
$late->query_safe(q(SELECT idem.outbox_enqueue('orders.k', '"second"'::json, key => 'k')));
$late->query_safe('COMMIT');
await_bodies('the order is that of enqueueing', '"first"', '"second"');

# Prepared transactions and savepoints.
truncate_file();
sql(q(BEGIN; SELECT idem.outbox_enqueue('orders.p', '"prepared"'::json); PREPARE TRANSACTION 'p'));
sql(q(BEGIN; SELECT idem.outbox_enqueue('orders.p', '"gone"'::json); PREPARE TRANSACTION 'q'));
sql(q(BEGIN; SAVEPOINT s; SELECT idem.outbox_enqueue('orders.p', '"undone"'::json); ROLLBACK TO s; SELECT idem.outbox_enqueue('orders.p', '"kept"'::json); COMMIT));
await_bodies('a savepoint that was rolled back leaves nothing', '"kept"');
sql(q(COMMIT PREPARED 'p'));
sql(q(ROLLBACK PREPARED 'q'));
await_bodies('a prepared one arrives when it is committed', '"kept"', '"prepared"');

# Later.
truncate_file();
sql(q(SELECT idem.outbox_enqueue('orders.d', '"later"'::json, key => 'd', deliver_at => clock_timestamp() + interval '1 second')));
sql(q(SELECT idem.outbox_enqueue('orders.d', '"now"'::json, key => 'd')));
await_bodies('one that is to be delivered later waits, and stops nobody', '"now"', '"later"');
ok((split /\|/, sql(q(SELECT count(*) FROM idem.relay_parked)))[0] == 0, 'nothing stays parked');

# One message fails, its key waits, others do not.
truncate_file();
sql(q(SELECT idem.outbox_enqueue('orders.f', '"transient"'::json, key => 'f')));
await_bodies('one that fails is tried again', '"transient"');
is((lines())[0][3], 3, 'until it succeeds');
truncate_file();
sql(q(SELECT idem.outbox_enqueue('orders.f', '"permanent"'::json, key => 'f')));
await_sql('one that is refused is a dead letter',
	q(SELECT name, reason, code, attempts, convert_from(body, 'UTF8') FROM idem.dead_letter), 'bus|never|400|1|"permanent"');
is(sql(q(SELECT name, reason FROM idem.stuck WHERE what = 'dead letter')), 'bus|never', 'and shows as stuck');
is(sql(q(SELECT outcome FROM idem.dead_letter_redrive(ARRAY[1, 99], dry_run => true) ORDER BY id)), "would be sent again\ndoes not exist", 'a dry run');
is(sql(q(SELECT outcome FROM idem.dead_letter_redrive(ARRAY[1]))), 'sent again', 'redriven');
await_sql('it is refused again', q(SELECT count(*), count(*) FILTER (WHERE state = 'dead') FROM idem.dead_letter), '2|1');
is(sql(q(SELECT idem.dead_letter_discard(ARRAY[1, 2], 'not needed'))), '1', 'discarded');
is(sql(q(SELECT state, note FROM idem.dead_letter WHERE id = 2)), 'discarded|not needed', 'with a trace');

# The destination is down: nothing is parked, nothing is lost.
truncate_file();
set_mode('down');
sql(q(SELECT idem.outbox_enqueue('orders.w', to_jsonb(i), key => 'w') FROM generate_series(1, 20) i));
await_sql('a server that is down is left alone', q(SELECT state, reason FROM idem.relay_status), 'backing off|nobody answers');
is(sql(q(SELECT count(*) FROM idem.relay_parked)), '0', 'nothing is parked');
set_mode('up');
await_bodies('when it is back, everything arrives in order', 1 .. 20);
is(join(',', map { $_->[3] } lines()), join(',', (1) x 20), 'no attempt was burned');

# It refuses us: it blocks, and nothing dies of that.
truncate_file();
set_mode('blocked');
sql(q(SELECT idem.outbox_enqueue('orders.w', to_jsonb(i), key => 'w') FROM generate_series(1, 20) i));
await_sql('a server that refuses us is blocked', q(SELECT state, reason FROM idem.relay_status), 'blocked|who are you?');
is(sql(q(SELECT count(*) FROM idem.dead_letter WHERE state = 'dead')), '0', 'no dead letters');
is(sql(q(SELECT fix FROM idem.stuck WHERE what = 'server')), q(SELECT idem.relay_resume('bus'); -- when that is mended), 'and it says what to do');
set_mode('up');
sql(q(SELECT idem.relay_resume('bus')));
await_bodies('then it goes on where it was', 1 .. 20);

# Everything fails for a while: that is the server, not the messages.
truncate_file();
set_mode('failing');
sql(q(SELECT idem.outbox_enqueue('orders.w', to_jsonb(i)) FROM generate_series(1, 100) i));
await_sql('a server that takes nothing is left alone', q(SELECT state FROM idem.relay_status), 'backing off');
cmp_ok(sql(q(SELECT count(*) FROM idem.relay_parked)), '<', 20, 'and hardly anything is parked');
set_mode('up');
await('all of them arrive', sub { my %seen = map { $_ => 1 } bodies(); return keys %seen == 100 });
is(sql(q(SELECT count(*) FROM idem.dead_letter WHERE state = 'dead')), '0', 'none is given up');

# Pause.
truncate_file();
sql(q(SELECT idem.relay_pause('bus')));
await_sql('paused', q(SELECT state FROM idem.relay_status), 'paused');
sql(q(SELECT idem.outbox_enqueue('orders.s', '"waits"'::json)));
sql(q(SELECT idem.relay_resume('bus')));
await_bodies('resumed', '"waits"');

# A message that kills the courier.
truncate_file();
my $started = sql('SELECT pg_postmaster_start_time()');
sql(q(SELECT idem.outbox_enqueue('orders.c', '"crash"'::json, key => 'c')));
sql(q(SELECT idem.outbox_enqueue('orders.c', '"after"'::json, key => 'c')));
await_sql('one that kills its courier is a dead letter',
	q(SELECT convert_from(body, 'UTF8'), reason ~ 'signal 11' FROM idem.dead_letter WHERE state = 'dead'), '"crash"|t');
await('and the others arrive', sub { grep { $_ eq '"after"' } bodies() });
is(sql('SELECT pg_postmaster_start_time()'), $started, 'the server did not notice');

# SIGKILL of the courier, under load: nothing is lost, order holds.
truncate_file();
sql(q(SELECT idem.outbox_enqueue('orders.l', to_jsonb(i), key => (i % 7)::text) FROM generate_series(1, 5000) i));
for (1 .. 5)
{
	my $courier = sql('SELECT courier FROM idem.relay_status');
	kill 'KILL', $courier if $courier;
	usleep(50_000);
}
sub complete { my %seen = map { $_ => 1 } bodies(); return keys %seen == 5000 }
await('everything arrives', \&complete);
sub in_order
{
	my %last;
	my %seen;
	for my $line (lines())
	{
		my ($key, $n) = ($line->[2], $line->[4]);
		next if $seen{$n}++;
		return 0 if ($last{$key} // 0) > $n;
		$last{$key} = $n;
	}
	return 1;
}
ok(in_order(), 'the first deliveries of each key are in order');

# The courier inherits nothing.
await_sql('there is a courier again', 'SELECT courier IS NOT NULL FROM idem.relay_status', 't');
my $courier = sql('SELECT courier FROM idem.relay_status');
is(join(' ', sort { $a <=> $b } grep { /^\d+$/ && $_ != 4 } map { basename($_) } glob("/proc/$courier/fd/*")), '0 1 2 3', 'descriptors of the courier')
  or diag(`ls -l /proc/$courier/fd`);
my $environ = slurp_file("/proc/$courier/environ");
unlike($environ, qr/PG|HOME/, 'nor the environment');

# Crash of the whole server under load.
truncate_file();
for my $round (1 .. 3)
{
	sql(qq(SELECT idem.outbox_enqueue('orders.r', to_jsonb(i), key => (i % 7)::text) FROM generate_series(($round - 1) * 1000 + 1, $round * 1000) i));
	$node->stop('immediate');
	$node->start;
}
await('nothing that was committed is lost', sub { my %s = map { $_ => 1 } bodies(); keys %s == 3000 });
ok(in_order(), 'and the order holds');

# A stop in good order repeats nothing.
truncate_file();
sql(q(SELECT idem.outbox_enqueue('orders.o', to_jsonb(i)) FROM generate_series(1, 2000) i));
$node->restart;
await('everything arrives after a restart', sub { my %s = map { $_ => 1 } bodies(); keys %s == 2000 });
is(scalar(bodies()), 2000, 'once');

# Many writers, some of which roll back, hold on, or use savepoints: the ledger.
truncate_file();
sql(q(CREATE TABLE ledger (n int)));
$node->command_ok([ 'pgbench', '-n', '-c', '8', '-j', '2', '-t', '150', '-f', dirname(abs_path($0)) . '/../courier/ledger.pgbench', '-h', $node->host, '-p', $node->port, 'postgres' ], 'eight writers');
my $committed = sql('SELECT count(*) FROM ledger');
await('all of the ledger arrives', sub { scalar(grep { /^\d+$/ } bodies()) >= $committed });
is(join(',', sort { $a <=> $b } grep { /^\d+$/ } bodies()), sql(q(SELECT string_agg(n::text, ',' ORDER BY n) FROM ledger)), 'exactly that, once each');
await_sql('the status agrees', q(SELECT unsent_at_most, parked FROM idem.relay_status), '0|0');

# Segments are emptied when all have passed.
$node->append_conf('postgresql.conf', "idem.outbox_retention = 1\nidem.outbox_segment_rows = 10");
$node->reload;
await('what has been sent is removed in time, table by table', sub {
	sql(q(SELECT idem.outbox_enqueue('orders.t', '"tick"'::json)));
	usleep(300_000);
	return sql('SELECT count(*) FROM idem.outbox') < 100 });
# a dump holds locks on all tables: nobody waits
my $dump = $node->background_psql('postgres');
$dump->query_safe('BEGIN; ' . join('; ', map { "LOCK TABLE idem.outbox_$_ IN ACCESS SHARE MODE" } 0 .. 7));
for (1 .. 20)
{
	sql(q(SET lock_timeout = '1s'; SELECT idem.outbox_enqueue('orders.t', '"dump"'::json)));
	usleep(100_000);
}
pass('enqueue does not wait behind a dump');
$dump->query_safe('COMMIT');

# A copy does not send.
$node->append_conf('postgresql.conf', "idem.site = 'elsewhere'");
$node->restart;
await_sql('a copy at another site holds', q(SELECT state, reason ~ 'relay_adopt' FROM idem.relay_status), 'holding|t');
truncate_file();
sql(q(SELECT idem.outbox_enqueue('orders.a', '"adopted"'::json)));
my $writer = session($node);
$writer->query_safe(q(BEGIN; SELECT idem.outbox_enqueue('orders.a', '"while adopting"'::json)));
my $adopter = session($node);
$adopter->query_until(qr//, "SELECT idem.relay_adopt();\n");
await_sql('adopting waits for those who write', q(SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = 'ShareLock' AND relation::regclass::text ~ '^idem.outbox_'), '1');
$writer->query_safe('COMMIT');
leave($_) for $writer, $adopter;
await('until it is adopted', sub { 2 == grep { /adopt/ } bodies() });
is(scalar(grep { $_ eq '"adopted"' } bodies()), 1, 'once');

# Rename and drop.
sql(q(ALTER SERVER bus RENAME TO coach));
sql(q(SELECT idem.outbox_enqueue('orders.n', '"renamed"'::json)));
await('a renamed server goes on', sub { grep { $_ eq '"renamed"' } bodies() });
is(scalar(grep { $_ eq '"adopted"' } bodies()), 1, 'and repeats nothing');
sql(q(DROP SERVER coach CASCADE));
is(sql(q(SELECT count(*) FROM idem.relay_position)), '0', 'a dropped one leaves nothing');

# Many short transactions, each with a number close to that of a tick.
sql(q(CREATE SERVER bin FOREIGN DATA WRAPPER idem OPTIONS (url 'discard://')));
sql(q(SELECT idem.route_add('many.**', 'bin')));
my $before = sql(q(SELECT last_value FROM idem.outbox_seq));
$node->pgbench('-n -T 8 -c 8 -j 2', 0, [qr{processed}], [qr{^$}], 'many sessions',
	{ '150_many' => q(SET synchronous_commit = off; SELECT idem.outbox_enqueue('many.x', '1'::json);) });
# Every number is a message that was committed; the oldest are not kept here.
my $many = sql(qq(SELECT last_value - $before FROM idem.outbox_seq));
await_sql('none of many is passed over', q(SELECT sent FROM idem.relay_status WHERE server = 'bin'), $many);

$late->quit;
$dump->quit;
$node->stop;
done_testing();

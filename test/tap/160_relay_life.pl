# The life of a relay and its couriers: terminated, killed, stopped, in the way
# of commands, hung, and unable to write.  Nothing is lost, and nobody notices.
use strict;
use warnings;
use IO::Socket::INET;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);
use Idem;
use FileCourier;
use IdemWorkers qw(worker_pid terminate log_position logged log_is_clean stop_in_time);

my $node = cluster('life', {}, "idem.site = 'here'", 'max_prepared_transactions = 5',
	'max_worker_processes = 20', 'max_logical_replication_workers = 0');
install_courier($node);
sql(file_server('bus', ''));
sql(q(SELECT idem.route_add('orders.**', 'bus')));
my $started = sql('SELECT pg_postmaster_start_time()');

my $last = 0;    # what was enqueued: 1 .. $last, in order under 7 keys

sub enqueue
{
	my ($n) = @_;
	my $first = $last + 1;
	$last += $n;
	return sql("SET statement_timeout = '10s'; SELECT count(idem.outbox_enqueue('orders.x', to_jsonb(i), key => (i % 7)::text)) FROM generate_series($first, $last) i");
}
sub relay { return sql('SELECT pid FROM idem.relay_worker() WHERE pid IS NOT NULL') }
sub courier { return sql('SELECT courier FROM idem.relay_status WHERE courier <> 0') }
sub alive { return $_[0] ne '' && -d "/proc/$_[0]" }

# all that was enqueued is there, and in order for the first time
sub complete
{
	my ($what) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	await("$what: all of it arrives", sub { my %seen = map { $_ => 1 } bodies('bus'); return keys %seen == $last });
	my (%seen, %at, $wrong);
	for my $n (grep { !$seen{$_}++ } bodies('bus'))
	{
		$wrong //= "$n after $at{$n % 7}" if ($at{ $n % 7 } // 0) > $n;
		$at{ $n % 7 } = $n;
	}
	is($wrong, undef, "$what: in order");
}
sub twice { my %seen; return scalar grep { $seen{$_}++ } bodies('bus') }

#
# Terminated again and again, while there is something to do
#
my %pids;
for (1 .. 50)
{
	my $pid;
	enqueue(100);
	my $end = time + 30;
	usleep(10_000) while (($pid = relay()) eq '' || $pids{$pid}) && time < $end;
	$pids{$pid} = 1;
	terminate($node, $pid);
}
is(scalar(keys %pids), 50, 'a relay that is terminated comes back, 50 times');
complete('terminated');
is(twice(), 0, 'an end in good order sends nothing twice');
is(sql(q(SELECT count(*) FROM idem.dead_letter)), '0', 'nothing is given up');

#
# What a courier inherits
#
# the last relay may have sent everything before it ended
await('there is a courier again', sub { alive(courier()) });
my $courier = courier();
my %status = slurp_file("/proc/$courier/status") =~ /^(\w+):\s+(.*)$/mg;
is($status{SigBlk}, '0' x 16, 'a courier has no signals blocked');
# Perl ignores SIGFPE; 32 and 33 belong to the C library, which lets nobody touch them
is(hex($status{SigIgn}) & ~(1 << 7 | 3 << 31), 0, 'and none ignored');
is(join(' ', sort split /\0/, slurp_file("/proc/$courier/environ")), 'LANG=C.UTF-8 PATH=/usr/bin:/bin', 'its environment');
is(getpgrp($courier), $courier + 0, 'it has a process group of its own');
my %open = map { m{/(\d+)$} ? ($1 => readlink($_) // '') : () } glob("/proc/$courier/fd/*");
is(join(' ', @open{ 0, 1, 2 }), join(' ', ('/dev/null') x 3), 'it reads and writes nothing');
is(scalar(grep { /^socket:/ } values %open), 1, 'it has one socket');
is(join(' ', grep { m{/base/|/pg_wal/|/global/|pipe:|eventpoll} } values %open), '', 'and no file of the server');
like(slurp_file("/proc/$courier/cmdline"), qr{^\S*/idem-courier-file\0$}, 'no arguments');

#
# Couriers that die, or stop, under load
#
my $guest = session($node);
$guest->query_safe('BEGIN; SELECT 1');
for my $signal (qw(KILL SEGV KILL SEGV))
{
	enqueue(1000);
	my $victim = courier();
	kill $signal => $victim if $victim;
	complete("SIG$signal of the courier");
}
is($guest->query_safe('SELECT 2; COMMIT'), '2', 'another session does not notice');
leave($guest);
is(sql('SELECT pg_postmaster_start_time()'), $started, 'nor does the server');
is(sql(q(SELECT count(*) FROM idem.dead_letter)), '0', 'nothing is given up for that');

for my $who ('courier', 'relay')
{
	$courier = courier();
	my $pid = $who eq 'relay' ? relay() : $courier;
	kill STOP => $pid;
	my $end = time + 3;
	enqueue(100) while time < $end;
	pass("enqueue goes on while the $who is stopped");
	kill CONT => $pid;
	complete("the $who was stopped");
	is(courier(), $courier, 'it was no reason to start another courier');
}

#
# A hung broker
#
my $relay = relay();
set_mode('bus', 'hang');
enqueue(50);
await_sql('a courier that does not answer has messages in flight', 'SELECT in_flight > 0 FROM idem.relay_status', 't');
enqueue(50) for 1 .. 10;
await_sql('the relay holds no transaction open meanwhile',
	"SELECT backend_xid IS NULL, backend_xmin IS NULL, xact_start IS NULL FROM pg_stat_activity WHERE pid = $relay", 't|t|t');
$courier = courier();
$node->append_conf('postgresql.conf', 'idem.outbox_retention = 7200');
$node->reload;
await_sql('SIGHUP reaches the relay', 'SHOW idem.outbox_retention', '2h');
is(relay() . ' ' . courier(), "$relay $courier", 'and ends nothing');

# database commands while the courier hangs
sql('CREATE DATABASE other');
$node->safe_psql('other', 'CREATE EXTENSION idem');
my $begin = time;
sql('DROP DATABASE other');
cmp_ok(time - $begin, '<', 8, 'another database can be dropped meanwhile');
is(courier(), $courier, 'that does not concern this relay');

$begin = time;
my $there = $node->safe_psql('template1', 'CREATE DATABASE copy TEMPLATE postgres; ALTER DATABASE postgres RENAME TO moved; ALTER DATABASE moved RENAME TO postgres; SELECT 1');
is($there, '1', 'this one can be copied and renamed');
cmp_ok(time - $begin, '<', 15, 'in time');
ok(!alive($courier), 'its courier has gone');
await('and the relay is back', sub { alive(courier()) });
is($node->safe_psql('copy', 'SELECT count(*) > 0 FROM idem.outbox'), 't', 'the copy has the messages');
ok($node->poll_query_until('copy', q(SELECT state = 'holding' FROM idem.relay_status)), 'and holds');
set_mode('bus', 'up');
kill KILL => courier();
complete('the broker is back');

# this one, which sends to the same file: it must go, too
$node->safe_psql('copy', 'SELECT idem.relay_adopt()');
set_mode('bus', 'hang');
$node->safe_psql('copy', q(SELECT idem.outbox_enqueue('orders.copy', '"copy"'::json)));
ok($node->poll_query_until('copy', 'SELECT in_flight > 0 FROM idem.relay_status'), 'the adopted copy sends');
my $other = $node->safe_psql('copy', 'SELECT courier FROM idem.relay_status');
$begin = time;
sql('DROP DATABASE copy');
cmp_ok(time - $begin, '<', 8, 'a database can be dropped while its courier hangs');
await('that courier has gone', sub { !alive($other) });
set_mode('bus', 'up');

#
# Positions, or ticks, cannot be written: nothing is sent over and over
#
complete('before');
truncate_file('bus');
sub arrived { return scalar bodies('bus') }
for my $tables ([qw(relay_position)], [qw(relay_position outbox_tick)], [qw(outbox_tick)])
{
	my $what = join ' and ', @$tables;
	my $here = log_position($node);
	$relay = relay();
	set_mode('bus', 'up');
	truncate_file('bus');
	sql("ALTER TABLE idem.$_ ADD CONSTRAINT full_disk CHECK (false) NOT VALID") for @$tables;
	enqueue(3000);
	await("$what: cannot be written", sub { logged($node, qr/ERROR:.*"full_disk"/, $here) >= 4 });
	is(twice(), 0, "$what: nothing is sent twice");
	is(relay(), $relay, "$what: the relay stays, and remembers");
	is(enqueue(10), '10', "$what: enqueue goes on");
	sql("ALTER TABLE idem.$_ DROP CONSTRAINT full_disk") for @$tables;
	await("$what: mended, all of it arrives", sub { arrived() >= 3010 });
	is(arrived() . ' ' . twice(), '3010 0', "$what: once");
}
sql('ALTER DATABASE postgres SET default_transaction_read_only = on');
terminate($node, relay());
truncate_file('bus');
sql(q(SET default_transaction_read_only = off; SELECT idem.outbox_enqueue('orders.r', '"read only"'::json)));
await_bodies('read only by default does not concern the relay', 'bus', '"read only"');
sql(q(SET default_transaction_read_only = off; ALTER DATABASE postgres RESET default_transaction_read_only));

#
# DROP EXTENSION while there is something to send
#
sql(q(SELECT idem.outbox_enqueue('orders.x', to_jsonb(i)) FROM generate_series(1, 5000) i));
($relay, $courier) = (relay(), courier());
$begin = time;
sql('BEGIN; DROP EXTENSION idem CASCADE; ROLLBACK');
await('DROP EXTENSION ends the relay and its courier', sub { !alive($relay) && !alive($courier) });
await('rolled back, they are there again', sub { alive(relay()) && alive(courier()) });

# prepared: its locks stay, and nobody knows what will come of it
sql(q(BEGIN; DROP EXTENSION idem CASCADE; PREPARE TRANSACTION 'drop'));
is($node->safe_psql('template1', q(SELECT count(*) FROM pg_prepared_xacts)), '1', 'DROP EXTENSION can be prepared');
sql(q(ROLLBACK PREPARED 'drop'));
await('and rolled back', sub { alive(relay()) && alive(courier()) });
truncate_file('bus');
sql(q(SELECT idem.outbox_enqueue('orders.x', '"still here"'::json)));
await('then the relay goes on', sub { grep { $_ eq '"still here"' } bodies('bus') });
($relay, $courier) = (relay(), courier());
sql(q(BEGIN; DROP EXTENSION idem CASCADE; PREPARE TRANSACTION 'drop'));
sql(q(COMMIT PREPARED 'drop'));
ok($node->poll_query_until('postgres', q(SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type IN ('idem relay', 'idem maintenance')))), 'committed, the workers go');
ok(!alive($courier), 'and the courier');
sql('CREATE EXTENSION idem');
sql(file_server('bus', ''));
sql(q(SELECT idem.route_add('orders.**', 'bus')));
truncate_file('bus');
sql(q(SELECT idem.outbox_enqueue('orders.x', '"anew"'::json)));
await_bodies('created anew, it begins anew', 'bus', '"anew"');
($relay, $courier) = (relay(), courier());
set_mode('bus', 'hang');
sql(q(SELECT idem.outbox_enqueue('orders.x', '"hangs"'::json)));
await_sql('it hangs', 'SELECT in_flight > 0 FROM idem.relay_status', 't');
$begin = time;
sql('DROP EXTENSION idem CASCADE');
cmp_ok(time - $begin, '<', 8, 'DROP EXTENSION does not wait for a courier that hangs');
ok($node->poll_query_until('postgres', q(SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'idem relay'))), 'the relay has gone');
ok(!alive($courier), 'and its courier');
#
# No process left for the relay
#
sql('CREATE DATABASE other');
$node->safe_psql($_, 'CREATE EXTENSION idem') for 'postgres', 'other';
set_mode('bus', 'up');
truncate_file('bus');
sql(file_server('bus', ''));
sql(q(SELECT idem.route_add('orders.**', 'bus')));
# room for the launcher and both maintenance workers, which come first here
$node->append_conf('postgresql.conf', "max_worker_processes = 3\nidem.relay = off");
$node->restart;
await_sql('both other workers run', q(SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'idem maintenance'), '2');
$node->append_conf('postgresql.conf', 'idem.relay = on');
$node->reload;
await_sql('without processes the status says so', q(SELECT state, reason ~ 'max_worker_processes' FROM idem.relay_status), 'waiting|t');
sql(q(SELECT idem.outbox_enqueue('orders.x', '"waits"'::json)));
is_deeply([ bodies('bus') ], [], 'enqueue needs none');
$node->safe_psql('other', 'DROP EXTENSION idem');
await_bodies('when there is one it goes on by itself', 'bus', '"waits"');

#
# A broker that takes connections and says nothing
#
my $hole = IO::Socket::INET->new(Listen => 100, LocalAddr => '127.0.0.1') or die $!;
my $port = $hole->sockport;
for my $scheme (qw(http amqp))
{
	my $url = $scheme eq 'amqp' ? "amqp://127.0.0.1:$port/" : "http://127.0.0.1:$port/";
	my ($rc, undef, $err) = $node->psql('postgres', "CREATE SERVER hole_$scheme FOREIGN DATA WRAPPER idem OPTIONS (url '$url')");
	is($rc, 0, "a server for $scheme") or diag($err);
	sql("SELECT idem.route_add('hole.**', 'hole_$scheme')");
}
sql(q(SELECT idem.outbox_enqueue('hole.x', to_jsonb(i)) FROM generate_series(1, 100) i));
SKIP:
{
	skip 'couriers are not built', 1 if sql(q(SELECT count(*) FROM idem.relay_status WHERE reason ~ 'not installed'));
	await_sql('both couriers have messages', q(SELECT count(*) FROM idem.relay_status WHERE server ~ 'hole' AND in_flight > 0), '2');
}
my @couriers = split /\n/, sql('SELECT courier FROM idem.relay_status WHERE courier <> 0');
stop_in_time($node, 'a server with such brokers stops in time');
ok(!(grep { alive($_) } @couriers), 'and leaves no courier behind');
log_is_clean($node, 5);    # the couriers above

done_testing();

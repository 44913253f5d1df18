# Copies of a database: none sends by accident, none loses what was pending.
# Restored dumps, templates, physical copies, standbys, recovery to a point in
# time, and the gate that waits for a standby.
use strict;
use warnings;
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Idem;
use FileCourier;

my $node = cluster('here', { allows_streaming => 1, has_archiving => 1 }, "idem.site = 'here'",
	'max_worker_processes = 40', 'max_prepared_transactions = 5', "wal_keep_size = '256MB'");
install_courier($node);

sub there { my ($n, $db, $sql) = @_; return $n->safe_psql($db, $sql) }
sub enqueue_there
{
	my ($n, $db, @bodies) = @_;
	return there($n, $db, join ';', map { qq(SELECT idem.outbox_enqueue('orders.x', '$_'::json, key => 'k$_')) } @bodies);
}
# becomes(...): soon, since the relay is told to look
sub becomes
{
	my ($what, $n, $db, $query, $expected) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	there($n, $db, 'SELECT idem.relay_notice()');
	ok($n->poll_query_until($db, $query, $expected), $what) or diag(there($n, $db, 'SELECT * FROM idem.relay_status'));
}
my $holds = q(SELECT string_agg(DISTINCT state || (reason ~ 'relay_adopt'), ' ') FROM idem.relay_status);
sub sorted { return join ' ', sort map { $_->[4] } lines($_[0]) }
sub await_sorted
{
	my ($what, $server, @expected) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	await($what, sub { sorted($server) eq join ' ', sort @expected });
	is(sorted($server), join(' ', sort @expected), "$what: exactly these");
}

# What has been sent, is pending, parked, delayed and dead.
sql(file_server('bus', ''));
sql(q(SELECT idem.route_add('orders.**', 'bus')));
enqueue_there($node, 'postgres', '"sent1"', '"sent2"', '"permanent"');
await_sorted('sent', 'bus', '"sent1"', '"sent2"');
await_sql('one is dead', 'SELECT count(*) FROM idem.dead_letter', '1');
sql(q(SELECT idem.outbox_enqueue('orders.x', '"delayed"'::json, deliver_at => clock_timestamp() + interval '1 hour')));
await_sql('one is delayed', 'SELECT count(*) FROM idem.relay_parked', '1');
sql(q(SELECT idem.relay_pause('bus')));
await_sql('paused', 'SELECT state FROM idem.relay_status', 'paused');
enqueue_there($node, 'postgres', '"pending1"', '"pending2"');
sql(q(BEGIN; SELECT idem.outbox_enqueue('orders.x', '"open"'::json); PREPARE TRANSACTION 'open'));

#
# A dump
#
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';
my $restored = cluster('restored', {}, "idem.site = 'here'", 'max_worker_processes = 40');
$node->command_ok([ 'pg_dump', '-Fc', '-f', $dump, 'postgres' ], 'pg_dump');
truncate_file('bus');
my %transactions = (restored => $node, far => $restored);
for my $db (sort keys %transactions)
{
	# in the same cluster, and in another whose transaction ids are lower
	my $n = $transactions{$db};
	truncate_file('bus');
	there($n, 'postgres', "CREATE DATABASE $db TEMPLATE template0");
	$n->command_ok([ 'pg_restore', '-e', '-d', $db, $dump ], "$db: pg_restore");
	becomes("$db: a restored copy holds", $n, $db, $holds, 'holdingtrue');
	enqueue_there($n, $db, '"after"');
	there($n, $db, q(SELECT idem.relay_resume('bus')));
	becomes("$db: whatever it is told", $n, $db, $holds, 'holdingtrue');
	is(sorted('bus'), '', "$db: it has sent nothing");
	there($n, $db, 'SELECT idem.relay_adopt()');
	await_sorted("$db: adopted, it sends what was pending", 'bus', '"pending1"', '"pending2"', '"after"');
	enqueue_there($n, $db, '"more"');
	await_sorted("$db: and goes on", 'bus', '"pending1"', '"pending2"', '"after"', '"more"');
	is(there($n, $db, q(SELECT count(*), count(*) FILTER (WHERE state = 'dead') FROM idem.dead_letter)), '1|1', "$db: dead is dead");
	is(there($n, $db, q(SELECT count(*) FROM idem.relay_parked)), '1', "$db: delayed is delayed");
	there($n, $db, q(UPDATE idem.relay_parked SET due = now(); SELECT idem.relay_notice()));
	there($n, $db, q(SELECT idem.dead_letter_redrive(ARRAY[1])));
	await("$db: until it is due", sub { grep { $_ eq '"delayed"' } bodies('bus') });
	becomes("$db: and a dead letter can be sent again", $n, $db, q(SELECT count(*) FROM idem.dead_letter), '2');
	is(there($n, $db, q(SELECT count(*), count(DISTINCT seq), count(DISTINCT msg_id) FROM idem.outbox)),
		there($n, $db, q(SELECT concat_ws('|', count(*), count(*), count(*)) FROM idem.outbox)), "$db: no number and no id twice");
}
$restored->stop;

#
# A dump of a database in which no relay has ever run
#
sql('CREATE DATABASE fresh');
there($node, 'postgres', 'ALTER SYSTEM SET idem.relay = off');
$node->reload;
there($node, 'fresh', 'CREATE EXTENSION idem');
there($node, 'fresh', file_server('fresh', ''));
there($node, 'fresh', q(SELECT idem.route_add('orders.**', 'fresh')));
enqueue_there($node, 'fresh', '"a"', '"b"');
is(there($node, 'fresh', 'SELECT count(*) FROM idem.relay_position'), '0', 'no relay has run there');
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dump.fresh", 'fresh' ], 'pg_dump');
sql('CREATE DATABASE fresh2 TEMPLATE template0');
$node->command_ok([ 'pg_restore', '-e', '-d', 'fresh2', "$dump.fresh" ], 'pg_restore');
sql('ALTER SYSTEM RESET idem.relay');
$node->reload;
becomes('it sends', $node, 'fresh', 'SELECT state FROM idem.relay_status', 'running');
await_sorted('what was enqueued before', 'fresh', '"a"', '"b"');
becomes('a restored one holds all the same', $node, 'fresh2', $holds, 'holdingtrue');
enqueue_there($node, 'fresh2', '"c"');
there($node, 'fresh2', 'SELECT idem.relay_adopt()');
await_sorted('adopted, it sends', 'fresh', '"a"', '"a"', '"b"', '"b"', '"c"');

#
# A relay that looks on while a dump is restored, table by table
#
sql('CREATE DATABASE source');
there($node, 'source', 'CREATE EXTENSION idem');
there($node, 'source', file_server('slow', ''));
there($node, 'source', q(SELECT idem.route_add('orders.**', 'slow')));
enqueue_there($node, 'source', '"permanent"');
becomes('one is dead', $node, 'source', 'SELECT count(*) FROM idem.dead_letter', '1');
there($node, 'source', q(SELECT idem.relay_pause('slow')));
becomes('paused', $node, 'source', 'SELECT state FROM idem.relay_status', 'paused');
enqueue_there($node, 'source', '"old1"', '"old2"');
# so old that they are kept only because they were not sent
there($node, 'source', q(UPDATE idem.outbox_0 SET enqueued_at = enqueued_at - interval '2 days'));
there($node, 'source', q(SELECT idem.dead_letter_redrive(ARRAY[1])));
is(there($node, 'source', 'SELECT count(*) FROM idem.relay_kept'), '1', 'one is kept apart');
there($node, 'source', q(DELETE FROM idem.relay_paused));
$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dump.slow", 'source' ], 'pg_dump');
sql('DROP DATABASE source');
truncate_file('slow');
my ($list, $err) = ('', '');
IPC::Run::run([ 'pg_restore', '-l', "$dump.slow" ], '>', \$list, '2>', \$err) or die $err;
my @entries = grep { /^\d/ } split /\n/, $list;
my $late_ones = qr/TABLE DATA idem (relay_identity|relay_parked|relay_position|route) /;
sub restore
{
	my ($what, @list) = @_;
	append_to_file("$dump.list.$what", join '', map { "$_\n" } @list);
	$node->command_ok([ 'pg_restore', '-e', '-d', 'slow', '-L', "$dump.list.$what", "$dump.slow" ], "restored: $what");
	# its relay takes a turn, and another
	for (1 .. 2)
	{
		my $now = there($node, 'slow', 'SELECT idem.relay_notice(); SELECT clock_timestamp()');
		ok($node->poll_query_until('slow', "SELECT xact_start IS NULL AND query_start > '$now' FROM pg_stat_activity, idem.relay_worker() w WHERE w.pid = pg_stat_activity.pid"), 'it has looked');
	}
}
sql('CREATE DATABASE slow TEMPLATE template0');
restore('first part', grep { $_ !~ $late_ones } @entries);
restore('routes', grep { /TABLE DATA idem route / } @entries);
is(there($node, 'slow', $holds), 'holdingtrue', 'it holds already');
restore($_, do { my $t = $_; grep { /TABLE DATA idem $t / } @entries }) for qw(relay_parked relay_position relay_identity);
is(there($node, 'slow', $holds), 'holdingtrue', 'and still');
is(sorted('slow'), '', 'it has sent nothing');
is(there($node, 'slow', 'SELECT count(*) FROM idem.outbox'), '3', 'and removed nothing');
is(there($node, 'slow', 'SELECT count(*) FROM idem.relay_kept'), '1', 'nor what was kept apart');
there($node, 'slow', 'SELECT idem.relay_adopt()');
await_sorted('adopted, it sends', 'slow', '"old1"', '"old2"');
becomes('all of it', $node, 'slow', 'SELECT count(*) FROM idem.dead_letter', '2');
sql("DROP DATABASE $_") for qw(fresh fresh2 restored slow);

#
# A template
#
truncate_file('bus');
sql(q(COMMIT PREPARED 'open'));
$node->safe_psql('template1', 'CREATE DATABASE copy TEMPLATE postgres');
there($node, 'copy', q(SELECT idem.relay_resume('bus')));
becomes('a copy of a template holds', $node, 'copy', $holds, 'holdingtrue');
is(sorted('bus'), '', 'it sends nothing');
sql('DROP DATABASE copy');
await_sql('the original waits for its resumption', 'SELECT state FROM idem.relay_status', 'paused');
sql(q(SELECT idem.relay_resume('bus')));
await_sorted('and goes on, with what was prepared', 'bus', '"pending1"', '"pending2"', '"open"');

#
# A physical copy under another site
#
$node->backup('base');
my $clone = PostgreSQL::Test::Cluster->new('clone');
$clone->init_from_backup($node, 'base');
$clone->append_conf('postgresql.conf', "idem.site = 'elsewhere'\narchive_mode = off");
truncate_file('bus');
$clone->start;
enqueue_there($clone, 'postgres', '"clone"');
becomes('a physical copy at another site holds', $clone, 'postgres', $holds, 'holdingtrue');
is(sorted('bus'), '', 'it sends nothing');
there($clone, 'postgres', 'SELECT idem.relay_adopt()');
await_sorted('until it is adopted', 'bus', '"clone"');
$clone->stop;

#
# Recovery to a point in time: what was recorded since is sent again
#
truncate_file('bus');
my $recovered = PostgreSQL::Test::Cluster->new('recovered');
enqueue_there($node, 'postgres', '"early"');
await_sorted('before the point', 'bus', '"early"');
sql(q(SELECT idem.relay_pause('bus')));
await_sql('paused', 'SELECT state FROM idem.relay_status', 'paused');
enqueue_there($node, 'postgres', '"between"');
sql(q(SELECT pg_create_restore_point('point')));
sql(q(SELECT idem.relay_resume('bus')));
enqueue_there($node, 'postgres', '"late"');
await_sorted('after the point', 'bus', '"early"', '"between"', '"late"');
sql('SELECT pg_switch_wal()');
$node->poll_query_until('postgres', q(SELECT last_archived_wal >= (SELECT last_archived_wal FROM pg_stat_archiver) AND archived_count > 0 FROM pg_stat_archiver));
$recovered->init_from_backup($node, 'base', has_restoring => 1, standby => 0);
$recovered->append_conf('postgresql.conf', "recovery_target_name = 'point'\nrecovery_target_action = promote\narchive_mode = off");
truncate_file('bus');
my @first = lines('bus');
$recovered->start;
$recovered->poll_query_until('postgres', 'SELECT NOT pg_is_in_recovery()');
there($recovered, 'postgres', q(SELECT idem.relay_resume('bus')));
enqueue_there($recovered, 'postgres', '"new"');
await('recovered to a point, it sends again what was recorded since', sub { my %s = map { $_ => 1 } bodies('bus'); $s{'"between"'} && $s{'"new"'} });
is(scalar(grep { $_ eq '"late"' } bodies('bus')), 0, 'and not what there is none of');
my $sent_by_both = there($node, 'postgres', q(SELECT string_agg(msg_id || ' ' || convert_from(body, 'UTF8'), E'\n') FROM idem.outbox)) . "\n"
  . there($recovered, 'postgres', q(SELECT string_agg(msg_id || ' ' || convert_from(body, 'UTF8'), E'\n') FROM idem.outbox));
my %body_of;
my @twice = grep { my ($id, $body) = split / /, $_, 2; ($body_of{$id} //= $body) ne $body } split /\n/, $sent_by_both;
is("@twice", '', 'no id has two bodies');
$recovered->stop;

#
# A standby, the gate, and failover
#
sub standby
{
	my ($name) = @_;
	my $standby = PostgreSQL::Test::Cluster->new($name);
	$standby->init_from_backup($node, 'base', has_streaming => 1);
	$standby->append_conf('postgresql.conf', 'archive_mode = off');
	$standby->start;
	return $standby;
}
my $standby = standby('second');
$node->wait_for_catchup($standby);
sub receiver { return there($standby, 'postgres', 'SELECT pid FROM pg_stat_wal_receiver') }
is(there($standby, 'postgres', q(SELECT count(*) FROM pg_stat_activity WHERE backend_type ~ '^idem')), '0', 'nothing of idem runs on a standby');
is(there($standby, 'postgres', q(SELECT DISTINCT state FROM idem.relay_status)), 'standby', 'and it says so');

# The walreceiver is frozen before the gated server has ever sent anything.
sub freeze { my $pid = receiver(); kill STOP => $pid; return $pid }
my $frozen = freeze();
sql(file_server('gated', '') =~ s/\)$/, gate 'standby', standbys 'second')/r);
sql(q(SELECT idem.route_add('orders.**', 'gated')));
truncate_file('bus');
enqueue_there($node, 'postgres', '"g1"', '"g2"');
await_sorted('an ungated server gets it at once', 'bus', '"g1"', '"g2"');
is(sorted('gated'), '', 'a gated one waits for the standby');
await_sql('and says so', q(SELECT state, reason FROM idem.relay_status WHERE server = 'gated'), 'running|waits until these have on disk what is to be sent: second');
# the very first message of a database
sql('CREATE DATABASE first');
there($node, 'first', 'CREATE EXTENSION idem');
there($node, 'first', file_server('first', '') =~ s/\)$/, gate 'standby', standbys 'second')/r);
there($node, 'first', q(SELECT idem.route_add('orders.**', 'first')));
enqueue_there($node, 'first', '"first"');
ok($node->poll_query_until('first', q(SELECT reason ~ 'waits until' FROM idem.relay_status)), 'the first message of all waits, too');
is(sorted('first'), '', 'it is not sent');
kill CONT => $frozen;
await_sorted('the first one is sent', 'first', '"first"');
await_sorted('and gets it when that has it', 'gated', '"g1"', '"g2"');
await_sql('which it says, too', q(SELECT state, reason IS NULL FROM idem.relay_status WHERE server = 'gated'), 'running|t');

$frozen = freeze();
enqueue_there($node, 'postgres', '"g3"');
await_sorted('frozen again: the ungated one', 'bus', '"g1"', '"g2"', '"g3"');
my $relay = sql('SELECT pid FROM idem.relay_worker()');
sql("SELECT pg_terminate_backend($relay)");
enqueue_there($node, 'postgres', '"g4"');
await_sql('a new relay', "SELECT pid <> $relay FROM idem.relay_worker()", 't');
await('the ungated one goes on', sub { grep { $_ eq '"g4"' } bodies('bus') });
is(sorted('gated'), '"g1" "g2"', 'a restart of the relay does not open the gate');
kill CONT => $frozen;
await_sorted('but the standby does', 'gated', '"g1"', '"g2"', '"g3"', '"g4"');

$standby->stop;
enqueue_there($node, 'postgres', '"g5"');
await('without the standby the ungated one gets it', sub { grep { $_ eq '"g5"' } bodies('bus') });
is(sorted('gated'), '"g1" "g2" "g3" "g4"', 'the gated one does not');
$standby->start;
await_sorted('until it is back', 'gated', '"g1"', '"g2"', '"g3"', '"g4"', '"g5"');

# Failover: what the standby lacks was not sent through the gate.
my $backlog = join ';', map { qq(SELECT idem.outbox_enqueue('orders.x', '"f$_"'::json)) } 1 .. 20;
sql($backlog);
await('sent before the failover', sub { grep { $_ eq '"f20"' } bodies('gated') });
$frozen = freeze();
sql(q(SELECT idem.outbox_enqueue('orders.x', to_json('ghost' || i)) FROM generate_series(1, 50) i));
await('ghosts at the ungated server', sub { 50 == grep { /ghost/ } bodies('bus') });
crash($node);
crash($standby);    # with the process that is frozen
$standby->start;
$standby->promote;
becomes('a promoted standby goes on unaided', $standby, 'postgres', q(SELECT string_agg(DISTINCT state, ' ') FROM idem.relay_status), 'running');
enqueue_there($standby, 'postgres', '"promoted"');
for my $server (qw(bus gated))
{
	await("$server: it sends", sub { grep { $_ eq '"promoted"' } bodies($server) });
}
my %kept = map { $_ => 1 } split /\n/, there($standby, 'postgres', 'SELECT msg_id FROM idem.outbox');
is(scalar(grep { !$kept{ $_->[0] } } lines('gated')), 0, 'what came through the gate is there');
my %seen;
my %sent = map { $_->[0] => 1 } lines('gated');
is(there($standby, 'postgres', q(SELECT count(*) FROM idem.outbox o, idem.outbox_status(o.msg_id) s WHERE s.server = 'gated' AND s.state = 'pending')), '0', 'nothing is left to send');
my @conflicts = grep { ($seen{ $_->[0] } //= $_->[4]) ne $_->[4] } (lines('bus'), lines('gated'));
is(scalar(@conflicts), 0, 'no id has two bodies');

$standby->stop;
done_testing();

# What a relay must get over: messages that are never answered, outages that
# last, large ones that fail, locks, and hands that reach into its tables.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);
use Idem;
use FileCourier;

my $node = cluster('trouble', {}, 'max_worker_processes = 20', "wal_writer_delay = '10s'");
install_courier($node);
sub status { return sql("SELECT $_[1] FROM idem.relay_status WHERE server = '$_[0]'") }
sub server { my ($name, $options) = @_; sql(file_server($name, '')); sql("ALTER SERVER $name OPTIONS ($options)") if $options; sql("SELECT idem.route_add('$name', '$name')") }
sub enqueue { my ($topic, $body, $key) = @_; return sql("SELECT idem.outbox_enqueue('$topic', '$body'::json" . ($key ? ", key => '$key'" : '') . ')') }

# Sent before it was flushed by anybody but the relay.
server('durable');
my $id = sql(q(SET synchronous_commit = off; SELECT idem.outbox_enqueue('durable', '"durable"'::json)));
my $end = time + 60;
usleep(1_000) until (grep { $_ eq '"durable"' } bodies('durable')) || time > $end;
$node->stop('immediate');
$node->start;
is(sql("SELECT msg_id FROM idem.outbox WHERE msg_id = '$id'"), $id, 'what was sent had been on disk before');
await_sql('it is settled', "SELECT state FROM idem.outbox_status('$id')", 'delivered');

# Nor is there much that a crash makes the relay forget, while it works off a
# backlog and nobody else flushes anything.
server('crash', q(ADD window_messages '200'));
sql(q(SELECT idem.relay_pause('crash')));
sql(q(SELECT count(idem.outbox_enqueue('crash', to_json(i))) FROM generate_series(1, 20000) i));
sql(q(SELECT idem.relay_resume('crash')));
$end = time + 60;
usleep(1_000) until @{ [ lines('crash') ] } > 8000 || time > $end;
$node->stop('immediate');
my $there = @{ [ lines('crash') ] };
$node->start;
await('all arrive after a crash', sub { my %seen = map { $_ => 1 } bodies('crash'); 20000 == keys %seen });
diag("$there had been sent, " . (@{ [ lines('crash') ] } - 20000) . ' of them again');
cmp_ok(@{ [ lines('crash') ] } - 20000, '<', 1500, 'few are sent again');
cmp_ok($there, '<', 20000, 'it crashed in between');

# One that is never answered is not all that is tried.
server('mute');
enqueue('mute', '"unknown"', 'a');
enqueue('mute', '"fine"', 'b');
await('one that is never answered stops no other key', sub { grep { $_ eq '"fine"' } bodies('mute') });
await_sql('it is parked', q(SELECT state FROM idem.relay_parked WHERE server = 'mute'), 'retry');
enqueue('mute', '"next"', 'a');
await('given up while others arrive', sub { enqueue('mute', '"more"', 'b'); sql(q(SELECT count(*) FROM idem.dead_letter WHERE name = 'mute')) });
is(sql(q(SELECT string_agg(convert_from(body, 'UTF8'), ' ') FROM idem.dead_letter WHERE name = 'mute')), '"unknown"', 'it is a dead letter');
await('and its key goes on', sub { grep { $_ eq '"next"' } bodies('mute') });
my %ids = map { $_->[0] => 1 } grep { $_->[4] eq '"unknown"' } lines('mute');
is(scalar(keys %ids), 1, 'all the time it had the same id');

# An outage is not the fault of the messages that it meets.
server('out');
set_mode('out', 'failing');
enqueue('out', $_, $_) for 1 .. 3;
await_sql('an outage that lasts longer than any attempts', q(SELECT max(attempts) > 5 FROM idem.relay_parked WHERE server = 'out'), 't');
is(status('out', 'dead'), '0', 'no dead letters');
sql(q(SELECT pg_terminate_backend(pid) FROM idem.relay_worker()));
$end = sql(q(SELECT max(attempts) + 3 FROM idem.relay_parked WHERE server = 'out'));
await_sql('even if the relay is restarted', "SELECT max(attempts) > $end FROM idem.relay_parked WHERE server = 'out'", 't');
is(status('out', 'dead'), '0', 'no dead letters');
set_mode('out', 'up');
await('when it is over they arrive', sub { 3 == @{ [ bodies('out') ] } });

# Parked messages keep to the window, too.
server('large', q(ADD window_bytes '100kB', SET retry_min '300ms', SET retry_max '300ms', SET max_attempts '1000'));
set_mode('large', 'failing');
sql(q(SELECT idem.outbox_enqueue('large', to_json(repeat('x', 60000)), key => i::text) FROM generate_series(1, 20) i));
await_sql('many large ones are parked', q(SELECT count(*) >= 10 FROM idem.relay_parked WHERE server = 'large'), 't');
set_mode('large', 'hang');
await_sql('they are tried again', q(SELECT count(*) > 0 FROM idem.relay_status WHERE server = 'large' AND in_flight > 0), 't');
my $most = 0;
for (1 .. 20) { my $now = status('large', 'in_flight'); $most = $now if $now > $most; usleep(50_000) }
cmp_ok($most, '<=', 3, 'not all at once');
set_mode('large', 'up');
kill KILL => status('large', 'courier');
await('all arrive', sub { my %seen = map { $_->[2] => 1 } lines('large'); keys %seen == 20 });

# Somebody empties the outbox by hand.
server('hand', q(SET retry_min '1s', SET retry_max '1s', SET max_attempts '1000'));
set_mode('hand', 'failing');
my $lost = enqueue('hand', '"lost"', 'k');
enqueue('hand', '"behind"', 'k');
await_sql('parked', q(SELECT count(*) FROM idem.relay_parked WHERE server = 'hand'), '2');
sql("DELETE FROM idem.outbox_$_ WHERE msg_id = '$lost'") for 0 .. 7;
set_mode('hand', 'up');
await_bodies('what waited behind a lost one goes on', 'hand', '"behind"');
is(sql(q(SELECT state, msg_id FROM idem.dead_letter WHERE name = 'hand')), "lost|$lost", 'the lost one is shown');
is(sql(q(SELECT what, reason FROM idem.stuck WHERE name = 'hand')), 'dead letter|is not in the outbox any more', 'as stuck');
sql(sql(q(SELECT fix FROM idem.stuck WHERE name = 'hand')));
is(sql(q(SELECT count(*) FROM idem.stuck WHERE name = 'hand')), '0', 'until somebody deals with it');

# A server is altered and renamed under load: no reason to send anything twice.
server('busy');
my $total = 0;
sub some { my $first = $total + 1; $total += 500; return sql("SELECT count(idem.outbox_enqueue('busy', to_json(i), key => (i % 7)::text)) FROM generate_series($first, $total) i") }
sub all_of { my ($what, @files) = @_; my %seen; await($what, sub { %seen = map { $_ => 1 } map { bodies($_) } @files; keys %seen == $total }); return }
sql(q(ALTER SERVER busy OPTIONS (ADD "file.tag" '0')));
for (1 .. 5)
{
	some();
	sql(qq(ALTER SERVER busy OPTIONS (SET "file.tag" '$_')));
}
all_of('altered: all arrive', 'busy');
is(scalar(@{ [ bodies('busy') ] }), $total, 'once');
for my $name (qw(taxi tram busy))
{
	some();
	my ($old) = grep { /^(busy|taxi|tram)$/ } split /\n/, sql('SELECT srvname FROM pg_foreign_server');
	sql("ALTER SERVER $old RENAME TO $name");
}
all_of('renamed: all arrive', 'busy');
is(scalar(@{ [ bodies('busy') ] }), $total, 'once');
is(sql(q(SELECT count(*) FROM idem.relay_position WHERE server IN ('taxi', 'tram'))), '0', 'nothing stays under an old name');
my $ddl = session($node);
$ddl->query_safe(q(BEGIN; ALTER SERVER busy RENAME TO ferry));
some();
server('free');
enqueue('free', '"free"');
await_bodies('while that is not decided other servers go on', 'free', '"free"');
$ddl->query_safe('ROLLBACK');
leave($ddl);
all_of('and then this one, too', 'busy');
is(scalar(@{ [ bodies('busy') ] }), $total, 'once');

# The program of a courier vanishes just when it is needed.
my $started = sql('SELECT pg_postmaster_start_time()');
my $program = courier_program();
rename $program, "$program.away" or die $!;
kill KILL => status('free', 'courier');
await_sql('without its program a server is blocked', q(SELECT state, reason FROM idem.relay_status WHERE server = 'free'), 'blocked|courier "idem-courier-file" is not installed');
enqueue('free', '"waits"');
rename "$program.away", $program or die $!;
sql(q(SELECT idem.relay_resume('free')));
await_bodies('it goes on when that is there', 'free', '"free"', '"waits"');
is(sql('SELECT pg_postmaster_start_time()'), $started, 'the server did not notice');

# A topic that nobody takes.
enqueue('nobody.listens', '1') for 1 .. 2;
is(sql(q(SELECT name, reason FROM idem.stuck WHERE what = 'unrouted')), 'nobody.listens|2 messages of a topic that no route and no consumer takes', 'unrouted messages are counted and shown');

# Eight sessions write while a dump holds locks and segments are to be emptied.
sql(q(ALTER SERVER busy OPTIONS (ADD batch_messages '10')));
$node->append_conf('postgresql.conf', "idem.outbox_retention = 1\nidem.outbox_segment_rows = 10");
$node->reload;
my $dump = session($node);
$dump->query_safe('BEGIN; ' . join('; ', map { "LOCK TABLE idem.outbox_$_ IN ACCESS SHARE MODE" } 0 .. 7));
$node->pgbench('-n -T 7 -c 8 -j 2', 0, [qr{processed}], [qr{^$}], 'no enqueue waits behind a dump',
	{ '156_busy' => q(SET lock_timeout = '500ms'; SELECT idem.outbox_enqueue('busy', '"1"'::json);) });
$dump->query_safe('COMMIT');
leave($dump);
await_sql('all is sent', q(SELECT unsent_at_most FROM idem.relay_status WHERE server = 'busy'), '0');

# That took hundreds of rounds, which leave nothing in memory.
my $here = -s $node->logfile;
my @used;
sql(q(SELECT pg_log_backend_memory_contexts(pid) FROM idem.relay_worker()));
await('contexts are logged', sub { @used = slurp_file($node->logfile, $here) =~ /idem reader: [^\n]* (\d+) used/g; return @used && slurp_file($node->logfile, $here) =~ /Grand total/ });
cmp_ok((sort { $b <=> $a } @used)[0], '<', 8192, 'a reader takes no more than it needs') or diag("@used");
cmp_ok(sql('SELECT max(id) FROM idem.outbox_tick'), '>', 50, 'after many rounds');

# A server without routes that is paused still knows where it was.
server('idle');
enqueue('idle', '"before"');
await_bodies('one', 'idle', '"before"');
sql(q(SELECT idem.relay_pause('idle')));
await_sql('paused', q(SELECT state FROM idem.relay_status WHERE server = 'idle'), 'paused');
sql(q(SELECT idem.route_drop(id, discard => true) FROM idem.route WHERE server = 'idle'));
my $tick = sql(q(SELECT max(tick_a) FROM idem.relay_position WHERE server = 'idle'));
sql(q(SELECT pg_terminate_backend(pid) FROM idem.relay_worker()));
for (1 .. 3)
{
	my $ticks = sql('SELECT max(id) FROM idem.outbox_tick');
	enqueue('busy', '"2"');
	await_sql('time goes by', "SELECT max(id) > $ticks FROM idem.outbox_tick", 't');
	usleep(1_100_000);
	sql('SELECT idem.relay_notice()');
}
is(sql("SELECT count(*) FROM idem.outbox_tick WHERE id = $tick"), '1', 'its tick stays');
sql(q(SELECT idem.relay_resume('idle'); SELECT idem.route_add('idle', 'idle')));
enqueue('idle', '"after"');
await_bodies('resumed, it goes on', 'idle', '"before"', '"after"');

# Another encoding.
sql(q(CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0));
$node->safe_psql('latin', 'CREATE EXTENSION idem');
$node->safe_psql('latin', file_server('latin', ''));
$node->safe_psql('latin', q(SELECT idem.route_add('**', 'latin', 'to/{topic}')));
$node->safe_psql('latin', q(SELECT idem.outbox_enqueue(convert_from('\xc3a9', 'UTF8'), to_json(convert_from('\xc3bc', 'UTF8')), key => convert_from('\xc3a4', 'UTF8'))));
$node->safe_psql('latin', q(SELECT idem.outbox_enqueue('bytes', '\x00ff'::bytea)));
$node->safe_psql('latin', q(SELECT idem.outbox_enqueue('dead', '"permanent"'::json, key => convert_from('\xc3a4', 'UTF8'))));
await('from a database in LATIN1 messages are sent in UTF-8', sub { 2 == @{ [ lines('latin') ] } });
is(join('|', map { @$_[ 1, 2, 4 ] } (lines('latin'))[0]), qq(to/\xc3\xa9|\xc3\xa4|"\xc3\xbc"), 'topic, key and body');
is((lines('latin'))[1][4], "\x00\xff", 'bytes are not touched');
ok($node->poll_query_until('latin', q(SELECT key = convert_from('\xc3a4', 'UTF8') FROM idem.dead_letter)), 'what is stored is in LATIN1 again');
is(sqlstate($node, q(SELECT idem.outbox_enqueue('x', '"\ud800"'::jsonb)), 'latin'), '22P02', 'half a character is refused');

# The postmaster is killed, and nobody told anybody.
set_mode('busy', 'hang');
enqueue('busy', '"3"');
await_sql('a courier hangs', q(SELECT in_flight > 0 FROM idem.relay_status WHERE server = 'busy'), 't');
my @couriers = grep { $_ } split /\n/, sql('SELECT courier FROM idem.relay_status');
crash($node, orphans => 1);
$end = time + 30;
usleep(10_000) while (grep { -d "/proc/$_" } @couriers) && time < $end;
is(join(' ', grep { -d "/proc/$_" } @couriers), '', 'no courier outlives the postmaster');

# Figures of servers that went with their database leave their places.
my $few = cluster('few', {}, 'max_worker_processes = 20', 'idem.max_servers = 1');
for my $round (1 .. 3)
{
	$few->safe_psql('postgres', 'CREATE DATABASE other');
	$few->safe_psql('other', q(CREATE EXTENSION idem; CREATE SERVER bin FOREIGN DATA WRAPPER idem OPTIONS (url 'discard://'); SELECT idem.route_add('x', 'bin')));
	ok($few->poll_query_until('other', q(SELECT state = 'running' FROM idem.relay_status)), "round $round: the figures of a server are there");
	$few->safe_psql('other', 'DROP EXTENSION idem CASCADE') if $round == 2;
	$few->safe_psql('postgres', 'DROP DATABASE other');
}
$few->stop;

done_testing();

# What was sent can be sent again, a new route can begin in the past, and what
# is parked outlives its part of the outbox.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Idem;
use FileCourier;

my $node = cluster('replay', {}, "idem.site = 'here'", 'max_worker_processes = 20');
install_courier($node);
sql(file_server('bus', ''));
sql(q(SELECT idem.route_add('orders.**', 'bus')));

sub enqueue
{
	my ($topic, @n) = @_;
	sql(join ';', map { "SELECT idem.outbox_enqueue('$topic', '$_'::json, key => 'k')" } @n);
}

# Replay by time.
enqueue('orders.a', 1, 2, 3);
await_bodies('sent once', 'bus', 1, 2, 3);
my @ids = map { $_->[0] } lines('bus');
my $middle = sql('SELECT clock_timestamp()');
enqueue('orders.a', 4);
enqueue('other', 5);
await_bodies('and more', 'bus', 1 .. 4);
truncate_file('bus');
sql(qq(SELECT idem.outbox_replay('bus', until => '$middle')));
await_bodies('what was enqueued before a time is sent again', 'bus', 1, 2, 3);
is_deeply([ map { $_->[0] } lines('bus') ], \@ids, 'with the same ids');
await_sql('then the replay is over', 'SELECT count(*) FROM idem.relay_replay WHERE finished_at IS NULL', '0');
truncate_file('bus');
sql(qq(SELECT idem.outbox_replay('bus', since => '$middle')));
await_bodies('and since then', 'bus', 4);
is(sql(q(SELECT count(*) FROM idem.relay_position WHERE replay <> 0)), '0', 'a replay that is over leaves no position');

# It goes on where it was, whatever happens to the relay, and to the server.
truncate_file('bus');
sql(q(SELECT idem.outbox_enqueue('orders.many', to_json(i), key => (i % 7)::text) FROM generate_series(101, 5000) i));
await('many are sent', sub { scalar(my @l = lines('bus')) == 4900 });
truncate_file('bus');
sql(q(SELECT idem.outbox_replay('bus')));
await('a replay begins', sub { scalar(my @l = lines('bus')) > 100 });
sql(q(SELECT pg_terminate_backend(pid) FROM idem.relay_worker()));
enqueue('orders.new', 6);
await('what is new gets through', sub { grep { $_ eq '6' } bodies('bus') });
$node->stop('immediate');
$node->start;
await_sql('the replay ends', 'SELECT count(*) FROM idem.relay_replay WHERE finished_at IS NULL', '0');
my %seen;
$seen{$_}++ for bodies('bus');
is(scalar(grep { !$seen{$_} } 1 .. 4, 101 .. 5000), 0, 'and all was sent');
is($seen{5}, undef, 'but what no route takes');

# Paused, a replay waits, and can be cancelled.
sql(q(SELECT idem.relay_pause('bus')));
await_sql('paused', q(SELECT state FROM idem.relay_status WHERE server = 'bus'), 'paused');
truncate_file('bus');
my $replay = sql(q(SELECT idem.outbox_replay('bus')));
is(sql("SELECT idem.outbox_replay_cancel($replay)"), 't', 'cancelled');
is(sql("SELECT idem.outbox_replay_cancel($replay)"), 'f', 'only once');
sql(q(SELECT idem.relay_resume('bus')));
enqueue('orders.new', 7);
await_bodies('what was cancelled is not sent', 'bus', 7);

# A route that begins in the past, on a server that has long been sending.
truncate_file('bus');
sql(q(SELECT idem.route_add('other', 'bus', start_from => 'oldest')));
await_bodies('a route gets what is old', 'bus', 5);
enqueue('other', 8);
await_bodies('and what is new', 'bus', 5, 8);
truncate_file('bus');
my $then = sql('SELECT clock_timestamp()');
enqueue('third', 9);
enqueue('orders.x', 10);
await_bodies('others go on', 'bus', 10);
sql(qq(SELECT idem.route_add('third', 'bus', start_from => '$then')));
await_bodies('a route that begins at a time', 'bus', 10, 9);

# On one that has not: there it is where it begins.
sql(file_server('fresh', ''));
sql(q(SELECT idem.route_add('third', 'fresh')));
sql(q(SELECT idem.route_add('other', 'fresh', start_from => 'oldest')));
await_bodies('a new server gets what each route asks for', 'fresh', 5, 8);
enqueue('third', 11);
await_bodies('and goes on', 'fresh', 5, 8, 11);

# A dropped route goes when nothing is left for it.
my $route = sql(q(SELECT id FROM idem.route WHERE server = 'fresh' AND pattern = 'third'));
sql("SELECT idem.route_drop($route)");
await_sql('a dropped route goes', "SELECT count(*) FROM idem.route WHERE id = $route", '0');
my $late = $node->background_psql('postgres');
$late->query_safe(q(BEGIN; SELECT idem.outbox_enqueue('other', '12'::json)));
$route = sql(q(SELECT id FROM idem.route WHERE server = 'fresh' AND pattern = 'other'));
sql("SELECT idem.route_drop($route)");
enqueue('nobody', 13);
await_sql('one that an open transaction may need stays', qq(SELECT state FROM idem.routes WHERE id = $route), 'closing');
$late->query_safe('COMMIT');
await_bodies('until that has ended', 'fresh', 5, 8, 11, 12);
await_sql('and then goes, too', "SELECT count(*) FROM idem.route WHERE id = $route", '0');
$late->quit;

# One that was to wait behind another, which arrived before that was written.
sql(file_server('slow', ''));
sql(q(ALTER SERVER slow OPTIONS (SET retry_min '700ms', SET retry_max '1s', SET max_attempts '100')));
sql(q(SELECT idem.route_add('s', 'slow')));
set_mode('slow', 'failing');
sql(q(SELECT idem.outbox_enqueue('s', '"first"'::json, key => 'k')));
await_sql('one is parked', q(SELECT state FROM idem.relay_parked WHERE server = 'slow'), 'retry');
set_mode('slow', 'silent');
sql(q(SELECT idem.outbox_enqueue('s', '"silent"'::json)));
sql(q(SELECT idem.outbox_enqueue('s', '"second"'::json, key => 'k')));
await('it arrives', sub { grep { $_ eq '"first"' } bodies('slow') });
await_sql('and is forgotten', q(SELECT count(*) FROM idem.relay_parked WHERE server = 'slow'), '0');
set_mode('slow', 'up');
kill 'KILL', sql(q(SELECT courier FROM idem.relay_status WHERE server = 'slow'));
await_bodies('then the next one arrives, too', 'slow', '"first"', '"silent"', '"second"');

# A key with many messages behind a failed one catches up, in order.
truncate_file('slow');
set_mode('slow', 'failing');
sql(q(SELECT idem.outbox_enqueue('s', '0'::json, key => 'k')));
await_sql('one is parked', q(SELECT count(*) FROM idem.relay_parked WHERE server = 'slow'), '1');
sql(q(SELECT idem.outbox_enqueue('s', to_json(i), key => 'k') FROM generate_series(1, 500) i));
await_sql('all are parked behind it', q(SELECT count(*) FROM idem.relay_parked WHERE server = 'slow'), '501');
set_mode('slow', 'up');
await_bodies('they arrive in order', 'slow', 0 .. 500);
await_sql('and nothing stays parked', q(SELECT count(*) FROM idem.relay_parked WHERE server = 'slow'), '0');

# Unknown outcomes, held until somebody settles them.
sql(file_server('hold', ''));
sql(q(ALTER SERVER hold OPTIONS (ADD on_unknown 'hold')));
sql(q(SELECT idem.route_add('h', 'hold')));
sql(q(SELECT idem.outbox_enqueue('h', '"unknown"'::json, key => 'a')));
await_sql('one whose outcome is unknown is held', q(SELECT state FROM idem.relay_parked WHERE server = 'hold'), 'held');
sql(q(SELECT idem.outbox_enqueue('h', '"behind"'::json, key => 'a')));
sql(q(SELECT idem.outbox_enqueue('h', '"other key"'::json, key => 'b')));
await_bodies('one that nobody knows of holds its key only', 'hold', '"unknown"', '"other key"');
await_sql('it is shown', q(SELECT count(*) FROM idem.stuck WHERE what = 'unknown' AND name = 'hold'), '1');
my $fix = sql(q(SELECT fix FROM idem.stuck WHERE what = 'unknown' AND name = 'hold'));
sql($fix);
await_bodies('settled, the key goes on', 'hold', '"unknown"', '"other key"', '"behind"');
await_sql('and nothing is left', q(SELECT count(*) FROM idem.relay_parked WHERE server = 'hold'), '0');
truncate_file('hold');
sql(q(SELECT idem.outbox_enqueue('h', '"unknown"'::json, key => 'a')));
await_sql('held again', q(SELECT count(*) FROM idem.relay_parked WHERE server = 'hold' AND state = 'held'), '1');
is(sql(q(SELECT idem.relay_settle('hold', msg_id, false) FROM idem.relay_parked WHERE state = 'held')), '1', 'not delivered');
await('it is sent again', sub { scalar(my @l = grep { $_ eq '"unknown"' } bodies('hold')) >= 2 });
await_sql('and held again', q(SELECT state FROM idem.relay_parked WHERE server = 'hold'), 'held');
sql(q(SELECT idem.relay_settle('hold', msg_id, true) FROM idem.relay_parked WHERE state = 'held'));

# What is parked outlives its part of the outbox, and so do dead letters.
sql(q(SELECT idem.outbox_enqueue('orders.l', '"kept"'::json, deliver_at => clock_timestamp() + interval '12 seconds')));
sql(q(SELECT idem.outbox_enqueue('orders.l', '"permanent"'::json)));
await_sql('dead', q(SELECT count(*) FROM idem.dead_letter), '1');
my ($kept) = split /\n/, sql(q(SELECT seq FROM idem.relay_parked WHERE state = 'delayed'));
$node->append_conf('postgresql.conf', "idem.outbox_retention = '1s'\nidem.outbox_segment_rows = 1");
$node->reload;
enqueue('orders.z', 14);
await_sql('the part of the outbox is emptied', "SELECT count(*) FROM idem.outbox WHERE seq <= $kept", '0');
is(sql('SELECT seq FROM idem.relay_kept WHERE seq = ' . $kept), $kept, 'what is parked was copied');
truncate_file('bus');
await_bodies('and is sent', 'bus', '"kept"');
is(sql(q(SELECT outcome FROM idem.dead_letter_redrive(ARRAY[1]))), 'sent again', 'a dead letter can be redriven');
await_sql('it is tried again', q(SELECT count(*) FROM idem.dead_letter), '2');
await_sql('copies go', q(SELECT count(*) FROM idem.relay_kept), '0');

$node->stop;
done_testing();

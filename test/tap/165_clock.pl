# The clock is set back, and forward: pauses stay what they are.
use strict;
use warnings;
use Cwd 'abs_path';
use File::Basename;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Idem;
use FileCourier;

my $dir = PostgreSQL::Test::Utils::tempdir;
my ($library, $clock) = ("$dir/stepclock.so", "$dir/clock");
system_or_bail('cc', '-shared', '-fPIC', '-O1', '-o', $library, dirname(abs_path($0)) . '/../lib/stepclock.c');

sub set_clock
{
	my ($hours) = @_;
	# in place: it is mapped
	open(my $f, -e $clock ? '+<' : '>', $clock) or die $!;
	syswrite $f, pack('q', $hours * 3600) or die $!;
	close $f;
}
set_clock(0);

my $node = cluster('clock', { bare => 1 }, "shared_preload_libraries = 'idem'", 'max_worker_processes = 20');
{
	local $ENV{LD_PRELOAD} = $library;
	local $ENV{STEPCLOCK} = $clock;
	$node->start;
}
$node->safe_psql('postgres', 'CREATE EXTENSION idem');
install_courier($node);
sql(file_server('bus', ''));
sql(q(ALTER SERVER bus OPTIONS (SET retry_min '1s', SET retry_max '2s', SET max_attempts '1000')));
sql(q(SELECT idem.route_add('x', 'bus')));
my $n = 0;
sub enqueue { $n++; return sql("SELECT idem.outbox_enqueue('x', '$n'::json, key => 'k')") }
sub recorded { return sql('SELECT max(id) FROM idem.relay_position') }

enqueue();
await_bodies('a message', 'bus', 1 .. $n);
my $is = sql('SELECT extract(epoch FROM clock_timestamp())::bigint');
set_clock(-1);
await_sql('the clock is set back', "SELECT clock_timestamp() < to_timestamp($is)", 't');
my $before = recorded();
enqueue();
await_bodies('set back: a message arrives', 'bus', 1 .. $n);
await_sql('and is written down', "SELECT max(id) > $before FROM idem.relay_position", 't');

set_mode('bus', 'down');
enqueue();
await_sql('a server is down', 'SELECT state FROM idem.relay_status', 'backing off');
set_clock(-2);
set_mode('bus', 'up');
await_bodies('set back while the relay pauses: it goes on', 'bus', 1 .. $n);

set_mode('bus', 'failing');
enqueue();
await_sql('one is parked', 'SELECT state FROM idem.relay_parked', 'retry');
set_clock(-3);
set_mode('bus', 'up');
await_bodies('set back while one is to be tried again: it is', 'bus', 1 .. $n);

my $relay = sql('SELECT pid FROM idem.relay_worker()');
sql("SELECT pg_terminate_backend($relay)");
set_clock(-4);
enqueue();
await_bodies('set back while the relay is restarted: it is', 'bus', 1 .. $n);
isnt(sql('SELECT pid FROM idem.relay_worker()'), $relay, 'another one');

set_clock(4);
enqueue();
await_bodies('set forward: a message arrives', 'bus', 1 .. $n);
await_sql('and nothing waits', 'SELECT unsent_at_most, parked, in_flight FROM idem.relay_status', '0|0|0');
my %ids = map { $_->[0] => 1 } lines('bus');
is(scalar(keys %ids), $n, 'every message has an id of its own');

$node->stop;
done_testing();

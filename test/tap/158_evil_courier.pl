# Whatever a courier says, the server stays up, other destinations go on, and no
# message is lost or taken for delivered that is not.
use strict;
use warnings;
use Cwd 'abs_path';
use File::Basename;
use File::Copy;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);
use Idem;
use FileCourier;

my $node = cluster('evil', {}, 'max_worker_processes = 20');
install_courier($node);
my $program = dirname(courier_program()) . '/idem-courier-evil';
copy(dirname(abs_path($0)) . '/../courier/idem-courier-evil', $program) or die $!;
chmod 0755, $program;
my $dir = PostgreSQL::Test::Utils::tempdir;
my $started = sql('SELECT pg_postmaster_start_time()');
my $relay = sub { sql('SELECT pid FROM idem.relay_worker()') };

sql(file_server('good', ''));
sql(q(SELECT idem.route_add('good', 'good')));
sub seen { my ($way) = @_; return -s "$dir/$way" // 0 }
my $n = 0;
sub evil
{
	my ($way) = @_;
	sql(qq(CREATE SERVER "$way" FOREIGN DATA WRAPPER idem OPTIONS (url 'evil://x', "evil.way" '$way', "evil.path" '$dir/$way', retry_min '10ms', retry_max '100ms', max_attempts '3')));
	sql("SELECT idem.route_add('$way', '$way')");
	sql("SELECT idem.outbox_enqueue('$way', to_json(i), key => 'k') FROM generate_series(1, 3) i");
	await("$way: it has been asked", sub { seen($way) });
	$n++;
	sql("SELECT idem.outbox_enqueue('good', '$n'::json)");
	await_bodies("$way: another server goes on", 'good', 1 .. $n);
	return;
}
sub unsettled { my ($way) = @_; return sql("SELECT string_agg(DISTINCT s.state, ' ') FROM idem.outbox o, idem.outbox_status(o.msg_id) s WHERE o.topic = '$way'") }

my $pid = $relay->();
for my $way (qw(garbage long short type truncated outcome state count ready dies))
{
	evil($way);
	await_sql("$way: its courier is done with", "SELECT unknown > 0 AND last_error ~ 'courier|terminated' FROM idem.relay_status WHERE server = '$way'", 't');
	unlike(unsettled($way), qr/delivered/, "$way: nothing is taken for delivered");
	sql("SELECT idem.relay_pause('$way')");
}
evil('text');
await_sql('text: what it says is cut and cleaned', q(SELECT last_error !~ '[\x01-\x1f]' AND length(last_error) <= 255 FROM idem.relay_status WHERE server = 'text' AND last_error IS NOT NULL), 't');
for my $way (qw(none twice strange log flood))
{
	evil($way);
	await("$way: delivered, at last", sub { unsettled($way) eq 'delivered' });
	is(sql("SELECT dead FROM idem.relay_status WHERE server = '$way'"), '0', "$way: and no dead letter");
}
unlike(slurp_file($node->logfile), qr/^LOG:  forged/m, 'log: no line of its own');
evil('back');
my $before = seen('back');
my $begin = time;
usleep(100_000) while time - $begin < 2;
cmp_ok(seen('back') - $before, '<', 200, 'back: what it returns is not thrown at it again at full speed');
is($relay->(), $pid, 'the relay has lived through all that');
is(sql('SELECT pg_postmaster_start_time()'), $started, 'and so has the server');

# order none is an order to the courier, too
sql(q(CREATE SERVER loose FOREIGN DATA WRAPPER idem OPTIONS (url 'discard://', "order" 'none', fail_every '2', retry_min '3s', retry_max '3s')));
sql(q(SELECT idem.route_add('loose', 'loose')));
sql(q(SELECT idem.outbox_enqueue('loose', to_json(i), key => 'k') FROM generate_series(1, 4) i));
await_sql('without order the others do not wait for one that failed', q(SELECT sent, parked FROM idem.relay_status WHERE server = 'loose'), '2|2');

$node->stop;
done_testing();

# Orders that are told to another database, whatever breaks on the way.
#
#   database shop                                   database warehouse
#   order + outbox_enqueue() --> relay --> courier --> HTTP sink --> inbox_try_claim() + shipment
#
# Several sessions write orders; some roll back, some stay open for seconds.
# The sink fails at random: it answers 500, cuts the connection before or after
# it has done its work, and is too slow with its answer.  In the middle the
# whole server is killed with -9 and started again.  The ledger at the end is
# read from the tables of both databases.
#
# Connects by the usual libpq variables; the argument is the data folder.
use strict;
use warnings;
use FindBin;
use IO::Handle;
use IO::Socket::INET;
use lib $FindBin::RealBin;
use POSIX ();
use Shop;
use Time::HiRes qw(time usleep);

use constant {
	CONNECTIONS => 8,
	SINKS => 20,            # processes; some are slow, and some hold a connection that nobody uses
	WINDOW => 100,          # messages under way at a time
	TIMEOUT => 500,         # milliseconds the courier waits for an answer
	DEADLINE => 100,        # seconds
};

# What the sink does wrong, and how often.
my %fault = (
	error => 0.02,          # does the work, rolls it back, answers 500
	deaf => 0.005,          # cuts the connection before it does anything
	mute => 0.01,           # does the work and cuts the connection
	slow => 0.002,          # does the work and answers too late
);

my $data = shift // die "usage: orders.pl DATA\n";
my $seed = $ENV{SEED} || int(rand(1e6));
srand($seed);
$SIG{PIPE} = 'IGNORE';
$SIG{ALRM} = sub { print "\nnot done after ", DEADLINE, " seconds\n"; exit 1 };
alarm DEADLINE;
STDOUT->autoflush(1);

my $setup_warehouse = <<'SQL';
CREATE EXTENSION idem;
CREATE TABLE shipment (arrival bigserial, order_id int, customer int, n int);  -- no unique constraint
SQL

sub shipment_sql
{
	my ($id, $body) = @_;
	$body =~ s/'/''/g;
	return <<"SQL";
WITH claim AS (SELECT idem.inbox_try_claim('warehouse', '$id') AS mine)
INSERT INTO shipment (order_id, customer, n)
SELECT o.id, o.customer, o.n FROM claim, json_to_record('$body') AS o(id int, customer int, n int) WHERE mine;
SQL
}

# ---- The sink: so many processes, a connection and a psql each.

my $listen = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 64, ReuseAddr => 1) or die "socket: $!\n";
pipe(my $news, my $tell) or die "pipe: $!\n";
$tell->autoflush(1);
my @sinks;

sub read_request
{
	my ($connection) = @_;
	my ($length, $id) = (0);
	defined(my $line = readline $connection) or return;
	while (defined($line = readline $connection) && $line =~ /\S/)
	{
		$length = $1 if $line =~ /^content-length:\s*(\d+)/i;
		$id = $1 if $line =~ /^idempotency-key:\s*([0-9a-f-]{36})\s*$/i;
	}
	return unless defined $line && defined $id;
	return unless read($connection, my $body, $length) == $length;
	return ($id, $body);
}

sub answer
{
	my ($connection, $status) = @_;
	print $connection "HTTP/1.1 $status\r\nContent-Length: 0\r\n\r\n";
	return $connection->flush;
}

sub dice
{
	my $x = rand;
	for my $kind (sort keys %fault)
	{
		return $kind if ($x -= $fault{$kind}) < 0;
	}
	return 'fine';
}

# Serve one request: what happened, and whether the connection stays open.
sub serve
{
	my ($connection, $psql, $id, $body) = @_;
	my $luck = dice();
	return ('deaf', 0) if $luck eq 'deaf';

	my $sql = shipment_sql($id, $body) . "\\echo :ROW_COUNT\n";
	my $rows = ask($$psql, $luck eq 'error' ? "BEGIN;\n${sql}ROLLBACK;" : $sql);
	if (!defined $rows)
	{
		end_session($$psql);
		$$psql = session('warehouse');
		return ('away', answer($connection, '503 No Database'));
	}
	return ('error', answer($connection, '500 Bad Luck')) if $luck eq 'error';

	# From here on the work is done.
	my $what = $rows > 0 ? 'first' : 'duplicate';
	return ("$what mute", 0) if $luck eq 'mute';
	usleep(TIMEOUT * 1500) if $luck eq 'slow';
	answer($connection, '200 OK');
	return $luck eq 'slow' ? ("$what slow", 0) : ($what, 1);
}

sub sink
{
	my $psql = session('warehouse');
	srand($seed + $$);
	while (my $connection = $listen->accept)
	{
		while (my ($id, $body) = read_request($connection))
		{
			my ($what, $open) = serve($connection, \$psql, $id, $body);
			print $tell "$what\n";
			last unless $open;
		}
		close $connection;
	}
	return;
}

sub start_sinks
{
	for (1 .. SINKS)
	{
		my $pid = fork // die "fork: $!\n";
		if ($pid == 0)
		{
			close $news;
			sink();
			POSIX::_exit(0);
		}
		push @sinks, $pid;
	}
	close $tell;
	return;
}

my $main = $$;
END { my $rc = $?; if ($$ == $main) { kill 'TERM', @sinks; waitpid $_, 0 for @sinks; } $? = $rc; }

my $sink = { buffer => '' };
my %count = map { $_ => 0 } qw(first duplicate error deaf mute slow away);

# ---- What is shown meanwhile.

my $begin = time;
my ($shown, $shown_first) = ($begin, 0);
my $monitor;
my %relay = map { $_ => 0 } qw(unsent retried unknown base_retried base_unknown);



sub look_at_relay
{
	my $row = ask($monitor, "SELECT state, coalesce(unsent_at_most, 0), coalesce(in_flight, 0), coalesce(retried, 0), coalesce(unknown, 0) FROM idem.relay_status;");
	die "the monitor has ended\n" unless defined $row;
	chomp $row;
	@relay{qw(state unsent in_flight retried unknown)} = split /\|/, $row;
	return;
}

# Its counters start from zero after a crash.
sub restart_monitor
{
	end_session($monitor) if $monitor;
	$relay{"base_$_"} += $relay{$_} for qw(retried unknown);
	$monitor = session('shop');
	return;
}

sub progress
{
	my ($last) = @_;
	my $live = -t STDOUT;
	return if !$last && time - $shown < ($live ? 0.2 : 1);
	look_at_relay();
	my $line = sprintf '  %5.1f s  %s committed, %s delivered (%s/s), backlog %s, relay %s: %s retried, %s unknown, %s duplicates stopped',
	  time - $begin, commas(written()), commas($count{first}),
	  commas(($count{first} - $shown_first) / (time - $shown + 1e-9)), commas($relay{unsent}), $relay{state},
	  commas($relay{retried} + $relay{base_retried}), commas($relay{unknown} + $relay{base_unknown}), commas($count{duplicate});
	($shown, $shown_first) = (time, $count{first});
	print $live ? "\r$line\e[K" : $line, $live && !$last ? '' : "\n";
	return;
}

sub heard_from_sink
{
	my ($self) = @_;
	sysread($news, $self->{buffer}, 65536, length $self->{buffer}) or die "the sink is gone\n";
	while ($self->{buffer} =~ s/^(.*)\n//)
	{
		$count{$_}++ for split ' ', $1;
	}
	return;
}

# Whatever happens next.
sub turn
{
	writers_turn();
	progress();
	return;
}

# ---- The show.

query('postgres', "CREATE DATABASE $_") for qw(shop warehouse);
query('shop', "SET client_min_messages = warning; $setup_shop");
fill_shop();
query('warehouse', "SET client_min_messages = warning; $setup_warehouse");
start_sinks();
my $server = sprintf <<"SQL", $listen->sockport, CONNECTIONS, TIMEOUT, WINDOW;
CREATE SERVER warehouse FOREIGN DATA WRAPPER idem
    OPTIONS (url 'http://127.0.0.1:%d/orders', connections '%d', timeout_ms '%d',
             window_messages '%d', retry_min '20ms', retry_max '1s');
SELECT idem.route_add('order.*', 'warehouse');
SQL
query('shop', $server);

print "\nIn the database shop:\n\n${setup_shop}${server}\n";
print "For each order, in one transaction:\n\n", order_sql(17, 4), "\n";
print "In the database warehouse, for each delivery, in one transaction:\n\n",
  shipment_sql('(Idempotency-Key)', '(body)'), "\n";
printf "%s orders of %d sessions, %d of which leave their transactions open for %d s; some roll back (SEED=%d).\n",
  commas(ORDERS), SESSIONS + HOLDERS, HOLDERS, HELD, $seed;
print "The receiver answers 500, cuts connections before and after its work, and answers too late.\n\n";

$begin = $shown = time;
restart_monitor();
listen_to($news, sub { heard_from_sink($sink) });
start_writers();
turn() until all_written(0.5);
kill_server($data);
restart_monitor();
start_writers();
turn() until writers_idle();
end_writers();
note('no more orders');
do { turn(); look_at_relay(); } until $relay{state} eq 'running' && $relay{unsent} == 0 && $relay{in_flight} == 0;
my $drained = time;
turn() while $select->can_read(0.2);
progress('last');

# ---- The ledger: from the tables, not from what we believe.


my %ordered = map { $_ => 1 } split /\n/, query('shop', 'SELECT id FROM orders');
my %shipped = map { split /\|/ } split /\n/, query('warehouse', 'SELECT order_id, count(*) FROM shipment GROUP BY 1');
my @told = grep { $fate{$_} eq 'committed' } keys %fate;
my @rolled_back = grep { $fate{$_} eq 'rolled back' } keys %fate;
my @unknown = grep { $fate{$_} eq 'unknown' } keys %fate;
my $faults = $count{mute} + $count{slow};

print "\nLedger\n";
check(!(grep { !$ordered{$_} } @told), 'orders whose COMMIT was answered', scalar @told, 'all of them are in the table');
check(!(grep { $ordered{$_} } @rolled_back), 'orders rolled back, or open when the server died', scalar @rolled_back, 'none of them is');
check(@told + (grep { $ordered{$_} } @unknown) == keys %ordered, 'COMMITs that the server died on', scalar @unknown,
	sprintf '%d of them had committed', scalar grep { $ordered{$_} } @unknown);
check(keys %ordered > 0, 'orders in the table', scalar keys %ordered);
check(!(grep { !$shipped{$_} } keys %ordered), 'of these, not delivered', scalar grep { !$shipped{$_} } keys %ordered);
check(!(grep { $_ > 1 } values %shipped), 'with more than one shipment', scalar grep { $_ > 1 } values %shipped);
check(!(grep { !$ordered{$_} } keys %shipped), 'shipments of orders that were rolled back', scalar grep { !$ordered{$_} } keys %shipped);
my $swapped = query('warehouse', <<'SQL');
SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY customer ORDER BY arrival) AS before FROM shipment) s WHERE n <= before
SQL
check($swapped == 0, 'shipments out of order for their customer', $swapped);
check($count{error} && $count{deaf} && $count{mute} && $count{slow}, 'failures of the receiver',
	$count{error} + $count{deaf} + $faults,
	sprintf '%d answered 500, %d cut off before the work, %d after it, %d too slow', @count{qw(error deaf mute slow)});
check($count{duplicate} <= $faults + WINDOW, 'duplicates, stopped by inbox_try_claim()', $count{duplicate},
	sprintf 'at most %d: what was cut off after the work or too slow, and a window of %d', $faults + WINDOW, WINDOW);
my $dead = query('shop', 'SELECT count(*) FROM idem.dead_letter') + query('shop', 'SELECT count(*) FROM idem.relay_parked');
check($dead == 0, 'dead letters, and messages left over', $dead);

printf "\n%s\n", bad_checks()
  ? 'Something is off.'
  : sprintf 'What was committed was done exactly once, what was rolled back not at all, in %.1f s.', $drained - $begin;
exit(bad_checks() ? 1 : 0);

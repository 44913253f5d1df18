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
use IO::Handle;
use IO::Select;
use IO::Socket::INET;
use IPC::Open3;
use POSIX ();
use Time::HiRes qw(time usleep);

use constant {
	ORDERS => 3000,
	SESSIONS => 4,          # that write one order at a time
	HOLDERS => 2,           # that write a few and leave the transaction open
	HELD => 3,              # seconds, so long
	CUSTOMERS => 400,
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

my $setup_shop = <<'SQL';
CREATE EXTENSION idem;
CREATE TABLE customer (id int PRIMARY KEY, orders int);
CREATE TABLE orders (id int, customer int, n int);
SQL

my $setup_warehouse = <<'SQL';
CREATE EXTENSION idem;
CREATE TABLE shipment (arrival bigserial, order_id int, customer int, n int);  -- no unique constraint
SQL

# The customer's row is what transactions of the same customer serialise on.
sub order_sql
{
	my ($order, $customer) = @_;
	return <<"SQL";
WITH c AS (UPDATE customer SET orders = orders + 1 WHERE id = $customer RETURNING id, orders),
     o AS (INSERT INTO orders SELECT $order, id, orders FROM c RETURNING *)
SELECT idem.outbox_enqueue('order.placed', row_to_json(o), key => o.customer::text) FROM o;
SQL
}

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

# ---- psql, driven through pipes.

# what sessions complain about: those of a killed server do, and that is no news
my $errors = ($ENV{TMPDIR} || '/tmp') . "/demo.$$.err";
open(ERRORS, '+>', $errors) or die "$errors: $!\n";
unlink $errors;

sub session
{
	my ($database) = @_;
	my $self = { database => $database, buffer => '' };
	$self->{process} = open3($self->{in}, $self->{out}, '>&ERRORS',
		'psql', '-XqAt', '-v', 'ON_ERROR_STOP=1', '-d', $database);
	$self->{in}->autoflush(1);
	return $self;
}

sub end_session
{
	my ($s) = @_;
	close $s->{$_} for qw(in out);
	waitpid $s->{process}, 0;
	return;
}

# Send SQL and wait for its output; undef if the session is gone.
sub ask
{
	my ($s, $sql) = @_;
	print { $s->{in} } $sql, "\n\\echo end\n" or return;
	my $answer = '';
	while (defined(my $line = readline $s->{out}))
	{
		return $answer if $line eq "end\n";
		$answer .= $line;
	}
	return;
}

sub query
{
	my ($database, $sql) = @_;
	open(my $psql, '-|', 'psql', '-XqAt', '-v', 'ON_ERROR_STOP=1', '-d', $database, '-c', $sql) or die "psql: $!\n";
	my $result = join '', <$psql>;
	close $psql or die "failed: $sql\n";
	chomp $result;
	return $result;
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

# ---- The writers.

my $select = IO::Select->new;
my %writer;               # by file handle
my $next_order = 1;
my %fate;                 # of orders: committed, rolled back, or unknown
my $down = 0;

sub start_writer
{
	my ($kind, $customer) = @_;
	my $w = session('shop');
	@$w{qw(kind customer)} = ($kind, $customer);
	$writer{ $w->{out} } = $w;
	$select->add($w->{out});
	place_order($w);
	return;
}

# Write in an open transaction; it answers when that is done.
sub place_order
{
	my ($w) = @_;
	my $held = $w->{kind} eq 'holder';
	my $n = $held ? 5 : 1;
	my $sql = "BEGIN;\n";

	$w->{orders} = [];
	$w->{undone} = [];
	return $w->{idle} = 1 if $next_order > ORDERS;
	if (!$held && rand() < 0.05)
	{
		$sql .= "SAVEPOINT s;\n" . order_sql($next_order, customer($w)) . "ROLLBACK TO s;\n";
		push @{ $w->{undone} }, $next_order++;
	}
	for (1 .. $n)
	{
		$sql .= order_sql($next_order, customer($w));
		push @{ $w->{orders} }, $next_order++;
	}
	$w->{state} = 'writing';
	print { $w->{in} } "\\o /dev/null\n$sql\\o\n\\echo written\n";
	return;
}

sub customer { my ($w) = @_; return $w->{customer} // 1 + int(rand CUSTOMERS); }

sub finish_order
{
	my ($w) = @_;
	my $how = rand() < ($w->{kind} eq 'holder' ? 0.3 : 0.1) ? 'rolled back' : 'committed';
	$w->{state} = $how;
	print { $w->{in} } $how eq 'committed' ? 'COMMIT;' : 'ROLLBACK;', "\n\\echo ended\n";
	return;
}

sub heard_from_writer
{
	my ($w) = @_;
	return lost_writer($w) if !sysread($w->{out}, $w->{buffer}, 4096, length $w->{buffer});
	while ($w->{buffer} =~ s/^(.*)\n//)
	{
		if ($1 eq 'written')
		{
			$fate{$_} = 'rolled back' for @{ $w->{undone} };
			if ($down || $w->{kind} eq 'holder') { $w->{state} = 'open'; $w->{until} = time + HELD; }
			else { finish_order($w); }
		}
		elsif ($1 eq 'ended')
		{
			$fate{$_} = $w->{state} for @{ $w->{orders} };
			if ($down) { $w->{orders} = []; }
			else { place_order($w); }
		}
		else { die "unexpected: $1\n"; }
	}
	return;
}

# Killed before COMMIT was sent, an order is rolled back.  After that the client
# cannot know.
sub lost_writer
{
	my ($w) = @_;
	$select->remove($w->{out});
	delete $writer{ $w->{out} };
	end_session($w);
	die "a session has ended unexpectedly\n", slurp_errors() unless $down;
	$fate{$_} = 'rolled back' for @{ $w->{undone} };
	$fate{$_} = $w->{state} eq 'committed' ? 'unknown' : 'rolled back' for @{ $w->{orders} };
	return;
}

sub slurp_errors { seek ERRORS, 0, 0; return <ERRORS>; }

sub start_writers
{
	start_writer('writer') for 1 .. SESSIONS;
	start_writer('holder', CUSTOMERS + $_) for 1 .. HOLDERS;
	return;
}

# ---- Killing the server.

my $sink = { buffer => '' };
my %count = map { $_ => 0 } qw(first duplicate error deaf mute slow away);

# All of it at once, so that nobody gets the chance to tidy up.
sub kill_server
{
	open(my $file, '<', "$data/postmaster.pid") or die "postmaster.pid: $!\n";
	chomp(my $postmaster = readline $file);
	close $file;
	my @backends = grep { parent($_) == $postmaster } map { m{(\d+)} } glob '/proc/[0-9]*';
	my $open = grep { !$_->{idle} } values %writer;
	$down = 1;
	kill 'KILL', $postmaster, @backends;
	note(sprintf 'kill -9: the server, with %d processes and %d transactions under way', 1 + @backends, $open);

	# One that waits for its next command has not noticed yet.
	close $_->{in} for values %writer;
	while (%writer)
	{
		for my $handle ($select->can_read)
		{
			if ($handle == $news) { heard_from_sink($sink); }
			else { heard_from_writer($writer{$handle}); }
		}
	}
	my $begin = time;
	usleep(20_000) while time - $begin < 10 && grep { kill 0, $_ } $postmaster, @backends;
	system("pg_ctl -D '$data' -l '$data.log' -w -s start >'$data.pg_ctl.log' 2>&1") == 0 or die "the server does not start\n";
	$down = 0;
	note(sprintf 'the server is back after %.1f s', time - $begin);
	return;
}

sub parent
{
	open(my $stat, '<', "/proc/$_[0]/stat") or return 0;
	return (readline($stat) // '') =~ /\) \S (\d+)/ ? $1 : 0;
}

# ---- What is shown meanwhile.

my $begin = time;
my ($shown, $shown_first) = ($begin, 0);
my $monitor;
my %relay = map { $_ => 0 } qw(unsent retried unknown base_retried base_unknown);

sub commas { my $n = reverse int shift; $n =~ s/(\d{3})(?=\d)/$1,/g; return scalar reverse $n; }

sub written { return scalar grep { $_ eq 'committed' } values %fate; }

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

sub note
{
	print -t STDOUT ? "\r\e[K" : '', "  ! $_[0]\n";
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
	for my $handle ($select->can_read(0.05))
	{
		if ($handle == $news) { heard_from_sink($sink); }
		elsif ($writer{$handle}) { heard_from_writer($writer{$handle}); }
	}
	for my $w (values %writer)
	{
		finish_order($w) if ($w->{state} // '') eq 'open' && time >= $w->{until};
	}
	progress();
	return;
}

# ---- The show.

query('postgres', "CREATE DATABASE $_") for qw(shop warehouse);
query('shop', "SET client_min_messages = warning; $setup_shop");
query('shop', sprintf 'INSERT INTO customer SELECT i, 0 FROM generate_series(1, %d) i', CUSTOMERS + HOLDERS);
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
$select->add($news);
start_writers();
turn() while $next_order < ORDERS / 2;
kill_server();
restart_monitor();
start_writers();
turn() while grep { !$_->{idle} } values %writer;
end_session($_) for map { $select->remove($_->{out}); $_ } values %writer;
note('no more orders');
do { turn(); look_at_relay(); } until $relay{state} eq 'running' && $relay{unsent} == 0 && $relay{in_flight} == 0;
my $drained = time;
turn() while $select->can_read(0.2);
progress('last');

# ---- The ledger: from the tables, not from what we believe.

my $bad = 0;

sub check
{
	my ($ok, $what, $got, $more) = @_;
	$bad++ unless $ok;
	printf "  %-4s %-48s %6s%s\n", $ok ? 'ok' : 'BAD', $what, commas($got), $more ? "  $more" : '';
	return;
}

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

printf "\n%s\n", $bad
  ? 'Something is off.'
  : sprintf 'What was committed was done exactly once, what was rolled back not at all, in %.1f s.', $drained - $begin;
exit($bad ? 1 : 0);

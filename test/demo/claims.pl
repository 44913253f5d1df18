# A broker that delivers at least once, and a consumer that bills once.
#
# Each of 1,000 orders is delivered three times, shuffled, to four sessions at
# once.  Some transactions are rolled back after the work, and one session is
# killed in the middle of one; what was not acknowledged is delivered again, as
# brokers do.  The ledger at the end is read from the tables.
#
# Connects by the usual libpq variables.
use strict;
use warnings;
use IO::Handle;
use IO::Select;
use IPC::Open3;
use List::Util qw(shuffle);
use Time::HiRes qw(time);

use constant {
	ORDERS => 1000,
	COPIES => 3,
	SESSIONS => 4,
	PREFETCH => 10,       # deliveries a session holds before it acknowledges
	ROLLBACKS => 0.05,    # share of the transactions
	DEADLINE => 60,       # seconds
};

my $seed = $ENV{SEED} || int(rand(1e6));
srand($seed);
$SIG{PIPE} = 'IGNORE';    # a killed session shows at its other end
$SIG{ALRM} = sub { print "\nnot done after ", DEADLINE, " seconds\n"; exit 1 };
alarm DEADLINE;
STDOUT->autoflush(1);

sub bill
{
	my ($order) = @_;
	return <<"SQL";
WITH claim AS (SELECT idem.inbox_try_claim('billing', 'order-$order') AS mine)
INSERT INTO charge (order_id, amount) SELECT $order, 9.90 FROM claim WHERE mine;
SQL
}

my $setup = <<'SQL';
CREATE EXTENSION idem;
CREATE TABLE charge (order_id int, amount numeric);  -- no unique constraint
SQL

# ---- Sessions: psql, driven through pipes.

# what they complain about: a killed one does, and that is no news
my $errors = ($ENV{TMPDIR} || '/tmp') . "/demo.$$.err";
open(ERRORS, '+>', $errors) or die "$errors: $!\n";
unlink $errors;

sub session
{
	my $self = { todo => [], buffer => '' };
	$self->{process} = open3($self->{in}, $self->{out}, '>&ERRORS',
		'psql', '-XqAt', '-v', 'ON_ERROR_STOP=1');
	$self->{in}->autoflush(1);
	return $self;
}

# Run SQL and return the result; for the sessions that nobody waits for.
sub query
{
	my ($sql) = @_;
	open(my $psql, '-|', 'psql', '-XqAt', '-v', 'ON_ERROR_STOP=1', '-c', $sql) or die "psql: $!\n";
	my $result = join '', <$psql>;
	close $psql or die "failed: $sql\n";
	chomp $result;
	return $result;
}

sub slurp_errors { seek ERRORS, 0, 0; return <ERRORS>; }

# ---- The broker.

my @queue = shuffle(map { ($_) x COPIES } 1 .. ORDERS);
my %count = map { $_ => 0 } qw(delivered charged duplicate rolled_back killed);
my $killed = 0;
my $select = IO::Select->new;
my %session;    # by file handle

sub start
{
	my $s = session();
	$session{ $s->{out} } = $s;
	$select->add($s->{out});
	print { $s->{in} } "SELECT 'pid ' || pg_backend_pid();\n";
	return;
}

# Give a session its next delivery.  It answers with the number of rows that it
# inserted, in an open transaction.
sub deliver
{
	my ($s) = @_;
	push @{ $s->{todo} }, splice(@queue, 0, PREFETCH) unless @{ $s->{todo} };
	return $s->{idle} = 1 unless @{ $s->{todo} };
	$s->{idle} = 0;
	$count{delivered}++;
	print { $s->{in} } "BEGIN;\n", bill($s->{todo}[0]), "\\echo rows :ROW_COUNT\n";
	return;
}

# How does the transaction end?
sub finish
{
	my ($s, $rows) = @_;
	if (!$killed && $rows && @{ $s->{todo} } >= PREFETCH / 2 && $count{delivered} > ORDERS * COPIES / 2)
	{
		# It has claimed and charged, but not committed.
		$killed = $s->{pid};
		$count{killed}++;
		query("SELECT pg_terminate_backend($s->{pid})");
		print { $s->{in} } "COMMIT;\n";
		return;
	}
	my $how = rand() < ROLLBACKS ? 'rolled_back' : $rows ? 'charged' : 'duplicate';
	print { $s->{in} } $how eq 'rolled_back' ? "ROLLBACK;\n" : "COMMIT;\n", "\\echo end $how\n";
	return;
}

# Only now is a delivery acknowledged.
sub acknowledge
{
	my ($s, $how) = @_;
	my $order = shift @{ $s->{todo} };
	$count{$how}++;
	requeue($order) if $how eq 'rolled_back';
	return;
}

# Deliver again, at some later time.
sub requeue
{
	splice(@queue, int(rand(@queue + 1)), 0, $_) for @_;
	for my $s (grep { $_->{idle} } values %session) { deliver($s) if @queue; }
	return;
}

# A session is gone: what it had not acknowledged goes to a new one.
sub lost
{
	my ($s) = @_;
	$select->remove($s->{out});
	delete $session{ $s->{out} };
	waitpid $s->{process}, 0;
	die "a session has ended unexpectedly\n", slurp_errors() unless $killed && $s->{pid} == $killed;
	note(sprintf "killed backend %d inside its transaction; %d deliveries go to a new session",
		$killed, scalar @{ $s->{todo} });
	requeue(@{ $s->{todo} });
	start();
	return;
}

# ---- What is shown meanwhile.

my $begin = time;
my $shown = $begin;

sub commas { my $n = reverse shift; $n =~ s/(\d{3})(?=\d)/$1,/g; return scalar reverse $n; }

sub progress
{
	my ($last) = @_;
	my $live = -t STDOUT;
	return if !$last && time - $shown < ($live ? 0.1 : 0.5);
	$shown = time;
	my $line = sprintf '  %s deliveries: %s charged, %s duplicates stopped, %s rolled back  (%s/s)',
	  map { commas(int $_) } @count{qw(delivered charged duplicate rolled_back)},
	  $count{delivered} / (time - $begin + 1e-9);
	print $live ? "\r$line\e[K" : $line, $live && !$last ? '' : "\n";
	return;
}

sub note
{
	print -t STDOUT ? "\r\e[K" : '', "  ! $_[0]\n";
	return;
}

# ---- The show.

print "\n", $setup, "\n";
query("SET client_min_messages = warning; $setup");
print "For each delivery, in one transaction:\n\n", bill(17), "\n";
printf "%s orders, each delivered %d times, to %d sessions at once (SEED=%d)\n\n",
  commas(ORDERS), COPIES, SESSIONS, $seed;

start() for 1 .. SESSIONS;
while (grep { !$_->{idle} } values %session)
{
	for my $handle ($select->can_read)
	{
		my $s = $session{$handle};
		if (!sysread($handle, $s->{buffer}, 4096, length $s->{buffer})) { lost($s); next; }
		while ($s->{buffer} =~ s/^(.*)\n//)
		{
			my ($word, $value) = split ' ', $1;
			if ($word eq 'pid') { $s->{pid} = $value; deliver($s); }
			elsif ($word eq 'rows') { finish($s, $value); }
			elsif ($word eq 'end') { acknowledge($s, $value); deliver($s); }
			else { die "unexpected: $word\n"; }
		}
	}
	progress();
}
progress('last');
for my $s (values %session) { close $s->{in}; waitpid $s->{process}, 0; }

# ---- The ledger: from the tables, not from what we believe.

my $bad = 0;

sub check
{
	my ($what, $got, $want, $sql) = @_;
	my $ok = $got == $want;
	$bad++ unless $ok;
	printf "  %-4s %-38s %6s%s\n", $ok ? 'ok' : 'BAD', $what, commas($got),
	  $ok ? '' : ' instead of ' . commas($want);
	print "       $sql\n" if $sql;
	return;
}

sub check_sql { my ($what, $want, $sql) = @_; return check($what, query($sql), $want, $sql); }

print "\nLedger\n";
check('deliveries acknowledged', $count{charged} + $count{duplicate}, ORDERS * COPIES);
check('deliveries in total', $count{delivered},
	ORDERS * COPIES + $count{rolled_back} + $count{killed});
printf "       of which %d were rolled back and %d was killed; all were delivered again\n",
  @count{qw(rolled_back killed)};
check('sessions killed', $count{killed}, 1);
check('duplicates stopped', $count{duplicate}, ORDERS * (COPIES - 1));
check_sql('charges made', ORDERS, 'SELECT count(*) FROM charge');
check_sql('orders charged twice', 0,
	'SELECT count(*) FROM (SELECT order_id FROM charge GROUP BY order_id HAVING count(*) > 1) twice');
check_sql('orders not charged', 0,
	"SELECT count(*) FROM generate_series(1, @{[ORDERS]}) o WHERE o NOT IN (SELECT order_id FROM charge)");
check_sql('claims kept', ORDERS, "SELECT count(*) FROM idem.inbox WHERE consumer = 'billing'");

printf "\n%s\n", $bad
  ? "Something is off."
  : sprintf 'Every order was charged exactly once, in %.1f s.', time - $begin;
exit($bad ? 1 : 0);

# Orders and the consumers that follow them, all in one database, whatever breaks.
#
#   order + outbox_enqueue() --> relay --> ledger: handler add_to_ledger(), in order per customer
#                                      \-> mail:   handler send_mail(), which fails at random
#
# Several sessions write orders; some roll back, some stay open for seconds.
# The handler of one consumer raises an error every now and then, and can never
# do one particular order.  In the middle the whole server is killed with -9 and
# started again.  What it came to is read from the tables at the end.
#
# Connects by the usual libpq variables; the argument is the data folder.
use strict;
use warnings;
use FindBin;
use IO::Handle;
use lib $FindBin::RealBin;
use Shop;
use Time::HiRes qw(time usleep);

use constant {
	POISON => 666,          # an order that the mail cannot be sent for
	FAILS => 0.1,           # how often it cannot be sent just now
	ATTEMPTS => 12,         # that many failures in a row are no chance
	DEADLINE => 120,        # seconds
};

my $data = shift // die "usage: consumers.pl DATA\n";
my $seed = $ENV{SEED} || int(rand(1e6));
srand($seed);
$SIG{PIPE} = 'IGNORE';
$SIG{ALRM} = sub { print "\nnot done after ", DEADLINE, " seconds\n"; exit 1 };
alarm DEADLINE;
STDOUT->autoflush(1);

my $setup_consumers = sprintf <<'SQL', POISON, FAILS, ATTEMPTS;
CREATE TABLE ledger (entry bigserial, order_id int, customer int, n int);  -- no unique constraint
CREATE TABLE mail (order_id int);

CREATE FUNCTION add_to_ledger(m idem.message) RETURNS void LANGUAGE sql AS $$
    INSERT INTO ledger (order_id, customer, n)
    SELECT (m.payload->>'id')::int, (m.payload->>'customer')::int, (m.payload->>'n')::int
$$;
CREATE FUNCTION send_mail(m idem.message) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO mail SELECT (m.payload->>'id')::int;
    IF (m.payload->>'id')::int = %d THEN RAISE 'no such address'; END IF;
    IF random() < %s THEN RAISE 'busy'; END IF;
END $$;

SELECT idem.consumer_create('ledger', handler => 'add_to_ledger', topics => ARRAY['order.*'],
                            ordering => 'key', concurrency => 2);
SELECT idem.consumer_create('mail', handler => 'send_mail', topics => ARRAY['order.*'],
                            max_attempts => %d, backoff => '10 ms', backoff_max => '200 ms');
SQL

# ---- What is shown meanwhile.

my $begin = time;
my ($shown, $shown_done) = ($begin, 0);
my $monitor;
my %now;

sub look
{
	my $row = ask($monitor, <<'SQL');
SELECT (SELECT count(*) FROM ledger), (SELECT count(*) FROM mail),
       sum(pending + parked), sum(dead), (SELECT sum(retried) FROM idem.stat_consumer),
       (SELECT count(*) FROM idem.outbox) FROM idem.consumer_status;
SQL
	die "the monitor has ended\n" unless defined $row;
	chomp $row;
	@now{qw(ledger mail waiting dead retried outbox)} = map { $_ eq '' ? 0 : $_ } split /\|/, $row, -1;
	return;
}

sub progress
{
	my ($last) = @_;
	my $live = -t STDOUT;
	return if !$last && time - $shown < ($live ? 0.2 : 1);
	look();
	my $done = $now{ledger} + $now{mail};
	my $line = sprintf '  %5.1f s  %s committed, ledger %s, mail %s (%s/s), %s wait, %s tried again, %s dead',
	  time - $begin, commas(written()), commas($now{ledger}), commas($now{mail}),
	  commas(($done > $shown_done ? $done - $shown_done : 0) / (time - $shown + 1e-9)),
	  commas($now{waiting}), commas($now{retried}), commas($now{dead});
	($shown, $shown_done) = (time, $done);
	print $live ? "\r$line\e[K" : $line, $live && !$last ? '' : "\n";
	return;
}

sub turn
{
	writers_turn();
	progress();
	return;
}

# ---- The show.

query('postgres', 'CREATE DATABASE shop');
query('shop', "SET client_min_messages = warning; $setup_shop");
fill_shop();
query('shop', "SET client_min_messages = warning; $setup_consumers");
print "\n${setup_shop}\n${setup_consumers}\n";
print "For each order, in one transaction:\n\n", order_sql(17, 4), "\n";
printf "%s orders of %d sessions, %d of which leave their transactions open for %d s; some roll back (SEED=%d).\n",
  commas(ORDERS), SESSIONS + HOLDERS, HOLDERS, HELD, $seed;
printf "The handler of mail fails for %d %% of the messages, and always for order %d.\n\n", 100 * FAILS, POISON;

$begin = $shown = time;
$monitor = session('shop');
start_writers();
turn() until all_written(0.5);
kill_server($data);
end_session($monitor);
$monitor = session('shop');
start_writers();
turn() until writers_idle();
end_writers();
note('no more orders');

# It is over when everything has been handed over and nothing waits.
my $left = <<'SQL';
SELECT (SELECT sum(pending + parked) FROM idem.consumer_status)
	 + (SELECT count(*) FROM orders o WHERE NOT EXISTS (SELECT FROM ledger l WHERE l.order_id = o.id));
SQL
do { progress(); usleep(50_000); } until ask($monitor, $left) == 0;
my $drained = time;
progress('last');

# ---- The ledger: from the tables, not from what we believe.

my %ordered = map { $_ => 1 } split /\n/, query('shop', 'SELECT id FROM orders');
my @told = grep { $fate{$_} eq 'committed' } keys %fate;
my @rolled_back = grep { $fate{$_} eq 'rolled back' } keys %fate;
my @unknown = grep { $fate{$_} eq 'unknown' } keys %fate;
my $poison = $ordered{ +POISON } ? 1 : 0;

print "\nLedger\n";
check(!(grep { !$ordered{$_} } @told), 'orders whose COMMIT was answered', scalar @told, 'all of them are in the table');
check(!(grep { $ordered{$_} } @rolled_back), 'orders rolled back, or open when the server died', scalar @rolled_back, 'none of them is');
check(@told + (grep { $ordered{$_} } @unknown) == keys %ordered, 'COMMITs that the server died on', scalar @unknown,
	sprintf '%d of them had committed', scalar grep { $ordered{$_} } @unknown);
for my $consumer (qw(ledger mail))
{
	my %done = map { split /\|/ } split /\n/, query('shop', "SELECT order_id, count(*) FROM $consumer GROUP BY 1");
	my @missing = grep { !$done{$_} && !($consumer eq 'mail' && $_ == POISON) } keys %ordered;
	check(keys %done == keys(%ordered) - ($consumer eq 'mail' ? $poison : 0), "processed by $consumer", scalar keys %done);
	check(!@missing, "  orders that it has not processed", scalar @missing);
	check(!(grep { $_ > 1 } values %done), '  processed more than once', scalar grep { $_ > 1 } values %done);
	check(!(grep { !$ordered{$_} } keys %done), '  processed though rolled back', scalar grep { !$ordered{$_} } keys %done);
}
my $swapped = query('shop', <<'SQL');
SELECT count(*) FROM (SELECT n, lag(n) OVER (PARTITION BY customer ORDER BY entry) AS before FROM ledger) s WHERE n <= before
SQL
check($swapped == 0, 'entries out of order for their customer', $swapped);
my ($dead, $attempts) = split /\|/, query('shop', q(SELECT count(*), coalesce(max(attempts), 0) FROM idem.dead_letter));
check($dead == $poison, 'dead letters', $dead, $poison ? "order ${\POISON}, after $attempts attempts" : "order ${\POISON} was rolled back");

printf "\n%s\n", bad_checks()
  ? 'Something is off.'
  : sprintf 'What was committed was processed exactly once by each consumer, what was rolled back not at all, in %.1f s.', $drained - $begin;
exit(bad_checks() ? 1 : 0);

# What the demos have in common: sessions that write orders, some of which roll
# back or stay open, a server that is killed, and a ledger of what became of it.
package Shop;

use strict;
use warnings;
use Exporter 'import';
use IO::Handle;
use IO::Select;
use IPC::Open3;
use Time::HiRes qw(time usleep);

our @EXPORT = qw(ORDERS CUSTOMERS SESSIONS HOLDERS HELD $setup_shop fill_shop order_sql session end_session ask query
  $select %fate all_written start_writers end_writers writers_turn writers_idle listen_to kill_server
  commas written note check bad_checks);

use constant {
	ORDERS => 3000,
	SESSIONS => 4,          # that write one order at a time
	HOLDERS => 2,           # that write a few and leave the transaction open
	HELD => 3,              # seconds, so long
	CUSTOMERS => 400,
};

our $setup_shop = <<'SQL';
CREATE EXTENSION idem;
CREATE TABLE customer (id int PRIMARY KEY, orders int);
CREATE TABLE orders (id int, customer int, n int);
SQL

sub fill_shop
{
	query('shop', sprintf 'INSERT INTO customer SELECT i, 0 FROM generate_series(1, %d) i', CUSTOMERS + HOLDERS);
	return;
}

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

# ---- The writers.

our $select = IO::Select->new;
my %writer;               # by file handle
my $next_order = 1;
our %fate;                 # of orders: committed, rolled back, or unknown
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

sub end_writers
{
	for my $w (values %writer)
	{
		$select->remove($w->{out});
		end_session($w);
	}
	%writer = ();
	return;
}

# Have half of the orders, or all of them, been begun?
sub all_written { my ($share) = @_; return $next_order >= ORDERS * $share; }
sub writers_idle { return !grep { !$_->{idle} } values %writer; }

# ---- Other things to listen to: called when a file handle has something.

my %listener;

sub listen_to
{
	my ($handle, $heard) = @_;
	$select->add($handle);
	$listener{$handle} = $heard;
	return;
}

sub listen
{
	my ($timeout) = @_;
	for my $handle ($select->can_read($timeout))
	{
		if ($listener{$handle}) { $listener{$handle}->(); }
		elsif ($writer{$handle}) { heard_from_writer($writer{$handle}); }
	}
	return;
}

# Whatever the writers do next.
sub writers_turn
{
	Shop::listen(0.05);
	for my $w (values %writer)
	{
		finish_order($w) if ($w->{state} // '') eq 'open' && time >= $w->{until};
	}
	return;
}

# ---- Killing the server.

# All of it at once, so that nobody gets the chance to tidy up.
sub kill_server
{
	my ($data) = @_;
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
	Shop::listen(undef) while %writer;
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

# ---- What is shown.

sub commas { my $n = reverse int shift; $n =~ s/(\d{3})(?=\d)/$1,/g; return scalar reverse $n; }
sub written { return scalar grep { $_ eq 'committed' } values %fate; }

sub note
{
	print -t STDOUT ? "\r\e[K" : '', "  ! $_[0]\n";
	return;
}

my $bad = 0;

sub check
{
	my ($ok, $what, $got, $more) = @_;
	$bad++ unless $ok;
	printf "  %-4s %-48s %6s%s\n", $ok ? 'ok' : 'BAD', $what, commas($got), $more ? "  $more" : '';
	return;
}

sub bad_checks { return $bad; }

1;

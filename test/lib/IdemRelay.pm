# A cluster whose relay talks to real servers with the couriers as they are
# installed, and a proxy that loses answers.
package IdemRelay;

use strict;
use warnings;
use Exporter 'import';
use IO::Select;
use IO::Socket::INET;
use POSIX ();
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);
use Idem;

our @EXPORT = qw(relay_cluster sql await_that await_sql put_file in_key_order proxy leaks);

my $node;

# relay_cluster($name, $secrets): one cluster per test
sub relay_cluster
{
	my ($name, $secrets) = @_;
	$node = cluster($name, {}, "idem.secrets_dir = '$secrets'", 'max_worker_processes = 20');
	return $node;
}

sub sql { return $node->safe_psql('postgres', $_[0]) }

sub await_that
{
	my ($what, $condition, $seconds) = @_;
	my $end = time + ($seconds // 30);
	my $result;
	usleep(20_000) while !($result = $condition->()) && time < $end;
	ok($result, $what) or diag(sql('SELECT * FROM idem.relay_status'));
	return $result;
}

sub await_sql
{
	my ($what, $query, $expected) = @_;
	my $is;
	return await_that($what, sub { ($is = sql($query)) eq $expected }) || diag($is);
}

sub put_file
{
	my ($path, $content, $mode) = @_;
	open my $file, '>:raw', $path or die "$path: $!";
	print $file $content;
	close $file or die $!;
	chmod $mode, $path if defined $mode;
	return;
}

# in_key_order([key, number], ...): do the first deliveries of each key rise?
sub in_key_order
{
	my (%last, %seen);
	for (@_)
	{
		my ($key, $n) = @$_;
		next if $seen{"$key/$n"}++;
		return 0 if ($last{$key} // 0) > $n;
		$last{$key} = $n;
	}
	return 1;
}

# proxy($port): forwards; after lose() the answers get lost, until restore().
sub proxy
{
	my ($target) = @_;
	my $listen = IO::Socket::INET->new(Listen => 50, LocalAddr => '127.0.0.1') or die $!;
	my $parent = $$;
	my $pid = fork // die $!;
	if ($pid == 0)
	{
		$SIG{PIPE} = 'IGNORE';
		eval { proxy_loop($listen, $target, $parent) };
		POSIX::_exit(0);
	}
	return bless { pid => $pid, port => $listen->sockport }, 'IdemRelay::Proxy';
}

sub proxy_loop
{
	my ($listen, $target, $parent) = @_;
	my ($lose, $restored) = (0, 0);
	my (%peer, %answers);
	my $select = IO::Select->new($listen);
	my $hang_up = sub {
		for my $socket (grep { defined } $_[0], delete $peer{ $_[0] })
		{
			$select->remove($socket);
			delete $peer{$socket};
			delete $answers{$socket};
			close $socket;
		}
	};
	local $SIG{USR1} = sub { $lose = 1 };
	local $SIG{USR2} = sub { $lose = 0; $restored = 1 };
	while (getppid == $parent)
	{
		my @ready = $select->can_read(0.1);
		if ($restored)
		{
			# what has lost bytes is of no more use
			$restored = 0;
			$hang_up->($_) for grep { $_ != $listen } $select->handles;
			next;
		}
		for my $from (@ready)
		{
			if ($from == $listen)
			{
				my $in = $listen->accept or next;
				my $out = IO::Socket::INET->new("127.0.0.1:$target");
				close $in, next unless $out;
				@peer{ $in, $out } = ($out, $in);
				$answers{$out} = 1;
				$select->add($in, $out);
				next;
			}
			my $to = $peer{$from} or next;
			my $n = sysread $from, my $data, 65536;
			if (!$n) { $hang_up->($from) }
			elsif ($lose && $answers{$from}) { }
			else
			{
				for (my $at = 0; $at < $n;)
				{
					$at += syswrite($to, $data, $n - $at, $at) || last;
				}
			}
		}
	}
	return;
}

# Where a secret shows that should show nowhere.
sub leaks
{
	my ($canary) = @_;
	my $slurp = sub { local $/; open my $f, '<:raw', $_[0] or return ''; return <$f> // '' };
	my @places;
	my ($out, $err) = ('', '');
	IPC::Run::run([ 'pg_dumpall', '-h', $node->host, '-p', $node->port ], '>', \$out, '2>', \$err)
	  or die "pg_dumpall: $err";
	die 'nothing was dumped' unless $out =~ /CREATE SERVER/;
	push @places, 'dump' if $out =~ /$canary/;
	push @places, 'log' if $slurp->($node->logfile) =~ /$canary/;
	for my $view (qw(idem.relay_status idem.stuck idem.dead_letter idem.relay_parked idem.relay_answer
		pg_stat_activity pg_foreign_server pg_settings))
	{
		push @places, $view if sql("SELECT v FROM $view v") =~ /$canary/;
	}
	for my $path (glob '/proc/[0-9]*/cmdline /proc/[0-9]*/environ')
	{
		push @places, $path if $slurp->($path) =~ /$canary/;
	}
	return join ' ', @places;
}

package IdemRelay::Proxy;

sub lose { my ($self) = @_; return kill USR1 => $self->{pid} }
sub restore { my ($self) = @_; return kill USR2 => $self->{pid} }

sub DESTROY
{
	my ($self) = @_;
	local ($?, $!);
	kill KILL => $self->{pid};
	waitpid $self->{pid}, 0;
	return;
}

1;

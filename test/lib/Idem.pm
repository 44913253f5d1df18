# Helpers of the TAP tests: clusters with idem, crashes, sessions.
package Idem;

use strict;
use warnings;
use Exporter 'import';
use IPC::Run ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Time::HiRes 'usleep';

our @EXPORT = qw(cluster postmaster crash await_running await_waiting
  session leave start_sql finish_sql sqlstate extension_available);

# cluster($name, \%options, @settings): a running cluster with idem preloaded
# and created in database postgres.  Options: those of Cluster.pm's init, and
# bare => 1 for one without idem that is not started.
sub cluster
{
	my ($name, $options, @settings) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);

	$node->init(extra => [ '--encoding=UTF8', '--locale=C' ], %$options);
	$node->append_conf('postgresql.conf', $_) for @settings;
	return $node if $options->{bare};

	# A claim by itself is just what most tests want.
	$node->append_conf('postgresql.conf', <<'CONF');
shared_preload_libraries = 'idem'
idem.claim_outside_transaction = allow
CONF
	$node->start;
	$node->safe_psql('postgres', 'CREATE EXTENSION idem');
	return $node;
}

sub postmaster
{
	my ($node) = @_;
	my ($pid) = split /\n/, slurp_file($node->data_dir . '/postmaster.pid');
	return $pid;
}

# The parent of a process, or nothing if there is no such process.
sub parent_of
{
	my ($pid) = @_;
	open my $file, '<', "/proc/$pid/stat" or return;
	my $line = <$file>;
	close $file;
	return defined $line && $line =~ /\) [A-Za-z] (\d+)/ ? $1 : undef;
}

sub children
{
	my ($parent) = @_;
	my @pids;
	for my $path (glob '/proc/[0-9]*')
	{
		my ($pid) = $path =~ /(\d+)$/;
		push @pids, $pid if (parent_of($pid) // 0) == $parent;
	}
	return @pids;
}

# A process that is dead but not yet buried still counts: a postmaster takes it
# for alive, too.
sub await_gone
{
	my @pids = @_;
	for (1 .. 100 * $PostgreSQL::Test::Utils::timeout_default)
	{
		@pids = grep { defined parent_of($_) } @pids or return;
		usleep(10_000);
	}
	die "processes @pids do not end";
}

# Kill the postmaster; its children too, unless orphans => 1: then they find out
# by themselves.  Returns when all are gone, so that the cluster can be started.
sub crash
{
	my ($node, %options) = @_;
	my $postmaster = postmaster($node);

	# a stopped postmaster makes no more children
	kill STOP => $postmaster;
	my @children = children($postmaster);
	kill STOP => @children unless $options{orphans};
	$node->kill9;
	kill KILL => @children unless $options{orphans};
	await_gone($postmaster, @children);
	return;
}

# Wait until the maintenance worker is there.
sub await_running
{
	my ($node, $db) = @_;
	return $node->poll_query_until($db // 'postgres',
		"SELECT count(*) = 2 FROM idem.retention_status WHERE state = 'running'");
}

# Wait until as many sessions as that wait for a lock.
sub await_waiting
{
	my ($node, $n) = @_;
	return $node->poll_query_until('postgres',
		"SELECT count(*) = $n FROM pg_stat_activity WHERE wait_event_type = 'Lock'");
}

# A session that stays.
sub session
{
	my ($node, $db) = @_;
	my $session = $node->background_psql($db // 'postgres', on_error_stop => 0);
	$session->set_query_timer_restart;
	return $session;
}

# End a session, be its server alive or not.
sub leave
{
	for my $session (@_)
	{
		eval { $session->quit; 1 } or eval { $session->{run}->kill_kill };
	}
	return;
}

# Start SQL without waiting for the answer; finish_sql() waits for it.
sub start_sql
{
	my ($node, $sql, $db) = @_;
	my $job = { out => '', err => '' };
	my $timeout = IPC::Run::timeout($PostgreSQL::Test::Utils::timeout_default);
	$job->{run} = IPC::Run::start(
		[ $node->installed_command('psql'), '-XAtq', '-d', $node->connstr($db // 'postgres'),
			'-v', 'ON_ERROR_STOP=1', '-c', $sql ],
		'<', \undef, '>', \$job->{out}, '2>', \$job->{err}, $timeout);
	return $job;
}

sub finish_sql
{
	my ($job) = @_;
	eval { $job->{run}->finish; 1 } or die "no answer: $@";
	chomp(my $out = $job->{out});
	return $job->{err} eq '' ? $out : "$out$job->{err}";
}

# The SQLSTATE with which SQL fails, or what it returns if it does not.
sub sqlstate
{
	my ($node, $sql, $db) = @_;
	my ($rc, $out, $err) = $node->psql($db // 'postgres', "\\set VERBOSITY sqlstate\n$sql");
	return $err =~ /(?:ERROR|FATAL):\s+(\w{5})/ ? $1 : "no error: $out";
}

sub extension_available
{
	my ($node, $name) = @_;
	return $node->safe_psql('postgres',
		"SELECT count(*) FROM pg_available_extensions WHERE name = '$name'");
}

1;

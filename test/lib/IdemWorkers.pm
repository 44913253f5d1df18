# Helpers for the tests of the background workers: who runs, and waiting for it.
package IdemWorkers;

use strict;
use warnings;
use Exporter 'import';
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

our @EXPORT = qw(server workers_become worker_pid settled terminate old_claims
  mid_purge set_and_reload status_becomes relay_becomes log_position logged
  log_is_clean stop_in_time);

# A server with idem preloaded, and these settings; not started.
sub server
{
	my ($name, $settings, %init) = @_;
	my $node = PostgreSQL::Test::Cluster->new($name);
	$node->init(%init);
	$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'");
	$node->append_conf('postgresql.conf', 'max_worker_processes = 20');
	$node->append_conf('postgresql.conf', $settings);
	return $node;
}

# Wait until exactly these databases have workers, and one of each kind.  The
# relays may be others.
sub workers_become
{
	my ($node, $expected, $test, $relays) = @_;
	$relays //= $expected;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok( $node->poll_query_until('postgres', q{
			SELECT string_agg(datname, ' ' ORDER BY datname)
					 FILTER (WHERE backend_type = 'idem maintenance'),
				   string_agg(datname, ' ' ORDER BY datname)
					 FILTER (WHERE backend_type = 'idem relay')
			FROM pg_stat_activity},
			"$expected|$relays"),
		$test // ($expected eq '' ? 'no workers' : "workers: $expected"));
	return;
}

sub worker_pid
{
	my ($node, $db, $kind) = @_;
	$kind //= 'maintenance';
	return $node->safe_psql('postgres', qq{
		SELECT pid FROM pg_stat_activity
		WHERE backend_type = 'idem $kind' AND datname = '$db'});
}

# Wait until the maintenance worker of this database has completed a run, and
# the relay is there, unless it is switched off; returns the pid of the former.
# A look at the status is a use of the extension, so this also gets a worker
# for a database that idem has not heard of.
sub settled
{
	my ($node, $db) = @_;
	$node->poll_query_until($db, q{
		SELECT count(*) = 1
		FROM idem.retention_status s JOIN pg_stat_activity a USING (pid)
		WHERE s.what = 'key' AND s.reason IS NULL AND s.last_run > a.backend_start
		  AND EXISTS (SELECT FROM idem.worker_status() r JOIN pg_stat_activity USING (pid)
					  WHERE r.what = 'relay' AND r.state = 'running')
			= current_setting('idem.relay')::boolean})
	  or die "no worker in $db";
	return worker_pid($node, $db);
}

# End processes of the server, and wait until they have gone.
sub terminate
{
	my ($node, @pids) = @_;
	my $pids = join(', ', @pids);
	$node->safe_psql('postgres',
		"SELECT pg_terminate_backend(pid) FROM unnest(ARRAY[$pids]) pid");
	$node->poll_query_until('postgres',
		"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid IN ($pids))")
	  or die "processes $pids do not end";
	return;
}

# Put expired claims into the table.  A worker that has read it before would
# not look at them again soon, so it has to begin anew.
sub old_claims
{
	my ($node, $db, $count) = @_;
	$node->safe_psql($db, qq{
		INSERT INTO idem.inbox_claim
		SELECT gen_random_uuid(), 1, extract(epoch FROM now() - timestamptz '2000-01-01 00:00+00')
		FROM generate_series(1, $count);
		UPDATE idem.inbox_claim SET claimed_at = 0;
		SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE backend_type = 'idem maintenance' AND datname = '$db'});
	return;
}

# Wait until the worker has removed some claims; there are more.
sub mid_purge
{
	my ($node, $db) = @_;
	$node->poll_query_until($db, q{
		SELECT removed_last > 0 AND EXISTS (SELECT FROM idem.inbox_claim)
		FROM idem.retention_status WHERE what = 'inbox'})
	  or die "no purge in $db";
	return;
}

sub set_and_reload
{
	my ($node, $name, $value) = @_;
	$node->safe_psql('postgres', "ALTER SYSTEM SET $name = '$value'");
	$node->reload;
	return;
}

# Wait until the status view says this.
sub status_becomes
{
	my ($node, $db, $condition, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok( $node->poll_query_until($db,
			"SELECT bool_and($condition) FROM idem.retention_status"),
		$test) or diag($node->safe_psql($db, 'SELECT * FROM idem.retention_status'));
	return;
}

# The same of the relay.
sub relay_becomes
{
	my ($node, $db, $condition, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	ok( $node->poll_query_until($db,
			"SELECT $condition FROM idem.worker_status() WHERE what = 'relay'"),
		$test) or diag($node->safe_psql($db, 'SELECT * FROM idem.worker_status()'));
	return;
}

sub log_position
{
	my ($node) = @_;
	return -s $node->logfile;
}

# The lines of the log since a position that match.
sub logged
{
	my ($node, $pattern, $since) = @_;
	return grep { /$pattern/ }
	  split(/\n/, substr(slurp_file($node->logfile), $since // 0));
}

# Nothing died, but for as many processes as we killed ourselves.
sub log_is_clean
{
	my ($node, $killed) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	is(join("\n", logged($node, qr/TRAP:|PANIC:|detected double free|stuck spinlock/)),
		'', 'no assertion and no panic in the log of ' . $node->name);
	is(scalar(logged($node, qr/was terminated by signal/)), $killed // 0,
		'nothing died in ' . $node->name . ' that was not killed');
	return;
}

sub stop_in_time
{
	my ($node, $test) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $begin = time;
	$node->stop('fast');
	my $took = time - $begin;
	ok($took < 10, $test) or diag("it took $took seconds");
	return;
}

1;

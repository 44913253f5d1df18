# The workers: one of each kind per database that has the extension, whatever
# happens to them, to the launcher, to the extension and to the database.
use strict;
use warnings;
use IdemWorkers;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# With such a naptime nothing happens by itself: what a test sees was caused by
# the command before.
my $node = server('main', q{
	idem.maintenance_naptime = '1d'
	restart_after_crash = on
	autovacuum = off
});
$node->start;

sub sql { return $node->safe_psql(@_) }

sub launcher_pid
{
	return sql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem launcher'");
}

sub new_launcher
{
	my ($old) = @_;
	ok($node->poll_query_until('postgres', qq{
			SELECT count(*) = 1 FROM pg_stat_activity
			WHERE backend_type = 'idem launcher' AND pid <> $old}),
		'the launcher comes back');
	return;
}

#
# CREATE EXTENSION
#
sql('postgres', "CREATE DATABASE $_") for qw(a b c d);
workers_become($node, '', 'no workers without the extension');

sql('a', 'CREATE EXTENSION idem');
workers_become($node, 'a', 'CREATE EXTENSION starts a worker');
sql('b', 'CREATE EXTENSION idem');
workers_become($node, 'a b', 'and another one in another database');

sql('c', 'BEGIN; CREATE EXTENSION idem; ROLLBACK');
sql('c', 'BEGIN; SAVEPOINT s; CREATE EXTENSION idem; ROLLBACK TO s; COMMIT');
sql('d', 'BEGIN; SAVEPOINT s; CREATE EXTENSION idem; RELEASE s; COMMIT');
settled($node, 'd');
workers_become($node, 'a b d', 'but not if that is rolled back');

is(sql('a', "SELECT string_agg(what || ' ' || state || ' ' || (pid = "
			. worker_pid($node, 'a')
			. ")::text, ', ' ORDER BY what) FROM idem.retention_status"),
	'inbox running true, key running true', 'the status view knows the worker');
relay_becomes($node, 'a', "state = 'running' AND reason IS NULL AND pid = "
	  . worker_pid($node, 'a', 'relay'), 'the status of the relay knows it, too');

#
# DROP EXTENSION
#
# A command that drops it keeps the worker away until the transaction ends.
for my $command (
	'BEGIN; DROP EXTENSION idem; ROLLBACK',
	'BEGIN; SAVEPOINT s; DROP EXTENSION idem; ROLLBACK TO s; COMMIT',
	'BEGIN; DROP EXTENSION idem; CREATE EXTENSION idem; COMMIT',
	'BEGIN; DROP SCHEMA idem CASCADE; ROLLBACK')
{
	settled($node, 'a');
	sql('a', $command);
	settled($node, 'a');
	workers_become($node, 'a b d', "there is a worker after $command");
}

my $pid = settled($node, 'a');
sql('postgres', 'CREATE ROLE nobody LOGIN CREATEDB');
for my $command ('DROP EXTENSION idem', 'DROP SCHEMA idem CASCADE')
{
	my (undef, undef, $stderr) = $node->psql('a', $command, extra_params => [ '-U', 'nobody' ]);
	like($stderr, qr/must be owner/, "not for everybody: $command");
}
my (undef, undef, $stderr) = $node->psql('a', 'CREATE EXTENSION idem');
like($stderr, qr/already exists/, 'it is there already');
is(worker_pid($node, 'a'), $pid, 'none of that ends the worker');

sql('d', 'DROP EXTENSION idem');
workers_become($node, 'a b', 'DROP EXTENSION ends the worker');

sql('b', 'BEGIN; DROP SCHEMA idem CASCADE; COMMIT');
workers_become($node, 'a', 'as does DROP SCHEMA idem CASCADE');

# In quick succession, so that the worker is met in every state.
sql('b', 'CREATE EXTENSION idem; DROP EXTENSION idem; ' x 25);
sql('d', 'CREATE EXTENSION idem');
settled($node, 'd');
workers_become($node, 'a d', 'there is none if the extension is created and dropped');
sql('d', 'DROP EXTENSION idem');

for my $round (1 .. 15)
{
	sql('b', 'CREATE EXTENSION idem');
	$pid = settled($node, 'b');
	sql('b', 'DROP EXTENSION idem');
	$node->poll_query_until('postgres',
		"SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)")
	  or last;
}
workers_become($node, 'a', 'the worker never misses a DROP EXTENSION');

sql('b', 'CREATE EXTENSION idem');
sql('b', 'DROP EXTENSION idem; CREATE EXTENSION idem; ' x 25);
workers_become($node, 'a b', 'nor does the launcher miss a CREATE EXTENSION');

#
# DROP EXTENSION in the middle of a purge
#
set_and_reload($node, 'idem.maintenance_delay', '200ms');
old_claims($node, 'b', 150_000);
mid_purge($node, 'b');
sql('b', 'DROP EXTENSION idem');
workers_become($node, 'a', 'DROP EXTENSION ends a worker that is removing rows');

# The same for a while, and not for good.
sql('b', 'CREATE EXTENSION idem');
settled($node, 'b');
old_claims($node, 'b', 150_000);
mid_purge($node, 'b');
my $session = $node->background_psql('b');
$session->query_safe('BEGIN; DROP EXTENSION idem;');
workers_become($node, 'a', 'it goes before that commits');
$session->query_safe('ROLLBACK;');
mid_purge($node, 'b');
workers_become($node, 'a b', 'and goes on if it does not');
$session->query_safe('BEGIN; DROP EXTENSION idem; COMMIT;');
$session->quit;
workers_become($node, 'a', 'it stays away if it does');
is(join("\n", grep { !/administrator command/ } logged($node, qr/\d\] (ERROR|FATAL):/)), '',
	'no worker has died of all this');
set_and_reload($node, 'idem.maintenance_delay', '0');

#
# Workers and launcher are terminated
#
my %pids;
for my $round (1 .. 50)
{
	$pid = settled($node, 'a');
	$pids{$pid} = 1;
	terminate($node, $pid);
}
$pid = settled($node, 'a');
is(scalar(keys %pids), 50, 'a worker that is terminated comes back, 50 times');

%pids = ();
for my $round (1 .. 50)
{
	settled($node, 'a');
	my $relay = worker_pid($node, 'a', 'relay');
	$pids{$relay} = 1;
	terminate($node, $relay);
}
is(settled($node, 'a'), $pid, 'the relay can be terminated without the other worker');
is(scalar(keys %pids), 50, 'and comes back, 50 times');

# Both at once, and with the launcher.
terminate($node, $pid, worker_pid($node, 'a', 'relay'));
workers_become($node, 'a', 'all workers of a database come back');
settled($node, 'a');
my $launcher = launcher_pid();
terminate($node, $launcher, worker_pid($node, 'a'), worker_pid($node, 'a', 'relay'));
new_launcher($launcher);
workers_become($node, 'a', 'with the launcher, too');

sql('b', 'CREATE EXTENSION idem');
my %worker = map { $_ => settled($node, $_), "$_ relay" => worker_pid($node, $_, 'relay') } qw(a b);
$launcher = launcher_pid();
for my $round (1 .. 3)
{
	terminate($node, $launcher);
	new_launcher($launcher);
	$launcher = launcher_pid();
}
workers_become($node, 'a b', 'a new launcher starts no second workers');
is_deeply({ map { $_ => worker_pid($node, $_), "$_ relay" => worker_pid($node, $_, 'relay') } qw(a b) },
	\%worker,
	'and leaves the first ones alone');

# No launcher for about a second, in which everything changes.
sql('postgres', 'CREATE DATABASE e');
terminate($node, $launcher);
sql('c', 'CREATE EXTENSION idem');
sql('b', 'DROP EXTENSION idem');
sql('postgres', 'DROP DATABASE e');
terminate($node, $worker{a});
new_launcher($launcher);
workers_become($node, 'a c', 'a new launcher finds what has changed meanwhile');

#
# Crash and restart
#
sub crash
{
	my ($victim) = @_;
	my $before = log_position($node);
	kill('KILL', $victim) or die "could not kill $victim: $!";
	$node->wait_for_log(qr/all server processes terminated; reinitializing/, $before);
	$node->poll_query_until('postgres', 'SELECT true') or die 'no recovery';
	return;
}

crash(worker_pid($node, 'c'));
workers_become($node, 'a c', 'all workers are back after one was killed');
isnt(launcher_pid(), '', 'and the launcher');
crash(worker_pid($node, 'a', 'relay'));
workers_become($node, 'a c', 'all workers are back after a relay was killed');
crash(launcher_pid());
workers_become($node, 'a c', 'all workers are back after the launcher was killed');

$node->restart;
workers_become($node, 'a c', 'all workers are back after a restart');
settled($node, $_) for qw(a c);
isnt(launcher_pid(), '', 'and the launcher');

#
# Commands on databases
#
my $space = PostgreSQL::Test::Utils::tempdir();
sql('postgres', "CREATE TABLESPACE elsewhere LOCATION '$space'");
my $here = log_position($node);
my $done = 0;
eval {
	for my $round (1 .. 10)
	{
		settled($node, 'a');
		sql('postgres', 'CREATE DATABASE copy TEMPLATE a');
		sql('copy', "SET client_min_messages = error; SELECT idem.inbox_try_claim('x', 'y')");
		workers_become($node, 'a c copy', 'the copy has a worker when it is used')
		  if $round == 1;
		settled($node, 'copy');
		sql('postgres', 'ALTER DATABASE copy SET TABLESPACE elsewhere');
		settled($node, 'copy');
		sql('postgres', 'ALTER DATABASE copy RENAME TO other');
		settled($node, 'other');
		sql('postgres', q{DO $$ BEGIN EXECUTE 'ALTER DATABASE other RENAME TO again'; END $$});
		settled($node, 'again');
		sql('postgres', 'DROP DATABASE again');
		$done++;
	}
};
diag($@) if $@;
is($done, 10, 'CREATE ... TEMPLATE, SET TABLESPACE, RENAME and DROP DATABASE'
	  . ' succeed at the first try while there is a worker');
workers_become($node, 'a c', 'afterwards there are the workers from before');
is(join("\n", logged($node, qr/ERROR:|FATAL:/, $here)), '',
	'no worker has died of it');

# In a transaction block the database is locked until the end.
settled($node, 'a');
sql('postgres', 'BEGIN; ALTER DATABASE a RENAME TO aa; ROLLBACK');
settled($node, 'a');
sql('postgres', 'BEGIN; ALTER DATABASE a RENAME TO aa; ALTER DATABASE c RENAME TO cc; COMMIT');
workers_become($node, 'aa cc', 'the same in a transaction block');
settled($node, 'aa');
sql('postgres', 'ALTER DATABASE aa RENAME TO a; ALTER DATABASE cc RENAME TO c');
workers_become($node, 'a c');
is(join("\n", logged($node, qr/ERROR:|FATAL:/, $here)), '',
	'no worker has died of that either');

#
# Commands that fail
#
my $guest = $node->background_psql('a');
(undef, undef, $stderr) = $node->psql('postgres', 'DROP DATABASE a');
like($stderr, qr/being accessed by other users.*1 other session/s,
	'DROP DATABASE fails because of another session, not of the workers');
settled($node, 'a');
workers_become($node, 'a c', 'after that the worker is back');

$pid = settled($node, 'a');
my $relay = worker_pid($node, 'a', 'relay');
for my $command ('DROP DATABASE a', 'ALTER DATABASE a RENAME TO x',
	'CREATE DATABASE x TEMPLATE a', 'ALTER DATABASE a SET TABLESPACE elsewhere')
{
	(undef, undef, $stderr) = $node->psql('postgres', $command,
		extra_params => [ '-U', 'nobody' ]);
	like($stderr, qr/must be owner|permission denied/, "not for everybody: $command");
}
is(worker_pid($node, 'a'), $pid, 'a command without the right to it does not end the worker');
is(worker_pid($node, 'a', 'relay'), $relay, 'nor the relay');

# The session that runs the command is terminated while it waits for our guest.
$session = $node->background_psql('postgres', on_error_stop => 0);
my $dropper = $session->query('SELECT pg_backend_pid()');
$session->query_until(qr/begin/, "\\echo begin\nDROP DATABASE a;\n");
ok($node->poll_query_until('postgres', qq{
		SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid IN ($pid, $relay))}),
	'DROP DATABASE sends the workers away');
terminate($node, $dropper);
isnt(settled($node, 'a'), $pid, 'and it is back when that session was terminated');
eval { $session->quit };
$guest->quit;

#
# Templates, and databases that allow no connections
#
set_and_reload($node, 'idem.maintenance_naptime', '1s');
settled($node, 'a');
sql('postgres', 'ALTER DATABASE a IS_TEMPLATE true');
workers_become($node, 'c', 'a template has no worker');
sql('postgres', 'ALTER DATABASE a IS_TEMPLATE false');
settled($node, 'a');
workers_become($node, 'a c', 'it has one again when it is none any more, and used');

sql('postgres', 'ALTER DATABASE a ALLOW_CONNECTIONS false');
workers_become($node, 'c', 'a database that allows no connections has no worker');
sql('c', 'DROP EXTENSION idem');
sql('c', 'CREATE EXTENSION idem');
settled($node, 'c');
workers_become($node, 'c', 'none is started there');
sql('postgres', 'ALTER DATABASE a ALLOW_CONNECTIONS true');
settled($node, 'a');
workers_become($node, 'a c', 'it has one again when it allows them, and is used');

sql('postgres', 'ALTER DATABASE a IS_TEMPLATE true');
workers_become($node, 'c');
$node->restart;
workers_become($node, 'c', 'a restart does not change that');
is(sql('a', 'SELECT count(*) FROM idem.retention_status WHERE pid IS NOT NULL'), '0',
	'nor does a look at it');
sql('postgres', 'CREATE DATABASE copy TEMPLATE a');
settled($node, 'copy');
workers_become($node, 'c copy', 'the copy of a template has a worker when it is used');

stop_in_time($node, 'the server stops in time');
log_is_clean($node, 3);

done_testing();

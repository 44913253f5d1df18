# The workers when things are short, blocked, wrong or off: limits, locks,
# errors, settings, standbys, and no preloading at all.
use strict;
use warnings;
use IdemWorkers;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time);

my $node = server('main', q{
	idem.maintenance_naptime = 1
	idem.maintenance_delay = 0
	max_logical_replication_workers = 0
	autovacuum = off
});
$node->start;

sub sql { return $node->safe_psql(@_) }

sub claim
{
	my ($db, $id) = @_;
	return sql($db, "BEGIN; SELECT idem.inbox_try_claim('consumer', '$id'); COMMIT");
}

# Start anew with another value of a setting.
sub restart_with
{
	my ($setting, $value) = @_;
	sql('postgres', defined $value ? "ALTER SYSTEM SET $setting = $value" :
		  "ALTER SYSTEM RESET $setting");
	$node->restart;
	return;
}

for my $db (qw(a b c))
{
	sql('postgres', "CREATE DATABASE $db");
	sql($db, 'CREATE EXTENSION idem');
}
workers_become($node, 'a b c');

#
# max_worker_processes, first for the maintenance workers alone
#
set_and_reload($node, 'idem.relay', 'off');
restart_with('max_worker_processes', 1);
status_becomes($node, $_, "state = 'waiting' AND pid IS NULL AND reason ~ 'max_worker_processes'",
	"without processes the status of $_ names max_worker_processes")
  for qw(a b);
is(claim('a', 'no processes'), 't', 'a claim needs none');
is(claim('a', 'no processes'), 'f', 'nor does its duplicate');
workers_become($node, '');
relay_becomes($node, 'a', "state = 'off' AND pid IS NULL AND reason ~ 'idem.relay'",
	'the relay is switched off');
set_and_reload($node, 'idem.relay', 'on');
relay_becomes($node, 'a', "state = 'waiting' AND pid IS NULL AND reason ~ 'max_worker_processes'",
	'switched on, it lacks the same');
set_and_reload($node, 'idem.relay', 'off');

# Room for the launcher and two of three.
restart_with('max_worker_processes', 3);
ok($node->poll_query_until('postgres', q{
		SELECT count(*) = 2 FROM pg_stat_activity WHERE backend_type = 'idem maintenance'}),
	'two workers find room');
my ($without) = grep { worker_pid($node, $_) eq '' } qw(a b c);
my @with = grep { $_ ne $without } qw(a b c);
status_becomes($node, $without, "reason ~ 'max_worker_processes'",
	'the third database is told what is missing');
settled($node, $_) for @with;
sql($with[0], 'DROP EXTENSION idem');
workers_become($node, join(' ', sort($with[1], $without)),
	'when one of them goes, the third comes by itself', '');
status_becomes($node, $without, "state = 'running' AND reason IS NULL",
	'and its status is fine');
sql($with[0], 'CREATE EXTENSION idem');

# Room for all of them, but not for a relay.
restart_with('max_worker_processes', 4);
workers_become($node, 'a b c', 'all maintenance workers find room', '');
settled($node, $_) for qw(a b c);
set_and_reload($node, 'idem.relay', 'on');
relay_becomes($node, $_, "state = 'waiting' AND pid IS NULL AND reason ~ 'max_worker_processes'",
	"the status of the relay of $_ names max_worker_processes")
  for qw(a b c);
status_becomes($node, 'a', "state = 'running' AND reason IS NULL", 'the other worker is fine');
workers_become($node, 'a b c', 'no relay has found room', '');
my $other = worker_pid($node, 'b');
sql('c', 'DROP EXTENSION idem');
ok($node->poll_query_until('postgres', q{
		SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'idem relay'}),
	'when a worker goes, a relay comes by itself');
my ($relayed) = grep { worker_pid($node, $_, 'relay') ne '' } qw(a b);
relay_becomes($node, $relayed, "state = 'running' AND reason IS NULL", 'and its status is fine');
is(worker_pid($node, 'b'), $other, 'no other worker had to go for it');
sql('c', 'CREATE EXTENSION idem');
restart_with('max_worker_processes', undef);
workers_become($node, 'a b c', 'with enough of them there are all');

#
# idem.max_databases; a database without the extension is in the way for a
# moment only
#
restart_with('idem.max_databases', 1);
workers_become($node, 'a', 'the first database has the only slot');
settled($node, 'a');
status_becomes($node, 'b', "state = 'stopped' AND pid IS NULL AND reason ~ 'idem.max_databases'",
	'the status of the second says what to increase');
is(claim('b', 'no slot'), 't', 'a claim needs no slot');
sql('a', 'DROP EXTENSION idem');
workers_become($node, 'b', 'when the first goes, the second has it by itself');
sql('a', 'CREATE EXTENSION idem');
sql('b', 'DROP EXTENSION idem');
workers_become($node, 'c', 'and then the third');
sql('c', 'DROP EXTENSION idem');
settled($node, 'a');
workers_become($node, 'a', 'and then whoever uses it');
restart_with('idem.max_databases', undef);
sql($_, 'CREATE EXTENSION idem') for qw(b c);
workers_become($node, 'a b c');

#
# Settings
#
sub last_run
{
	return sql('a', "SELECT last_run FROM idem.retention_status WHERE what = 'key'");
}

sub old_key
{
	my ($key) = @_;
	sql('a', qq{
		BEGIN;
		SELECT idem.key_begin('scope', '$key');
		UPDATE idem.key SET expires_at = now() - interval '1 day' WHERE key = '$key';
		COMMIT});
	return;
}
my $key_is_gone = "SELECT NOT EXISTS (SELECT FROM idem.key)";

settled($node, 'a');
old_key('one');
ok($node->poll_query_until('a', $key_is_gone), 'maintenance removes a key');

my $pid = settled($node, 'a');
set_and_reload($node, 'idem.maintenance', 'off');
status_becomes($node, 'a', "state = 'off' AND reason ~ 'idem.maintenance' AND pid = $pid",
	'idem.maintenance can be switched off');
# A run that had begun may still have to end.
$node->poll_query_until('a', q{
	SELECT now() > last_run + interval '3 s' FROM idem.retention_status WHERE what = 'key'})
  or die 'it goes on';
my $seen = last_run();
old_key('two');
# Two more rounds, in which it only looks for the extension.
for my $round (1, 2)
{
	my $changed = sql('a', "SELECT state_change FROM pg_stat_activity WHERE pid = $pid");
	$node->poll_query_until('a',
		"SELECT state_change > '$changed' FROM pg_stat_activity WHERE pid = $pid")
	  or die 'the worker does nothing at all';
}
is(last_run(), $seen, 'then it does nothing');
is(sql('a', $key_is_gone), 'f', 'and removes nothing');
set_and_reload($node, 'idem.maintenance', 'on');
ok($node->poll_query_until('a', $key_is_gone), 'switched on, it does');
is(worker_pid($node, 'a'), $pid, 'it is still the same worker');

set_and_reload($node, 'idem.maintenance_naptime', '1d');
$node->poll_query_until('a', qq{
	SELECT state = 'idle' AND now() > state_change + interval '3 s'
	FROM pg_stat_activity WHERE pid = $pid}) or die 'it does not rest';
old_key('three');
is(sql('a', $key_is_gone), 'f', 'with a long idem.maintenance_naptime it sleeps');
set_and_reload($node, 'idem.maintenance_naptime', '1s');
ok($node->poll_query_until('a', $key_is_gone), 'and wakes when that is made short');
is(worker_pid($node, 'a'), $pid, 'it is still the same worker');

#
# idem.relay
#
$pid = settled($node, 'a');
$other = worker_pid($node, 'a', 'relay');
set_and_reload($node, 'idem.relay', 'off');
workers_become($node, 'a b c', 'idem.relay can be switched off', '');
relay_becomes($node, 'a', "state = 'off' AND pid IS NULL AND reason ~ 'idem.relay'",
	'the status of the relay says so');
status_becomes($node, 'a', "state = 'running' AND reason IS NULL AND pid = $pid",
	'the other worker goes on');
sql('a', 'DROP EXTENSION idem');
sql('a', 'CREATE EXTENSION idem');
$pid = settled($node, 'a');
workers_become($node, 'a b c', 'CREATE EXTENSION starts none then', '');
set_and_reload($node, 'idem.relay', 'on');
workers_become($node, 'a b c', 'and on');
relay_becomes($node, 'a', "state = 'running' AND reason IS NULL AND pid <> $other",
	'its status is fine');
is(worker_pid($node, 'a'), $pid, 'all the same to the other worker');
# In quick succession; the last word counts.
for my $round (1 .. 10)
{
	set_and_reload($node, 'idem.relay', 'off');
	set_and_reload($node, 'idem.relay', 'on');
}
workers_become($node, 'a b c', 'switched often, the relay is there in the end');
settled($node, $_) for qw(a b c);

#
# A worker that waits for a lock
#
sub locked
{
	my $session = $node->background_psql('a');
	$session->query_safe('BEGIN; LOCK TABLE idem.inbox_claim IN ACCESS EXCLUSIVE MODE;');
	ok($node->poll_query_until('postgres', q{
			SELECT wait_event_type = 'Lock' FROM pg_stat_activity
			WHERE backend_type = 'idem maintenance' AND datname = 'a'}),
		'the worker waits for a lock');
	return $session;
}

my $session = locked();
settled($node, 'b');
sql('postgres', 'DROP DATABASE b');
settled($node, 'c');
workers_become($node, 'a c', 'another database can be dropped meanwhile');

$pid = worker_pid($node, 'a');
my (undef, undef, $stderr) = $node->psql('postgres', 'CREATE DATABASE copy TEMPLATE a');
like($stderr, qr/being accessed by other users.*There is 1 other session/s,
	'CREATE DATABASE ... TEMPLATE fails because of the session, not of the worker');
ok($node->poll_query_until('postgres', qq{
		SELECT count(*) = 1 FROM pg_stat_activity
		WHERE backend_type = 'idem maintenance' AND datname = 'a' AND pid <> $pid
		  AND wait_event_type = 'Lock'}),
	'there is a worker again, and it waits again');
$session->query_safe('COMMIT;');
$session->quit;
settled($node, 'a');
sql('postgres', 'CREATE DATABASE copy TEMPLATE a');
settled($node, 'copy');
sql('postgres', 'DROP DATABASE copy');

$session = locked();
stop_in_time($node, 'a worker that waits for a lock does not delay a fast stop');
eval { $session->quit };
$node->start;
workers_become($node, 'a c');

#
# Stop in the middle of a purge
#
set_and_reload($node, 'idem.maintenance_delay', '300ms');
settled($node, 'a');
old_claims($node, 'a', 200_000);
mid_purge($node, 'a');
stop_in_time($node, 'a purge does not delay a fast stop');
$node->append_conf('postgresql.auto.conf', 'idem.maintenance_delay = 0');
$node->start;
ok($node->poll_query_until('a', 'SELECT NOT EXISTS (SELECT FROM idem.inbox_claim)'),
	'after the start it goes on to the end');

#
# Errors
#
settled($node, 'a');
$pid = settled($node, 'c');
my $relay = worker_pid($node, 'a', 'relay');
my $here = log_position($node);
my $began = time;
sql('a', 'ALTER TABLE idem.key RENAME TO lost');
status_becomes($node, 'a', "reason ~ '^42P01: .*idem.key'",
	'an error of the worker is in the status, with its code');
# The pattern must not match this statement, which is in the log as well.
ok($node->poll_query_until('a', qq{
		SELECT count(*) >= 5 FROM regexp_matches(
			pg_read_file('@{[$node->logfile]}', $here, 100000000),
			'ERROR: {2}relation "idem.key" does not exist', 'g')}),
	'it tries again');
my $took = time - $began;
# 200, 400, 800 and 1600 ms
ok($took > 3, 'with growing pauses') or diag("five errors in $took seconds");
is(claim('a', 'worker broken'), 't', 'claims go on');
sql('a', 'ALTER TABLE idem.lost RENAME TO key');
status_becomes($node, 'a', "state = 'running' AND reason IS NULL",
	'it recovers when the cause is gone');
my $errors = logged($node, qr/ERROR:  relation "idem.key" does not exist/, $here);
ok($errors < 12, 'the log is not flooded') or diag("$errors errors");
is(worker_pid($node, 'c'), $pid, 'the worker of another database was not concerned');
is(worker_pid($node, 'a', 'relay'), $relay, 'nor was the relay of this one');

$node->stop;
log_is_clean($node);

#
# A standby
#
my $primary = server('primary', 'idem.maintenance_naptime = 1', allows_streaming => 1);
$primary->start;
$primary->safe_psql('postgres', 'CREATE EXTENSION idem');
settled($primary, 'postgres');
$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->start;
$primary->wait_for_catchup($standby);
is( $standby->safe_psql('postgres',
		"SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'"),
	'0', 'a standby has neither launcher nor workers');
status_becomes($standby, 'postgres', "state = 'standby' AND reason ~ 'promoted'",
	'its status says so');
relay_becomes($standby, 'postgres', "state = 'standby' AND pid IS NULL AND reason ~ 'promoted'",
	'and that of the relay');
$standby->promote;
settled($standby, 'postgres');
workers_become($standby, 'postgres', 'they start when it is promoted');
$_->stop for $standby, $primary;
log_is_clean($_) for $standby, $primary;

#
# Without preloading
#
my $plain = PostgreSQL::Test::Cluster->new('plain');
$plain->init;
$plain->start;
$plain->safe_psql('postgres', 'CREATE EXTENSION idem');
$plain->safe_psql('postgres', 'CREATE DATABASE a');
$plain->safe_psql('a', 'CREATE EXTENSION idem');
is( $plain->safe_psql('a', q{
		BEGIN;
		SELECT idem.inbox_try_claim('consumer', 'message');
		SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%';
		COMMIT}),
	"t\n0", 'without shared_preload_libraries claims work, and nothing else runs');
status_becomes($plain, 'a', "state = 'not loaded' AND pid IS NULL AND reason ~ 'shared_preload_libraries'",
	'the status says so');
relay_becomes($plain, 'a', "state = 'not loaded' AND pid IS NULL AND reason ~ 'shared_preload_libraries'",
	'and that of the relay');
$plain->safe_psql('postgres', $_)
  for 'CREATE DATABASE b TEMPLATE a', 'ALTER DATABASE b RENAME TO c', 'DROP DATABASE c';
$plain->safe_psql('a', 'DROP EXTENSION idem');
$plain->stop;
log_is_clean($plain);

done_testing();

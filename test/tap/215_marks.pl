# The marks from which on sessions look for work: whatever commits in whatever
# order while others look, is found.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Idem;

my $node = cluster('marks', {}, 'max_worker_processes = 20', 'fsync = off');
my $dir = PostgreSQL::Test::Utils::tempdir;

$node->safe_psql('postgres', q(SELECT idem.consumer_create('none', max_attempts => 1000, backoff => '0.001 s', backoff_max => '0.002 s'),
	idem.consumer_create('key', ordering => 'key', max_attempts => 1000, backoff => '0.001 s', backoff_max => '0.002 s');
	CREATE TABLE done (consumer text, msg_id text)));

for my $consumer (qw(none key))
{
	append_to_file("$dir/$consumer.store", <<"S");
\\set us random(0, 3000)
\\set key random(1, 20)
BEGIN;
SELECT idem.inbox_store('$consumer', gen_random_uuid()::text, '1', key => :key::text);
\\sleep :us us
COMMIT;
S
	append_to_file("$dir/$consumer.take", <<"S");
\\set max random(1, 3)
\\set us random(0, 2000)
BEGIN;
WITH n AS MATERIALIZED (SELECT msg_id FROM idem.inbox_next('$consumer', :max)), d AS (INSERT INTO done SELECT '$consumer', msg_id FROM n)
SELECT count(idem.inbox_done('$consumer', msg_id)) FROM n;
\\sleep :us us
COMMIT;
S
	append_to_file("$dir/$consumer.back", <<"S");
BEGIN;
SELECT msg_id FROM idem.inbox_next('$consumer', 2);
ROLLBACK;
S
	$node->command_ok([ 'pgbench', '-n', '-c', '10', '-T', '8', '-f', "$dir/$consumer.store\@6", '-f', "$dir/$consumer.take\@8",
		'-f', "$dir/$consumer.back\@1", $node->connstr('postgres') ], "$consumer: stored and taken at the same time");

	# Whoever comes last finds all that is left.
	$node->safe_psql('postgres', qq(DO \$\$
		DECLARE
			n integer;
			empty timestamptz;
			until timestamptz := clock_timestamp() + interval '60 s';
		BEGIN
			LOOP
				WITH n AS MATERIALIZED (SELECT msg_id FROM idem.inbox_next('$consumer', 100)), d AS (INSERT INTO done SELECT '$consumer', msg_id FROM n)
				SELECT count(idem.inbox_done('$consumer', msg_id)) INTO n FROM n;
				COMMIT;
				EXIT WHEN clock_timestamp() > until OR n = 0 AND NOT EXISTS (SELECT FROM idem.inbox_parked);
				-- those that wait for nothing must come at once
				IF n > 0 THEN
					empty := NULL;
				ELSE
					empty := coalesce(empty, clock_timestamp());
				END IF;
				EXIT WHEN empty < clock_timestamp() - interval '5 s';
			END LOOP;
		END \$\$));
	is($node->safe_psql('postgres', 'SELECT count(*) FROM idem.inbox_message; SELECT count(*) FROM idem.inbox_parked'), "0\n0", "$consumer: nothing is left behind");
	is($node->safe_psql('postgres', qq(SELECT count(*) - count(DISTINCT msg_id) FROM done WHERE consumer = '$consumer')), '0', "$consumer: nothing came twice");
	is($node->safe_psql('postgres', qq(SELECT count(DISTINCT d.msg_id) - (SELECT stored FROM idem.stat_consumer s WHERE s.consumer = '$consumer' AND type IS NULL) FROM done d WHERE consumer = '$consumer')),
		'0', "$consumer: nothing is lost");
}

# Exactly that: one has looked and not yet said so, when others commit and look.
SKIP:
{
	skip 'this build has no fault points (make IDEM_FAULTS=1)', 3
	  if $node->safe_psql('postgres', q(SELECT count(*) FROM pg_settings WHERE name = 'idem.fault')) eq '0';
	my $from = -s $node->logfile;
	my $mine = q(SET idem.fault = '';);
	my $take = q(WITH n AS MATERIALIZED (SELECT msg_id FROM idem.inbox_next('slow', 1)) SELECT msg_id, idem.inbox_done('slow', msg_id) FROM n);
	$node->safe_psql('postgres', q(SELECT idem.consumer_create('slow')));
	my $early = session($node);
	$early->query_safe(q(BEGIN; SELECT idem.inbox_store('slow', 'early 1', '1'), idem.inbox_store('slow', 'early 2', '1')));
	$node->safe_psql('postgres', q(SELECT idem.inbox_store('slow', 'late', '1')));
	$node->append_conf('postgresql.conf', "idem.fault = 'take-scanned:wait'");
	$node->reload;
	$node->poll_query_until('postgres', q(SELECT current_setting('idem.fault') <> ''));
	my $looks = start_sql($node, $take);
	$node->wait_for_log(qr/waiting at take-scanned/, $from);
	$early->query_safe('COMMIT');
	is($node->safe_psql('postgres', "$mine $take"), 'early 1|', 'what has committed meanwhile is seen by another');
	$node->append_conf('postgresql.conf', "idem.fault = ''");
	$node->reload;
	is(finish_sql($looks), 'late|', 'the one that looked before gets what it saw');
	is($node->safe_psql('postgres', "$take"), 'early 2|', 'and what it could not see is found after it');
	leave($early);
}

$node->stop;
done_testing();

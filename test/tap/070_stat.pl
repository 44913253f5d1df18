# Counters: what is counted, for whom, how long; and life without them.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = cluster('stat', {});
my $consumer = 'claims, duplicates, waits, in_flight, expired';
my $scope = 'started, replayed, conflicts, in_flight, taken_over';

sub sql { return $node->safe_psql($_[1] // 'postgres', $_[0]); }

sub consumer
{
	my ($name, $db) = @_;
	return sql("SELECT $consumer FROM idem.stat_consumer WHERE consumer = '$name'", $db);
}

sub scope
{
	my ($name, $db) = @_;
	return sql("SELECT $scope FROM idem.stat_key WHERE scope = '$name'", $db);
}

# ---- claims

is(sql('SELECT count(*) FROM idem.stat_consumer'), '0', 'no consumers yet');
is(sql('SELECT count(*) FROM idem.stat_key'), '0', 'no scopes yet');

sql("SELECT idem.inbox_try_claim('c', i::text) FROM generate_series(1, 5) i");
is(consumer('c'), '5|0|0|0|0', 'claims');
sql("SELECT idem.inbox_try_claim('c', '1')");
sql("SELECT idem.inbox_claim('c', '2')");
sql("SELECT idem.inbox_claim_batch('c', '{3,6,6}')");
is(consumer('c'), '6|4|0|0|0', 'duplicates, also within a batch');
sql("SELECT idem.inbox_claim('c', 'old', sent_at => '2001-01-01')");
is(consumer('c'), '6|4|0|0|1', 'expired');
sql("BEGIN; SELECT idem.inbox_try_claim('c', 'gone'); ROLLBACK");
is(consumer('c'), '7|4|0|0|1', 'what is rolled back stays counted');
sql("SELECT idem.inbox_try_claim('c', gen_random_uuid())");
is(consumer('c'), '8|4|0|0|1', 'a claim by uuid');

my $holder = session($node);
$holder->query_safe("BEGIN; SELECT idem.inbox_try_claim('c', 'held')");
sql("SELECT idem.inbox_claim('c', 'held', wait => false)");
is(consumer('c'), '9|4|0|1|1', 'in flight');
my @waiters = map { start_sql($node, "SELECT idem.inbox_try_claim('c', 'held')") } 1, 2;
ok(await_waiting($node, 2), 'two wait');
$holder->query_safe('COMMIT');
is(finish_sql($_), 'f', 'it was a duplicate') for @waiters;
is(consumer('c'), '9|6|2|1|1', 'waits, that ended as duplicates');
$holder->query_safe("BEGIN; SELECT idem.inbox_try_claim('c', 'held2')");
my $waiter = start_sql($node, "SELECT idem.inbox_try_claim('c', 'held2')");
ok(await_waiting($node, 1), 'one waits');
$holder->query_safe('ROLLBACK');
is(finish_sql($waiter), 't', 'the claim was free then');
is(consumer('c'), '11|6|3|1|1', 'a wait, that ended as a claim');

# ---- keys

sql("SELECT idem.key_begin('s', 'a', 'x'); SELECT idem.key_complete('s', 'a')");
is(scope('s'), '1|0|0|0|0', 'started');
sql("SELECT idem.key_begin('s', 'a', 'x')");
is(scope('s'), '1|1|0|0|0', 'replayed');
sql("SELECT idem.key_begin('s', 'a', 'y')");
is(scope('s'), '1|1|1|0|0', 'conflict');
sql("SELECT idem.key_begin('s', 'b', lease => '1 hour')");
sql("SELECT idem.key_begin('s', 'b', lease => '1 hour')");
is(scope('s'), '2|1|1|1|0', 'in flight, leased');
$holder->query_safe("BEGIN; SELECT idem.key_begin('s', 'c')");
sql("SELECT idem.key_begin('s', 'c', wait => false)");
$holder->query_safe('ROLLBACK');
leave($holder);
is(scope('s'), '3|1|1|2|0', 'in flight, in an open transaction');
sql("UPDATE idem.key SET lease_until = now() - interval '1 s' WHERE key = 'b'");
sql("SELECT idem.key_begin('s', 'b', lease => '1 hour')");
is(scope('s'), '4|1|1|2|1', 'taken over');
is(sql("SELECT bool_and(since BETWEEN pg_postmaster_start_time() AND now()), bool_and(type IS NULL)
		FROM idem.stat_consumer"), 't|t', 'since when, and no type of messages');

# ---- restarts

my $since = sql("SELECT since FROM idem.stat_consumer WHERE consumer = 'c'");
$node->restart;
is(consumer('c'), '11|6|3|1|1', 'a restart keeps the counters of consumers');
is(scope('s'), '4|1|1|2|1', 'and of scopes');
is(sql("SELECT since FROM idem.stat_consumer WHERE consumer = 'c'"), $since, 'and since when');
sql("SELECT idem.inbox_try_claim('c', '1')");
$node->restart;
is(consumer('c'), '11|7|3|1|1', 'counting goes on, and the next restart keeps that');
crash($node);
$node->start;
is(sql('SELECT count(*) FROM idem.stat_consumer'), '0', 'a crash sets them to zero');
is(sql('SELECT count(*) FROM idem.stat_key'), '0', 'those of scopes as well');
sql("SELECT idem.inbox_try_claim('c', '1')");
is(consumer('c'), '0|1|0|0|0', 'and then counting begins anew');

# ---- several databases

sql("CREATE DATABASE other");
sql("CREATE EXTENSION idem", 'other');
sql("SELECT idem.inbox_try_claim('c', 'x'); SELECT idem.inbox_try_claim('only here', 'x');
	 SELECT idem.key_begin('s', 'x')", 'other');
is(consumer('c', 'other'), '1|0|0|0|0', 'the same consumer in another database');
is(consumer('c'), '0|1|0|0|0', 'is counted apart');
is(consumer('only here'), '', 'and others are not seen');
is(scope('s'), '', 'nor are scopes');

my $counting = session($node);
$counting->query_safe("SELECT idem.inbox_try_claim('c', '1')");
sql('SELECT idem.stat_reset()');
is(sql('SELECT count(*) FROM idem.stat_consumer'), '0', 'stat_reset()');
is(consumer('c', 'other'), '1|0|0|0|0', 'is for this database only');
is(scope('s', 'other'), '1|0|0|0|0', 'for scopes too');
$counting->query_safe("SELECT idem.inbox_try_claim('c', '1')");
is(consumer('c'), '0|1|0|0|0', 'a session that has counted before goes on at zero');
leave($counting);

# ---- more consumers than there is room for

sql('DROP DATABASE other');
$node->append_conf('postgresql.conf', 'idem.stat_entries = 10');
crash($node);
$node->start;
sql("SELECT idem.inbox_try_claim('many' || c, i::text)
	 FROM generate_series(1, 30) c, generate_series(1, 3) i");
sql("SELECT idem.inbox_try_claim('many' || c, '1') FROM generate_series(1, 30) c");
is(sql("SELECT count(*), count(*) FILTER (WHERE consumer = '(other)'), sum(claims), sum(duplicates)
		FROM idem.stat_consumer"),
	'11|1|90|30', 'ten are counted apart, the rest together, and nothing is lost');
is(sql("SELECT string_agg(DISTINCT claims || ' ' || duplicates, ', ') FROM idem.stat_consumer
		WHERE consumer <> '(other)'"), '3 1', 'those apart are exact');
is(consumer('(other)'), '60|20|0|0|0', 'so are the others');
sql("SELECT idem.key_begin('scope' || i, 'x') FROM generate_series(1, 5) i");
is(sql("SELECT scope, started FROM idem.stat_key"), '(other)|5', 'scopes share the room');
$node->restart;
is(sql("SELECT count(*), sum(claims), sum(duplicates) FROM idem.stat_consumer"),
	'11|90|30', 'a restart keeps all of that');

# fewer than that after a restart would be the same; more make room again
$node->append_conf('postgresql.conf', 'idem.stat_entries = 12');
$node->restart;
is(sql("SELECT count(*), sum(claims), sum(duplicates) FROM idem.stat_consumer"),
	'11|90|30', 'with more room, too');
$node->append_conf('postgresql.conf', 'idem.stat_entries = 10');
sql('SELECT idem.stat_reset()');
$node->restart;
is(sql('SELECT count(*) FROM idem.stat_consumer'), '0', 'a reset is kept as well');

# ---- a database that is dropped leaves room

sql('CREATE DATABASE drop_me');
sql('CREATE EXTENSION idem', 'drop_me');
sql("SELECT idem.inbox_try_claim('many' || c, '1') FROM generate_series(1, 10) c", 'drop_me');
ok(await_running($node, 'drop_me'), 'a database that takes all the room');
sql("SELECT idem.inbox_try_claim('mine', '1')");
is(sql('SELECT consumer FROM idem.stat_consumer'), '(other)', 'there is none left for us');
sql('DROP DATABASE drop_me');
ok($node->poll_query_until('postgres', qq{
		DO \$\$ BEGIN PERFORM idem.inbox_try_claim('mine', '1'); END \$\$;
		SELECT EXISTS (SELECT FROM idem.stat_consumer WHERE consumer = 'mine')}, "DO\nt"),
	'when it is dropped, there is');
sql("SELECT idem.inbox_try_claim('mine' || i, '1') FROM generate_series(1, 9) i");
is(sql("SELECT count(*) FROM idem.stat_consumer WHERE consumer LIKE 'mine%'"), '10', 'all of it');
$node->stop;

# ---- without shared_preload_libraries everything works but this

my $bare = cluster('bare', { bare => 1 }, 'autovacuum = off',
	'idem.claim_outside_transaction = allow', 'idem.stat_entries = 10', 'idem.max_databases = 2');
$bare->start;
$node = $bare;
sql('CREATE EXTENSION idem');
is(sql("SELECT idem.inbox_try_claim('c', '1')"), 't', 'not loaded: a claim');
is(sql("SELECT idem.inbox_try_claim('c', '1')"), 'f', 'not loaded: a duplicate');
is(sql("SELECT string_agg(status::text, ',') FROM idem.inbox_claim_batch('c', '{1,2}')"),
	'duplicate,claimed', 'not loaded: a batch');
is(sql("SELECT status FROM idem.key_begin('s', 'a')"), 'started', 'not loaded: a key');
is(sql("SELECT idem.key_complete('s', 'a', 7); SELECT status, code FROM idem.key_begin('s', 'a')"),
	"\ncompleted|7", 'not loaded: its outcome');
is(sql("SELECT idem.version_advance('v', 'e', 2); SELECT idem.version_advance('v', 'e', 1)"),
	"applied\nstale", 'not loaded: a version');
is(sql("SELECT idem.consumer_create('c', retention => '1 day'); UPDATE idem.inbox_claim SET claimed_at = claimed_at - 100000;
		SELECT idem.inbox_purge()"), "\n2", 'not loaded: a purge by hand');
is(sql("UPDATE idem.key SET expires_at = now() - interval '1 s'; SELECT idem.key_purge()"),
	'1', 'not loaded: the same for keys');
is(sql('SELECT count(*) FROM idem.stat_consumer'), '0', 'not loaded: no counters of consumers');
is(sql('SELECT count(*) FROM idem.stat_key'), '0', 'not loaded: nor of scopes');
is(sql('SELECT idem.stat_reset()'), '', 'not loaded: a reset is no error');
is(sql("SELECT what, state, reason LIKE '%shared_preload_libraries%', last_run IS NULL, removed_total IS NULL
		FROM idem.retention_status ORDER BY 1"),
	"inbox|not loaded|t|t|t\nkey|not loaded|t|t|t", 'not loaded: the status says so, and what to do');
sql('DROP EXTENSION idem');
$bare->stop;

done_testing();

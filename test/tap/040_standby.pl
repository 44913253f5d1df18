# A standby: it refuses claims, and takes over with all that was claimed.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $primary = cluster('primary', { allows_streaming => 1 }, 'max_prepared_transactions = 5');
ok(await_running($primary), 'maintenance runs on the primary');
$primary->backup('backup');
my $standby = PostgreSQL::Test::Cluster->new('standby');
$standby->init_from_backup($primary, 'backup', has_streaming => 1);
$standby->append_conf('postgresql.conf', 'idem.maintenance_naptime = 1s');
$standby->start;

# ---- what is done on the primary

$primary->safe_psql('postgres', q{
	SELECT idem.inbox_try_claim('c', '1');
	SELECT idem.inbox_claim_batch('c', '{2,3}');
	SELECT idem.key_begin('s', 'done'); SELECT idem.key_complete('s', 'done', 200, '{"a": 1}', 'body');
	SELECT idem.key_begin('s', 'leased', lease => '1 hour');
	SELECT idem.version_advance('v', 'e', 5);
	SELECT idem.consumer_create('short', retention => '1 hour');
	BEGIN; SELECT idem.inbox_try_claim('c', 'prepared'); PREPARE TRANSACTION 'p';
	SELECT idem.inbox_try_claim('short', 'old');
	UPDATE idem.inbox_claim SET claimed_at = claimed_at - 7200 WHERE key = idem.inbox_key('short', 'old');
});
my $open = session($primary);
$open->query_safe("BEGIN; SELECT idem.inbox_try_claim('c', 'open'); SELECT idem.inbox_try_claim('new', 'open')");
# so that what is open is there, too
$primary->safe_psql('postgres', "SELECT idem.inbox_try_claim('c', 'last')");
$primary->wait_for_catchup($standby, 'replay', $primary->lsn('insert'));

# ---- what the standby says

sub standby { return $standby->safe_psql('postgres', $_[0]); }

is(sqlstate($standby, "SELECT $_"), '25006', "read only: $_") for (
	"idem.inbox_try_claim('c', 'new')",
	"idem.inbox_try_claim('c', '1')",    # not even of what is known
	"idem.inbox_try_claim('c', gen_random_uuid())",
	"idem.inbox_claim('c', 'new')",
	"idem.inbox_claim_batch('c', '{new}')",
	"idem.key_begin('s', 'new')",
	"idem.key_begin('s', 'done')",
	"idem.key_complete('s', 'leased')",
	"idem.key_release('s', 'leased')",
	"idem.version_advance('v', 'e', 5)",
	"idem.version_advance('v', 'e', 6)",
	"idem.version_reset('v')",
	"idem.consumer_create('x')",
	"idem.consumer_alter('short', retention => '1 day')",
	"idem.inbox_purge()",
	"idem.key_purge()");
is(standby("SELECT what, state, reason IS NOT NULL, pid IS NULL FROM idem.retention_status ORDER BY 1"),
	"inbox|standby|t|t\nkey|standby|t|t", 'the status says that it is a standby');
is(standby("SELECT count(*) FROM idem.inbox_lookup('c', '1')"), 1, 'claims can be looked up');
is(standby("SELECT count(*) FROM idem.inbox_lookup('c', 'open')"), 0, 'those that are not committed cannot');
is(standby("SELECT count(*) FROM idem.inbox"), 5, 'claims can be read');
is(standby('SELECT count(*) FROM idem.stuck'), 0, 'nothing is stuck');
is(standby('SELECT count(*) FROM idem.stat_consumer'), 0, 'nothing was counted here');
is(standby("SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'idem%'"), 0,
	'nothing runs here');

# ---- the primary dies, the standby takes over

my $reader = session($standby);    # one that was there before, and stays
$reader->query_safe("SELECT count(*) FROM idem.inbox_lookup('c', '1')");
crash($primary);
leave($open);
$standby->promote;
ok(await_running($standby), 'maintenance starts by itself');
is($reader->query_safe("SELECT idem.inbox_try_claim('c', '1')"), 'f', 'a session from before can claim');
is($reader->query_safe("SELECT idem.inbox_try_claim('c', 'by reader')"), 't', 'also something new');
leave($reader);

is(standby("SELECT idem.inbox_try_claim('c', '$_')"), 'f', "$_ was claimed on the primary") for 1, 2, 3, 'last';
is(standby("SELECT idem.inbox_try_claim('c', '$_')"), 't', "$_ was not") for 'open', 'new';
is(standby("SELECT idem.inbox_try_claim('new', 'open')"), 't', 'nor was that of another consumer');
is(standby("SELECT status FROM idem.inbox_claim('c', 'prepared', wait => false)"), 'in_flight',
	'what was prepared there is in flight here');
standby("COMMIT PREPARED 'p'");
is(standby("SELECT idem.inbox_try_claim('c', 'prepared')"), 'f', 'and can be committed');
is(standby("SELECT status, code, headers, body FROM idem.key_begin('s', 'done')"),
	'completed|200|{"a": 1}|body', 'outcomes are replayed');
is(standby("SELECT status FROM idem.key_begin('s', 'leased')"), 'in_flight', 'leases hold');
is(standby("SELECT idem.version_advance('v', 'e', 5)"), 'duplicate', 'versions guard');
is(standby("SELECT idem.version_advance('v', 'e', 6)"), 'applied', 'and advance');
is(standby("SELECT count(*) FROM idem.inbox WHERE consumer IS NULL"), 0, 'every claim knows its consumer');
is(standby("SELECT count(*), count(DISTINCT id) FROM idem.inbox_consumer"), '3|3', 'numbers of consumers are unique');
ok($standby->poll_query_until('postgres',
		"SELECT count(*) = 0 FROM idem.inbox_lookup('short', 'old')"), 'what is expired is removed here');
is(standby("SELECT sum(claims), sum(duplicates) FROM idem.stat_consumer WHERE consumer = 'c'"),
	'3|6', 'what is done here is counted here');

$standby->stop;
done_testing();

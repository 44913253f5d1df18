# Dump and restore: what was claimed stays claimed; and the extension dropped
# and created under a session's feet.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = cluster('dump', {}, 'max_worker_processes = 60');    # two per database
my $dir = $PostgreSQL::Test::Utils::tmp_check;

sub sql { return $node->safe_psql($_[1] // 'postgres', $_[0]); }

# ---- a database with something of everything

sql(q{
	SELECT idem.roles_create();
	CREATE ROLE app LOGIN IN ROLE idem_consumer;
	SELECT idem.inbox_try_claim('c', i::text) FROM generate_series(1, 1000) i;
	SELECT idem.inbox_try_claim('c', 'a2b5dd4e-0b9c-4b5e-9d3b-0123456789ab'::uuid);
	SELECT idem.inbox_try_claim('c' || i, '1') FROM generate_series(1, 20) i;
	SELECT idem.consumer_create('c1', retention => '2 hours');
	SELECT idem.consumer_create('declared', retention => '1 month 2 days 03:04:05');
	SELECT idem.consumer_create('default');
	SELECT idem.consumer_alter('c1', retention => '30 days');
	SELECT idem.key_begin('s', 'done', '\x0102'::bytea, ttl => '3 days');
	SELECT idem.key_complete('s', 'done', 201, '{"b": [1, null, "x"], "a": 1.50}', E'line\nline\t\\\\ end');
	SELECT idem.key_begin('s', 'nothing'); SELECT idem.key_complete('s', 'nothing');
	SELECT idem.key_begin('s', 'flight');
	CREATE TABLE lease AS SELECT token FROM idem.key_begin('s', 'leased', lease => '1 hour');
	SELECT idem.version_advance('v', 'e', 41);
	GRANT SELECT ON idem.consumer TO app;
});

# All of it, as text.
my $contents = join ' ', map { "SELECT * FROM idem.$_ ORDER BY 1, 2;" }
  qw(consumer inbox_consumer inbox_claim key version);
my $rights = q{
	SELECT 'relation', relname, relacl::text FROM pg_class WHERE relnamespace = 'idem'::regnamespace
	UNION ALL SELECT 'function', oid::regprocedure::text, proacl::text FROM pg_proc WHERE pronamespace = 'idem'::regnamespace
	UNION ALL SELECT 'schema', nspname, nspacl::text FROM pg_namespace WHERE nspname = 'idem'
	ORDER BY 1, 2};

# Copy a database: in plain text through psql, or through pg_restore.
my %copy = (
	plain => sub {
		my ($from, $to) = @_;
		$node->command_ok([ 'pg_dump', '-f', "$dir/$to.sql", $from ], "$to: pg_dump");
		$node->command_ok([ 'psql', '-X', '-v', 'ON_ERROR_STOP=1', '-d', $to, '-f', "$dir/$to.sql" ],
			"$to: psql");
	},
	custom => sub {
		my ($from, $to) = @_;
		$node->command_ok([ 'pg_dump', '-Fc', '-f', "$dir/$to.dump", $from ], "$to: pg_dump");
		$node->command_ok([ 'pg_restore', '-e', '-d', $to, "$dir/$to.dump" ], "$to: pg_restore");
	},
	parallel => sub {
		my ($from, $to) = @_;
		$node->command_ok([ 'pg_dump', '-Fd', '-j', 2, '-f', "$dir/$to.dir", $from ], "$to: pg_dump");
		$node->command_ok([ 'pg_restore', '-e', '-j', 2, '-d', $to, "$dir/$to.dir" ], "$to: pg_restore");
	},
	inserts => sub {
		my ($from, $to) = @_;
		$node->command_ok([ 'pg_dump', '--inserts', '-f', "$dir/$to.sql", $from ], "$to: pg_dump");
		$node->command_ok([ 'psql', '-X', '-v', 'ON_ERROR_STOP=1', '-d', $to, '-f', "$dir/$to.sql" ],
			"$to: psql");
	});

for my $how (sort keys %copy)
{
	my $db = "restored_$how";
	sql("CREATE DATABASE $db TEMPLATE template0");
	$copy{$how}->('postgres', $db);

	is(sql($contents, $db), sql($contents), "$how: the contents are the same");
	is(sql($rights, $db), sql($rights), "$how: the rights are the same");
	is(sql("SELECT count(*) FROM generate_series(1, 1001) i WHERE idem.inbox_try_claim('c', i::text)", $db),
		1, "$how: claims are still duplicates, others are new");
	is(sql("SELECT idem.inbox_try_claim('c', 'a2b5dd4e-0b9c-4b5e-9d3b-0123456789ab')", $db),
		'f', "$how: so is a uuid");
	is(sql("SELECT idem.inbox_try_claim('new' || i, '1') FROM generate_series(1, 3) i", $db),
		"t\nt\nt", "$how: new consumers can claim");
	is(sql("SELECT count(*), count(DISTINCT id), count(DISTINCT name) FROM idem.inbox_consumer", $db),
		'24|24|24', "$how: and have numbers of their own");
	is(sql("SELECT count(*) FROM idem.inbox WHERE consumer IS NULL", $db), 0, "$how: all claims have names");

	is(sql("SELECT * FROM idem.key_begin('s', 'done', '\\x0102')", $db),
		qq{completed||201|{"a": 1.50, "b": [1, null, "x"]}|line\nline\t\\ end}, "$how: a stored outcome");
	is(sql("SELECT status FROM idem.key_begin('s', 'done', '\\x03')", $db), 'mismatch', "$how: its fingerprint");
	is(sql("SELECT * FROM idem.key_begin('s', 'nothing')", $db), 'completed||||', "$how: an empty outcome");
	is(sql("SELECT status FROM idem.key_begin('s', 'flight')", $db), 'in_flight', "$how: a key in flight");
	is(sql("SELECT status FROM idem.key_begin('s', 'leased')", $db), 'in_flight', "$how: one with a lease");
	is(sql("SELECT idem.key_complete('s', 'leased', 3, token => (SELECT token FROM lease));
			SELECT status, code FROM idem.key_begin('s', 'leased')", $db),
		"\ncompleted|3", "$how: that its holder can complete");
	is(sql("SELECT idem.version_advance('v', 'e', $_->[0])", $db), $_->[1], "$how: version $_->[0]")
	  for [ 41, 'duplicate' ], [ 40, 'stale' ], [ 42, 'applied' ];

	is(sql("SELECT status FROM idem.inbox_claim('declared', 'x', sent_at => now() - interval '31 days')", $db),
		'expired', "$how: a declared retention is in force, but only what was there is known");
	is(sql("SELECT idem.consumer_create('declared2', retention => '40 days');
			SELECT retention FROM idem.consumer WHERE name = 'declared'", $db),
		"\n1 mon 2 days 03:04:05", "$how: it is kept as it was written");
	is($node->safe_psql($db, "SELECT idem.inbox_try_claim('app', '1')", extra_params => [ '-U', 'app' ]),
		't', "$how: who was granted a role can claim");
	my ($rc, $out, $err) = $node->psql($db, 'SELECT idem.inbox_purge()', extra_params => [ '-U', 'app' ]);
	like($err, qr/permission denied/, "$how: and no more");
	ok(await_running($node, $db), "$how: maintenance runs there");
}

# ---- to another encoding

{
	sql("CREATE DATABASE latin ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0");
	sql("CREATE DATABASE utf ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0");
	sql('CREATE EXTENSION idem', 'latin');
	my $e = 'U&' . q{'Verk\00e4ufer \00df'};
	my $id = 'U&' . q{'Stra\00dfe \00e9\00ff'};
	my $do = qq{
		SELECT idem.inbox_try_claim($e, $id);
		SELECT idem.inbox_try_claim($e, 'plain');
		SELECT idem.inbox_try_claim('plain', $id);
		SELECT idem.inbox_claim_batch($e, ARRAY[$id || 'b']);
		SELECT idem.consumer_create($e, retention => '1 day');
		SELECT idem.key_begin($e, $id); SELECT idem.key_complete($e, $id, 1, to_jsonb(text $id), $id);
		SELECT idem.version_advance($e, $id, 2);
	};
	my $ask = qq{
		SELECT idem.inbox_try_claim($e, $id), idem.inbox_try_claim($e, 'plain'),
			   idem.inbox_try_claim('plain', $id), (idem.inbox_claim_batch($e, ARRAY[$id || 'b'])).status,
			   idem.inbox_try_claim($e, $id || 'new');
		SELECT status, body = $id, headers = to_jsonb(text $id) FROM idem.key_begin($e, $id);
		SELECT idem.version_advance($e, $id, 2);
		SELECT count(*), count(DISTINCT consumer) FROM idem.inbox WHERE consumer = $e;
		SELECT retention FROM idem.consumer WHERE name = $e;
		SELECT idem.inbox_key($e, $id);
	};
	my $expected = "f|f|f|duplicate|t\ncompleted|t|t\nduplicate\n4|1\n1 day\n";

	sql($do, 'latin');
	is(sql("SELECT octet_length($id)", 'latin'), 9, 'one byte per character here');
	$copy{plain}->('latin', 'utf');
	is(sql("SELECT octet_length($id)", 'utf'), 12, 'several there');
	my $there = sql($ask, 'utf');
	my $here = sql($ask, 'latin');
	like($here, qr/^\Q$expected\E/, 'known where it came from');
	is($there, $here, 'known in a database of another encoding, with the same keys');

	# and back
	sql("CREATE DATABASE latin2 ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0");
	$copy{custom}->('utf', 'latin2');
	is(sql("SELECT idem.inbox_try_claim($e, $id), idem.inbox_try_claim($e, $id || 'new')", 'latin2'),
		'f|f', 'and back again');
}

# ---- DROP and CREATE EXTENSION under the feet of sessions

{
	sql('CREATE DATABASE again');
	sql('CREATE EXTENSION idem', 'again');
	my $one = session($node, 'again');
	my $two = session($node, 'again');
	my $work = q{
		SELECT idem.inbox_try_claim('c', '1');
		SELECT status FROM idem.inbox_claim('c', '2', sent_at => now());
		SELECT status FROM idem.inbox_claim_batch('d', '{1}');
		SELECT status FROM idem.key_begin('s', 'a');
		SELECT 1 FROM idem.key_complete('s', 'a');
		SELECT status FROM idem.key_begin('s', 'lease', lease => '1 h');
		SELECT idem.version_advance('v', 'e', 1);
		SELECT idem.version_advance('v', 'e', 2);
		SELECT 1 FROM idem.consumer_create('c', retention => '1 day');
		SELECT 1 FROM idem.consumer_alter('c', retention => '2 days');
		SELECT idem.inbox_purge();
		SELECT idem.key_purge();
		SELECT count(*) FROM idem.inbox WHERE consumer IS NOT NULL;
	};
	my $answers = join "\n",
	  qw(t claimed claimed started 1 started applied applied 1 1 0 0 3);

	is($one->query_safe($work), $answers, 'before');
	is($two->query_safe("SELECT idem.inbox_try_claim('c', '1')"), 'f', 'another session knows it');

	$one->query_safe('DROP EXTENSION idem; CREATE EXTENSION idem');
	is($two->query_safe("SELECT idem.inbox_try_claim('x', '1')"), 't', 'another session goes on');
	is($one->query_safe("SELECT idem.inbox_try_claim('x', '1')"), 'f', 'on the new tables');
	$two->query_safe('DROP EXTENSION idem; CREATE EXTENSION idem');
	is($two->query_safe($work), $answers, 'after, in the session that did it');
	is($one->query_safe("SELECT idem.inbox_try_claim('c', '1')"), 'f', 'after, in the other');
	$one->query_safe('DROP EXTENSION idem; CREATE EXTENSION idem');
	is($one->query_safe($work), $answers, 'and once more');

	# in one transaction, one rolled back, one not
	is($one->query_safe("BEGIN; DROP EXTENSION idem; CREATE EXTENSION idem;
						 SELECT idem.inbox_try_claim('c', '1'); SELECT idem.inbox_try_claim('y', '1'); ROLLBACK"),
		"t\nt", 'in one transaction: nothing is known in the new one');
	is($one->query_safe("SELECT idem.inbox_try_claim('c', '1'); SELECT idem.inbox_try_claim('y', '1')"),
		"f\nt", 'rolled back: the old ones are back');
	is($one->query_safe("BEGIN; DROP EXTENSION idem; CREATE EXTENSION idem;
						 SELECT idem.inbox_try_claim('c', '1'); COMMIT; SELECT idem.inbox_try_claim('c', '1')"),
		"t\nf", 'committed: the new ones stay');
	is($two->query_safe("SELECT idem.inbox_try_claim('c', '1'); SELECT idem.inbox_try_claim('y', '1')"),
		"f\nt", 'for the other session as well');
	is($two->query_safe('SELECT count(*) FROM idem.inbox WHERE consumer IS NULL'), 0, 'all claims have names');
	ok(await_running($node, 'again'), 'maintenance runs');

	$one->query_safe('DROP EXTENSION idem');
	like(sqlstate($node, "SELECT idem.inbox_try_claim('c', '1')", 'again'), qr/^(3F000|42883)$/,
		'without the extension there is nothing');
	leave($one, $two);
}

$node->stop;
done_testing();

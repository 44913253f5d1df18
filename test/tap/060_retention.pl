# Retention: what is too old goes, nothing else does, and nobody is held up.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

# It begins with the worker switched off.  With a naptime of an hour it runs
# when it is told to, see run_now().
my $node = cluster('retention', {}, 'idem.maintenance = off',
	'idem.maintenance_naptime = 1h', 'idem.maintenance_delay = 0', 'autovacuum = off',
	'restart_after_crash = on');

sub sql { return $node->safe_psql('postgres', $_[0]); }

# sql() that must not say anything but its result, nor take for ever
sub quiet
{
	my ($sql) = @_;
	my ($rc, $out, $err) =
	  $node->psql('postgres', "SET statement_timeout = '60s'; $sql");
	return "$out$err";
}

sub status
{
	my ($what, $columns) = @_;
	return sql("SELECT $columns FROM idem.retention_status WHERE what = '$what'");
}

sub set
{
	my (@settings) = @_;
	sql("ALTER SYSTEM SET $_") for @settings;
	$node->reload;
	return;
}

# Have the worker run once and wait for the end of it.  A reload wakes it, unless
# it is awake.
sub run_now
{
	$node->poll_query_until('postgres',
		"SELECT count(*) = 1 FROM pg_stat_activity
		 WHERE backend_type = 'idem maintenance' AND wait_event_type = 'Extension'")
	  or die 'the worker does not rest';
	my $last = status('key', "coalesce(last_run, '-infinity')");
	$node->reload;
	$node->poll_query_until('postgres',
		"SELECT last_run > '$last' FROM idem.retention_status WHERE what = 'key'")
	  or die 'the worker does not run';
	return;
}

# Who updates times behind the worker's back must have it look anew.
sub new_worker
{
	my $old = status('key', 'pid');
	sql("SELECT pg_terminate_backend($old)");
	$node->poll_query_until('postgres',
		"SELECT pid <> $old AND last_run IS NOT NULL AND state = 'running'
		 FROM idem.retention_status WHERE what = 'key'")
	  or die 'no new worker';
	run_now();
	return;
}

sub claim
{
	my ($consumer, @ids) = @_;
	sql("BEGIN; SELECT idem.inbox_try_claim('$consumer', '$_'); COMMIT;") for @ids;
	return;
}

# Make a claim older than it is.
sub age
{
	my ($consumer, $id, $age) = @_;
	sql("UPDATE idem.inbox_claim SET claimed_at = claimed_at - extract(epoch FROM interval '$age')
		 WHERE key = idem.inbox_key('$consumer', '$id')");
	return;
}

# Those of some ids that a consumer still knows, in their order.
sub known
{
	my ($consumer, @ids) = @_;
	my $ids = join ',', map { "'$_'" } @ids;
	return sql("SELECT string_agg(id, ' ' ORDER BY n) FROM unnest(ARRAY[$ids]) WITH ORDINALITY u(id, n)
				WHERE EXISTS (SELECT FROM idem.inbox_lookup('$consumer', id))");
}

# ---- an expired claim that is still there still counts

is(status('inbox', 'state, reason'), 'off|idem.maintenance is off', 'switched off');
claim('kept', 'old');
age('kept', 'old', '1000 days');
is(sql("SELECT idem.inbox_try_claim('kept', 'old')"), 'f', 'expired, but still a duplicate');
is(sql("SELECT status, first_seen < now() - interval '999 days' FROM idem.inbox_claim('kept', 'old', sent_at => now() - interval '1000 days')"),
	'duplicate|t', 'expired, but inbox_claim() knows it');
is(sql("SELECT status FROM idem.inbox_claim('kept', 'other', sent_at => now() - interval '1000 days')"),
	'expired', 'one that was never seen cannot be told from one that was removed');

# ---- claims of all ages, consumers of all kinds

my @ages = ('0 s', '2 h', '2 days', '8 days', '40 days');
my @consumers = (
	# name, SQL that declares it, ages that stay
	[ 'default', '', @ages[ 0 .. 2 ] ],
	[ 'short', "SELECT idem.consumer_create('short', retention => '1 hour')", @ages[ 0 .. 0 ] ],
	[ 'long', "SELECT idem.consumer_create('long', retention => '30 days')", @ages[ 0 .. 3 ] ],
	[ 'month', "SELECT idem.consumer_create('month', retention => '1 month')", @ages[ 0 .. 3 ] ],
	[ 'century', "SELECT idem.consumer_create('century', retention => '100 years')", @ages ],
	[ 'null', "SELECT idem.consumer_create('null')", @ages[ 0 .. 2 ] ],
	[   'shortened',
		"SELECT idem.consumer_create('shortened', retention => '30 days');
		 SELECT idem.consumer_alter('shortened', retention => '1 day')", @ages[ 0 .. 1 ] ],
	[   'lengthened',
		"SELECT idem.consumer_create('lengthened', retention => '1 hour');
		 SELECT idem.consumer_alter('lengthened', retention => '30 days')", @ages[ 0 .. 3 ] ],
	[   'reset',
		"SELECT idem.consumer_create('reset', retention => '1 hour');
		 SELECT idem.consumer_alter('reset', reset => ARRAY['retention'])", @ages[ 0 .. 2 ] ],
	[   'rolled back',
		"BEGIN; SELECT idem.consumer_create('rolled back', retention => '1 hour'); ROLLBACK", @ages[ 0 .. 2 ] ]);
my $expired = 1;    # that of "kept"

for my $consumer (@consumers)
{
	my ($name, $declare, @stay) = @$consumer;
	sql($declare) if $declare;
	claim($name, @ages);
	age($name, $_, $_) for @ages;
	$expired += @ages - @stay;
}

# Keys go when their ttl is over, whatever their state.
sql(q{
	SELECT idem.key_begin('s', 'old completed', ttl => '1 hour');
	SELECT idem.key_complete('s', 'old completed');
	SELECT idem.key_begin('s', 'old in flight', ttl => '1 hour');
	SELECT idem.key_begin('s', 'old with lease', ttl => '1 hour', lease => '1 minute');
	UPDATE idem.key SET started_at = started_at - interval '2 hours',
		expires_at = expires_at - interval '2 hours', lease_until = lease_until - interval '2 hours';
	SELECT idem.key_begin('s', 'completed', ttl => '1 hour');
	SELECT idem.key_complete('s', 'completed');
	SELECT idem.key_begin('s', 'in flight', ttl => '1 hour');
	SELECT idem.key_begin('s', 'with lease', ttl => '1 hour', lease => '1 minute');
	UPDATE idem.key SET lease_until = lease_until - interval '30 minutes' WHERE key = 'with lease';
});
is(status('key', "backlog, behind BETWEEN '59 min' AND '61 min'"), '3|t',
	'three keys are due, for an hour');

set('idem.maintenance = on');
ok(await_running($node), 'switched on without a restart');
ok($node->poll_query_until('postgres',
		"SELECT last_run IS NOT NULL FROM idem.retention_status WHERE what = 'key'"),
	'it has run');
is(known($_->[0], @ages), join(' ', @$_[ 2 .. $#$_ ]), "what consumer $_->[0] keeps")
  for @consumers;
is(known('kept', 'old'), '', 'what was expired all along is gone as well');
is(sql("SELECT string_agg(key, ', ' ORDER BY key) FROM idem.key"),
	'completed, in flight, with lease', 'keys that stay');
is(status('inbox', 'removed_total, backlog, behind IS NULL'), "$expired|0|t", 'figures of the inbox');
is(status('key', 'removed_total, backlog, behind IS NULL'), '3|0|t', 'figures of keys');
is(sql("SELECT idem.inbox_try_claim('default', '8 days')"), 't', 'what is gone can be claimed again');
is(sql("SELECT idem.inbox_try_claim('default', '2 days')"), 'f', 'what is there cannot');
is(sql("SELECT status FROM idem.key_begin('s', 'old completed')"), 'started',
	'a key that is gone can be begun again');
is(sql("SELECT status FROM idem.inbox_claim('lengthened', 'x', sent_at => now() - interval '2 days')"),
	'expired', 'a longer retention does not bring back what the shorter one removed');

# ---- a shorter retention takes effect on what is there, in the same worker

my $pid = status('inbox', 'pid');
run_now();
is(status('inbox', 'removed_last, removed_total, backlog'), "0|$expired|0", 'nothing more to do');

sql("SELECT idem.consumer_alter('long', retention => '1 day')");
run_now();
is(known('long', @ages), '0 s 2 h', 'shortened by consumer_alter()');
is(status('inbox', 'removed_last, backlog'), '2|0', 'the figures say so');
$expired += 2;

sql("SELECT idem.consumer_create('default', retention => '1 hour')");
run_now();
is(known('default', @ages), '0 s 8 days', 'shortened by consumer_create()');
$expired += 2;

sql("SELECT idem.consumer_alter('century', reset => ARRAY['retention'])");
run_now();
is(known('century', @ages), '0 s 2 h 2 days', 'shortened by the default');
$expired += 2;

sql("ALTER SYSTEM SET idem.inbox_retention = '1h'");
run_now();
is(known('null', @ages), '0 s', 'shortened by idem.inbox_retention');
is(known('rolled back', @ages), '0 s', 'the same for a consumer that is not declared');
is(known('lengthened', @ages), '0 s 2 h 2 days 8 days', 'but not where another is declared');
is(known('month', @ages), '0 s 2 h 2 days 8 days', 'nor here');
$expired += 8;    # two each of null, reset, rolled back, century

# nothing before may have been done by another worker
is(status('inbox', 'pid'), $pid, 'all of that by the same worker');
is(status('inbox', 'removed_total'), $expired, 'and everything was counted');

sql('ALTER SYSTEM RESET idem.inbox_retention');
set('idem.maintenance = off');
ok($node->poll_query_until('postgres',
		"SELECT count(*) = 2 FROM idem.retention_status WHERE state = 'off'"), 'switched off again');

# ---- by hand, some at a time

# expired_claims($consumer, $n): claims 1 .. n, long expired
sub expired_claims
{
	my ($consumer, $n) = @_;
	sql("SELECT count(*) FROM generate_series(1, $n) i WHERE idem.inbox_try_claim('$consumer', i::text)");
	sql("UPDATE idem.inbox_claim SET claimed_at = claimed_at - 86400 * 365
		 WHERE consumer IN (SELECT id FROM idem.inbox_consumer WHERE name = '$consumer')");
	return;
}

sub remaining
{
	my ($consumer) = @_;
	return sql("SELECT count(*) FROM idem.inbox WHERE consumer = '$consumer'");
}

expired_claims('hand', 1000);
my $others = sql("SELECT count(*) FROM idem.inbox WHERE consumer <> 'hand'");
is(sql("SELECT idem.inbox_purge($_->[0])"), $_->[1], "inbox_purge($_->[0]) removes $_->[1]")
  for [ 300, 300 ], [ 300, 300 ], [ 1, 1 ], [ 398, 398 ], [ 300, 1 ], [ 300, 0 ];
is(remaining('hand'), 0, 'all expired claims are gone');
is(sql("SELECT count(*) FROM idem.inbox"), $others, 'all others are there');
is(sqlstate($node, "SELECT idem.$_->[0]"), $_->[1], $_->[0])
  for [ 'inbox_purge(0)', '22023' ], [ 'inbox_purge(-1)', '22023' ], [ 'inbox_purge(NULL)', '22004' ];

sql("SELECT idem.key_begin('purge', i::text) FROM generate_series(1, 100) i;
	 UPDATE idem.key SET expires_at = now() - interval '1 s' WHERE scope = 'purge'");
is(sql("SELECT idem.key_purge($_->[0])"), $_->[1], "key_purge($_->[0]) removes $_->[1]")
  for [ 60, 60 ], [ 60, 40 ], [ 60, 0 ];

# ---- neither waits for the other

{
	my $purge = session($node);

	expired_claims('hold', 3);
	$purge->query_safe('BEGIN');
	is($purge->query_safe('SELECT idem.inbox_purge(2)'), 2, 'a purge in an open transaction');
	is(quiet("SELECT idem.inbox_try_claim('hold', '1')"), 'f',
		'a claim of what is being removed is answered at once');
	is(quiet("SELECT status FROM idem.inbox_claim('hold', '1')"), 'duplicate', 'by inbox_claim() too');
	is(quiet("SELECT status FROM idem.inbox_claim_batch('hold', '{1,2,3}')"),
		"duplicate\nduplicate\nduplicate", 'and in a batch');
	is(quiet('SELECT idem.inbox_purge()'), 1, 'another purge removes the rest at once');
	$purge->query_safe('ROLLBACK');
	is(remaining('hold'), 2, 'rolled back: they are there');
	is(quiet("SELECT idem.inbox_try_claim('hold', '1')"), 'f', 'and known');

	$purge->query_safe('BEGIN');
	is($purge->query_safe('SELECT idem.inbox_purge()'), 2, 'once more');
	is($purge->query_safe("SELECT idem.inbox_try_claim('hold', '1')"), 't',
		'who has removed a claim can claim it in the same transaction');
	$purge->query_safe('COMMIT');
	is(quiet("SELECT idem.inbox_try_claim('hold', '2')"), 't', 'committed: it can be claimed anew');

	$purge->query_safe("BEGIN; SELECT idem.inbox_try_claim('hold', 'open')");
	expired_claims('beside', 3);
	is(quiet('SELECT idem.inbox_purge()'), 3, 'a purge does not wait for an open claim');
	$purge->query_safe('COMMIT');
	leave($purge);
}

# ---- 300,000 of them, while somebody holds an old snapshot

{
	my $n = 300_000;
	my $reader = session($node);

	claim('large', 'x');
	sql(qq{
		INSERT INTO idem.inbox_claim
		SELECT idem.inbox_key('large', i::text), n.id,
			   extract(epoch FROM now() - '2000-01-01 00:00+00')::int
			   - CASE WHEN i % 3000 = 0 THEN 0 ELSE 86400 * 30 END
		FROM generate_series(1, $n) i, idem.inbox_consumer n WHERE n.name = 'large'});
	$reader->query_safe("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM idem.inbox");
	my $before = status('inbox', 'removed_total');
	set('idem.maintenance = on');
	new_worker();
	is(remaining('large'), 101, 'of 300,000 claims the 100 that are not expired stay, and one more');
	is(sql("SELECT count(*) FROM generate_series(3000, $n, 3000) i
			WHERE EXISTS (SELECT FROM idem.inbox_lookup('large', i::text))"),
		100, 'they are the right ones');
	is(status('inbox', "removed_total - $before, backlog, behind IS NULL"),
		$n - 100 . '|0|t', 'all are counted, none is left');
	is($reader->query_safe("SELECT count(*) FROM idem.inbox WHERE consumer = 'large'"),
		$n + 1, 'the old snapshot still sees them');
	is(sql("SELECT idem.inbox_try_claim('large', '1')"), 't', 'others can claim them anew');
	$reader->query_safe('COMMIT');
	leave($reader);
}

# ---- claims in space that was freed expire as well, and in their own time

{
	set("idem.inbox_retention = '2s'", "idem.maintenance_naptime = '1s'");
	sql("SELECT idem.consumer_create('stays', retention => '1 day')");
	my $batch = sub {
		my ($consumer, $prefix, $n) = @_;
		return sql("SELECT count(*) FROM idem.inbox_claim_batch('$consumer',
			(SELECT array_agg('$prefix' || i) FROM generate_series(1, $n) i)) WHERE status = 'claimed'");
	};

	# a last page that stays, so that vacuum frees space rather than cuts it off
	is($batch->('goes', 'a', 30_000), 30_000, 'a first lot');
	is($batch->('stays', 'a', 500), 500, 'some that stay');
	my $blocks = sql("SELECT pg_relation_size('idem.inbox_claim') / 8192");
	ok($node->poll_query_until('postgres',
			"SELECT count(*) = 0 FROM idem.inbox WHERE consumer = 'goes'"), 'the first lot expires');
	$pid = status('inbox', 'pid');
	sql('VACUUM idem.inbox_claim');

	for my $round (1 .. 2)
	{
		is($batch->('goes', "b$round", 20_000), 20_000, "round $round: a second lot");
		is(sql("SELECT pg_relation_size('idem.inbox_claim') / 8192"), $blocks,
			"round $round: it needed no new space");
		ok($node->poll_query_until('postgres',
				"SELECT count(*) = 0 FROM idem.inbox WHERE consumer = 'goes'"),
			"round $round: it expires too");
		sql('VACUUM idem.inbox_claim');
	}
	is(remaining('stays'), 500, 'the others stay');
	is(status('inbox', 'pid'), $pid, 'all of that by the same worker');

	# keys expire by themselves, too
	sql("SELECT idem.key_begin('brief', 'k', ttl => '1 s')");
	ok($node->poll_query_until('postgres',
			"SELECT count(*) = 0 FROM idem.key WHERE scope = 'brief'"), 'a key expires by itself');
	sql('ALTER SYSTEM RESET idem.inbox_retention');
	set('idem.maintenance = off');
}

# ---- indexes that a DBA has added are kept up

{
	my $amcheck = extension_available($node, 'amcheck');
	sql('CREATE EXTENSION amcheck') if $amcheck;
	sql(q{
		CREATE FUNCTION even(int) RETURNS bool IMMUTABLE LANGUAGE plpgsql AS
			'BEGIN RETURN $1 % 2 = 0; END';
		CREATE INDEX plain ON idem.inbox_claim (claimed_at);
		CREATE INDEX partial ON idem.inbox_claim (claimed_at) WHERE get_byte(uuid_send(key), 0) < 128;
		CREATE INDEX expression ON idem.inbox_claim ((get_byte(uuid_send(key), 0)));
		CREATE INDEX mixed ON idem.inbox_claim ((claimed_at % 7)) WHERE even(get_byte(uuid_send(key), 1));
		CREATE UNIQUE INDEX uniq ON idem.inbox_claim (key, consumer);
		CREATE INDEX hash ON idem.inbox_claim USING hash (key);
		CREATE INDEX brin ON idem.inbox_claim USING brin (claimed_at) WITH (pages_per_range = 1);
		CREATE INDEX key_plain ON idem.key (scope, started_at);
		CREATE INDEX key_partial ON idem.key (started_at) WHERE NOT completed;
		CREATE INDEX key_brin ON idem.key USING brin (started_at);
		CREATE INDEX version_plain ON idem.version (version);
		CREATE INDEX version_expression ON idem.version ((version % 3)) WHERE entity <> 'x';
		CREATE INDEX version_brin ON idem.version USING brin (advanced_at);
	});

	# One made CONCURRENTLY while claims go on.  It waits for the transaction
	# that is open; that one and others go on claiming.
	my $open = session($node);
	$open->query_safe("BEGIN; SELECT idem.inbox_try_claim('index', 'open1')");
	my $create = start_sql($node, 'CREATE INDEX CONCURRENTLY concurrent ON idem.inbox_claim (claimed_at, key)');
	ok(await_waiting($node, 1), 'CREATE INDEX CONCURRENTLY waits for an open claim');
	is(quiet("SELECT count(*) FROM generate_series(1, 100) i WHERE idem.inbox_try_claim('index', 'c' || i)"),
		100, 'claims meanwhile');
	$open->query_safe("SELECT idem.inbox_try_claim('index', 'open2'); COMMIT");
	is(finish_sql($create), '', 'CREATE INDEX CONCURRENTLY succeeds');
	leave($open);

	# All ways to write a claim.  None may say anything about buffers or the like.
	is(quiet("SELECT idem.inbox_try_claim('index', 'one')"), 't', 'a single claim');
	is(quiet("SELECT idem.inbox_try_claim('index', gen_random_uuid())"), 't', 'one by uuid');
	is(quiet("SELECT status FROM idem.inbox_claim('index', 'two')"), 'claimed', 'inbox_claim()');
	is(quiet("SELECT count(*) FROM generate_series(1, 3000) i WHERE idem.inbox_try_claim('index', 'd' || i)"),
		3000, 'many');
	is(quiet("SELECT status, count(*) FROM idem.inbox_claim_batch('index',
			  (SELECT array_agg('e' || i) FROM generate_series(1, 3000) i)) GROUP BY 1"),
		'claimed|3000', 'a batch');
	is(quiet("BEGIN; SELECT idem.inbox_try_claim('index', 'gone'); ROLLBACK"), 't', 'one rolled back');
	is(quiet("SELECT count(*) FROM generate_series(1, 300) i, idem.key_begin('index', i::text) b
			  WHERE status = 'started'"), 300, 'keys');
	is(quiet("SELECT count(idem.key_complete('index', i::text)) FROM generate_series(1, 300, 2) i"),
		150, 'keys completed');
	is(quiet("SELECT count(*) FROM generate_series(1, 300) i
			  WHERE idem.version_advance('index', i::text, i) = 'applied'"), 300, 'versions');
	is(quiet("SELECT count(*) FROM generate_series(1, 300) i
			  WHERE idem.version_advance('index', i::text, 2 * i) = 'applied'"), 300, 'versions advanced');

	my $check = sub {
		my ($when) = @_;
		# The conditions are such that each index serves; it is the only way left.
		my %query = (
			plain => 'idem.inbox_claim WHERE claimed_at >= 0',
			partial => 'idem.inbox_claim WHERE claimed_at >= 0 AND get_byte(uuid_send(key), 0) < 128',
			expression => 'idem.inbox_claim WHERE get_byte(uuid_send(key), 0) >= 0',
			mixed => 'idem.inbox_claim WHERE claimed_at % 7 >= 0 AND even(get_byte(uuid_send(key), 1))',
			concurrent => 'idem.inbox_claim WHERE claimed_at >= 1 AND key >= uuid_in(\'00000000-0000-0000-0000-000000000000\')',
			uniq => 'idem.inbox_claim WHERE key >= uuid_in(\'00000000-0000-0000-0000-000000000000\') AND consumer > 0',
			brin => 'idem.inbox_claim WHERE claimed_at BETWEEN 1 AND 2000000000',
			key_plain => "idem.key WHERE scope = 'index' AND started_at > '2000-01-01'",
			key_partial => "idem.key WHERE started_at > '2000-01-01' AND NOT completed",
			key_brin => "idem.key WHERE started_at BETWEEN '2000-01-02' AND '2200-01-01'",
			version_plain => 'idem.version WHERE version >= 0',
			version_expression => "idem.version WHERE version % 3 >= 0 AND entity <> 'x'",
			version_brin => "idem.version WHERE advanced_at BETWEEN '2000-01-02' AND '2200-01-01'");
		for my $index (sort keys %query)
		{
			# Put all others of the table out of the way, for one transaction.
			my ($table) = $query{$index} =~ /^idem\.(\w+)/;
			my $type = $index =~ /brin/ ? 'enable_indexscan' : 'enable_bitmapscan';
			my $hide = "UPDATE pg_index SET indisvalid = false WHERE indrelid = 'idem.$table'::regclass
						AND indexrelid <> 'idem.$index'::regclass";
			my $answer = sql(qq{
				BEGIN;
				SELECT count(*) FROM $query{$index};
				$hide;
				SET LOCAL enable_seqscan = off; SET LOCAL $type = off;
				SELECT count(*) FROM $query{$index};
				EXPLAIN (COSTS off) SELECT count(*) FROM $query{$index};
				ROLLBACK;});
			my ($n, $m, $plan) = split /\n/, $answer, 3;
			like($plan, qr/\b$index\b/, "$when: index $index is used");
			is($m, $n, "$when: index $index has all $n rows");
			cmp_ok($n, '>', 0, "$when: index $index has rows");
		}
		is(sql("SET enable_seqscan = off; SET enable_indexscan = off; SET enable_indexonlyscan = off;
				SELECT count(*) FROM idem.inbox_claim WHERE key = idem.inbox_key('index', 'one')"),
			1, "$when: index hash finds a row");
	  SKIP:
		{
			skip 'amcheck is not available', 1 unless $amcheck;
			is(quiet(q{
					SELECT count(bt_index_check(c.oid, true)) > 0
					FROM pg_class c JOIN pg_index i ON i.indexrelid = c.oid
						 JOIN pg_am a ON a.oid = c.relam JOIN pg_class t ON t.oid = i.indrelid
					WHERE a.amname = 'btree' AND t.relnamespace = 'idem'::regnamespace}),
				't', "$when: amcheck finds all rows in all indexes");
		}
		return;
	};

	$check->('after claims');
	is(sql("SELECT idem.inbox_purge(1000000) >= 0"), 't', 'a purge');
	sql("UPDATE idem.inbox_claim SET claimed_at = claimed_at - 86400 * 365 WHERE even(get_byte(uuid_send(key), 2));
		 SELECT idem.inbox_purge(1000000); VACUUM idem.inbox_claim, idem.key, idem.version");
	is(quiet("SELECT count(*) > 1000 FROM generate_series(1, 3000) i WHERE idem.inbox_try_claim('index', 'd' || i)"),
		't', 'claims in freed space');
	sql("SELECT idem.inbox_try_claim('index', 'one')");
	$check->('after purge and vacuum');
}

# ---- the same for the names of consumers

{
	sql(q{
		CREATE INDEX name_partial ON idem.inbox_consumer (name) WHERE name LIKE 'a%';
		CREATE INDEX name_expression ON idem.inbox_consumer (lower(name));
	});
	is(quiet("SELECT idem.inbox_try_claim('$_', 'x')"), 't', "a first claim of $_") for 'Abc', 'abc', 'xyz';
	is(quiet(q{
			SET enable_seqscan = off;
			SELECT name FROM idem.inbox_consumer WHERE lower(name) = 'abc' ORDER BY name}),
		"Abc\nabc", 'an index on an expression has the new names');
	is(quiet(q{
			SET enable_seqscan = off;
			SELECT name FROM idem.inbox_consumer WHERE name LIKE 'a%' AND name > 'aaa'}),
		'abc', 'a partial index has those that belong there');
}

$node->stop;
done_testing();

# An answer that says "already done" never rests on a commit that a crash can
# still undo.  And what such an answer costs, and how many claims a transaction
# can hold.
#
# Commits are asynchronous here and the WAL writer is stopped, so a commit
# reaches the disk only if somebody insists.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = cluster('durable', {},
	'fsync = on', 'synchronous_commit = off', 'wal_writer_delay = 10s',
	'autovacuum = off', 'checkpoint_timeout = 1h', 'max_wal_size = 4GB',
	'idem.maintenance = off', 'log_statement = none', 'full_page_writes = off');
my $pageinspect = extension_available($node, 'pageinspect');
$node->safe_psql('postgres', 'CREATE EXTENSION pageinspect') if $pageinspect;

my $writer;

sub stop_wal_writer
{
	$node->safe_psql('postgres', 'CHECKPOINT');
	$writer = $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'");
	kill STOP => $writer or die "no WAL writer";
	return;
}

sub restart
{
	crash($node);
	$node->start;
	stop_wal_writer();
	return;
}

# Is WAL on disk beyond this position?
sub flushed_beyond
{
	my ($lsn) = @_;
	return $node->safe_psql('postgres', "SELECT pg_current_wal_flush_lsn() > '$lsn'");
}

# Do something in a transaction of its own; returns the WAL position before its
# commit, which is thus not on disk unless WAL is flushed beyond that position.
sub commit
{
	my ($sql) = @_;
	my $answer = $node->safe_psql('postgres', qq{
		BEGIN;
		$sql;
		SELECT pg_current_wal_insert_lsn();
		COMMIT;
	});
	my ($lsn) = $answer =~ /([^\n]+)\z/;
	return $lsn;
}

stop_wal_writer();

# Each case: what is committed, how somebody is told about it (after something
# that may happen in between), and the answer.  After a crash the answer must
# still be the same.
my @cases = (
	[   'inbox_try_claim(text)',
		q{SELECT idem.inbox_try_claim('c', 'text')},
		q{SELECT idem.inbox_try_claim('c', 'text')}, 'f' ],
	[   'inbox_try_claim(uuid)',
		q{SELECT idem.inbox_try_claim('c', '00000000-0000-0000-0000-00000000000a'::uuid)},
		q{SELECT idem.inbox_try_claim('c', '00000000-0000-0000-0000-00000000000a'::uuid)}, 'f' ],
	[   'inbox_claim()',
		q{SELECT idem.inbox_claim('c', 'claim')},
		q{SELECT status FROM idem.inbox_claim('c', 'claim')}, 'duplicate' ],
	[   'inbox_claim(wait => false)',
		q{SELECT idem.inbox_claim('c', 'nowait')},
		q{SELECT status FROM idem.inbox_claim('c', 'nowait', wait => false)}, 'duplicate' ],
	[   'inbox_claim(sent_at => long ago)',
		q{SELECT idem.inbox_claim('c', 'sent')},
		q{SELECT status FROM idem.inbox_claim('c', 'sent', sent_at => '2001-01-01')}, 'duplicate' ],
	[   'inbox_claim_batch()',
		q{SELECT idem.inbox_claim_batch('c', '{b1,b2,b3}')},
		q{SELECT string_agg(status::text, ',') FROM idem.inbox_claim_batch('c', '{b3,b1}')},
		'duplicate,duplicate' ],
	[   'a claim in a batch of one that is known',
		q{SELECT idem.inbox_try_claim('c', 'b4')},
		q{SELECT status FROM idem.inbox_claim_batch('c', '{b4}')}, 'duplicate' ],
	[   'a claim in a subtransaction',
		q{SAVEPOINT a; SELECT idem.inbox_try_claim('c', 'sub'); RELEASE a},
		q{SELECT idem.inbox_try_claim('c', 'sub')}, 'f' ],
	[   'a claim in a subtransaction of a subtransaction, after one rolled back',
		q{SAVEPOINT a; SAVEPOINT b; SELECT idem.inbox_try_claim('c', 'subsub'); ROLLBACK TO b;
		  SELECT idem.inbox_try_claim('c', 'subsub'); RELEASE a},
		q{SELECT idem.inbox_try_claim('c', 'subsub')}, 'f' ],
	[   'key_begin() of a completed key',
		q{SELECT idem.key_begin('s', 'k'); SELECT idem.key_complete('s', 'k', 201, '{"x": 1}', 'body')},
		q{SELECT status, code, headers, body FROM idem.key_begin('s', 'k')},
		'completed|201|{"x": 1}|body' ],
	[   'key_begin(wait => false) of a completed key',
		q{SELECT idem.key_begin('s', 'k2'); SELECT idem.key_complete('s', 'k2', 201)},
		q{SELECT status, code FROM idem.key_begin('s', 'k2', wait => false)}, 'completed|201' ],
	[   'key_begin() of a key with a lease',
		q{SELECT idem.key_begin('s', 'k3', lease => '1 hour')},
		q{SELECT status FROM idem.key_begin('s', 'k3')}, 'in_flight' ],
	[   'key_begin() with another fingerprint',
		q{SELECT idem.key_begin('s', 'k4', 'a'); SELECT idem.key_complete('s', 'k4')},
		q{SELECT status FROM idem.key_begin('s', 'k4', 'b')}, 'mismatch' ],
	[   'version_advance() to the same version',
		q{SELECT idem.version_advance('v', 'e', 7)},
		q{SELECT idem.version_advance('v', 'e', 7)}, 'duplicate' ],
	[   'version_advance() to an older one',
		q{SELECT idem.version_advance('v', 'e', 9)},
		q{SELECT idem.version_advance('v', 'e', 8)}, 'stale' ],
	[   'a frozen claim',
		q{SELECT idem.inbox_try_claim('c', 'frozen')},
		q{SELECT idem.inbox_try_claim('c', 'frozen')}, 'f',
		between => 'VACUUM (FREEZE) idem.inbox_claim',
		frozen => 'frozen' ],
	[   'a frozen claim of a subtransaction',
		q{SAVEPOINT a; SELECT idem.inbox_try_claim('c', 'subfrozen'); RELEASE a},
		q{SELECT idem.inbox_try_claim('c', 'subfrozen')}, 'f',
		between => 'VACUUM (FREEZE) idem.inbox_claim',
		frozen => 'subfrozen' ],
	[   'a claim that others have looked at before',
		q{SELECT idem.inbox_try_claim('c', 'hinted')},
		q{SELECT idem.inbox_try_claim('c', 'hinted')}, 'f',
		between => 'SELECT count(*) FROM idem.inbox' ],
);

for my $case (@cases)
{
	my ($what, $do, $ask, $answer, %more) = @$case;
	my $lsn = commit($do);
	$node->safe_psql('postgres', $more{between}) if $more{between};
	if ($more{frozen} && $pageinspect)
	{
		# both bits that say "committed" and "aborted" mean "frozen"
		is($node->safe_psql('postgres', qq{
				SELECT i.t_infomask & 768
				FROM idem.inbox_claim c,
					 heap_page_items(get_raw_page('idem.inbox_claim',
						(c.ctid::text::point)[0]::int)) i
				WHERE c.key = idem.inbox_key('c', '$more{frozen}')
				  AND i.lp = (c.ctid::text::point)[1]::int}),
			'768', "$what: its row is frozen");
	}
	is(flushed_beyond($lsn), 'f', "$what: the commit is not on disk");
	is($node->safe_psql('postgres', $ask), $answer, "$what: another session is told '$answer'");
	is(flushed_beyond($lsn), 't', "$what: then the commit is on disk");

	# The control: something committed now, about which nobody is told, is lost.
	$lsn = commit("SELECT idem.inbox_try_claim('control', 'untold')");
	is(flushed_beyond($lsn), 'f', "$what: control: not on disk");
	restart();
	is($node->safe_psql('postgres', $ask), $answer, "$what: the same after a crash");
	is($node->safe_psql('postgres', "SELECT count(*) FROM idem.inbox_lookup('control', 'untold')"),
		'0', "$what: control: what nobody was told about is lost");
}

# ---- "gap" also tells of a commit: of the version that is there

{
	my $lsn = commit(q{SELECT idem.version_advance('v', 'gap', 1)});
	is($node->safe_psql('postgres', q{SELECT idem.version_advance('v', 'gap', 3, 'next')}),
		'gap', 'a gap');
	is(flushed_beyond($lsn), 't', 'a gap: what it leaves from is on disk');
}

# ---- the waiting kind: told once the other has committed

for my $case (
	[   'inbox_try_claim()', q{SELECT idem.inbox_try_claim('c', 'waited')},
		q{SELECT idem.inbox_try_claim('c', 'waited')}, 'f' ],
	[   'key_begin()', q{SELECT idem.key_begin('s', 'waited'); SELECT idem.key_complete('s', 'waited', 1)},
		q{SELECT status FROM idem.key_begin('s', 'waited')}, 'completed' ],
	[   'version_advance()', q{SELECT idem.version_advance('v', 'waited', 1)},
		q{SELECT idem.version_advance('v', 'waited', 1)}, 'duplicate' ])
{
	my ($what, $do, $ask, $answer) = @$case;
	my $holder = session($node);
	$holder->query_safe("BEGIN; $do");
	my $lsn = $holder->query_safe('SELECT pg_current_wal_insert_lsn()');
	my $waiter = start_sql($node, $ask);
	ok(await_waiting($node, 1), "$what waits for an open transaction");
	$holder->query_safe('COMMIT');
	is(finish_sql($waiter), $answer, "$what is told after the wait");
	is(flushed_beyond($lsn), 't', "$what: the commit is on disk then");
	restart();
	leave($holder);
	is($node->safe_psql('postgres', $ask), $answer, "$what: the same after a crash");
}

# ---- what a duplicate costs

{
	my %known = (
		"idem.inbox_try_claim('c', 'text')" => 'f',
		"(idem.inbox_claim('c', 'text')).status" => 'duplicate',
		"(idem.inbox_claim_batch('c', '{text,claim}')).status" => "duplicate\nduplicate",
		"(idem.inbox_claim('c', 'never seen', sent_at => '2001-01-01')).status" => 'expired',
		"(idem.key_begin('s', 'k')).status" => 'completed',
		"idem.version_advance('v', 'e', 9)" => 'duplicate',
		"idem.version_advance('v', 'e', 8)" => 'stale');
	for my $call (sort keys %known)
	{
		is($node->safe_psql('postgres', qq{
				BEGIN;
				SELECT $call;
				SELECT pg_current_xact_id_if_assigned() IS NULL;
				COMMIT;}),
			"$known{$call}\nt", "no transaction id for $call");
	}
	is($node->safe_psql('postgres', qq{
			BEGIN;
			SELECT idem.inbox_try_claim('c', 'new');
			SELECT pg_current_xact_id_if_assigned() IS NULL;
			COMMIT;}),
		"t\nf", 'control: a new claim has one');
}
kill CONT => $writer;

# ---- many claims in one transaction

{
	my $n = 100_000;
	is($node->safe_psql('postgres', qq{
			DO \$\$
			BEGIN
				FOR i IN 1 .. $n LOOP
					IF NOT idem.inbox_try_claim('single', i::text) THEN
						RAISE EXCEPTION 'claim % is taken', i;
					END IF;
				END LOOP;
			END \$\$;
			SELECT count(*) FROM idem.inbox WHERE consumer = 'single';}),
		$n, "$n single claims in one transaction");
	is($node->safe_psql('postgres', qq{
			SELECT count(*) FROM generate_series(1, $n + 1) i
			WHERE NOT idem.inbox_try_claim('single', i::text)}),
		$n, 'all of them are known');

	my $batch = qq{
		SELECT status, count(*) FROM idem.inbox_claim_batch('batch',
			(SELECT array_agg(i::text) FROM generate_series(1, $n) i)) GROUP BY 1};
	is($node->safe_psql('postgres', $batch), "claimed|$n", "a batch of $n");
	is($node->safe_psql('postgres', $batch), "duplicate|$n", 'the same batch again');
	is($node->safe_psql('postgres',
			"SELECT count(DISTINCT key) FROM idem.inbox WHERE consumer = 'batch'"),
		$n, 'each of the batch has its row');

	# every other savepoint is rolled back, one of all 10,000 is claimed twice
	my $m = 10_000;
	my $sql = join "\n", 'BEGIN;', (map {
		"SAVEPOINT s; SELECT idem.inbox_try_claim('savepoint', '$_'); "
		  . ($_ % 2 ? 'RELEASE s;' : 'ROLLBACK TO s;')
	} 1 .. $m), 'COMMIT;';
	my $answers = $node->safe_psql('postgres', $sql);
	is($answers, join("\n", ('t') x $m), "$m claims with a savepoint each");
	is($node->safe_psql('postgres', qq{
			SELECT count(*), count(*) FILTER (WHERE i % 2 = 1)
			FROM generate_series(1, $m) i
			WHERE EXISTS (SELECT FROM idem.inbox_lookup('savepoint', i::text))}),
		$m / 2 . '|' . $m / 2, 'those whose savepoint was released are there, no others');
	is($node->safe_psql('postgres',
			"SELECT count(*) FROM idem.inbox WHERE consumer IS NULL"),
		'0', 'every claim knows its consumer');

	# the same by exceptions, all nested in one transaction
	is($node->safe_psql('postgres', qq{
			DO \$\$
			BEGIN
				FOR i IN 1 .. $m LOOP
					BEGIN
						PERFORM idem.inbox_try_claim('exception', i::text);
						IF i % 2 = 0 THEN RAISE division_by_zero; END IF;
					EXCEPTION WHEN division_by_zero THEN NULL;
					END;
				END LOOP;
			END \$\$;
			SELECT count(*) FROM idem.inbox WHERE consumer = 'exception';}),
		$m / 2, "$m claims with an exception block each");
}

$node->stop;
done_testing();

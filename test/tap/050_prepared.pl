# Two-phase commit: a prepared transaction guards what it has claimed.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = cluster('prepared', {}, 'max_prepared_transactions = 10');

sub sql { return $node->safe_psql('postgres', $_[0]); }

# What is done in the prepared transaction, how others ask, what they are told
# after a commit and after a rollback, and without waiting.  ID becomes the name
# of the case.
my @cases = (
	{   what => 'claim',
		do => "SELECT idem.inbox_try_claim('c', 'ID')",
		ask => "SELECT idem.inbox_try_claim('c', 'ID')",
		committed => 'f', rolled_back => 't',
		nowait => "SELECT status FROM idem.inbox_claim('c', 'ID', wait => false)" },
	{   what => 'claim in a savepoint',
		do => "SAVEPOINT a; SELECT idem.inbox_try_claim('sub', 'ID'); RELEASE a",
		ask => "SELECT status FROM idem.inbox_claim('sub', 'ID')",
		committed => 'duplicate', rolled_back => 'claimed',
		nowait => "SELECT status FROM idem.inbox_claim('sub', 'ID', wait => false)" },
	{   what => 'batch',
		do => "SELECT idem.inbox_claim_batch('batch', '{ID,x,y}')",
		ask => "SELECT status FROM idem.inbox_claim_batch('batch', '{ID}')",
		committed => 'duplicate', rolled_back => 'claimed' },
	{   what => 'key',
		do => "SELECT idem.key_begin('s', 'ID'); SELECT idem.key_complete('s', 'ID', 5)",
		ask => "SELECT status, code FROM idem.key_begin('s', 'ID')",
		committed => 'completed|5', rolled_back => 'started|',
		nowait => "SELECT status FROM idem.key_begin('s', 'ID', wait => false)" },
	{   what => 'version',
		do => "SELECT idem.version_advance('v', 'ID', 3)",
		ask => "SELECT idem.version_advance('v', 'ID', 3)",
		committed => 'duplicate', rolled_back => 'applied' });

# for_id($sql, $id)
sub for_id
{
	my ($sql, $id) = @_;
	return $sql =~ s/ID/$id/gr;
}

# ---- others wait for the outcome, and are told accordingly

for my $case (@cases)
{
	for my $end ('committed', 'rolled_back')
	{
		my $what = "$case->{what}, $end";
		sql('BEGIN;' . for_id($case->{do}, $end) . "; PREPARE TRANSACTION 'p'");
		if ($case->{nowait})
		{
			is(sql(for_id($case->{nowait}, $end)), 'in_flight', "$what: in flight for who does not wait");
		}
		my $waiter = start_sql($node, for_id($case->{ask}, $end));
		ok(await_waiting($node, 1), "$what: others wait");
		is(sql("SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
				WHERE NOT l.granted AND l.locktype = 'transactionid'"),
			1, "$what: for the transaction");
		sql($end eq 'committed' ? "COMMIT PREPARED 'p'" : "ROLLBACK PREPARED 'p'");
		is(finish_sql($waiter), $case->{$end}, "$what: they are told");
	}
}

# ---- a prepared transaction outlives a restart and a crash, and still guards

for my $how ('restart', 'crash')
{
	for my $end ('committed', 'rolled_back')
	{
		my $id = "$how $end";
		for my $case (@cases)
		{
			sql('BEGIN;' . for_id($case->{do}, $id) . "; PREPARE TRANSACTION '$case->{what}'");
		}
		if ($how eq 'crash') { crash($node); $node->start; }
		else { $node->restart; }

		for my $case (@cases)
		{
			my $what = "$case->{what}, $end after $how";
			my $waiter = start_sql($node, for_id($case->{ask}, $id));
			is(sql(for_id($case->{nowait}, $id)), 'in_flight', "$what: in flight") if $case->{nowait};
			ok(await_waiting($node, 1), "$what: others wait");
			sql(($end eq 'committed' ? 'COMMIT' : 'ROLLBACK') . " PREPARED '$case->{what}'");
			is(finish_sql($waiter), $case->{$end}, "$what: they are told");
		}
	}
}

# ---- the first claim of a consumer, prepared: what the session remembers of it

for my $end ('COMMIT', 'ROLLBACK')
{
	my $session = session($node);
	my $name = lc "new $end";

	is($session->query_safe("BEGIN; SELECT idem.inbox_try_claim('$name', '1')"), 't', "$name: first claim");
	$session->query_safe("PREPARE TRANSACTION 'new'");
	is($session->query_safe("SELECT idem.inbox_try_claim('$name', '2')"), 't',
		"$name: the same session claims again before the end");
	$session->query_safe("$end PREPARED 'new'");
	is($session->query_safe("SELECT idem.inbox_try_claim('$name', '3')"), 't', "$name: and after it");
	is($session->query_safe("SELECT idem.inbox_try_claim('$name', '1')"),
		$end eq 'COMMIT' ? 'f' : 't', "$name: and the first one");
	is(sql("SELECT count(*) FROM idem.inbox WHERE consumer = '$name'"), 3, "$name: all claims bear the name");
	leave($session);
}
is(sql('SELECT count(*) FROM idem.inbox WHERE consumer IS NULL'), 0, 'no claim is without a name');

# ---- the same with nothing in between

{
	my $session = session($node);
	is($session->query_safe("BEGIN; SELECT idem.inbox_try_claim('again', '1')"), 't', 'first claim');
	$session->query_safe("PREPARE TRANSACTION 'again'; ROLLBACK PREPARED 'again'");
	is($session->query_safe("SELECT idem.inbox_try_claim('again', '1')"), 't', 'rolled back: claimed again');
	is(sql("SELECT consumer FROM idem.inbox WHERE key = idem.inbox_key('again', '1')"), 'again',
		'the claim has its name');
	leave($session);
}

$node->stop;
done_testing();

# What a crash leaves: committed claims and nothing else, whoever was killed.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = cluster('crash', {}, 'restart_after_crash = on', 'max_connections = 30',
	'log_statement = none', 'synchronous_commit = on');
$node->safe_psql('postgres', 'CREATE TABLE effect (msg text)');

# One message, processed in one transaction: a claim, a key, a version, and the
# effect they guard.  Says what each of the three found.
sub process_sql
{
	my ($id) = @_;
	return qq{
		SELECT idem.inbox_try_claim('crash', '$id'),
			   (idem.key_begin('crash', '$id')).status,
			   idem.version_advance('crash', '$id', 1);
	};
}

sub first_sql
{
	my ($id) = @_;
	return process_sql($id) . qq{
		SELECT idem.key_complete('crash', '$id', 200, '{"a": 1}', 'done $id');
		INSERT INTO effect VALUES ('$id');
	};
}

my $fresh = 't|started|applied';
my $known = 'f|completed|duplicate';

# Deliver the message again and again: once it is new (unless it was known all
# along), then never more, and there is one effect.
sub redeliver
{
	my ($id, $expected, $what) = @_;
	is($node->safe_psql('postgres', process_sql($id)), $expected, "$what: $id") if $expected eq $known;
	if ($expected eq $fresh)
	{
		like($node->safe_psql('postgres', 'BEGIN;' . first_sql($id) . 'COMMIT;'),
			qr/^\Q$fresh\E$/m, "$what: $id is new");
		is($node->safe_psql('postgres', process_sql($id)), $known, "$what: $id is known then");
	}
	is($node->safe_psql('postgres', "SELECT body FROM idem.key_begin('crash', '$id')"),
		"done $id", "$what: outcome of $id");
	is($node->safe_psql('postgres', "SELECT count(*) FROM effect WHERE msg = '$id'"),
		'1', "$what: one effect of $id");
	return;
}

sub backend_pid
{
	my ($session) = @_;
	return $session->query_safe('SELECT pg_backend_pid()');
}

# ---- between claim and commit, and right after commit: the postmaster dies

for my $orphans (0, 1)
{
	my $what = $orphans ? 'postmaster killed' : 'everything killed';
	my $before = session($node);
	my $after = session($node);

	$after->query_safe('BEGIN;' . first_sql("after$orphans"));
	$before->query_safe('BEGIN;' . first_sql("before$orphans"));
	$after->query_safe('COMMIT');
	crash($node, orphans => $orphans);
	leave($before, $after);
	$node->start;
	redeliver("before$orphans", $fresh, $what);
	redeliver("after$orphans", $known, $what);
	ok(await_running($node), "$what: maintenance is running again");
}

# ---- the same, but it is the session that dies; the server restarts itself

for my $case ([ before => $fresh ], [ after => $known ])
{
	my ($when, $expected) = @$case;
	my $session = session($node);
	my $started = $node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()');
	my $launcher = $node->safe_psql('postgres',
		"SELECT pid FROM pg_stat_activity WHERE backend_type = 'idem launcher'");

	$session->query_safe('BEGIN;' . first_sql("backend_$when"));
	$session->query_safe('COMMIT') if $when eq 'after';
	kill KILL => backend_pid($session);

	# There is another launcher once the server has gone through recovery.
	ok($node->poll_query_until('postgres',
			"SELECT count(*) = 1 FROM pg_stat_activity
			 WHERE backend_type = 'idem launcher' AND pid <> $launcher"),
		"backend killed $when commit: the server is back");
	is($node->safe_psql('postgres', 'SELECT pg_postmaster_start_time()'), $started,
		'the postmaster is the same');
	leave($session);
	redeliver("backend_$when", $expected, "backend killed $when commit");
	ok(await_running($node), "backend killed $when commit: maintenance is running again");
}

# ---- many sessions in the middle of it

my $ids = 50_000;
my @scripts = (
	"\\set m random(1, $ids)\n"
	  . "BEGIN;\n"
	  . "SELECT idem.inbox_try_claim(:consumer::text, :m::text)::int AS mine \\gset\n"
	  . "\\if :mine\nINSERT INTO load VALUES (:consumer::int, :m::int);\n\\endif\nCOMMIT;\n",
	"\\set m random(1, $ids)\n"
	  . "INSERT INTO load SELECT :consumer::int, :m::int\n"
	  . "WHERE idem.inbox_try_claim(:consumer::text, :m::text);\n",
	"\\set m random(1, $ids)\n"
	  . "INSERT INTO load SELECT :consumer::int, msg_id::int\n"
	  . "FROM idem.inbox_claim_batch(:consumer::text, ARRAY[least(:m::int + 1, $ids)::text, :m::text])\n"
	  . "WHERE status = 'claimed';\n");
my @files;
for my $i (0 .. $#scripts)
{
	my $file = "$PostgreSQL::Test::Utils::tmp_check/load$i.sql";
	append_to_file($file, $scripts[$i]);
	push @files, '-f', $file;
}
$node->safe_psql('postgres', 'CREATE TABLE load (consumer int, msg int)');

for my $round (1 .. 4)
{
	my $output = '';
	my $load = IPC::Run::start(
		[ $node->installed_command('pgbench'), '-n', '-c', '8', '-j', '2', '-T',
			$PostgreSQL::Test::Utils::timeout_default,
			'-M', $round % 2 ? 'prepared' : 'simple', '-D', "consumer=$round", @files,
			'-h', $node->host, '-p', $node->port, 'postgres' ],
		'<', \undef, '>&', \$output);
	ok($node->poll_query_until('postgres',
			"SELECT count(*) > 500 FROM load WHERE consumer = $round"),
		"round $round: load is running")
	  or diag($output);
	crash($node, orphans => $round <= 2);
	eval { $load->finish };
	unlike($output, qr/ERROR/, "round $round: sessions saw no error before they died");
	$node->start;

	my $effects = $node->safe_psql('postgres',
		"SELECT count(*), count(DISTINCT msg) FROM load WHERE consumer = $round");
	my ($n, $distinct) = split /\|/, $effects;
	is($n, $distinct, "round $round: $n effects after the crash, none twice");
	cmp_ok($n, '<', $ids, "round $round: it crashed in the middle");
	is($node->safe_psql('postgres', "SELECT count(*) FROM idem.inbox WHERE consumer = '$round'"),
		$n, "round $round: as many claims as effects");

	# Redeliver everything, from two sides at once.
	my $sql = "INSERT INTO load SELECT $round, m FROM generate_series(1, $ids) m
			   WHERE idem.inbox_try_claim('$round', m::text)";
	my @jobs = map { start_sql($node, $sql) } 1, 2;
	is(finish_sql($_), '', "round $round: redelivered") for @jobs;
	is($node->safe_psql('postgres',
			"SELECT count(*), count(DISTINCT msg), min(msg), max(msg)
			 FROM load WHERE consumer = $round"),
		"$ids|$ids|1|$ids", "round $round: every message has exactly one effect");
}
ok(await_running($node), 'maintenance is running after all of that');

$node->stop;
done_testing();

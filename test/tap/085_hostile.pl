# What a hostile or careless neighbour does must neither give rights away nor
# let a message be claimed twice.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $node = PostgreSQL::Test::Cluster->new('hostile');
$node->init;
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'\nidem.claim_outside_transaction = allow\n");
$node->start;

sub fresh_database
{
	my ($name) = @_;
	$node->safe_psql('postgres', "CREATE DATABASE $name");
	return $name;
}

# ---- A schema of that name that somebody made before.
my $db = fresh_database('squatted');
$node->safe_psql($db, "CREATE ROLE mallory; GRANT CREATE ON DATABASE $db TO mallory;
	SET ROLE mallory; CREATE SCHEMA idem");
my ($rc, $out, $err) = $node->psql($db, "\\set VERBOSITY verbose\nCREATE EXTENSION idem");
like($err, qr/42501: schema "idem" belongs to another role/, 'the schema of somebody else is refused');
$node->safe_psql($db, "ALTER SCHEMA idem OWNER TO CURRENT_USER;
	CREATE FUNCTION idem.inbox_try_claim(varchar, varchar) RETURNS boolean LANGUAGE sql AS 'SELECT true'");
($rc, $out, $err) = $node->psql($db, "\\set VERBOSITY verbose\nCREATE EXTENSION idem");
like($err, qr/2BP01: schema "idem" is not empty/, 'and one with something in it');
$node->safe_psql($db, "DROP FUNCTION idem.inbox_try_claim(varchar, varchar);
	GRANT CREATE ON SCHEMA idem TO mallory; CREATE EXTENSION idem");
is($node->safe_psql($db, "SELECT has_schema_privilege('mallory', 'idem', 'CREATE')"), 'f',
	'nobody else can create anything in it');

# ---- Default privileges that give everything to everybody.
$db = fresh_database('generous');
$node->safe_psql($db, "ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO mallory;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO mallory;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO mallory;
	ALTER DEFAULT PRIVILEGES GRANT ALL ON SCHEMAS TO mallory;
	CREATE EXTENSION idem");
is($node->safe_psql($db, q{
	SELECT count(*) FROM (
		SELECT relacl AS acl FROM pg_class WHERE relnamespace = 'idem'::regnamespace AND relkind IN ('r', 'v', 'S')
		UNION ALL SELECT proacl FROM pg_proc WHERE pronamespace = 'idem'::regnamespace
		UNION ALL SELECT nspacl FROM pg_namespace WHERE nspname = 'idem') o, aclexplode(acl)
	WHERE grantee <> grantor}), '0', 'default privileges give nothing away');

# ---- REINDEX CONCURRENTLY while a transaction that began before it claims.
for my $case (
	[ 'inbox_claim', q{SELECT idem.inbox_try_claim('c', 'K')}, 't', 'f' ],
	[ 'version', q{SELECT idem.version_advance('c', 'K', 1)}, 'applied', 'duplicate' ],
	[ 'key', q{SELECT status FROM idem.key_begin('c', 'K')}, 'started', 'in_flight' ])
{
	my ($table, $claim, $first, $second) = @$case;
	$db = fresh_database("reindex_$table");
	(my $warm = $claim) =~ s/'K'/'warm'/;
	(my $other = $claim) =~ s/'K'/'other'/;
	$node->safe_psql($db, 'CREATE EXTENSION idem');

	my $claimer = $node->background_psql($db);
	my $early = $node->background_psql($db);
	my $late = $node->background_psql($db);
	my $reindex = $node->background_psql($db, on_error_stop => 0);

	$claimer->query_safe($warm);              # it knows the indexes
	$early->query_safe("BEGIN; LOCK TABLE idem.$table IN ACCESS SHARE MODE");
	$claimer->query_safe('BEGIN');
	$reindex->query_until(qr/started/, "\\echo started\nREINDEX INDEX CONCURRENTLY idem.${table}_pkey;\n");

	# It waits for the early one before it swaps the indexes, then for the late
	# one with the old index dead; that is when the claim is made.
	my $waits = q{SELECT EXISTS (SELECT FROM pg_stat_progress_create_index
		WHERE datname = current_database() AND phase LIKE 'waiting for %s')};
	$node->poll_query_until($db, sprintf($waits, '%')) or die 'REINDEX does not wait';
	$late->query_safe("BEGIN; $other");
	$early->query_safe('COMMIT');
	$node->poll_query_until($db, sprintf($waits, 'readers before dropping'))
	  or $node->poll_query_until($db, sprintf($waits, 'readers before marking dead'))
	  or die 'REINDEX does not come to its end';

	is($claimer->query_safe($claim), $first, "$table: claimed while the index is replaced");
	$claimer->query_safe('COMMIT');
	$late->query_safe('COMMIT');
	is($node->safe_psql($db, $claim), $second, "$table: nobody else claims it");
	$node->poll_query_until($db, qq{SELECT NOT EXISTS (SELECT FROM pg_stat_progress_create_index)
		AND (SELECT bool_and(indisvalid) FROM pg_index WHERE indrelid = 'idem.$table'::regclass)})
	  or die 'REINDEX does not end';
	is($claimer->query_safe($claim), $second, "$table: nor does the same session");
	is($node->safe_psql($db, "REINDEX TABLE idem.$table; SELECT 'sound'"), 'sound', "$table: the index is sound");
	$_->quit for $claimer, $early, $late, $reindex;
}

# ---- A file of figures that is not intact.
for my $content ('', 'garbage' x 1000, "1mdi" . "\xff" x 5000)
{
	$node->stop;
	my $file = $node->data_dir . '/pg_stat/idem.stat';
	open(my $fh, '>:raw', $file) or die "$file: $!";
	print $fh $content;
	close $fh;
	$node->start;
	is($node->safe_psql('generous', 'SELECT count(*) FROM idem.stat_consumer'), '0',
		'a file of figures that is not intact is ignored');
}

$node->stop;
unlike(slurp_file($node->logfile), qr/TRAP:|PANIC|terminated by signal/, 'nothing has crashed');
done_testing();

# Messages that were restored carry transaction ids of another cluster, which
# here are of the future.  All are delivered, once; none is taken for another.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Idem;
use FileCourier;

my $n = 300;
my $source = cluster('source', {}, 'idem.relay = off');
my $node = cluster('target', {}, 'max_worker_processes = 20');
install_courier($node);

my $burn = q(CREATE PROCEDURE burn(upto bigint) LANGUAGE plpgsql AS $$
	BEGIN
		WHILE pg_current_xact_id()::text::bigint < upto LOOP
			COMMIT;
		END LOOP;
	END $$);

# In the old place: one message per transaction, none is sent.
sub old { return $source->safe_psql('postgres', $_[0]) }
old($burn);
old(q(CALL burn(5000)));
old(file_server($_, '')) for qw(bus paused);
old(qq(SELECT idem.route_add('old.*', '$_'); SELECT idem.route_add('new.*', '$_'))) for qw(bus paused);
old(q(SELECT idem.relay_pause('paused')));
old(qq(DO \$\$ BEGIN FOR i IN 1 .. $n LOOP PERFORM idem.outbox_enqueue('old.x', to_json(i)); COMMIT; END LOOP; END \$\$));
my ($low, $high) = split /\|/, old('SELECT min(xid::text::bigint), max(xid::text::bigint) FROM idem.outbox');
cmp_ok($high - $low, '<', $n + 100, 'one transaction after the other');
my $dump = PostgreSQL::Test::Utils::tempdir . '/dump';
$source->command_ok([ 'pg_dump', '-Fc', '-f', $dump, 'postgres' ], 'pg_dump');
$source->stop;

# In the new one.
sql('DROP EXTENSION idem; DROP SCHEMA idem');
$node->command_ok([ 'pg_restore', '-e', '-d', 'postgres', $dump ], 'pg_restore');
cmp_ok(sql('SELECT pg_snapshot_xmax(pg_current_snapshot())'), '<', $low, 'here, these transactions are of the future');
sub numbers { return join ' ', sort { $a <=> $b } bodies($_[0]) }
my $all = join ' ', 1 .. $n;
sub await_numbers
{
	my ($what, $server, $expected) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	await($what, sub { numbers($server) eq $expected });
	is(numbers($server), $expected, "$what: exactly these");
}
sql('SELECT idem.relay_adopt()');
await_numbers('adopted, all are sent', 'bus', $all);
sql(q(SELECT idem.outbox_enqueue('new.x', '301'::json)));
await_numbers('and new ones', 'bus', "$all 301");
is(numbers('paused'), '', 'a paused server gets none');
is(sql(q(SELECT server, state, count(*) FROM idem.outbox o, idem.outbox_status(o.msg_id) GROUP BY 1, 2 ORDER BY 1)),
	"bus|delivered|301\npaused|pending|301", 'and the status of each says so');

# The moment of the adoption is long over when this one goes on.
sql(q(SELECT idem.relay_resume('paused')));
await_numbers('resumed, it gets all', 'paused', "$all 301");
sql(q(SELECT idem.outbox_enqueue('new.x', '302'::json)));
await_numbers('and goes on', 'paused', "$all 301 302");

truncate_file('bus');
sql(q(SELECT idem.outbox_replay('bus')));
await_numbers('what was restored can be replayed', 'bus', "$all 301 302");
sql(file_server('new', ''));
sql(q(SELECT idem.route_add('old.*', 'new', start_from => 'oldest')));
await_numbers('a new server gets all from the oldest on', 'new', $all);
sql(q(SELECT idem.route_add('new.*', 'new', start_from => 'oldest')));
await_numbers('and by another route', 'new', "$all 301 302");

# Transactions with the same ids as restored rows.
sql($burn) if sql(q(SELECT count(*) FROM pg_proc WHERE proname = 'burn')) eq '0';
sql(sprintf 'CALL burn(%d)', $low + 20);
truncate_file($_) for qw(bus paused new);
my @late = map { session($node) } 1 .. 5;
my $i = 303;
$_->query_safe(sprintf q(BEGIN; SELECT idem.outbox_enqueue('new.x', '%d'::json)), $i++) for @late;
cmp_ok(sql('SELECT pg_snapshot_xmin(pg_current_snapshot())'), '<', $high, 'they have ids of restored rows');
sql(q(SELECT idem.outbox_enqueue('new.x', '308'::json)));
await_numbers('one that is committed passes them', $_, '308') for qw(bus paused new);
$_->query_safe('COMMIT') for @late;
await_numbers('when they commit, they are sent and nothing else', $_, '303 304 305 306 307 308') for qw(bus paused new);
leave(@late);

# And yet the tables are emptied.
$node->append_conf('postgresql.conf', "idem.outbox_retention = 1\nidem.outbox_segment_rows = 10");
$node->reload;
sql(q(SELECT idem.outbox_enqueue('new.x', '309'::json)));
await('what was restored is removed in time', sub { sql(q(SELECT count(*) FROM idem.outbox WHERE topic = 'old.x')) eq '0' });
await_numbers('nothing was sent again', $_, '303 304 305 306 307 308 309') for qw(bus paused new);
cmp_ok(sql('SELECT pg_snapshot_xmin(pg_current_snapshot())'), '<', $high, 'all the while some were of the future');

$node->stop;
done_testing();

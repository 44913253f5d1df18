# Secrets of servers stay below their directory and out of sight; routes follow
# their server when it is renamed or dropped, and survive a dump.
use strict;
use warnings;
use Idem;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use POSIX 'mkfifo';
use Test::More;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $secrets = "$dir/secrets";
mkdir $secrets;
# The relay would remove routes that are closed and done with.
my $node = cluster('server', {}, 'max_worker_processes = 30', 'idem.relay = off');

sub sql { return $node->safe_psql($_[1] // 'postgres', $_[0]); }

sub file
{
	my ($path, $content, $mode) = @_;
	open(my $fh, '>:raw', $path) or die "$path: $!";
	print $fh $content;
	close $fh;
	chmod $mode // 0600, $path;
	return;
}

# A courier that is there, though it does nothing.
chomp(my $bin = `pg_config --bindir`);
plan skip_all => "cannot write to $bin" unless -w $bin;
file("$bin/idem-courier-taptest", "#!/bin/sh\n", 0755);
sql("CREATE SERVER s FOREIGN DATA WRAPPER idem OPTIONS (url 'taptest://h')");
is(sql(q{SELECT idem.server_check('s') IS NULL}), 't', 'nothing is wrong with a server without secrets');
chmod 0600, "$bin/idem-courier-taptest";
is(sql(q{SELECT idem.server_check('s')}), 'courier "idem-courier-taptest" is not installed',
	'a courier must be executable');
chmod 0755, "$bin/idem-courier-taptest";

# ---- secrets

sub check
{
	my ($name, $expected, $title) = @_;
	sql("ALTER SERVER s OPTIONS (SET key_file '$name')");
	like(sql(q{SELECT coalesce(idem.server_check('s'), 'fine')}), $expected, $title);
	return;
}

sql("ALTER SERVER s OPTIONS (ADD key_file 'good')");
like(sql(q{SELECT idem.server_check('s')}), qr/idem\.secrets_dir is not set/, 'there must be a directory');
$node->append_conf('postgresql.conf', "idem.secrets_dir = '$dir/nowhere'");
$node->reload;
$node->poll_query_until('postgres', "SELECT current_setting('idem.secrets_dir') <> ''") or die;
like(sql(q{SELECT idem.server_check('s')}), qr/could not open idem\.secrets_dir: No such file/, 'it must exist');
$node->append_conf('postgresql.conf', "idem.secrets_dir = '$secrets'");
$node->reload;
$node->poll_query_until('postgres', "SELECT current_setting('idem.secrets_dir') = '$secrets'") or die;

my $canary = 'open-sesame-4711';
file("$dir/outside", "$canary\n");
mkdir "$dir/secrets-too";
file("$dir/secrets-too/x", "$canary\n");
file("$secrets/good", "$canary\n");
mkdir "$secrets/sub";
file("$secrets/sub/good", "$canary\n");
symlink('sub', "$secrets/..data");
symlink('..data/good', "$secrets/mounted");
symlink('../outside', "$secrets/escape");
symlink("$dir/outside", "$secrets/absolute");
symlink('..', "$secrets/up");
symlink('../secrets-too', "$secrets/sibling");
symlink('loop', "$secrets/loop");
symlink('nothing', "$secrets/dangling");
mkfifo("$secrets/fifo", 0600);
file("$secrets/everybody", "$canary\n", 0644);
file("$secrets/writable", "$canary\n", 0602);
file("$secrets/group", "$canary\n", 0640);
file("$secrets/limit", 'x' x 65536);
file("$secrets/large", 'x' x 65537);
file("$secrets/empty", '');
file("$secrets/newline", "\n");
file("$secrets/zero", "a\0b");
file("$secrets/latin1", "caf\xe9");
file("$secrets/utf8", "caf\xc3\xa9");
file("$secrets/mine", "$canary\n", 0000);

check('good', qr/^fine$/, 'a file');
check('sub/good', qr/^fine$/, 'a file in a folder');
check('mounted', qr/^fine$/, 'a link that stays inside');
check('group', qr/^fine$/, 'a file for a group');
check('limit', qr/^fine$/, 'the largest file');
check('utf8', qr/^fine$/, 'UTF-8');
check('missing', qr/could not open secret file "missing": No such file/, 'a file that is not there');
check('escape', qr/"escape" leads out of idem\.secrets_dir/, 'a link to the outside');
check('absolute', qr/leads out of/, 'an absolute link to the outside');
check('up/outside', qr/leads out of/, 'a folder that is a link to the outside');
check('sibling/x', qr/leads out of/, 'a folder with a similar name');
check('loop', qr/could not open .*: Too many levels/, 'a link to itself');
check('dangling', qr/could not open .*: No such file/, 'a link to nothing');
check('good/x', qr/could not open .*: Not a directory/, 'a file as a folder');
check('sub', qr/"sub" is not a regular file/, 'a folder');
check('fifo', qr/"fifo" is not a regular file/, 'a pipe');
check('everybody', qr/can be read or written by everybody/, 'a file that everybody can read');
check('writable', qr/can be read or written by everybody/, 'a file that everybody can write');
check('large', qr/is larger than 65536 bytes/, 'a file that is too large');
check('empty', qr/"empty" is empty/, 'an empty file');
check('newline', qr/"newline" is empty/, 'a file with nothing but a newline');
check('zero', qr/is not text in UTF-8/, 'zero bytes');
check('latin1', qr/is not text in UTF-8/, 'another encoding');
check('mine', qr/could not open .*: Permission denied/, 'a file that the server may not read') if $> != 0;
for my $name ('../outside', "$dir/outside", 'sub/../../outside', '.', '..')
{
	is(sqlstate($node, "ALTER SERVER s OPTIONS (SET key_file '$name')"), '22023', "the name $name is refused");
}

# One server that cannot be used does not hide what is wrong with another.
sql(q{CREATE SERVER t FOREIGN DATA WRAPPER idem OPTIONS (url 'taptest://h', key_file 'good')});
is(sql(q{SELECT idem.server_check('t') IS NULL}), 't', 'other servers go on');
# An option that an earlier version may have accepted.
sql(q{UPDATE pg_foreign_server SET srvoptions = srvoptions || '{colour=red}' WHERE srvname = 't'});
is(sql(q{SELECT idem.server_check('t')}), 'invalid option "colour"', 'options are checked again');
sql('DROP SERVER t');

# ---- routes follow their server

sql(q{
	SELECT idem.route_add('a.*', 's'), idem.route_add('b.*', 's');
	SELECT idem.outbox_enqueue('b.1', '1'::json);
	SELECT idem.route_drop(id) FROM idem.routes WHERE pattern = 'b.*';
	CREATE SERVER taken FOREIGN DATA WRAPPER idem OPTIONS (url 'taptest://h');
	CREATE ROLE stranger;
});
my $routes = q{SELECT string_agg(pattern || ' ' || server || ' ' || state, ', ' ORDER BY id) FROM idem.routes};
is(sql($routes), 'a.* s open, b.* s closing', 'two routes');
is(sqlstate($node, 'DROP SERVER s'), '2BP01', 'a server with routes is not dropped');
is(sqlstate($node, 'DROP SERVER taken, s'), '2BP01', 'nor together with another');
is(sqlstate($node, 'DROP EXTENSION idem'), '2BP01', 'nor does the extension go');
is(sqlstate($node, 'SET ROLE stranger; DROP SERVER s CASCADE'), '42501', 'a stranger may not drop it');
is(sqlstate($node, 'SET ROLE stranger; ALTER SERVER s RENAME TO r'), '42501', 'nor rename it');
is(sqlstate($node, 'ALTER SERVER s RENAME TO taken'), '42710', 'a name that is taken');
is(sqlstate($node, 'BEGIN READ ONLY; DROP SERVER s CASCADE'), '25006', 'read only');
is(sql($routes), 'a.* s open, b.* s closing', 'none of this changes routes');
sql('BEGIN; ALTER SERVER s RENAME TO r; ROLLBACK');
is(sql($routes), 'a.* s open, b.* s closing', 'a rename is rolled back');
sql('ALTER SERVER s RENAME TO r');
is(sql($routes), 'a.* r open, b.* r closing', 'a rename is followed');

# A route that is being added holds a drop up, and the reverse.
my $adder = session($node);
$adder->query_safe(q{BEGIN; SELECT idem.route_add('c', 'taken')});
my $job = start_sql($node, 'DROP SERVER taken');
await_waiting($node, 1) or die;
$adder->query_safe('COMMIT');
like(finish_sql($job), qr/because routes lead to it/, 'a route that commits first keeps its server');
sql(q{SELECT idem.route_drop(id, true) FROM idem.routes WHERE pattern = 'c'});
$adder->query_safe('BEGIN; DROP SERVER taken');
$job = start_sql($node, q{SELECT idem.route_add('c', 'taken')});
await_waiting($node, 1) or die;
$adder->query_safe('COMMIT');
like(finish_sql($job), qr/server "taken" does not exist/, 'a server that is dropped first gets no route');
leave($adder);

# ---- dump and restore

sql('CREATE DATABASE restored TEMPLATE template0');
$node->command_ok([ 'pg_dump', '-f', "$dir/dump.sql", 'postgres' ], 'pg_dump');
$node->command_ok([ 'psql', '-X', '-v', 'ON_ERROR_STOP=1', '-d', 'restored', '-f', "$dir/dump.sql" ], 'psql');
is(sql('SELECT * FROM idem.route ORDER BY id', 'restored'), sql('SELECT * FROM idem.route ORDER BY id'),
	'routes are dumped');
is(sql($routes, 'restored'), 'a.* r open, b.* r closing', 'and have their server');
is(sql(q{SELECT idem.route_add('d', 'r') > max(id) FROM idem.route}, 'restored'), 't', 'and their numbers');

# ---- servers that go

my ($rc, $out, $err) = $node->psql('postgres', 'DROP SERVER r CASCADE');
like($err, qr/drop cascades to routes to server "r"/, 'CASCADE says what it does');
is(sql('SELECT count(*) FROM idem.route'), '0', 'and drops the routes');
sql(q{CREATE ROLE leaver; GRANT USAGE ON FOREIGN DATA WRAPPER idem TO leaver;
	SET ROLE leaver; CREATE SERVER mine FOREIGN DATA WRAPPER idem OPTIONS (url 'taptest://h'); RESET ROLE;
	SELECT idem.route_add('m', 'mine'); DROP OWNED BY leaver});
is(sql($routes), 'm mine no server', 'a server that goes by another way leaves its routes');
sql(q{SELECT idem.route_drop(id, true) FROM idem.routes});
is(sql('SELECT count(*) FROM idem.route'), '0', 'which can be dropped');

# ---- nothing is given away

$node->stop;
unlike(slurp_file($node->logfile) . slurp_file("$dir/dump.sql"), qr/$canary/, 'no secret in log or dump');
unlike(slurp_file($node->logfile), qr/TRAP:|PANIC|terminated by signal/, 'nothing has crashed');
unlink "$bin/idem-courier-taptest";
done_testing();

# pg_upgrade: the messages of the old cluster are all there, those that were
# sent are not sent again, and nothing is sent before somebody says that this
# is the cluster that counts.  IDEM_OLD_PG_CONFIG is that of another, older
# PostgreSQL, in which idem can be installed; make check-versions has one.
use strict;
use warnings;
use Cwd 'abs_path';
use File::Basename;
use File::Copy;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Idem;
use FileCourier;

my $old_config = $ENV{IDEM_OLD_PG_CONFIG};
plan skip_all => 'IDEM_OLD_PG_CONFIG is not set' unless $old_config;
chomp(my $old_bin = `$old_config --bindir`);
chomp(my $version = `$old_config --version`);
note $version;

# its own build of the extension
my $dir = PostgreSQL::Test::Utils::tempdir_short;
my $source = dirname(abs_path($0)) . '/../..';
system_or_bail('cp', '-r', $source, "$dir/src");
system_or_bail('make', '-s', '-C', "$dir/src", 'clean', "PG_CONFIG=$old_config", 'with_llvm=no');
system_or_bail('make', '-s', '-C', "$dir/src", 'install', "PG_CONFIG=$old_config", 'with_llvm=no');
copy("$dir/src/test/courier/idem-courier-file", "$old_bin/idem-courier-file") or die $!;
chmod 0755, "$old_bin/idem-courier-file";

my $old = PostgreSQL::Test::Cluster->new('old', install_path => dirname($old_bin));
$old->init(extra => [ '--encoding=UTF8', '--locale=C' ]);
$old->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'\nidem.site = 'here'\nmax_worker_processes = 20");
$old->start;
$old->safe_psql('postgres', 'CREATE EXTENSION idem');
install_courier($old);
sql(file_server('bus', ''));
sql(q(SELECT idem.route_add('orders.**', 'bus')));
my $last = 0;
sub enqueue { return map { $last++; sql(qq(SELECT idem.outbox_enqueue('orders.x', '$last'::json, key => 'k', dedup_key => 'd$last'))) } 1 .. $_[0] }
enqueue(3);
sql(q(SELECT idem.outbox_enqueue('orders.x', '"permanent"'::json)));
await_bodies('sent by the old one', 'bus', 1 .. 3);
await_sql('one is dead', 'SELECT count(*) FROM idem.dead_letter', '1');
sql(q(SELECT idem.outbox_enqueue('orders.x', '"delayed"'::json, deliver_at => clock_timestamp() + interval '1 hour')));
await_sql('one is delayed', 'SELECT count(*) FROM idem.relay_parked', '1');
sql(q(SELECT idem.relay_pause('bus')));
await_sql('paused', 'SELECT state FROM idem.relay_status', 'paused');
my ($id) = enqueue(2);
is(sql(q(SELECT idem.inbox_try_claim('c', 'm'))), 't', 'a claim');
sql('DELETE FROM idem.relay_paused');
$old->stop;
is_deeply([ bodies('bus') ], [ 1 .. 3 ], 'no more was sent by the old one');

my $new = PostgreSQL::Test::Cluster->new('new');
$new->init(extra => [ '--encoding=UTF8', '--locale=C', ($version =~ / 1[0-7]/ && `initdb --version` =~ / 1[89]/ ? '--no-data-checksums' : ()) ]);
$new->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'\nidem.site = 'here'\nmax_worker_processes = 20");
install_courier($new);
chdir $dir or die $!;
$new->command_ok([ 'pg_upgrade', '--no-sync', '-d', $old->data_dir, '-D', $new->data_dir, '-b', $old_bin,
		'-B', dirname((grep { -x } map { "$_/postgres" } split /:/, $ENV{PATH})[0]), '-s', $dir,
		'-p', $old->port, '-P', $new->port ], 'pg_upgrade');
truncate_file('bus');
$new->start;
await_sql('upgraded, it holds', q(SELECT state, reason ~ 'relay_adopt' FROM idem.relay_status), 'holding|t');
sql(q(SELECT idem.relay_resume('bus')));
enqueue(1);
is_deeply([ bodies('bus') ], [], 'it sends nothing');
is(sql("SELECT idem.outbox_enqueue('orders.x', '0'::json, dedup_key => 'd4')"), $id, 'a dedup_key is still known');
is(sql(q(SELECT idem.inbox_try_claim('c', 'm'))), 'f', 'and so is a claim');
sql('SELECT idem.relay_adopt()');
await_bodies('adopted, it sends what was pending, and what is new', 'bus', 4 .. 6);
enqueue(1);
await_bodies('and goes on', 'bus', 4 .. 7);
is(sql(q(SELECT count(*), count(DISTINCT seq), count(DISTINCT msg_id) FROM idem.outbox)), '9|9|9', 'all are there, no number and no id twice');
is(sql(q(SELECT string_agg(state, ' ' ORDER BY o.seq) FROM idem.outbox o, idem.outbox_status(o.msg_id))),
	'delivered delivered delivered dead delayed delivered delivered delivered delivered', 'and what has become of them');
sql(q(SELECT idem.outbox_replay('bus')));
await('all can be replayed', sub { my %seen = map { $_ => 1 } grep { /^\d+$/ } bodies('bus'); 7 == keys %seen });
sql('VACUUM FREEZE');
$new->stop;
done_testing();

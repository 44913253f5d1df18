# The courier for Redis Streams, against a real Redis.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use BrokerTable;
use BrokerTests qw(message outcomes reason state_of text);
use IdemRelay;

my $class = BrokerTable::begin('redis');
BrokerTable::courier('redis');

sub start { return BrokerTests::courier(@_) }

my $redis = $class->new(dir => "$BrokerTable::work/own");
$redis->start;
sub length_of { my ($n) = $redis->cli('XLEN', $_[0]) =~ /(\d+)/; return $n }

# ---- streams kept short; databases

my $c = start(url => $redis->url, maxlen => 10, maxlen_exact => 'on');
is(outcomes($c, map { message($c, to => 'short') } 1 .. 100), join(' ', (0) x 100), 'maxlen: delivered');
is(length_of('short'), 10, 'and trimmed');
$c = start(url => $redis->url . '/3');
is(outcomes($c, message($c, to => 'third')), '0', 'database 3: delivered');
is(length_of('third'), 0, 'not in database 0');
like($redis->cli('-n', 3, 'XLEN', 'third'), qr/1/, 'but in 3');
$c = start(url => $redis->url . '/999');
is(outcomes($c, message($c)) . state_of($c), '53', 'a database that is not there: blocked');

# ---- what a user may not do

$c = start(url => $redis->url, user => 'humble', password => 'humble');
is(outcomes($c, message($c)), '0', 'a user who may do nothing but XADD');
is(outcomes($c, message($c, to => 'other')) . state_of($c), '33', 'but not to that stream: blocked');
like(reason($c), qr/"other".*NOPERM/, 'with the reason');
$c = start(url => $redis->url, user => 'humble', password => 'humble', dedup_seconds => 60);
is(outcomes($c, message($c)) . state_of($c), '53', 'nor use scripts: blocked');

# ---- Redis takes nothing for a while: nothing is blamed on the messages

$c = start(url => $redis->url);
is(outcomes($c, message($c)), '0', 'takes messages');
for my $case ([ 'OOM', [qw(CONFIG SET maxmemory 1)], [qw(CONFIG SET maxmemory 0)] ],
	[ 'READONLY', [qw(REPLICAOF 127.0.0.1 1)], [qw(REPLICAOF NO ONE)] ])
{
	my ($code, $on, $off) = @$case;
	$redis->cli(@$on);
	my @sent = map { message($c, key => $code) } 1 .. 3;
	is(outcomes($c, @sent), '5 5 5', "$code: returned");
	is(state_of($c), 2, "$code: down");
	like(join('', map { $_->{text} } @{ $c->{states} }), qr/$code/, "$code: says so");
	$redis->cli(@$off);
	Broker::await($code, sub { outcomes($c, message($c)) eq '0' });
	is(state_of($c), 1, "$code: up when it is over");
}

# ---- nothing twice

my $proxy = proxy($redis->{port});
$c = start(url => $redis->url(port => $proxy->{port}), $redis->login, dedup_seconds => 600, timeout_ms => 500);
my @ids = map { sprintf '01900000-0000-7000-9000-%012x', $_ } 1 .. 4;
is(outcomes($c, message($c, to => 'once', id => $ids[0])), '0', 'dedup: delivered');
$proxy->lose;
is(outcomes($c, map { message($c, to => 'once', id => $ids[$_]) } 1 .. 3), '4 4 4', 'dedup: answers lost, unknown');
$proxy->restore;
is(length_of('once'), 4, 'dedup: they were stored');
Broker::await('connection', sub { outcomes($c, message($c, to => 'once', id => $ids[0])) eq '0' });
is(outcomes($c, map { message($c, to => 'once', id => $_) } @ids), '0 0 0 0', 'dedup: sent again, delivered');
is(length_of('once'), 4, 'dedup: each is there once');
is(outcomes($c, message($c, to => 'twice', id => $ids[0])) . length_of('twice'), '01', 'dedup: another stream is another matter');
my ($entry) = $redis->entries('once', 1);
like($redis->cli('GET', "idem:once:$ids[0]"), qr/"\Q$entry->{entry}\E"/, 'dedup: the register has the id of the entry');
my ($ttl) = $redis->cli('TTL', "idem:once:$ids[0]") =~ /(\d+)/;
ok($ttl > 500 && $ttl <= 600, 'dedup: and expires');
$redis->cli('SCRIPT', 'FLUSH');
is(outcomes($c, message($c, to => 'once')) . state_of($c), '52', 'dedup: script gone, connects again');
is(outcomes($c, message($c, to => 'once')), '0', 'dedup: and loads it');
is(length_of('once'), 5, 'dedup: nothing is lost or doubled by that');
$redis->cli('SET', 'nostream', 'x');
my $id = '01900000-0000-7000-9000-00000000ffff';
is(outcomes($c, message($c, to => 'nostream', id => $id)), '3', 'dedup: no stream, blocked');
$redis->cli('DEL', 'nostream');
is(outcomes($c, message($c, to => 'nostream', id => $id)) . length_of('nostream'), '01', 'dedup: a failure is not remembered as done');
$redis->stop;

BrokerTable::relay('redis', exact => "dedup_seconds '600'");
done_testing();

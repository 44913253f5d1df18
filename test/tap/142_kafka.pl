# The courier for Kafka, against a real broker, or where there is none against
# librdkafka's mock: what arrives, and what the courier says when it does not.
use strict;
use warnings;
use File::Temp ();
use Test::More;
use Time::HiRes qw(time usleep);

use BrokerTests;
use IdemRelay ();
use Kafka;

my $why = Kafka::missing_tools();
plan skip_all => $why if $why;
plan skip_all => 'idem-courier-kafka is not built' unless courier_program('kafka');

my $work = File::Temp->newdir(CLEANUP => !$ENV{KEEP});
$ENV{COURIER_STDERR} = "$work/stderr";
my $no_broker = Kafka::missing();
diag("$no_broker: the mock cluster takes its place") if $no_broker;

# ---- bad options

my $url = 'kafka://127.0.0.1:1';
for ([ 'no url', qr/url/ ], [ 'password in the url', qr/credentials/, url => 'kafka://u:p@h' ],
	[ 'scheme', qr/kafka/, url => 'http://h' ], [ 'path', qr/look like/, url => 'kafka://h:1/x' ],
	[ 'no host', qr/look like/, url => 'kafka://' ],
	[ 'option not known', qr/./, url => $url, nonsense => 1 ],
	[ 'property not known', qr/such/, url => $url, 'kafka.nonsense' => 1 ],
	[ 'bad value of a property', qr/compression/, url => $url, 'kafka.compression.type' => 'x' ],
	[ 'not together', qr/in.flight/, url => $url, 'kafka.max.in.flight' => 100 ],
	[ 'acks', qr/lost/, url => $url, 'kafka.acks' => 1 ],
	[ 'acks by its other name', qr/lost/, url => $url, 'kafka.request.required.acks' => 1 ],
	[ 'idempotence', qr/twice/, url => $url, 'kafka.enable.idempotence' => 'false' ],
	[ 'gaps', qr/order/, url => $url, 'kafka.enable.gapless.guarantee' => 'false' ],
	[ 'retries', qr/order/, url => $url, 'kafka.retries' => 1 ],
	[ 'lifo', qr/order/, url => $url, 'kafka.queuing.strategy' => 'lifo' ],
	[ 'random partition', qr/order/, url => $url, 'kafka.partitioner' => 'random' ],
	[ 'time-out of messages', qr/timeout_ms/, url => $url, 'kafka.message.timeout.ms' => 1000 ],
	[ 'other brokers', qr/url/, url => $url, 'kafka.bootstrap.servers' => 'h' ],
	[ 'no verification', qr/always/, url => 'kafkas://h', 'kafka.enable.ssl.certificate.verification' => 'false' ],
	[ 'no host name', qr/always/, url => 'kafkas://h', 'kafka.ssl.endpoint.identification.algorithm' => 'none' ],
	[ 'other files', qr/tls_/, url => 'kafkas://h', 'kafka.ssl.ca.location' => '/etc/passwd' ],
	[ 'programs', qr/sasl_/, url => $url, 'kafka.sasl.kerberos.kinit.cmd' => 'true' ],
	[ 'code', qr/code/, url => $url, 'kafka.plugin.library.paths' => 'x.so' ],
	[ 'too much memory', qr/262144/, url => $url, 'kafka.queue.buffering.max.kbytes' => 1048576 ],
	[ 'TLS options without TLS', qr/kafkas/, url => $url, tls_ca => 'x' ],
	[ 'no certificate', qr/PEM|certificate/, url => 'kafkas://h', tls_ca => 'x' ],
	[ 'half a login', qr/go together/, url => $url, user => 'u' ],
	[ 'Kerberos', qr/SCRAM/, url => $url, user => 'u', password => 'p', sasl_mechanism => 'GSSAPI' ])
{
	my ($name, $pattern, %options) = @$_;
	my $c = courier(%options);
	until_($c, sub { 0 }, 10);
	like(reason($c), $pattern, "refused: $name");
	is(state_of($c) . ($c->{ready} // ''), '3', "blocked: $name");
	$c->ended;
}

my $c = courier(url => 'kafkas://h', 'kafka.compression.type' => 'lz4', 'kafka.linger.ms' => 3, 'kafka.ssl.cipher.suites' => 'DEFAULT');
ok(until_($c, sub { $c->{ready} }), 'other properties are fine');
ok(quit($c), 'quits');

# ---- down at the start

my $canary = "canary$$";
my $tls = certificates("$work");
my $proxied = Kafka::free_port();
my $proxy = IdemRelay::proxy($proxied);
my $broker = $no_broker ? undef : Kafka->new(
	dir => "$work/kafka", password => $canary, proxied_port => $proxied, proxied => $proxy->{port},
	config => "message.max.bytes=2000000\n",
	($tls ? (tls => { cert => "$work/srv.pem", key => "$work/srv.key" }) : ()));
$broker //= Kafka->mock(dir => "$work/mock");
$url = "kafka://$broker->{servers}";

$c = courier(url => $no_broker ? 'kafka://127.0.0.1:1' : $url);
ok(until_($c, sub { $c->{ready} }), 'ready before it connects');
like($c->{ready}, qr{^idem-courier-kafka \S+ librdkafka/}, 'names its library');
my $begin = time;
is(outcomes($c, message($c)), '5', 'no broker: returned');
is(state_of($c), 2, 'no broker: down');
like(reason($c), qr/refused/, 'says why');
cmp_ok(time - $begin, '<', 3, 'soon');
if ($no_broker) { quit($c); $c = courier(url => $url) }
else { $broker->start; $broker->create('q', 3); $broker->create('one', 1) }

# ---- content

my $utf8 = "\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x98";
my @bodies = bodies();
my @sent = map { message($c, body => $_, key => "k$utf8", headers => qq({"h":"x$utf8","n":1,"o":{"a":[1]},"s":"\\u00e9\\n","type":"mine"}), topic => 't.x', type => 'text/x; y=1') } @bodies;
is(outcomes($c, @sent), '0 0 0 0 0', 'delivered once the broker is there');
is(state_of($c), 1, 'up');
my @got = $broker->read('q');
is(scalar @got, 5, 'all are in the topic');
ok($got[$_]{body} eq $bodies[$_], "body $_ is the same") for 0 .. 4;
is(scalar(grep { $_->{key} eq "k$utf8" } @got), 5, 'with the key');
is_deeply($got[1]{headers}, { h => "x$utf8", n => 1, o => '{"a":[1]}', s => "\xc3\xa9\n", type => 't.x', 'content-type' => 'text/x; y=1',
		'message-id' => '01900000-0000-7000-8000-000000000003', 'enqueued-at' => '2023-11-14T22:13:20.000000Z' }, 'headers');
is(scalar(keys %{ { map { $_->{partition} => 1 } @got } }), 1, 'one key, one partition');

# ---- order, and a full window

@sent = map { message($c, body => "n$_", key => 'k' . $_ % 7) } 1 .. 5000;
settled($c, @sent);
is(scalar(grep { outcome($c, $_) == 0 } @sent), 5000, '5000 in a window');
sub numbers { return map { $_->{body} =~ /^$_[1](\d+)/ ? [ $_->{key}, $1, $_->{partition} ] : () } $broker->read($_[0]) }
my @numbers = numbers('q', 'n');
is(scalar @numbers, 5000, 'each once');
ok(IdemRelay::in_key_order(@numbers), 'in order per key');
cmp_ok(scalar(keys %{ { map { $_->[2] => 1 } @numbers } }), '>', 1, 'on several partitions');

# ---- names

is(outcomes($c, map { message($c, to => $_) } '', 'a/b', '..', 'x' x 250), '2 2 2 2', 'what is no name of a topic');
is(outcomes($c, message($c, headers => '{"x":"\u0000"}')), '2', 'headers that cannot be sent');

# ---- what only the mock can be made to do

{
	my $mock = $no_broker ? $broker : Kafka->mock(dir => "$work/mock");
	my $m = courier(url => "kafka://$mock->{servers}");
	is(outcomes($m, message($m)), '0', 'mock: delivered');
	$mock->refuse(45);
	is(outcomes($m, message($m, key => 'k')), '4', 'out of order: a fatal error, and unknown');
	is(outcomes($m, message($m, key => 'k', id => '01900000-0000-7000-8000-' . sprintf('%012x', 0xffff))), '5', 'those behind it are returned');
	is(outcomes($m, message($m, key => 'j')), '0', 'the producer is made anew');
	$mock->refuse(19);
	is(outcomes($m, message($m, key => 'j')), '0', 'not enough replicas: tried again');
	$mock->refuse(20);
	is(outcomes($m, message($m, key => 'j')), '0', 'not enough replicas after writing: tried again');
	$mock->refuse(29);
	is(outcomes($m, message($m, key => 'j')) . state_of($m), '33', 'not allowed: blocked');
	like(reason($m), qr/not allowed.*"q"/, 'says what');
	is(outcomes($m, message($m)) . state_of($m), '01', 'and goes on');
	$mock->refuse(76);
	is(outcomes($m, message($m)) . state_of($m), '33', 'compression not supported: blocked');
	ok(quit($m), 'quits');
}

SKIP:
{
	skip "$no_broker: only the mock was asked", 1 if $no_broker;

	# ---- missing topic

	is(outcomes($c, message($c, to => 'nowhere')), '3', 'missing topic: blocked');
	like(reason($c), qr/topic "nowhere" does not exist/, 'says which');
	is(state_of($c), 3, 'state blocked');
	is(outcomes($c, message($c)), '0', 'goes on afterwards');
	is(state_of($c), 1, 'and is up');
	@sent = map { message($c, key => 'k', to => $_ == 50 ? 'nowhere' : 'one', body => "m$_") } 1 .. 100;
	settled($c, @sent);
	is(outcome($c, $sent[49]), 3, 'in a window: the one is blocked');
	ok(!(grep { outcome($c, $_) !~ /^[05]$/ } @sent[ 0 .. 48, 50 .. 99 ]), 'others are delivered or returned');
	$broker->create('nowhere', 1);
	is(outcomes($c, message($c, to => 'nowhere')), '0', 'when it is there');
	$broker->delete('nowhere');

	# ---- too large, in the library's eyes and in the broker's

	is(join(' ', persist($c, map { { key => 'k' . $_ % 2, to => 'one', body => $_ == 2 ? 'x' x 2_100_000 : "b$_" } } 1 .. 6)),
		'0 2 0 0 0 0', 'too large: permanent for that one, and for no other');
	$broker->create('small', 1, 'max.message.bytes' => 5000);
	my @outcomes = persist($c, map { { to => 'small', key => 'k' . $_ % 5, body => "s$_ " . 'y' x ($_ % 50 ? 100 : 9000) } } 1 .. 200);
	is(join(' ', grep { $outcomes[ $_ - 1 ] != 0 } 1 .. 200), '50 100 150 200', 'a topic with a limit of its own: only those above it are refused');
	my @small = numbers('small', 's');
	is(scalar @small, 196, 'all others are there, once');
	ok(IdemRelay::in_key_order(@small), 'in order per key');

	# ---- a topic that wants keys

	$broker->create('compact', 1, 'cleanup.policy' => 'compact');
	is(join(' ', persist($c, map { { to => 'compact', key => $_ == 3 ? undef : "k$_" } } 1 .. 5)), '0 0 2 0 0',
		'a message without a key is poison for a compacted topic, and others are fine');

	# ---- credentials

	my @sasl = (url => "kafka://127.0.0.1:$broker->{sasl_port}", user => 'relay', password => $canary);
	for my $mechanism (qw(PLAIN SCRAM-SHA-256))
	{
		my $s = courier(@sasl, sasl_mechanism => $mechanism);
		is(outcomes($s, message($s)), '0', "$mechanism: delivered");
		unlike(slurp("/proc/$s->{pid}/$_"), qr/$canary/, "no password in $_") for qw(cmdline environ);
		ok(quit($s), 'quits');
		$s = courier(@sasl, sasl_mechanism => $mechanism, password => "wrong$canary");
		is(outcomes($s, message($s)) . state_of($s), '53', "$mechanism, wrong password: blocked");
		like(reason($s), qr/[Aa]uthentication/, 'says so');
		unlike(reason($s), qr/$canary/, 'and does not tell the password');
		quit($s);
	}
	my $s = courier(@sasl, user => 'poor');
	like(outcomes($s, message($s)) . state_of($s), qr/^[35]3$/, 'no rights at all: blocked');
	like(reason($s), qr/uthoriz|not allowed/, 'says so');
	$broker->admin('allow', 'poor', 'q');
	is(outcomes($s, message($s)), '0', 'may write to one topic');
	is(outcomes($s, message($s, to => 'one')) . state_of($s), '33', 'but not to another');
	like(reason($s), qr/not allowed to write to topic "one"/, 'says which');
	is(outcomes($s, message($s)) . state_of($s), '01', 'goes on');
	quit($s);
	$s = courier(url => "kafka://127.0.0.1:$broker->{sasl_port}", connect_timeout_ms => 1000);
	is(outcomes($s, message($s)) . state_of($s), '52', 'no login where one is wanted: down');
	quit($s);

	# ---- addresses

	for ([ 'public_only refuses loopback', url => $url, public_only => 'true' ],
		[ 'link-local is refused', url => 'kafka://169.254.169.254:9092' ],
		[ 'however it is spelled', url => 'kafka://0xa9fea9fe:9092' ])
	{
		my ($name, @options) = @$_;
		$s = courier(@options);
		is(outcomes($s, message($s)) . state_of($s), '53', $name);
		like(reason($s), qr/address/, 'says why');
		quit($s);
	}

	# ---- TLS

	SKIP:
	{
		skip 'no openssl', 1 unless $tls;
		my $ca = slurp("$work/ca.pem");
		my $t = courier(url => "kafkas://localhost:$broker->{tls_port}", tls_ca => $ca);
		my $body = join '', map { chr(($_ * 7) % 256) } 1 .. 1_500_000;
		$broker->create('tls', 1);
		is(outcomes($t, message($t, to => 'tls', body => $body), map { message($t) } 1 .. 100), join(' ', (0) x 101), 'TLS');
		ok(($broker->read('tls'))[0]{body} eq $body, 'the same bytes over TLS');
		ok(quit($t), 'quits');
		for ([ 'wrong name', '127.0.0.1', $ca ], [ 'other authority', 'localhost', slurp("$work/ca2.pem") ], [ 'system authorities', 'localhost' ])
		{
			my ($name, $host, $pem) = @$_;
			$t = courier(url => "kafkas://$host:$broker->{tls_port}", defined $pem ? (tls_ca => $pem) : ());
			is(outcomes($t, message($t)) . state_of($t), '53', "TLS, $name: refused");
			like(reason($t), qr/certificate/, 'says why');
			quit($t);
		}
		$t = courier(url => "kafkas://localhost:$broker->{port}", tls_ca => $ca, connect_timeout_ms => 2000);
		is(outcomes($t, message($t)) . state_of($t), '52', 'no falling back to plain');
		quit($t);
	}

	# ---- answers get lost on the way

	$broker->create('lossy', 1);
	my $l = courier(url => "kafka://127.0.0.1:$proxy->{port}", timeout_ms => 9000);
	is(outcomes($l, message($l, to => 'lossy', body => 'l0')), '0', 'through the proxy');
	$proxy->lose;
	@sent = map { message($l, to => 'lossy', key => 'k', body => "l$_") } 1 .. 20;
	IdemCourier::await(sub { (my @m = $broker->read('lossy')) > 1 }, 10);
	$proxy->restore;
	is(outcomes($l, @sent), join(' ', (0) x 20), 'answers lost for a while: delivered in the end');
	is(join(' ', map { $_->{body} } $broker->read('lossy')), join(' ', map { "l$_" } 0 .. 20), 'once, in order: the broker has seen the double');
	ok(quit($l), 'quits');
	$l = courier(url => "kafka://127.0.0.1:$proxy->{port}", timeout_ms => 2000);
	is(outcomes($l, message($l, to => 'lossy', body => 'm0')), '0', 'through the proxy again');
	$proxy->lose;
	$begin = time;
	@sent = map { message($l, to => 'lossy', key => 'k', body => "m$_") } 1 .. 20;
	like(outcomes($l, @sent), qr/^4( 4)*( 5)*$/, 'lost for longer: unknown, or never sent');
	cmp_ok(time - $begin, '<', 5, 'after the time it was given');
	is(state_of($l), 2, 'and down');
	is(outcomes($l, message($l, to => 'lossy', key => 'k')), '5', 'those behind them are returned');
	is(scalar(grep { $_->{body} =~ /^m/ } $broker->read('lossy')), 1 + grep({ outcome($l, $_) == 4 } @sent), 'those that are unknown were stored, and no other');
	is(outcomes($l, message($l, key => 'x')) . state_of($l), '52', 'nothing is sent while there is no answer at all');
	$proxy->restore;
	is(outcomes($l, message($l, to => 'lossy', key => 'y')), '0', 'connects again');
	# quit while answers do not come
	my $stored = () = $broker->read('lossy');
	$proxy->lose;
	my $t = message($l, to => 'lossy');
	IdemCourier::await(sub { (my @m = $broker->read('lossy')) > $stored }, 10);
	ok(quit($l), 'quits within 2 s without answers');
	is(outcome($l, $t), 4, 'and says what is unknown');
	$proxy->restore;

	# ---- the broker is killed under load

	$broker->create('load', 3);
	quit($c);
	$c = courier(url => $url, timeout_ms => 3000);
	my %ledger;
	my @early = map { message($c, to => 'load', body => "e$_", key => "k$_") } 1 .. 500;
	settled($c, @early);
	# stopped, it answers nothing and soon takes nothing, so that every case occurs
	kill STOP => $broker->{pid};
	my @late = map { message($c, to => 'load', body => "k$_ " . 'x' x 50_000, key => "k$_") } 1 .. 600;
	@ledger{@early} = map { "e$_" } 1 .. 500;
	@ledger{@late} = map { "k$_" } 1 .. 600;
	$broker->kill9;
	settled($c, keys %ledger);
	my %by;
	push @{ $by{ outcome($c, $_) // '-' } }, $ledger{$_} for keys %ledger;
	note join ', ', map { "outcome $_: " . @{ $by{$_} } } sort keys %by;
	is(join(' ', sort keys %by), '0 4 5', 'some delivered, some unknown, some returned');
	is(state_of($c), 2, 'down');
	$broker->start;
	is(outcomes($c, message($c, to => 'load', body => 'again')), '0', 'up again');
	my %there;
	$there{ $_->{body} =~ s/ .*//r }++ for $broker->read('load');
	is(scalar(grep { !$there{$_} } @{ $by{0} // [] }), 0, 'every delivered message is there');
	is(scalar(grep { $there{$_} } @{ $by{5} // [] }), 0, 'no returned message is');

	# ---- back in time: nothing comes back, and nothing comes twice

	quit($c);
	$c = courier(url => $url);
	$broker->create('blip', 3);
	message($c, to => 'blip', body => 'b0', key => 'x');
	until_($c, sub { defined outcome($c, $c->{ticket}) });
	@sent = map { message($c, to => 'blip', body => "b$_", key => 'k' . $_ % 9) } 1 .. 3000;
	$broker->kill9;
	$broker->start;
	settled($c, @sent);
	is(scalar(grep { outcome($c, $_) == 0 } @sent), 3000, 'killed and started again: all delivered');
	my @blip = numbers('blip', 'b');
	is(scalar @blip, 3001, 'each once');
	ok(IdemRelay::in_key_order(@blip), 'in order per key');

	# ---- nobody answers at all: black hole

	my $hole = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 5) or die $!;
	my $h = courier(url => 'kafka://127.0.0.1:' . $hole->sockport, connect_timeout_ms => 1000);
	is(outcomes($h, message($h)) . state_of($h), '52', 'black hole: down');
	like(reason($h), qr/within 1000 ms/, 'says so');
	$t = message($h);
	ok(quit($h), 'quits');
	is(outcome($h, $t), 5, 'with an answer');
}

# ---- quit drains (that no ticket is answered twice is seen to by IdemCourier)

@sent = map { message($c, body => "q$_") } 1 .. 500;
ok(quit($c), 'quits');
is(scalar(grep { !defined outcome($c, $_) } @sent), 0, 'with an answer for everything');

$broker->stop;
is(-s "$work/stderr" ? slurp("$work/stderr") : '', '', 'nothing on stderr');
done_testing();

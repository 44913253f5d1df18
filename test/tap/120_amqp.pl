# The courier for RabbitMQ, against a real broker: what arrives, and what the
# courier says when it does not.
use strict;
use warnings;
use File::Temp ();
use IO::Socket::INET;
use POSIX ();
use Test::More;
use Time::HiRes qw(time usleep);

use IdemCourier ();
use RabbitMQ;

my $why = RabbitMQ::missing();
plan skip_all => $why if $why;

my ($program) = grep { -x } $ENV{IDEM_COURIER_AMQP} // (),
  map { "$_/idem-courier-amqp" } split /:/, $ENV{PATH};
plan skip_all => 'idem-courier-amqp is not built' unless $program;

my $work = File::Temp->newdir(CLEANUP => !$ENV{KEEP});

# ---- a relay in small

$ENV{COURIER_STDERR} = "$work/stderr";

sub courier
{
	my (%options) = @_;
	my $c = IdemCourier->start($program);
	$c->hello(server => 'bus', %options);
	return $c;
}

# Read frames until done() or the deadline.
sub until_
{
	my ($c, $done, $seconds) = @_;
	my $deadline = time + ($seconds // 30);
	until ($done->())
	{
		my $left = $deadline - time;
		my $frame = $left > 0 ? $c->frame($left) : undef;
		return 0 unless $frame;
		$c->{ready} = $frame->{text} if $frame->{type} eq 'h';
	}
	return 1;
}

my $uuid = 0;
sub message
{
	my ($c, %m) = @_;
	return $c->send_message(
		id => $m{id} // sprintf('01900000-0000-7000-8000-%012x', ++$uuid), destination => $m{to} // 'q',
		topic => $m{topic} // 'orders.created', key => $m{key}, content_type => $m{type}, headers => $m{headers},
		enqueued_at => 1_700_000_000_000_000, body => $m{body});
}

sub outcome { my ($c, $t) = @_; return $c->{settled}{$t} ? $c->{settled}{$t}{outcome} : undef }
sub text { my ($c, $t) = @_; return $c->{settled}{$t}{text} }
sub settled { my ($c, @t) = @_; return until_($c, sub { !grep { !$c->{settled}{$_} } @t }) }
sub outcomes { my ($c, @t) = @_; settled($c, @t); return join ' ', map { outcome($c, $_) // '-' } @t }
sub state { my ($c) = @_; return @{ $c->{states} } ? $c->{states}[-1]{state} : '-' }
sub reason { my ($c) = @_; return @{ $c->{states} } ? $c->{states}[-1]{text} : undef }
sub quit
{
	my ($c) = @_;
	my $begin = time;
	$c->quit;
	$c->rest;
	return $c->ended(10) eq '0' && time - $begin < 2.5;
}

# ---- certificates: a CA, one for localhost, one for another name, one self-signed

my $openssl = grep { -x "$_/openssl" } split /:/, $ENV{PATH};
sub slurp { my ($f) = @_; local $/; open my $h, '<', $f or die "$f: $!"; return scalar <$h> }
sub openssl { system("openssl @_ >>$work/openssl.log 2>&1") == 0 or die "openssl @_" }
if ($openssl)
{
	openssl("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=idem-test-ca -keyout $work/ca.key -out $work/ca.pem");
	openssl("req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout $work/srv.key -out $work/srv.csr");
	RabbitMQ::put("$work/ext", "subjectAltName=DNS:localhost\n");
	openssl("x509 -req -days 2 -in $work/srv.csr -CA $work/ca.pem -CAkey $work/ca.key -CAcreateserial -extfile $work/ext -out $work/srv.pem");
	openssl("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other-ca -keyout $work/ca2.key -out $work/ca2.pem");
}

my $broker = RabbitMQ->new(
	dir => "$work/rabbit",
	config => "max_message_size = 2000000\n",
	($openssl ? (tls => { ca => "$work/ca.pem", cert => "$work/srv.pem", key => "$work/srv.key" }) : ()));
my $url = "amqp://127.0.0.1:$broker->{port}";

# ---- bad options

for ([ 'no url', qr/url/ ], [ 'password in the url', qr/credentials/, url => 'amqp://u:p@h' ],
	[ 'scheme', qr/amqp/, url => 'http://h' ], [ 'unroutable', qr/on_unroutable/, url => $url, on_unroutable => 'x' ],
	[ 'option not known', qr/./, url => $url, nonsense => 1 ])
{
	my ($name, $pattern, %options) = @$_;
	my $c = courier(%options);
	until_($c, sub { 0 }, 10);
	like(reason($c), $pattern, "refused: $name");
	is(state($c) . ($c->{ready} // ''), '3', "blocked: $name");
	$c->ended;
}

# ---- down at the start

my $c = courier(url => $url);
ok(until_($c, sub { $c->{ready} }), 'ready before it connects');
like($c->{ready}, qr{^idem-courier-amqp \S+ librabbitmq/}, 'names its library');
is(outcomes($c, message($c)), '5', 'no broker: returned');
is(state($c), 2, 'no broker: down');

$broker->start;
$broker->queue('q');

# ---- content

my $utf8 = "\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x98";
my @bodies = ('{"a":1}', '', "\0\xff\xfe\r\n\0", $utf8, join('', map { chr($_ % 256) } 1 .. 1_000_000));
my @sent = map { message($c, body => $_, headers => qq({"h":"x$utf8","n":1,"o":{"a":[1]},"s":"\\u00e9\\n"}), topic => 't.x', type => 'text/x; y=1') } @bodies;
is(outcomes($c, @sent), '0 0 0 0 0', 'delivered once the broker is there');
is(state($c), 1, 'up');
my @got = $broker->take('q', 10);
is(scalar @got, 5, 'all in the queue');
ok($got[$_]{body} eq $bodies[$_], "body $_ is the same") for 0 .. 4;
my $p = $got[0]{properties};
is_deeply($p->{headers}, { h => "x\x{e4}\x{20ac}\x{1f418}", n => '1', o => '{"a":[1]}', s => "\x{e9}\n" }, 'headers');
is("$p->{type} $p->{app_id} $p->{delivery_mode} $p->{content_type} $p->{timestamp}",
	't.x idem 2 text/x; y=1 1700000000', 'properties');
like($p->{message_id}, qr/^01900000-0000-7000-8000-/, 'message id');

message($c, body => "get\0me");
until_($c, sub { defined outcome($c, $c->{ticket}) });
is(scalar(`amqp-get -u $url -q q`), "get\0me", 'another client gets the same bytes');

# ---- order, and a full window

@sent = map { message($c, body => "n$_", key => 'k' . $_ % 3) } 1 .. 2000;
settled($c, @sent);
is(scalar(grep { outcome($c, $_) == 0 } @sent), 2000, '2000 in a window');
is(join(' ', map { $_->{body} } $broker->take('q', 3000)), join(' ', map { "n$_" } 1 .. 2000), 'in order');

# ---- destinations

$broker->api('PUT', 'exchanges/%2f/ex', { type => 'topic' });
$broker->api('POST', 'bindings/%2f/e/ex/q/q', { routing_key => 'a.#' });
is(outcomes($c, message($c, to => 'ex/a.b/c')), '0', 'exchange/key');
my ($one) = $broker->take('q', 5);
is("$one->{exchange} $one->{routing_key}", 'ex a.b/c', 'the key is all after the first slash');

# ---- unroutable

my @mixed = map { message($c, to => $_) } 'q', 'ex/z', 'q';
like(outcomes($c, @mixed), qr/^0 3 [05]$/, 'unroutable: blocked, never delivered');
like(text($c, $mixed[1]), qr/"ex".*"z"/, 'the reason names exchange and key');
ok((grep { $_->{state} == 3 } @{ $c->{states} }), 'state blocked');
is(outcomes($c, message($c)), '0', 'goes on afterwards');
is(state($c), 1, 'and is up');

my $dead = courier(url => $url, on_unroutable => 'dead');
is(outcomes($dead, message($dead, to => 'ex/z'), message($dead)), '2 0', 'unroutable: dead if so wished');
is(state($dead), 1, 'and up');

# the same id to two destinations, one of them unroutable
my $id = '01900000-0000-7000-8000-0000000000ff';
is(outcomes($dead, map { message($dead, id => $id, to => $_) } 'q', 'ex/z', 'ex/a'), '0 2 0', 'returns are told apart');
ok(quit($dead), 'quits');

# ---- nack

$broker->queue('full', 'x-max-length' => 1, 'x-overflow' => 'reject-publish');
is(outcomes($c, message($c, to => 'full')), '0', 'room for one');
is(outcomes($c, message($c, to => 'full')), '1', 'nack: transient');

# ---- missing exchange

is(outcomes($c, message($c, to => 'nowhere/x')), '3', 'missing exchange: blocked');
like(reason($c), qr/nowhere/, 'says which');
is(state($c), 3, 'state blocked');
is(outcomes($c, message($c)), '0', 'the channel is opened again');
is(state($c), 1, 'and it is up');
@sent = map { message($c, to => $_ == 50 ? 'nowhere/x' : 'q', body => "m$_") } 1 .. 100;
settled($c, @sent);
is(outcome($c, $sent[49]), 3, 'in a window: the one is blocked');
ok(!(grep { outcome($c, $_) !~ /^[04]$/ } @sent[ 0 .. 48 ]), 'those before it are delivered or unknown');
like(join(' ', map { outcome($c, $_) } @sent[ 50 .. 99 ]), qr/^5( 5)*( 0)*$/, 'those behind it are returned, but for any that came later');
@sent = map { message($c, key => 'k', to => $_ == 50 ? 'nowhere/x' : 'q', body => "m$_") } 1 .. 100;
settled($c, @sent);
is(join(' ', map { outcome($c, $_) } @sent[ 50 .. 99 ]), join(' ', (5) x 50), 'with its key, all behind it are returned');

# ---- too large

$broker->api('DELETE', 'queues/%2f/q/contents');
@sent = map { message($c, body => $_ == 2 ? 'x' x 2_100_000 : "b$_") } 1 .. 4;
settled($c, @sent);
like(outcomes($c, @sent), qr/^[04] 2 0 0$/, 'too large: permanent for that one');
like(text($c, $sent[1]), qr/size/, 'with the reason');
is(outcomes($c, message($c, headers => '{"' . 'n' x 300 . '":1}')), '2', 'a name of a header that is too long');
is(outcomes($c, message($c, to => 'r' x 300)), '2', 'a routing key that is too long');

# ---- credentials

my $canary = "canary$$";
my $bad = courier(url => $url, user => 'guest', password => $canary);
is(outcomes($bad, message($bad)), '5', 'wrong password: nothing sent');
is(state($bad), 3, 'wrong password: blocked');
like(reason($bad), qr/ACCESS_REFUSED/, 'says so');
unlike(reason($bad), qr/$canary/, 'and does not tell the password');
unlike(slurp("/proc/$bad->{pid}/$_"), qr/$canary/, "no password in $_") for qw(cmdline environ);
quit($bad);
$bad = courier(url => "$url/nohost");
is(outcomes($bad, message($bad)) . state($bad), '53', 'missing virtual host: blocked');
quit($bad);
$bad = courier(url => $url, public_only => 'true');
is(outcomes($bad, message($bad)) . state($bad), '53', 'public_only refuses loopback');
quit($bad);
$bad = courier(url => 'amqp://169.254.169.254');
is(outcomes($bad, message($bad)) . state($bad), '53', 'link-local is refused');
quit($bad);

# ---- TLS

SKIP:
{
	skip 'no openssl', 8 unless $openssl;
	my $ca = slurp("$work/ca.pem");
	my $tls = courier(url => "amqps://localhost:$broker->{tls_port}", tls_ca => $ca);
	my $body = join '', map { chr(($_ * 7) % 256) } 1 .. 1_500_000;
	$broker->api('DELETE', 'queues/%2f/q/contents');
	is(outcomes($tls, message($tls, body => $body), map { message($tls) } 1 .. 100), join(' ', (0) x 101), 'TLS');
	ok(($broker->take('q', 1))[0]{body} eq $body, 'the same bytes over TLS');
	ok(quit($tls), 'quits');
	for ([ 'wrong name', '127.0.0.1', $ca ], [ 'other authority', 'localhost', slurp("$work/ca2.pem") ], [ 'system authorities', 'localhost' ])
	{
		my ($name, $host, $pem) = @$_;
		$tls = courier(url => "amqps://$host:$broker->{tls_port}", defined $pem ? (tls_ca => $pem) : ());
		is(outcomes($tls, message($tls)) . state($tls), '53', "TLS, $name: refused");
		quit($tls);
	}
	$tls = courier(url => "amqps://localhost:$broker->{port}", tls_ca => $ca);
	is(outcomes($tls, message($tls)) . state($tls), '52', 'no falling back to plain');
	quit($tls);
	$tls = courier(url => $url, tls_ca => $ca);
	until_($tls, sub { 0 }, 10);
	is(state($tls), 3, 'TLS options without TLS are refused');
	$tls->ended;
}

# ---- answers get lost on the way

my $listen = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 5) or die $!;
my $proxy = fork // die $!;
if (!$proxy)
{
	# on SIGUSR1, drop what the broker says
	my $drop = 0;
	local $SIG{USR1} = sub { $drop = 1 };
	while (1)
	{
		my $in = $listen->accept or next;
		my $out = IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $broker->{port}) or next;
		my $open = 1;
		while ($open)
		{
			my $set = '';
			vec($set, fileno($_), 1) = 1 for $in, $out;
			next if select(my $ready = $set, undef, undef, undef) <= 0;
			for ([ $in, $out ], [ $out, $in ])
			{
				my ($from, $to) = @$_;
				next unless vec($ready, fileno($from), 1);
				$open = 0, last unless sysread($from, my $data, 65536);
				syswrite($to, $data) unless $drop && $from == $out;
			}
		}
		$drop = 0;
		close $_ for $in, $out;
	}
}
my $lossy = courier(url => 'amqp://127.0.0.1:' . $listen->sockport, heartbeat => 1);
is(outcomes($lossy, message($lossy)), '0', 'through the proxy');
$broker->api('DELETE', 'queues/%2f/q/contents');
kill USR1 => $proxy;
@sent = map { message($lossy, body => "l$_") } 1 .. 3;
is(outcomes($lossy, @sent), '4 4 4', 'answers lost: unknown');
is(state($lossy), 2, 'and down');
is(scalar(my @there = $broker->take('q', 10)), 3, 'although they were stored');
is(outcomes($lossy, message($lossy)), '0', 'connects again');

# quit while answers do not come
kill USR1 => $proxy;
my $t = message($lossy);
RabbitMQ::await('message', sub { ($broker->api('GET', 'queues/%2f/q')->{messages} // 0) >= 0 });
ok(quit($lossy), 'quits within 2 s without answers');
is(outcome($lossy, $t), 4, 'and says what is unknown');
kill KILL => $proxy;
waitpid $proxy, 0;

# ---- the broker takes no more (alarm), which must not hang us

$broker->ctl('set_vm_memory_high_watermark', '0.000001');
my $big = 'x' x 100_000;
@sent = map { message($c, body => $big) } 1 .. 100;
until_($c, sub { state($c) == 2 }, 20);
is(state($c), 2, 'alarm: down');
like(reason($c), qr/takes no messages/, 'says why');
$broker->ctl('set_vm_memory_high_watermark', '0.6');
settled($c, @sent);
ok(!(grep { outcome($c, $_) !~ /^[05]$/ } @sent), 'delivered later, or returned');
until_($c, sub { state($c) == 1 }, 20);
is(outcomes($c, message($c)), '0', 'goes on when the alarm is over');

# ---- the broker is killed under load

$broker->api('DELETE', 'queues/%2f/q/contents');
my %ledger;
my @early = map { message($c, body => "e$_") } 1 .. 500;
settled($c, @early);
# stopped, it answers nothing and soon takes nothing, so that every case occurs
kill STOP => $broker->{pid};
my @late = map { message($c, body => "k$_ " . 'x' x 50_000) } 1 .. 600;
@ledger{@early} = map { "e$_" } 1 .. 500;
@ledger{@late} = map { "k$_" } 1 .. 600;
$broker->kill9;
settled($c, keys %ledger);
my %by;
push @{ $by{ outcome($c, $_) } }, $ledger{$_} for keys %ledger;
note join ', ', map { "outcome $_: " . @{ $by{$_} } } sort keys %by;
is(join(' ', sort keys %by), '0 4 5', 'some delivered, some unknown, some returned');
is(outcomes($c, message($c)) . state($c), '52', 'down');
$broker->start;
is(outcomes($c, message($c, body => 'again')), '0', 'up again');
my %there;
while (my @some = $broker->take('q', 1000)) { $there{ $_->{body} =~ s/ .*//r }++ for @some }
is(scalar(grep { !$there{$_} } @{ $by{0} // [] }), 0, 'every delivered message is there');
is(scalar(grep { $there{$_} } @{ $by{5} // [] }), 0, 'no returned message is');

# ---- quit drains (that no ticket is answered twice is seen to by IdemCourier)

@sent = map { message($c, body => "q$_") } 1 .. 500;
ok(quit($c), 'quits');
is(scalar(grep { !defined outcome($c, $_) } @sent), 0, 'with an answer for everything');

$broker->stop;
is(-s "$work/stderr" ? slurp("$work/stderr") : '', '', 'nothing on stderr');
done_testing();

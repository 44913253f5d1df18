# The courier for NATS JetStream, against a real server.
use strict;
use warnings;
use JSON::PP ();
use MIME::Base64 ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use BrokerTable;
use BrokerTests qw(message outcomes reason state_of text);
use IdemRelay;

my $class = BrokerTable::begin('nats');
BrokerTable::courier('nats');

sub start { return BrokerTests::courier(@_) }

my $work = "$BrokerTable::work";
my $nats = $class->new(dir => "$work/own");
$nats->start;
my $c = start(url => $nats->url, $nats->login);

# ---- what duplicates are known by

$nats->ask(do => 'stream', config => { name => 'two', subjects => [ 'two', 'two.*' ] });
my $id = '01900000-0000-7000-9000-000000000001';
is(outcomes($c, map { message($c, to => $_, topic => 'two.a', id => $id) } qw(two.a two.b two.a)), '0 0 0', 'one id to two subjects, and again');
my @got = $nats->take('two', 10);
is(join(' ', map { $_->{dedup} } @got), "$id $id:two.b", 'each subject has it once');
is(join(' ', map { "$_->{id} $_->{topic}" } $got[1]), "$id two.a", 'and its id can be told');

# ---- headers and subjects that would speak to the server

is(outcomes($c, message($c, to => 'two', body => 'stays'),
		message($c, to => 'two', headers => '{"Nats-Rollup": "all", "nats-msg-id": "x", "Idem-Id": "y", "fine": "z"}')), '0 0', 'headers that would speak for us: delivered');
@got = $nats->take('two', 10);
is($got[0]{body}, 'stays', 'the stream was not emptied');
is(join(' ', sort keys %{ $got[1]{headers} }), 'fine', 'and they were left out');
is(outcomes($c, message($c, to => 'two', headers => '{"a b": "1"}'), message($c, to => 'two', headers => '{"a": "1\r\n2"}')), '2 2', 'headers that cannot be: permanent');
my @bad = ('$JS.API.STREAM.DELETE.two', '$SYS.x', '_INBOX.x', 'a b', 'a..b', '.a', 'a.', 'a.*', 'a.>', "a\tb");
is(outcomes($c, map { message($c, to => $_) } @bad), join(' ', (2) x @bad), 'subjects that must not or cannot be: permanent');
is(outcomes($c, message($c, to => 'two')), '0', 'the stream is still there');

# ---- not allowed; full

is(outcomes($c, message($c, to => 'forbidden'), message($c, to => 'two')) =~ s/5$/0/r, '3 0', 'a subject we may not publish to: blocked');
ok((grep { $_->{state} == 3 && $_->{text} =~ /Permissions Violation.*forbidden/i } @{ $c->{states} }), 'with the reason');
is(outcomes($c, message($c, to => 'two')) . state_of($c), '01', 'others go on');
$nats->ask(do => 'stream', config => { name => 'full', subjects => ['full'], max_msgs => 1, discard_new => JSON::PP::true });
is(outcomes($c, message($c, to => 'full')), '0', 'room for one');
is(outcomes($c, message($c, to => 'full')) . state_of($c), '52', 'full: returned and down, so that no message is blamed for it');
like(reason($c), qr/"full".*maximum messages/, 'with the reason');
$nats->ask(do => 'stream', config => { name => 'small', subjects => ['small'], max_msg_size => 1000 });
is(outcomes($c, message($c, to => 'small', body => 'x' x 2000), message($c, to => 'small')), '2 0', 'larger than the stream allows: permanent');
$nats->stop;

# ---- not allowed to hear the answers

my $deaf = $class->new(dir => "$work/deaf", authorization => <<'CONF');
authorization { users = [ { user: deaf, password: deaf, permissions: { publish: ">", subscribe: "mine.>" } } ] }
CONF
$deaf->start;
$c = start(url => $deaf->url, user => 'deaf', password => 'deaf');
like(outcomes($c, message($c, to => 'x')) . state_of($c), qr/^[45]3$/, 'no right to the inbox: blocked');
like(reason($c), qr/Subscription/, 'with the reason');
$c = start(url => $deaf->url, user => 'deaf', password => 'deaf', inbox_prefix => 'mine');
is(outcomes($c, message($c, to => 'x')), '3', 'with inbox_prefix: it hears that there is no stream');
$deaf->stop;

# ---- a token

my $canary = "token$$";
my $token = $class->new(dir => "$work/token", authorization => qq(authorization { token: "$canary" }\n));
$token->start;
$c = start(url => $token->url, token => $canary);
is(outcomes($c, message($c, to => 'x')), '3', 'a token: let in');
like(reason($c), qr/no stream/, 'though there is no stream');
$c = start(url => $token->url, token => "$canary-not");
is(outcomes($c, message($c, to => 'x')) . state_of($c), '53', 'a wrong token: blocked');
unlike(reason($c), qr/$canary/, 'which is not told');
$token->stop;

# ---- credentials: a JWT, and a key to sign what the server asks for

sub run_openssl { system("openssl @_ >>$work/openssl.log 2>&1") == 0 or die "openssl @_"; return }
sub base64url { return MIME::Base64::encode_base64($_[0], '') =~ tr{+/=}{-_}dr }

# a key in NATS's own spelling: prefix, 32 bytes, CRC-16, in base 32
sub spell
{
	my ($bytes) = @_;
	my $crc = 0;
	for my $byte (unpack 'C*', $bytes)
	{
		$crc ^= $byte << 8;
		$crc = ($crc & 0x8000 ? $crc << 1 ^ 0x1021 : $crc << 1) & 0xffff for 1 .. 8;
	}
	my $bits = unpack 'B*', $bytes . pack 'v', $crc;
	$bits .= '0' while length($bits) % 5;
	return join '', map { ('A' .. 'Z', 2 .. 7)[ oct "0b$_" ] } $bits =~ /.{5}/g;
}

sub key_pair
{
	my ($name, $prefix) = @_;
	run_openssl("genpkey -algorithm ed25519 -out $work/$name.pem");
	run_openssl("pkey -in $work/$name.pem -outform DER -out $work/$name.der");
	run_openssl("pkey -in $work/$name.pem -pubout -outform DER -out $work/$name.pub");
	return { file => "$work/$name.pem",
		public => spell(chr($prefix) . substr(BrokerTable::slurp("$work/$name.pub"), -32)),
		seed => spell(chr(0x90 | $prefix >> 5) . chr(($prefix & 31) << 3) . substr(BrokerTable::slurp("$work/$name.der"), -32)) };
}

sub jwt
{
	my ($issuer, $subject, %claims) = @_;
	my $json = JSON::PP->new->canonical;
	my $text = join '.', map { base64url($json->encode($_)) } { typ => 'JWT', alg => 'ed25519-nkey' },
	  { jti => 'x', iat => 1_700_000_000, iss => $issuer->{public}, sub => $subject->{public}, name => $claims{type},
		nats => { version => 2, %claims } };
	Broker::put("$work/to_sign", $text);
	run_openssl("pkeyutl -sign -rawin -inkey $issuer->{file} -in $work/to_sign -out $work/signature");
	return "$text." . base64url(BrokerTable::slurp("$work/signature"));
}

my ($operator, $system, $account, $user, $stranger) =
  map { key_pair(@$_) } [ 'operator', 112 ], [ 'system', 0 ], [ 'account', 0 ], [ 'user', 160 ], [ 'stranger', 160 ];
my %limits = map { $_ => -1 } qw(subs data payload imports exports conn leaf mem_storage disk_storage streams consumer);
my %accounts = map { $_->{public} => jwt($operator, $_, type => 'account', limits => { %limits, wildcards => JSON::PP::true }) } $account;
$accounts{ $system->{public} } = jwt($operator, $system, type => 'account',
	limits => { map({ $_ => -1 } qw(subs data payload imports exports conn leaf)), wildcards => JSON::PP::true });
my $preload = join '', map { "\t$_: \"$accounts{$_}\"\n" } sort keys %accounts;
Broker::put("$work/operator.jwt", jwt($operator, $operator, type => 'operator'));
my $trusting = $class->new(dir => "$work/trusting", authorization => <<"CONF");
operator: "$work/operator.jwt"
system_account: $system->{public}
resolver: MEMORY
resolver_preload: {
$preload}
CONF
$trusting->start;
my $ticket = jwt($account, $user, type => 'user', map({ $_ => -1 } qw(subs data payload)));
sub creds { return "-----BEGIN NATS USER JWT-----\n$ticket\n------END NATS USER JWT------\n\n-----BEGIN USER NKEY SEED-----\n$_[0]\n------END USER NKEY SEED------\n" }
$c = start(url => $trusting->url, creds => creds($user->{seed}));
is(outcomes($c, message($c, to => 'x')), '3', 'credentials: let in');
like(reason($c), qr/no stream/, 'though there is no stream');
$c = start(url => $trusting->url, creds => creds($stranger->{seed}));
is(outcomes($c, message($c, to => 'x')) . state_of($c), '53', 'credentials with the key of somebody else: blocked');
unlike(reason($c), qr/$stranger->{seed}/, 'which is not told');
$c = start(url => $trusting->url);
is(outcomes($c, message($c, to => 'x')) . state_of($c), '53', 'no credentials: blocked');
$trusting->stop;

BrokerTable::relay('nats', exact => '');
done_testing();

# From outbox_enqueue through the relay to a real Kafka, and what becomes of
# messages when it fails.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);
use BrokerTests qw(bodies);
use IdemRelay;
use Idem;
use Kafka;

my $why = Kafka::missing() // Kafka::missing_tools();
plan skip_all => $why if $why;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $secrets = "$dir/secrets";
mkdir $secrets;
my $canary = "canary-$$-sesame";
put_file("$secrets/right", "$canary\n", 0600);
put_file("$secrets/wrong", "$canary-not\n", 0600);

my $proxied = Kafka::free_port();
my $proxy = proxy($proxied);
my $broker = Kafka->new(dir => "$dir/kafka", password => $canary, proxied_port => $proxied, proxied => $proxy->{port});
my $url = "kafka://127.0.0.1:$broker->{sasl_port}";
my $retry = "retry_min '20ms', retry_max '200ms'";
my $node = relay_cluster('kafka', $secrets);

sub server
{
	my ($name, $pattern, $options, $destination) = @_;
	sql("CREATE SERVER $name FOREIGN DATA WRAPPER idem OPTIONS ($retry, $options)");
	sql("SELECT idem.route_add('$pattern', '$name', '$destination')");
	return;
}
my $login = q("user" 'relay', password_file 'right');
sub status { return sql("SELECT $_[1] FROM idem.relay_status WHERE server = '$_[0]'") }
sub await_status
{
	my ($what, $server, $columns, $expected, $seconds) = @_;
	my $is;
	return await_that($what, sub { ($is = status($server, $columns)) eq $expected }, $seconds // 60) || diag($is);
}

# ---- options

for ([ 'a secret in clear', q("kafka.ssl.key.password" 'x') ], [ 'another', q("kafka.sasl.password" 'x') ],
	[ 'an option not known', q(exchange 'x') ], [ 'a mechanism not known', q(sasl_mechanism 'GSSAPI') ])
{
	my ($name, $option) = @$_;
	like(sqlstate($node, "CREATE SERVER bad FOREIGN DATA WRAPPER idem OPTIONS (url '$url', $option)"), qr/^(HV00D|22023)$/, "refused: $name");
}
server('unwise', 'x.*', qq(url '$url', "kafka.acks" '1'), 'x');
await_status('what the courier refuses blocks', 'unwise', q(state, reason ~ 'kafka.acks'), 'blocked|t');
sql(q(SELECT idem.route_drop(id, true) FROM idem.routes WHERE server = 'unwise'));

# ---- down at the start

server('bus', 'q.*', "url '$url', $login", 'q');
sql(q(SELECT idem.outbox_enqueue('q.early', '{"n":  1}'::json)));
await_status('no broker: backing off', 'bus', 'state, parked, dead', 'backing off|0|0');
$broker->start;
$broker->create('q', 3, 'max.message.bytes' => 2000000);
$broker->create('load', 3);
$broker->create('lossy', 1);
await_status('delivered when it is there', 'bus', 'state, sent, dead', 'running|1|0');
my @got = $broker->read('q');
is($got[0]{body}, '{"n":  1}', 'the same bytes');

# ---- content, byte for byte

my %expected;
for my $body (bodies())
{
	my $file = "$dir/body";
	put_file($file, $body);
	my $id = sql("SELECT idem.outbox_enqueue('q.content', pg_read_binary_file('$file'), key => 'k', content_type => 'application/x; y=1',"
		  . q{ headers => jsonb_build_object('h', U&'x\00E4\20AC', 'n', 7))});
	$expected{$id} = $body;
}
await_status('all are sent', 'bus', 'sent', '6');
for my $m (grep { $_->{headers}{type} eq 'q.content' } $broker->read('q'))
{
	my $body = delete $expected{ $m->{headers}{'message-id'} };
	ok(defined $body && $m->{body} eq $body, length($m->{body}) . ' bytes: the same');
	is("$m->{key}|$m->{headers}{'content-type'}|$m->{headers}{h}|$m->{headers}{n}", "k|application/x; y=1|x\xc3\xa4\xe2\x82\xac|7", 'key and headers');
}
is(scalar keys %expected, 0, 'each of them');

# ---- killed and started again under load; then the courier, twice

server('load', 'load.*', "url '$url', $login, timeout_ms '2000'", 'load');
sub load { return map { $_->{body} =~ /(\d+) k(\d+)/ ? [ $2, $1 ] : () } $broker->read('load') }
my $fill = q(SELECT idem.outbox_enqueue_batch('load.x', array_agg(to_jsonb(i || ' k' || i % 7)::text), array_agg('k' || i % 7)) FROM generate_series(%d, %d) i);
sql(sprintf $fill, $_ * 10000 + 1, ($_ + 1) * 10000) for 0 .. 2;
await_that('some have arrived', sub { status('load', 'sent') > 500 });
$broker->kill9;
my $sent = status('load', 'sent');
cmp_ok($sent, '<', 30000, 'killed before all have');
await_status('down', 'load', 'state, parked, dead', 'backing off|0|0');
sql(sprintf $fill, 30001, 32000);
$broker->start;
await_status('all are sent, none is dead', 'load', 'state, unsent_at_most, dead', 'running|0|0');
for my $signal (qw(KILL SEGV))
{
	my $from = $signal eq 'KILL' ? 32001 : 52001;
	my $before = status('load', 'sent');
	sql(sprintf $fill, $from, $from + 19999);
	await_that('some have arrived', sub { status('load', 'sent') > $before + 500 });
	my $pid = status('load', 'courier');
	kill $signal => $pid;
	await_status("SIG$signal: all are sent, none is dead", 'load', 'state, unsent_at_most, dead', 'running|0|0');
	isnt(status('load', 'courier'), $pid, 'by another courier');
}
my @load = load();
my %distinct = map { $_->[1] => 1 } @load;
is(scalar keys %distinct, 72000, 'nothing is lost');
cmp_ok(@load - 72000, '<=', 3000, 'no more than a window came twice, each time');
note 'twice: ' . (@load - 72000) . ', unknown: ' . status('load', 'unknown');
ok(in_key_order(@load), 'the order of each key held');

# ---- answers get lost: unknown, and sent again with the same id

server('lossy', 'l.*', "url 'kafka://127.0.0.1:$proxy->{port}', timeout_ms '1000', connect_timeout_ms '1000'", 'lossy');
sql(q(SELECT idem.outbox_enqueue('l.first', '{}'::json)));
await_status('through the proxy', 'lossy', 'sent, unknown', '1|0');
$proxy->lose;
my $lost = sql(q(SELECT idem.outbox_enqueue('l.lost', '{}'::json)));
await_that('no answer: unknown', sub { status('lossy', 'unknown') >= 1 });
$proxy->restore;
await_status('sent again', 'lossy', 'state, sent, unsent_at_most, dead', 'running|2|0|0');
my (undef, @twice) = $broker->read('lossy');
cmp_ok(scalar @twice, '>=', 2, 'it is there more than once');
is(join(' ', grep { $_ ne $lost } map { $_->{headers}{'message-id'} } @twice), '', 'always with the same id');

# ---- missing topic, poison, no right, wrong credentials

server('missing', 'n.*', "url '$url', $login", '{topic}');
sql(q(SELECT idem.outbox_enqueue('n.x', to_jsonb(i), key => 'u') FROM generate_series(1, 3) i));
await_status('missing topic: blocked', 'missing', q(state, reason, sent, dead), 'blocked|topic "n.x" does not exist|0|0');
$broker->create('n.x', 1);
await_status('goes on when it is there', 'missing', 'state, sent, dead', 'running|3|0');
is(join(' ', map { $_->{body} } $broker->read('n.x')), '1 2 3', 'in order');

$broker->create('small', 1, 'max.message.bytes' => 2000);
server('small', 's.*', "url '$url', $login", 'small');
sql(q(SELECT idem.outbox_enqueue('s.x', to_jsonb(repeat('x', CASE i WHEN 50 THEN 5000 ELSE 50 END)), key => 'u') FROM generate_series(1, 100) i));
await_status('poison: one is dead, the others are sent', 'small', 'state, sent, dead, unsent_at_most', 'running|99|1|0');
is(sql(q(SELECT name, code, reason ~ 'large' FROM idem.dead_letter)), 'small|10|t', 'with its code');

server('login', 'w.*', qq(url '$url', "user" 'relay', password_file 'wrong'), 'q');
server('poor', 'p.*', qq(url '$url', "user" 'poor', password_file 'right'), 'q');
sql(q(SELECT idem.outbox_enqueue('w.x', '"let in"'::json), idem.outbox_enqueue('p.x', '"poor"'::json)));
await_status('wrong password: blocked', 'login', q(state, reason ~ 'uthentication', sent, dead), 'blocked|t|0|0');
await_status('no right: blocked', 'poor', q(state, reason ~ 'uthoriz|allowed', sent, dead), 'blocked|t|0|0');
sql(q(ALTER SERVER login OPTIONS (SET password_file 'right')));
await_status('right password: goes on', 'login', 'state, sent', 'running|1');
$broker->admin('allow', 'poor', 'q');
await_status('right granted: goes on', 'poor', 'state, sent', 'running|1');

# ---- nothing is given away; a fast stop while nobody answers

is(leaks($canary), '', 'the secret shows nowhere');
unlike(slurp_file($node->logfile), qr/TRAP:|PANIC|server process .* was terminated/, 'nothing else has crashed');
kill STOP => $broker->{pid};
sql(sprintf $fill, 80001, 90000);
await_that('the window is out', sub { sql(q(SELECT count(*) > 0 FROM idem.relay_status WHERE server = 'load' AND unsent_at_most > 0)) eq 't' });
my $begin = time;
$node->stop('fast');
cmp_ok(time - $begin, '<', 10, 'fast stop with a broker that hangs');
$broker->kill9;
done_testing();

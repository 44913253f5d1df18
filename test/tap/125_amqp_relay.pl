# From outbox_enqueue through the relay to a real RabbitMQ, and what becomes of
# messages when it fails.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdemRelay;
use Idem;
use RabbitMQ;

my $why = RabbitMQ::missing();
plan skip_all => $why if $why;

my $dir = PostgreSQL::Test::Utils::tempdir;
my $secrets = "$dir/secrets";
mkdir $secrets;
my $canary = "canary-$$-sesame";
put_file("$secrets/right", "$canary\n", 0600);
put_file("$secrets/wrong", "$canary-not\n", 0600);

my $broker = RabbitMQ->new(dir => "$dir/rabbit");
my $url = "amqp://127.0.0.1:$broker->{port}";
my $retry = "retry_min '20ms', retry_max '200ms'";
my $node = relay_cluster('amqp', $secrets);

sub server
{
	my ($name, $pattern, $options, $destination) = @_;
	sql("CREATE SERVER $name FOREIGN DATA WRAPPER idem OPTIONS (\"user\" 'relay', $retry, $options)");
	sql("SELECT idem.route_add('$pattern', '$name', '$destination')");
	return;
}
sub status { return sql("SELECT $_[1] FROM idem.relay_status WHERE server = '$_[0]'") }
sub await_status
{
	my ($what, $server, $columns, $expected) = @_;
	return await_sql($what, "SELECT $columns FROM idem.relay_status WHERE server = '$server'", $expected);
}

# ---- down at the start

server('bus', 'q.*', "url '$url', password_file 'right'", 'q');
sql(q(SELECT idem.outbox_enqueue('q.early', '{"n":  1}'::json)));
await_status('no broker: backing off', 'bus', 'state, parked, dead', 'backing off|0|0');
$broker->start;
$broker->api('PUT', 'users/relay', { password => $canary, tags => '' });
$broker->api('PUT', 'permissions/%2f/relay', { map { $_ => '.*' } qw(configure write read) });
$broker->queue($_) for qw(q load lossy);
await_status('delivered when it is there', 'bus', 'state, sent, dead', 'running|1|0');
is(scalar(`amqp-get -u $url -q q`), '{"n":  1}', 'the same bytes');

# ---- content, byte for byte

my @bodies = (
	[ q(SELECT decode(string_agg(lpad(to_hex(i), 2, '0'), '' ORDER BY i), 'hex') FROM generate_series(0, 255) i), join '', map { chr } 0 .. 255 ],
	[ q(SELECT '\\x'::bytea), '' ],
	[ q(SELECT convert_to(repeat('0123456789abcdef', 65536), 'UTF8')), '0123456789abcdef' x 65536 ],
	[ q(SELECT convert_to(U&'\\00E4\\20AC\\+01F418', 'UTF8')), "\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x98" ]);
for my $body (@bodies)
{
	my $id = sql("SELECT idem.outbox_enqueue('q.content', ($body->[0]), key => 'k', content_type => 'application/x; y=1',"
		  . q{ headers => jsonb_build_object('h', U&'x\00E4\20AC', 'n', 7))});
	my $length = length $body->[1];
	my ($got) = take_one('q');
	ok($got->{body} eq $body->[1], "$length bytes: the same");
	my $p = $got->{properties};
	is("$p->{message_id}|$p->{type}|$p->{content_type}|$p->{delivery_mode}|$p->{app_id}",
		"$id|q.content|application/x; y=1|2|idem", "$length bytes: properties");
	is_deeply($p->{headers}, { h => "x\x{e4}\x{20ac}", n => '7' }, "$length bytes: headers");
}
sub take_one
{
	my ($queue) = @_;
	my @got;
	await_that("a message in $queue", sub { @got = $broker->take($queue, 1) });
	return @got;
}
is(sqlstate($node, q(SELECT idem.outbox_enqueue('q.x', '{}'::json, headers => '{"x": "a\r\nb"}'))), '22023', 'line breaks are refused');

# ---- killed and started again under load

server('load', 'load.*', "url '$url', password_file 'right'", 'load');
my @got;
sub drain
{
	my ($queue) = @_;
	while (my @some = eval { $broker->take($queue, 1000) })
	{
		push @got, map { [ $_->{body} =~ /(\d+) k(\d+)/ ? ($2, $1) : () ] } @some;
	}
	return;
}
my $fill = q(SELECT idem.outbox_enqueue_batch('load.x', array_agg(to_jsonb(i || ' k' || i % 7)::text), array_agg('k' || i % 7)) FROM generate_series(%d, %d) i);
sql(sprintf $fill, 1, 10000);
await_that('some have arrived', sub { status('load', 'sent') > 500 });
$broker->kill9;
my $sent = status('load', 'sent');
cmp_ok($sent, '<', 10000, 'killed before all have');
await_status('down', 'load', 'state, parked, dead', 'backing off|0|0');
sql(sprintf $fill, 10001, 12000);
$broker->start;
await_status('all are sent, none is dead', 'load', 'state, unsent_at_most, dead', 'running|0|0');
drain('load');
my %distinct = map { $_->[1] => 1 } @got;
is(scalar keys %distinct, 12000, 'nothing is lost');
cmp_ok(@got - 12000, '<=', 1000, 'no more than a window came twice');
note 'twice: ' . (@got - 12000) . ', unknown: ' . status('load', 'unknown');
ok(in_key_order(@got), 'the order of each key held');

# ---- answers get lost: unknown, and sent again with the same id

my $proxy = proxy($broker->{port});
server('lossy', 'l.*', "url 'amqp://127.0.0.1:$proxy->{port}', password_file 'right', heartbeat '1'", 'lossy');
sql(q(SELECT idem.outbox_enqueue('l.first', '{}'::json)));
await_status('through the proxy', 'lossy', 'sent, unknown', '1|0');
take_one('lossy');
$proxy->lose;
my $lost = sql(q(SELECT idem.outbox_enqueue('l.lost', '{}'::json)));
await_that('no answer: unknown', sub { status('lossy', 'unknown') >= 1 });
$proxy->restore;
await_status('sent again', 'lossy', 'state, sent, unsent_at_most, dead', 'running|2|0|0');
my @twice = $broker->take('lossy', 10);
cmp_ok(scalar @twice, '>=', 2, 'it is there more than once');
is(join(' ', grep { $_ ne $lost } map { $_->{properties}{message_id} } @twice), '', 'always with the same id');

# ---- nothing takes it, or there is no such exchange

$broker->api('PUT', 'exchanges/%2f/ex', { type => 'topic' });
server('strict', 'u.*', "url '$url', password_file 'right'", 'ex/{topic}');
server('easy', 'u.*', "url '$url', password_file 'right', on_unroutable 'dead'", 'ex/{topic}');
server('nowhere', 'n.*', "url '$url', password_file 'right'", 'missing/{topic}');
sql(q(SELECT idem.outbox_enqueue('u.x', to_jsonb(i), key => 'u') FROM generate_series(1, 3) i));
sql(q(SELECT idem.outbox_enqueue('n.x', '{}'::json)));
await_status('unroutable: blocked', 'strict', q(state, reason, sent, dead), 'blocked|exchange "ex" has no queue for routing key "u.x"|0|0');
await_status('unroutable: dead if so wished', 'easy', q(state, sent, dead, unsent_at_most), 'running|0|3|0');
is(sql(q(SELECT DISTINCT name, code FROM idem.dead_letter)), 'easy|312', 'with its code');
await_status('missing exchange: blocked', 'nowhere', q(state, reason ~ 'missing', sent, dead), 'blocked|t|0|0');
$broker->queue('u');
$broker->api('POST', 'bindings/%2f/e/ex/q/u', { routing_key => 'u.#' });
await_status('it goes on when somebody has bound a queue', 'strict', 'state, sent, dead', 'running|3|0');
is(join(' ', map { $_->{body} } $broker->take('u', 10)), '1 2 3', 'in order');
$broker->api('PUT', 'exchanges/%2f/missing', { type => 'fanout' });
$broker->api('POST', 'bindings/%2f/e/missing/q/u', {});
await_status('and when the exchange is there', 'nowhere', 'state, sent, dead', 'running|1|0');

# ---- wrong credentials

server('login', 'w.*', "url '$url', password_file 'wrong'", 'u');
sql(q(SELECT idem.outbox_enqueue('w.x', '"let in"'::json)));
await_status('wrong password: blocked', 'login', q(state, reason ~* 'refused|access', sent, dead), 'blocked|t|0|0');
sql(q(ALTER SERVER login OPTIONS (SET password_file 'right')));
await_status('right password: goes on', 'login', 'state, sent', 'running|1');

# ---- nothing is given away

is(leaks($canary), '', 'the secret shows nowhere');
unlike(slurp_file($node->logfile), qr/TRAP:|PANIC|terminated by signal/, 'nothing has crashed');
$node->stop;
$broker->kill9;
$broker->stop;
done_testing();

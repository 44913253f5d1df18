# From outbox_enqueue through the relay to a real web server, and what becomes of
# messages when it fails.
use strict;
use warnings;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use IdemCourier qw(free_port);
use IdemRelay;
use Idem;

my ($nginx) = grep { -x } map { "$_/nginx" } '/usr/sbin', split /:/, $ENV{PATH};
plan skip_all => 'nginx is not installed' unless $nginx;
plan skip_all => 'curl is not installed' unless grep { -x "$_/curl" } split /:/, $ENV{PATH};

my $dir = PostgreSQL::Test::Utils::tempdir;
my $secrets = "$dir/secrets";
mkdir $_ for $secrets, "$dir/files";
my $port = free_port();
my $canary = "canary-$$-sesame";
put_file("$secrets/token", "$canary\n", 0600);
put_file("$dir/outside", "outside-$canary\n", 0600);
symlink '../outside', "$secrets/escape";

# ---- the web server: keeps what is PUT, and notes what it has seen

put_file("$dir/nginx.conf", <<"CONF");
daemon off; master_process off; pid $dir/nginx.pid; error_log $dir/nginx.log;
events { worker_connections 200; }
http {
	log_format seen escape=none '\$status|\$request_method \$request_uri|\$http_idempotency_key|\$content_type|'
		'\$http_x_text|\$http_x_n|\$http_ce_partitionkey|\$http_authorization|\$http_ce_id|\$http_ce_type';
	access_log $dir/seen seen;
	client_body_temp_path $dir/tmp1; proxy_temp_path $dir/tmp2; fastcgi_temp_path $dir/tmp3;
	uwsgi_temp_path $dir/tmp4; scgi_temp_path $dir/tmp5;
	keepalive_requests 100000;
	server {
		listen 127.0.0.1:$port; root $dir/files; client_max_body_size 10m;
		location / { dav_methods PUT; create_full_put_path on; }
		location /gate/ {
			if (!-f $dir/open) { return 401; }
			dav_methods PUT; create_full_put_path on;
		}
		location /echo/ { return 200 "stored as \$http_idempotency_key"; }
		location /invalid/ { return 422 "no thanks"; }
	}
}
CONF

my $nginx_pid;
sub start_nginx
{
	$nginx_pid = fork // die $!;
	if ($nginx_pid == 0)
	{
		open STDERR, '>>', "$dir/nginx.err";
		exec $nginx, '-e', "$dir/nginx.log", '-p', $dir, '-c', "$dir/nginx.conf" or POSIX::_exit(1);
	}
	IdemCourier::await(sub { IO::Socket::INET->new("127.0.0.1:$port") }, 20) or die 'nginx does not start';
	return;
}
sub kill_nginx { kill KILL => $nginx_pid; waitpid $nginx_pid, 0; undef $nginx_pid; return }
END { local $?; if ($nginx_pid) { kill KILL => $nginx_pid; waitpid $nginx_pid, 0 } }

# seen(qr/path/): the requests as nginx has noted them
sub seen
{
	my ($path) = @_;
	my @names = qw(status request id type text n key authorization ce_id ce_type);
	my @seen;
	for (split /\n/, -e "$dir/seen" ? slurp_file("$dir/seen") : '')
	{
		my %r;
		@r{@names} = split /\|/, $_, scalar @names;
		push @seen, \%r if $r{request} =~ $path;
	}
	return @seen;
}

sub get { my ($path) = @_; local $/; open my $out, '-|', 'curl', '-s', "http://127.0.0.1:$port/$path" or die; my $r = <$out>; close $out; return $r // '' }
sub stored { my ($prefix) = @_; opendir my $d, "$dir/files" or die; return scalar grep { /^\Q$prefix\E/ } readdir $d }

my $node = relay_cluster('http', $secrets);
my $retry = "retry_min '20ms', retry_max '200ms'";

# ---- down at the start

sql(qq(CREATE SERVER web FOREIGN DATA WRAPPER idem OPTIONS (url 'http://127.0.0.1:$port', method 'PUT', bearer_file 'token', $retry)));
sql(q(SELECT idem.route_add('c.*', 'web'), idem.route_add('load.*', 'web')));
sql(q(SELECT idem.outbox_enqueue('c.early', '{"n":  1}'::json)));
await_sql('no server: backing off', q(SELECT state, parked, dead FROM idem.relay_status), 'backing off|0|0');
start_nginx();
await_that('delivered when it is there', sub { get('c.early') eq '{"n":  1}' });

# ---- content, byte for byte

my %bodies = (
	binary => q(decode(string_agg(lpad(to_hex(i), 2, '0'), '' ORDER BY i), 'hex') FROM generate_series(0, 255) i),
	empty => q('\\x'::bytea),
	large => q(convert_to(repeat('0123456789abcdef', 65536), 'UTF8')),
	utf8 => q(convert_to(U&'\\00E4\\20AC\\+01F418', 'UTF8')),
	crlf => q(convert_to(E'a\\r\\n\\r\\nb', 'UTF8')));
my %expected = (
	binary => join('', map { chr } 0 .. 255), empty => '', large => '0123456789abcdef' x 65536,
	utf8 => "\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x98", crlf => "a\r\n\r\nb");
sql('CREATE TABLE body (name text, body bytea)');
sql("INSERT INTO body SELECT '$_', $bodies{$_}") for sort keys %bodies;
sql(q(SELECT idem.outbox_enqueue('c.' || name, body, key => U&'k \00E4', content_type => 'application/x; y=1',
	headers => jsonb_build_object('x-text', U&'\00E4 \20AC', 'x-n', 7)) FROM body));
await_that('all arrive', sub { seen(qr{/c\.}) >= 1 + keys %bodies });
for my $name (sort keys %expected)
{
	ok(get("c.$name") eq $expected{$name}, "$name: the same bytes");
	my ($r) = grep { $_->{status} =~ /^2/ } seen(qr{/c\.$name$});
	my $id = sql("SELECT msg_id FROM idem.outbox WHERE topic = 'c.$name'");
	is("$r->{id} $r->{ce_id}", "$id $id", "$name: the id");
	is("$r->{type}|$r->{text}|$r->{n}|$r->{key}|$r->{ce_type}", "application/x; y=1|\xc3\xa4 \xe2\x82\xac|7|k%20%C3%A4|c.$name", "$name: headers");
	is($r->{authorization}, "Bearer $canary", "$name: the secret");
}
for my $bad (q(headers => '{"x": "a\r\nb"}'), q(headers => '{"x\n": "a"}'), q(content_type => E'a\r\nb: c'))
{
	is(sqlstate($node, "SELECT idem.outbox_enqueue('c.x', '{}'::json, $bad)"), '22023', "line breaks are refused: $bad");
}

# ---- killed and started again under load

sql(q(SELECT idem.outbox_enqueue('load.n' || i, to_jsonb(i), key => 'k' || i % 7, headers => jsonb_build_object('x-n', i))
	FROM generate_series(1, 3000) i));
for my $n (100, 500, 900)
{
	await_that("$n have arrived", sub { stored('load.n') >= $n });
	kill_nginx();
	cmp_ok(stored('load.n'), '<', 3000, 'killed before all have');
	start_nginx();
}
await_that('nothing is lost', sub { stored('load.n') == 3000 });
ok(in_key_order(map { [ $_->{key}, $_->{n} ] } grep { $_->{status} =~ /^2/ } seen(qr{/load\.})), 'and the order of each key held');
await_sql('nothing waits, nothing is dead', q(SELECT state, unsent_at_most, dead FROM idem.relay_status), 'running|0|0');

# ---- it refuses us for a while

sql(qq(CREATE SERVER gate FOREIGN DATA WRAPPER idem OPTIONS (url 'http://127.0.0.1:$port/gate/', method 'PUT', $retry)));
sql(q(SELECT idem.route_add('g.*', 'gate')));
sql(q(SELECT idem.outbox_enqueue('g.n' || i, to_jsonb(i), key => 'k' || i % 3, headers => jsonb_build_object('x-n', i)) FROM generate_series(1, 200) i));
await_sql('401: blocked', q(SELECT state, reason, dead, parked FROM idem.relay_status WHERE server = 'gate'), 'blocked|HTTP status 401|0|0');
sql(q(SELECT idem.outbox_enqueue('c.meanwhile', '"x"'::json)));
await_that('other servers go on', sub { get('c.meanwhile') eq '"x"' });
put_file("$dir/open", '');
await_that('all arrive when it does not any more', sub { (grep { $_->{status} =~ /^2/ } seen(qr{/gate/})) >= 200 });
ok(in_key_order(map { [ $_->{key}, $_->{n} ] } grep { $_->{status} =~ /^2/ } seen(qr{/gate/})), 'in order');
await_sql('none is dead', q(SELECT dead, unsent_at_most FROM idem.relay_status WHERE server = 'gate'), '0|0');

# ---- answers are kept if so wished; what is refused is a dead letter

sql(qq(CREATE SERVER answers FOREIGN DATA WRAPPER idem OPTIONS (url 'http://127.0.0.1:$port', keep_answer 'true', $retry)));
sql(q(SELECT idem.route_add('a.good', 'answers', 'echo/x'), idem.route_add('a.bad', 'answers', 'invalid/x')));
my $good = sql(q(SELECT idem.outbox_enqueue('a.good', '{}'::json)));
my $bad = sql(q(SELECT idem.outbox_enqueue('a.bad', '{}'::json)));
await_sql('keep_answer', "SELECT state, code, answer FROM idem.outbox_status('$good') WHERE server = 'answers'", "delivered|200|stored as $good");
await_sql('422: dead', "SELECT state, code FROM idem.outbox_status('$bad') WHERE server = 'answers'", 'dead|422');
await_sql('with its reason', q(SELECT reason FROM idem.dead_letter WHERE name = 'answers'), 'HTTP status 422: no thanks');

# ---- answers get lost: unknown, and sent again with the same id

my $proxy = proxy($port);
sql(qq(CREATE SERVER lossy FOREIGN DATA WRAPPER idem OPTIONS (url 'http://127.0.0.1:$proxy->{port}', method 'PUT', timeout_ms '400', $retry)));
sql(q(SELECT idem.route_add('l.*', 'lossy')));
sql(q(SELECT idem.outbox_enqueue('l.first', '{}'::json)));
await_that('through the proxy', sub { seen(qr{/l\.first}) });
await_sql('and back', q(SELECT sent, unknown FROM idem.relay_status WHERE server = 'lossy'), '1|0');
$proxy->lose;
my $lost = sql(q(SELECT idem.outbox_enqueue('l.lost', '{}'::json, key => 'l')));
sql(q(SELECT idem.outbox_enqueue('l.behind', '{}'::json, key => 'l')));
await_that('it is sent again', sub { seen(qr{/l\.lost}) >= 2 });
cmp_ok(sql(q(SELECT unknown FROM idem.relay_status WHERE server = 'lossy')), '>=', 1, 'and counted as unknown');
is(scalar(my @none = seen(qr{/l\.behind})), 0, 'its successor waits');
$proxy->restore;
await_that('which arrives, too', sub { seen(qr{/l\.behind}) });
await_sql('all is settled', q(SELECT state, unsent_at_most, dead, sent FROM idem.relay_status WHERE server = 'lossy'), 'running|0|0|3');
is(join(' ', grep { $_ ne $lost } map { $_->{id} } seen(qr{/l\.lost})), '', 'always with the same id');

# ---- whoever owns a server gets at no other file

sql(q(CREATE ROLE owner; GRANT USAGE ON FOREIGN DATA WRAPPER idem TO owner; GRANT CREATE ON DATABASE postgres TO owner));
sql(qq(SET ROLE owner; CREATE SERVER sly FOREIGN DATA WRAPPER idem OPTIONS (url 'http://127.0.0.1:$port', method 'PUT', bearer_file 'escape', $retry)));
is(sqlstate($node, "SET ROLE owner; ALTER SERVER sly OPTIONS (SET bearer_file '$_')"), '22023', "file $_")
  for '../outside', "$dir/outside";
is(sqlstate($node, "SET ROLE owner; ALTER SERVER sly OPTIONS (ADD $_ '$dir/outside')"), 'HV00D', "option $_")
  for qw(tls_ca bearer any);
sql(q(SELECT idem.route_add('s.*', 'sly')));
sql(q(SELECT idem.outbox_enqueue('s.x', '{}'::json)));
await_sql('a link to the outside: blocked', q(SELECT state, reason ~ 'leads out of' FROM idem.relay_status WHERE server = 'sly'), 'blocked|t');
is(scalar(@none = seen(qr{/s\.})), 0, 'and nothing is sent');

# ---- nothing is given away

is(leaks($canary), '', 'the secret shows nowhere');
unlike(slurp_file($node->logfile), qr/TRAP:|PANIC|terminated by signal/, 'nothing has crashed');
$node->stop;
done_testing();

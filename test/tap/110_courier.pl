# Couriers, without the relay: the protocol, the http courier against servers on
# this machine, and a courier in another language.
use strict;
use warnings;
use Digest::SHA qw(hmac_sha256_base64);
use File::Temp;
use FindBin;
use IdemCourier;
use MIME::Base64;
use POSIX ();
use Test::More;
use Time::HiRes 'time';

$SIG{PIPE} = 'IGNORE';
my $top = "$FindBin::RealBin/../..";
my $dir = File::Temp->newdir;
my ($discard, $http) = map { "$top/idem-courier-$_" } qw(discard http);
BAIL_OUT('couriers were not built') unless -x $discard && -x $http;

my %O = %IdemCourier::OUTCOME;
my ($CONNECTING, $UP, $DOWN, $BLOCKED) = 0 .. 3;
my $sink = http_sink("$dir/requests");

sub http { return IdemCourier->connect($http, url => $sink->{url}, @_) }

sub slurp
{
	my ($file) = @_;
	open my $in, '<:raw', $file or return;
	local $/;
	return scalar <$in>;
}

# Send one message, return what became of it.  A state comes first.
sub one
{
	my ($courier, %message) = @_;
	my $result = $courier->settle($courier->send_message(%message));
	return $result // { outcome => 'none', code => '', text => '' };
}

sub blocked
{
	my ($name, $program, $like, %options) = @_;
	my $courier = IdemCourier->start($program);
	$courier->hello(%options);
	my $frame = $courier->frame // {};
	is($frame->{type}, 's', "$name: state instead of ready");
	is($frame->{state}, $BLOCKED, "$name: blocked");
	like($frame->{text}, $like, "$name: reason");
	is($courier->ended, 0, "$name: exit 0");
	return;
}

#
# The runtime
#
{
	my $courier = IdemCourier->connect($discard, url => 'discard:');
	like($courier->{program}, qr/^idem-courier-discard \d/, 'ready names the program');
	ok($courier->settle($courier->send_message), 'a message is settled');
	is($courier->{settled}{1}{outcome}, $O{delivered}, 'delivered');
	is($courier->{states}[0]{state}, $UP, 'and the state is up');
	$courier->quit;
	is($courier->ended, 0, 'quit ends it');
}
{
	my $courier = IdemCourier->connect($discard);
	$courier->close;
	is($courier->ended, 0, 'end of file ends it');
}
{
	my $courier = IdemCourier->connect($discard, delay_ms => 3_600_000);
	$courier->send_message for 1 .. 3;
	$courier->close;
	my $begin = time;
	is($courier->ended(10), 0, 'end of file ends it while messages are held');
	cmp_ok(time - $begin, '<', 4, 'soon');
}
{
	my $courier = IdemCourier->connect($discard, delay_ms => 200);
	$courier->send_message for 1 .. 3;
	$courier->quit;
	$courier->rest;
	is_deeply([ sort keys %{ $courier->{settled} } ], [ 1, 2, 3 ], 'quit reports what is under way');
	is($courier->ended, 0, 'and ends it');
}
{
	my $courier = IdemCourier->connect($discard, fail_every => 3);
	$courier->send_message for 1 .. 6;
	$courier->settle(1 .. 6);
	is(join('', map { $courier->{settled}{$_}{outcome} } 1 .. 6), '001001', 'fail_every');
}
blocked('option that does not exist', $discard, qr/has no option "color"/, color => 'red');
blocked('option that is no number', $discard, qr/"delay_ms" must be a number/, delay_ms => '1x');

# What follows a failure with the same key comes back, until the relay knows.
{
	my $courier = IdemCourier->connect($discard, fail_every => 2);
	my @m = map { ($courier->message(key => 'k', id => IdemCourier::uuid($_)))[1] } 1 .. 5;
	$courier->write(join '', @m);
	$courier->settle(1 .. 5);
	is(join('', map { $courier->{settled}{$_}{outcome} } 1 .. 5), '01555',
		'messages behind a failure are returned, others of the key too');
	is($courier->settle($courier->send_message(key => 'other'))->{outcome}, 0, 'another key is not');
	$courier->settle($courier->send_message(key => 'k', id => IdemCourier::uuid(9)));
	is($courier->{settled}{7}{outcome}, $O{returned}, 'a new message of that key is');
	$courier->settle($courier->send_message(key => 'k', id => IdemCourier::uuid(2), attempt => 2));
	is($courier->{settled}{8}{outcome}, 1, 'the failed one is sent, and fails again');
	$courier->settle($courier->send_message(key => 'k', id => IdemCourier::uuid(2), attempt => 3));
	is($courier->{settled}{9}{outcome}, 0, 'and is delivered');
	$courier->settle($courier->send_message(key => 'x')); # fail_every
	$courier->settle($courier->send_message(key => 'k', id => IdemCourier::uuid(3)));
	is($courier->{settled}{11}{outcome}, 0, 'and so is its successor');
}

# Garbage
for my $case (
	[ 'length 0', pack('N', 0) ],
	[ 'length over the limit', pack('N', 64 * 1024 * 1024 + 1) . 'x' ],
	[ 'not our protocol', "GET / HTTP/1.0\r\n\r\n" ],
	[ 'type that does not exist', IdemCourier::framed('z', 'abc'), 1 ],
	[ 'message before hello', IdemCourier::framed('M', 'abc') ],
	[ 'empty hello', IdemCourier::framed('H', '') ],
	[ 'hello of another version', IdemCourier::framed('H', pack('N N/a* N', 2, 's', 0)) ],
	[ 'hello with too many options', IdemCourier::framed('H', pack('N N/a* N', 1, 's', 0xFFFFFFFE)) ],
	[ 'hello with a string that is too long', IdemCourier::framed('H', pack('N N', 1, 0xFFFFFFF0)) ],
	[ 'hello with NUL', IdemCourier::framed('H', pack('N N/a* N', 1, "a\0b", 0)) ],
	[ 'second hello', IdemCourier::framed('H', pack('N N/a* N', 1, 's', 0)), 1 ],
	[ 'message cut short', IdemCourier::framed('M', pack('Q> N/a* N', 1, 'id', 1000)), 1 ],
	[ 'message without body', IdemCourier::framed('M', pack('Q>', 1) . pack('N/a*', 'a') x 3
			  . pack('N', 0xFFFFFFFF) . pack('N/a*', 'a') x 2 . pack('Q> N N', 0, 1, 0xFFFFFFFF)), 1 ],
	[ 'message with bytes left over', IdemCourier::framed('M', pack('Q>', 1) . pack('N/a*', 'a') x 6
			  . pack('Q> N N/a* a*', 0, 1, 'body', 'more')), 1 ])
{
	my ($name, $bytes, $hello) = @$case;
	my $courier = $hello ? IdemCourier->connect($discard) : IdemCourier->start($discard);
	$courier->write($bytes);
	$courier->rest;
	is($courier->ended, 1 << 8, "garbage ends it with an error: $name");
	like($courier->{logs}[0]{text} // '', qr/^protocol error/, 'which is logged');
}

# frames in pieces
{
	my $courier = IdemCourier->connect($discard);
	my $bytes = join '', map { ($courier->message(body => 'x' x 50))[1] } 1 .. 3;
	$courier->write($_) for split //, $bytes;
	$courier->settle(1 .. 3);
	is(scalar keys %{ $courier->{settled} }, 3, 'frames byte by byte');
	$courier->send_message(body => 'x' x (40 << 20));
	is($courier->settle->{outcome}, 0, 'a body of 40 MB');
}

# memory
{
	my $courier = IdemCourier->connect($discard);
	my $rss = sub { (slurp("/proc/$courier->{pid}/status") // '') =~ /VmRSS:\s+(\d+)/ ? $1 : 0 };
	my $send = sub {
		for (1 .. $_[0])
		{
			$courier->write(join '', map { ($courier->message(body => 'x' x 300, key => "k$_"))[1] } 1 .. 1000);
			$courier->settle;
		}
	};
	$send->(20);
	my $before = $rss->();
	$send->(80);
	is(scalar keys %{ $courier->{settled} }, 100_000, '100000 messages');
	cmp_ok($rss->(), '<', $before + 1024, 'memory stays level');
}

#
# http: what is sent
#
my $binary = join '', map { chr } 0 .. 255;
{
	my $courier = http();
	like($courier->{program}, qr{^idem-courier-http \S+ libcurl/}, 'ready names the library');
	my %bodies = (
		binary => $binary, empty => '', large => $binary x 4096,
		text => "\xc3\xa4\xe2\x82\xac\xf0\x9f\x98\x80", crlf => "a\r\n\r\nb", nul => "\0");
	for my $name (sort keys %bodies)
	{
		is(one($courier, body => $bodies{$name}, content_type => 'application/octet-stream')->{outcome},
			$O{delivered}, "$name body: delivered");
		my ($request) = $sink->requests;
		ok($request->{body} eq $bodies{$name}, "$name body: same bytes");
	}
	is($courier->{states}[0]{state}, $UP, 'state up');
	is(scalar @{ $courier->{states} }, 1, 'once');

	one($courier, topic => "order \xc3\xa4", key => 'k 1', destination => "/a b/\xc3\xa4/../c?d#e");
	is($courier->{settled}{ $courier->{ticket} }{outcome}, $O{permanent}, '.. in a destination: permanent');
	is(one($courier, destination => $_)->{outcome}, $O{permanent}, "$_: permanent")
	  for '..', '../x', 'x/..', './x', 'x\\..\\y';
	is(scalar(my @none = $sink->requests), 0, 'and nothing was sent');

	one($courier, topic => "order \xc3\xa4", key => 'k 1', destination => "//a b/\xc3\xa4/x..y?d#e%2e");
	my ($request) = $sink->requests;
	is($request->{path}, '/a%20b/%C3%A4/x..y%3Fd%23e%252e', 'destination is encoded');
	is($request->{method}, 'POST', 'method');
	my $h = $request->{headers};
	is($h->{host}, "127.0.0.1:$sink->{port}", 'host');
	is($h->{'content-type'}, 'application/json', 'content type');
	is($h->{'idempotency-key'}, IdemCourier::uuid($courier->{ticket}), 'idempotency key');
	is($h->{'ce-id'}, IdemCourier::uuid($courier->{ticket}), 'ce-id');
	is($h->{'ce-specversion'}, '1.0', 'ce-specversion');
	is($h->{'ce-type'}, 'order%20%C3%A4', 'ce-type');
	is($h->{'ce-source'}, 'urn:idem:test', 'ce-source');
	is($h->{'ce-time'}, '2023-11-14T22:13:20.123456Z', 'ce-time');
	is($h->{'ce-partitionkey'}, 'k%201', 'ce-partitionkey');
	ok(!exists $h->{authorization} && !exists $h->{'webhook-id'}, 'nothing nobody asked for');

	one($courier, headers => '{"traceparent": "00-ab-cd-01", "n": 1.5, "b": true, "no": null, "o": {"a": [1, "}"]},'
		  . ' "e": "", "esc": "\\u00e4\\ud83d\\ude00\\"\\\\", "ce-source": "/mine", "CE-ID": "forged", "Content-Type": "x/y"}');
	($request) = $sink->requests;
	$h = $request->{headers};
	is($h->{traceparent}, '00-ab-cd-01', 'headers of a message are sent');
	is($h->{n}, '1.5', 'a number');
	is($h->{b}, 'true', 'a boolean');
	is($h->{o}, '{"a": [1, "}"]}', 'an object');
	is($h->{e}, '', 'an empty one');
	is($h->{esc}, "\xc3\xa4\xf0\x9f\x98\x80\"\\", 'escapes');
	ok(!exists $h->{no}, 'null is not sent');
	is($h->{'ce-source'}, '/mine', 'ce-source is the message\'s');
	is($h->{'ce-id'}, IdemCourier::uuid($courier->{ticket}), 'ce-id is not');
	is($h->{'content-type'}, 'application/json', 'nor is the content type');

	for my $headers ('{"a": "x\\r\\ny: z"}', '{"a": "x\\ny"}', '{"a\\r\\nb": "x"}', '{"a b": "x"}',
		'{"Host": "evil"}', '{"content-length": "0"}', '{"Authorization": "x"}', '{"": "x"}', '[]', '{"a": "\\u0000"}')
	{
		is(one($courier, headers => $headers)->{outcome}, $O{permanent}, "headers $headers: permanent");
	}
	is(one($courier, content_type => "a\r\nb: c")->{outcome}, $O{permanent}, 'line break in content type: permanent');
	is(scalar(@none = $sink->requests), 0, 'and nothing was sent');
}
{
	my $key = 'whsec_' . encode_base64('0123456789abcdefghij0123', '');
	my $courier = http(
		signing_key => $key, bearer => 'canary-bearer', method => 'PUT', url => "$sink->{url}/base/?q=1",
		cloudevents => 'off', 'header.X-Fixed' => 'fixed', order => 'key', window_messages => 10);
	one($courier, destination => 'x', body => $binary, headers => '{"x-fixed": "theirs"}');
	my ($request) = $sink->requests;
	my $h = $request->{headers};
	is("$request->{method} $request->{path}", 'PUT /base/x?q=1', 'method, path and query');
	my $expect = hmac_sha256_base64(
		IdemCourier::uuid(1) . ".$h->{'webhook-timestamp'}.$binary", '0123456789abcdefghij0123');
	$expect .= '=' while length($expect) % 4;
	is($h->{'webhook-signature'}, "v1,$expect", 'Standard Webhooks signature');
	is($h->{'webhook-id'}, IdemCourier::uuid(1), 'webhook-id');
	cmp_ok(abs($h->{'webhook-timestamp'} - time), '<', 60, 'webhook-timestamp');
	is($h->{authorization}, 'Bearer canary-bearer', 'bearer');
	is($h->{'x-fixed'}, 'fixed', 'header of an option, over that of a message');
	ok(!exists $h->{'ce-id'}, 'no CloudEvents');
	one($courier, destination => '');
	($request) = $sink->requests;
	is($request->{path}, '/base?q=1', 'no destination');
	for my $what (qw(cmdline environ))
	{
		my $text = slurp("/proc/$courier->{pid}/$what");
		ok(defined $text && $text !~ /canary|whsec/, "no secret in $what");
	}
	my @fds = map { m{(\d+)$} } glob "/proc/$courier->{pid}/fd/*";
	is_deeply([ grep { $_ <= 3 } sort @fds ], [ 0, 1, 2, 3 ], 'descriptors 0 to 3');
}
{
	my $courier = http(user => 'me', password => 'pw:x', public_only => 'false');
	one($courier);
	my ($request) = $sink->requests;
	is($request->{headers}{authorization}, 'Basic ' . encode_base64('me:pw:x', ''), 'user and password');
}
{
	local @ENV{qw(http_proxy HTTP_PROXY ALL_PROXY all_proxy)} = ('http://127.0.0.1:1') x 4;
	is(one(http())->{outcome}, $O{delivered}, 'no proxy of the environment');
}
blocked('url ' . s/\s+/ /r, $http, qr/url/, url => $_)
  for 'ftp://x/', 'file:///etc/passwd', 'http://u:p@x/', 'x', 'http://', "http://x/\r\ny", 'http://x/#f', '';
blocked('no url', $http, qr/"url" is required/);
blocked('unknown option', $http, qr/no option "speed"/, url => $sink->{url}, speed => 1);
blocked('header option', $http, qr/header\.A/, url => $sink->{url}, 'header.A' => "x\r\ny");
blocked('method', $http, qr/method/, url => $sink->{url}, method => 'GET');
blocked('signing key', $http, qr/signing_key/, url => $sink->{url}, signing_key => 'whsec_***');
blocked('TLS option', $http, qr/https/, url => $sink->{url}, tls_ca => 'x');

#
# http: what comes of it
#
$sink->requests;
for my $case (
	[ delivered => qw(200 201 202 204 299) ],
	[ transient => qw(408 409 425 429 500 502 503 504 599) ],
	[ permanent => qw(400 402 405 410 413 415 422 499) ],
	[ blocked => qw(401 403 404 301 302 303 307 308 304) ])
{
	my ($outcome, @statuses) = @$case;
	my $courier = http();
	for my $status (@statuses)
	{
		my $result = one($courier, destination => "status/$status");
		is($result->{outcome}, $O{$outcome}, "$status is $outcome");
		next if $outcome eq 'delivered';
		is($result->{code}, $status, 'with its code');
		like($result->{text}, qr/^HTTP status $status$/, 'and text');
		is($courier->{states}[-1]{state}, $outcome eq 'blocked' ? $BLOCKED : $UP, 'and state');
	}
}
is(scalar(my @all = $sink->requests), 5 + 9 + 8 + 9, 'one request each, no redirect followed');
{
	my $courier = http(keep_answer => 'true');
	my $result = one($courier, destination => 'echo', body => "\xff" . ('y' x 2000));
	is($result->{outcome}, $O{delivered}, 'keep_answer: delivered');
	is($result->{code}, 200, 'with the status');
	is($result->{text}, '?' . ('y' x 1023), 'and 1 kB of the answer, in UTF-8');
	like(one($courier, destination => 'status/422')->{text}, qr/^HTTP status 422: because$/, 'also when it fails');
}
{
	my $courier = http();
	is(one($courier, destination => 'retry/7')->{retry}, 7000, 'Retry-After in seconds');
	my $date = POSIX::strftime('%a, %d %b %Y %H:%M:%S GMT', gmtime(time + 100));
	my $retry = one($courier, destination => "retry/$date")->{retry};
	ok($retry > 90_000 && $retry <= 100_000, 'Retry-After as a date');
	is(one($courier, destination => 'retry/x')->{retry}, 0, 'Retry-After that is neither');
}
{
	my $courier = http(timeout_ms => 300);
	my $result = one($courier, destination => 'hang');
	is($result->{outcome}, $O{unknown}, 'timeout: unknown');
	like($result->{text}, qr/timed out/i, 'with its reason');
	is(one($courier, destination => 'drop')->{outcome}, $O{unknown}, 'connection closed without an answer: unknown');
	is(one($courier, destination => 'cut')->{outcome}, $O{unknown}, 'half an answer: unknown');
	is(one($courier)->{outcome}, $O{delivered}, 'and it goes on');
	$sink->requests;
	for my $body ('body', '')
	{
		is(one($courier)->{outcome}, $O{delivered}, 'a connection is in use');
		is(one($courier, destination => 'drop2', body => $body)->{outcome}, $O{unknown}, 'and closed without an answer: unknown');
	}
	is(scalar(@all = $sink->requests), 4, 'and not sent again by itself') or note explain \@all;
}
{
	my $port = free_port();
	my $courier = http(url => "http://127.0.0.1:$port");
	$courier->send_message(key => 'k') for 1 .. 3;
	$courier->settle(1 .. 3);
	is(join('', map { $courier->{settled}{$_}{outcome} } 1 .. 3), '555', 'refused connection: returned');
	is($courier->{states}[0]{state}, $DOWN, 'and down');
	is(one(http(url => 'http://name.invalid/'))->{outcome}, $O{returned}, 'name that does not resolve: returned');
}

# order and concurrency
{
	my $courier = http(connections => 8);
	$sink->requests;
	my $bytes = '';
	for my $n (1 .. 40)
	{
		$bytes .= ($courier->message(key => 'k' . $n % 4, destination => 'slow/10', body => $n))[1];
		$bytes .= ($courier->message(destination => 'slow/10', body => 'free'))[1];
	}
	$courier->write($bytes);
	$courier->settle(1 .. 80);
	my @requests = $sink->requests;
	is(scalar @requests, 80, 'all sent once');
	is((grep { $_->{same_key} > 1 } @requests), 0, 'one of each key at a time');
	for my $k (0 .. 3)
	{
		my @seen = map { $_->{body} } grep { ($_->{headers}{'ce-partitionkey'} // '') eq "k$k" } @requests;
		is_deeply(\@seen, [ grep { $_ % 4 == $k } 1 .. 40 ], "order of key k$k");
	}
}
{
	my $courier = http(connections => 4);
	my $bytes = join '', map { ($courier->message(key => 'k', destination => $_, body => $_))[1] }
	  'slow/50', 'once/503/a', 'x', 'y';
	$bytes .= ($courier->message(key => 'other', destination => 'slow/100'))[1];
	$courier->write($bytes);
	$courier->settle(1 .. 5);
	is(join('', map { $courier->{settled}{$_}{outcome} } 1 .. 5), '01550',
		'those behind a failure with the same key are returned');
	$sink->requests;
	$courier->send_message(key => 'k', destination => 'once/503/a', id => IdemCourier::uuid(2), attempt => 2);
	$courier->send_message(key => 'k', destination => 'x', id => IdemCourier::uuid(3));
	$courier->settle(6, 7);
	is_deeply([ map { $_->{path} } $sink->requests ], [ '/once/503/a', '/x' ], 'and sent again in order');
}
{
	my $courier = http(connections => 1);
	$courier->send_message(destination => $_) for 'slow/300', 'a', 'b';
	await(sub { $sink->requests });
	$courier->quit;
	$courier->rest;
	is(join('', map { $courier->{settled}{$_}{outcome} // '-' } 1 .. 3), '055',
		'quit: what is under way is finished, the rest returned');
	is($courier->ended, 0, 'exit 0');
}
{
	my $courier = http();
	$courier->send_message(destination => 'hang');
	await(sub { $sink->requests });
	my $begin = time;
	$courier->quit;
	is($courier->ended(10), 0, 'quit with a hanging server: exit 0');
	cmp_ok(time - $begin, '<', 4, 'in time');
}

# addresses
for my $case (
	[ 'false', '169.254.169.254', '0xA9FEA9FE', '2852039166', '0251.0376.0251.0376', '169.254.43518',
		'[::ffff:169.254.169.254]', '[::ffff:a9fe:a9fe]', '[64:ff9b::a9fe:a9fe]', '[fe80::1]', '[fd00:ec2::254]' ],
	[ 'true', '127.0.0.1', '0x7f.1', '2130706433', '[::1]', 'localhost', '[::ffff:127.0.0.1]', '10.1.2.3',
		'172.16.0.1', '192.168.1.1', '100.64.0.1', '0.0.0.0', '[::]', '224.0.0.1', '[ff02::1]', '[fd00::1]', '169.254.1.1' ])
{
	my ($public_only, @hosts) = @$case;
	for my $host (@hosts)
	{
		my $courier = http(url => "http://$host:$sink->{port}/", public_only => $public_only, connect_timeout_ms => 2000);
		my $result = one($courier);
		is($result->{outcome}, $O{blocked}, "$host with public_only $public_only: blocked") or diag $result->{text};
		like($result->{text}, qr/address/, 'with its reason');
		is(($courier->{states}[-1] // {})->{state}, $BLOCKED, 'and state');
	}
}
is(scalar(@all = $sink->requests), 0, 'and nothing was sent');
is(one(http(url => "http://localhost:$sink->{port}/"))->{outcome}, $O{delivered}, 'localhost without public_only');

#
# A real server, with TLS
#
sub run { my $log = `@_ 2>&1`; $? == 0 or BAIL_OUT("@_: $log"); return }

my ($nginx) = grep { -x } map { "$_/nginx" } '/usr/sbin', split /:/, $ENV{PATH};
SKIP:
{
	skip 'no nginx or openssl', 1 unless $nginx && grep { -x "$_/openssl" } split /:/, $ENV{PATH};

	run("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout $dir/ca.key -out $dir/ca.pem");
	for my $case ([ good => 'DNS:localhost' ], [ wrong => 'DNS:elsewhere.test' ], [ client => 'DNS:client' ])
	{
		my ($name, $san) = @$case;
		open my $ext, '>', "$dir/$name.ext" or die;
		print $ext "subjectAltName=$san\n";
		close $ext;
		run("openssl req -newkey rsa:2048 -nodes -subj /CN=$name -keyout $dir/$name.key -out $dir/$name.csr");
		run("openssl x509 -req -days 2 -in $dir/$name.csr -CA $dir/ca.pem -CAkey $dir/ca.key -CAcreateserial"
			  . " -extfile $dir/$name.ext -out $dir/$name.pem");
	}
	run("openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
		  . " -keyout $dir/self.key -out $dir/self.pem");

	my %port = map { $_ => free_port() } qw(good wrong self mutual);
	my $servers = join '', map {
		my $cert = $_ eq 'mutual' ? 'good' : $_;
		"server { listen 127.0.0.1:$port{$_} ssl; ssl_certificate $dir/$cert.pem; ssl_certificate_key $dir/$cert.key;"
		  . ($_ eq 'mutual' ? " ssl_client_certificate $dir/ca.pem; ssl_verify_client on;" : '')
		  . " root $dir/files; client_max_body_size 10m; location / { dav_methods PUT; create_full_put_path on; } }\n"
	} sort keys %port;
	mkdir "$dir/files";
	open my $conf, '>', "$dir/nginx.conf" or die;
	print $conf <<"CONF";
daemon off; master_process off; pid $dir/nginx.pid; error_log $dir/nginx.log;
events { worker_connections 100; }
http {
	access_log off; client_body_temp_path $dir/tmp1; proxy_temp_path $dir/tmp2;
	fastcgi_temp_path $dir/tmp3; uwsgi_temp_path $dir/tmp4; scgi_temp_path $dir/tmp5;
	$servers
}
CONF
	close $conf;
	my $pid = fork // die;
	if ($pid == 0)
	{
		open STDERR, '>', '/dev/null';
		exec $nginx, '-e', "$dir/nginx.log", '-p', "$dir", '-c', "$dir/nginx.conf" or POSIX::_exit(1);
	}
	my $nginx_runs = await(sub { IO::Socket::INET->new("127.0.0.1:$port{mutual}") }, 10);
	ok($nginx_runs, 'nginx runs') or diag slurp("$dir/nginx.log");

	my $ca = slurp("$dir/ca.pem");
	my $tls = sub {
		my ($name, @options) = @_;
		return http(url => "https://localhost:$port{$name}/", method => 'PUT', tls_ca => $ca, @options);
	};
	my $courier = $tls->('good');
	my %bodies = (binary => $binary, empty => '', large => $binary x 4096, text => "\xc3\xa4");
	for my $name (sort keys %bodies)
	{
		is(one($courier, destination => "$name/a b", body => $bodies{$name})->{outcome}, $O{delivered}, "TLS, $name: delivered");
		ok(slurp("$dir/files/$name/a b") eq $bodies{$name}, "TLS, $name: same bytes");
	}
	for my $case (
		[ 'certificate for another name', $tls->('wrong') ],
		[ 'self-signed certificate', $tls->('self') ],
		[ 'certificate that the system does not trust', http(url => "https://localhost:$port{good}/", method => 'PUT') ],
		[ 'address that is not in the certificate', http(url => "https://127.0.0.1:$port{good}/", method => 'PUT', tls_ca => $ca) ],
		[ 'CA that is none', $tls->('good', tls_ca => 'rubbish') ])
	{
		my ($name, $bad) = @$case;
		is(one($bad, destination => 'never', body => 'x')->{outcome}, $O{blocked}, "$name: blocked");
		is($bad->{states}[-1]{state}, $BLOCKED, 'and state');
	}
	ok(!-e "$dir/files/never", 'and nothing was sent');
	is(one($tls->('mutual'), destination => 'm')->{outcome}, $O{blocked}, 'client certificate missing: blocked');
	is(one(http(url => "http://localhost:$port{good}/", method => 'PUT'), destination => 'm')->{outcome}, $O{blocked},
		'plain HTTP to a server with TLS: blocked');
	is(one($tls->('mutual', tls_cert => slurp("$dir/client.pem"), tls_key => slurp("$dir/client.key")), destination => 'm')
		  ->{outcome}, $O{delivered}, 'client certificate');
	$sink->requests;
	my $plain = one(http(url => "https://127.0.0.1:$sink->{port}/"));
	is($plain->{outcome}, $O{returned}, 'TLS to a server without: never sent');
	is(scalar(@all = $sink->requests), 0, 'no fall back to plain');
	kill TERM => $pid;
	waitpid $pid, 0;
}

#
# A courier in another language
#
SKIP:
{
	my ($python) = grep { -x } '/usr/bin/python3', map { "$_/python3" } split /:/, $ENV{PATH};
	skip 'no python3', 1 unless $python;
	my $example = [ $python, "$top/test/courier/example.py" ];
	my $courier = IdemCourier->connect($example, path => "$dir/lines");
	is($courier->{program}, 'idem-courier-lines 1', 'example.py: ready');
	$courier->send_message(key => 'k', body => $binary, headers => '{"a": 1}') for 1 .. 3;
	$courier->settle(1 .. 3);
	is(join('', map { $courier->{settled}{$_}{outcome} // '-' } 1 .. 3), '000', 'example.py: delivered');
	my @lines = split /\n/, slurp("$dir/lines");
	is(scalar @lines, 3, 'example.py: three lines');
	my ($body) = $lines[2] =~ /"body": "([^"]*)"/;
	ok(decode_base64($body) eq $binary, 'example.py: same bytes');
	$courier->quit;
	is($courier->ended, 0, 'example.py: quit');
	$courier = IdemCourier->start(@$example);
	$courier->hello;
	is($courier->frame->{state}, $BLOCKED, 'example.py: blocked without its option');
	is($courier->ended, 0, 'example.py: exit 0');
}

done_testing();

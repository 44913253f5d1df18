# Tests that every courier for a broker has to pass, against a real one.
#
#   my $class = BrokerTable::begin('redis');  # or skips everything
#   BrokerTable::courier('redis');       # the courier alone, without PostgreSQL
#   BrokerTable::relay('redis', ...);    # from outbox_enqueue on
#
# Options of relay: exact => OPTIONS of the server with which nothing comes twice,
# '' if it takes none.
#
# A new broker is a line in %CLASS and a class; Broker.pm says what it has.
package BrokerTable;

use strict;
use warnings;
use File::Temp ();
use IO::Socket::INET;
use POSIX ();
use Test::More;
use Time::HiRes qw(time usleep);

use Broker ();
use BrokerTests qw(until_ message outcome text settled outcomes state_of reason quit);
use IdemCourier ();
use IdemRelay;

our %CLASS = (
	nats => 'NatsServer',
	redis => 'RedisServer',
);

my %OUTCOME = %IdemCourier::OUTCOME;
my ($UP, $DOWN, $BLOCKED) = 1 .. 3;
my $UTF8 = "\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x98";
our $work;

# The class of a broker; what the tests need; or everything is skipped.
sub begin
{
	my ($name) = @_;
	my $class = $CLASS{$name} or die "no broker $name";
	require "$class.pm";
	my $why = $class->missing;
	plan skip_all => $why if $why;
	plan skip_all => "idem-courier-$name is not built" unless BrokerTests::courier_program($name);
	$work = File::Temp->newdir(CLEANUP => !$ENV{KEEP});
	chmod 0755, "$work";
	$ENV{COURIER_STDERR} = "$work/stderr";
	BrokerTests::certificates("$work") or plan skip_all => 'openssl is not installed';
	return $class;
}

sub slurp { my ($f) = @_; local $/; open my $h, '<:raw', $f or return ''; return <$h> // '' }

sub start { return BrokerTests::courier(@_) }

# Options that are refused: blocked, in place of ready.
sub refused
{
	my ($name, $pattern, %options) = @_;
	my $c = start(%options);
	until_($c, sub { 0 }, 10);
	like(reason($c), $pattern, "refused: $name");
	is(state_of($c) . ($c->{ready} // ''), $BLOCKED, "blocked: $name");
	return;
}

# Would this courier accept a url with TLS?
sub has_tls
{
	my ($broker) = @_;
	my $c = start(url => $broker->url(tls => 1));
	until_($c, sub { $c->{ready} || @{ $c->{states} } }, 10);
	return !!$c->{ready};
}

sub courier
{
	my ($name) = @_;
	my $class = $CLASS{$name};
	my $canary = "canary$$";
	my $broker = $class->new(dir => "$work/broker", password => $canary);
	my $url = $broker->url;
	my ($scheme) = $url =~ /^(\w+)/;

	# ---- bad options

	refused(@$_) for ([ 'no url', qr/url/ ], [ 'password in the url', qr/credentials/, url => "$scheme://u:p\@h" ],
		[ 'scheme', qr/$scheme/, url => 'http://h' ], [ 'port', qr/url/, url => "$scheme://h:0" ],
		[ 'option not known', qr/./, url => $url, nonsense => 1 ],
		[ 'TLS options without TLS', qr/tls/, url => $url, tls_ca => 'x' ], $broker->refusals);

	# ---- down at the start

	my $c = start(url => $url, $broker->login);
	ok(until_($c, sub { $c->{ready} }), 'ready before it connects');
	like($c->{ready}, qr{^idem-courier-\w+ \S+ [a-z-]+/\d}, 'names its library');
	is(outcomes($c, message($c)), '5', 'no broker: returned');
	is(state_of($c), $DOWN, 'no broker: down');
	$broker->start;
	$broker->place('q');

	# ---- content

	my @bodies = ('{"a":1}', '', "\0\xff\xfe\r\n\0", $UTF8, join('', map { chr($_ % 256) } 1 .. 1_000_000));
	my @sent = map { message($c, body => $_, headers => qq({"h":"x$UTF8","n":1,"o":{"a":[1]},"s":"\\u00e9"}), topic => 't.x', type => 'text/x; y=1', key => "k$UTF8") } @bodies;
	is(outcomes($c, @sent), '0 0 0 0 0', 'delivered once the broker is there');
	is(state_of($c), $UP, 'up');
	my @got = $broker->take('q', 10);
	is(scalar @got, 5, 'all are there');
	ok($got[$_]{body} eq $bodies[$_], "body $_ is the same") for 0 .. 4;
	is_deeply($got[0]{headers}, { h => "x$UTF8", n => '1', o => '{"a":[1]}', s => "\xc3\xa9" }, 'headers');
	is("$got[1]{topic}|$got[1]{key}|$got[1]{content_type}", "t.x|k$UTF8|text/x; y=1", 'what else is known of it');
	is($got[1]{enqueued_at} // 1700000000000000, 1700000000000000, 'and when it was enqueued, if that is kept');
	like($got[0]{id}, qr/^01900000-0000-7000-8000-[0-9a-f]{12}$/, 'its id');

	# ---- order, and a full window

	@sent = map { message($c, body => "n$_", key => 'k' . $_ % 3) } 1 .. 2000;
	settled($c, @sent);
	is(scalar(grep { outcome($c, $_) == 0 } @sent), 2000, '2000 in a window');
	is(join(' ', map { $_->{body} } $broker->take('q', 3000)), join(' ', map { "n$_" } 1 .. 2000), 'in order');

	# ---- refused: the place is not there, or not what it should be

	my $pattern = $broker->obstacle('elsewhere');
	@sent = map { message($c, to => $_) } 'q', 'elsewhere', 'q';
	like(outcomes($c, @sent), qr/^0 3 [05]$/, 'obstacle: blocked, never delivered');
	like(text($c, $sent[1]), $pattern, 'with the reason');
	ok((grep { $_->{state} == $BLOCKED && $_->{text} =~ $pattern } @{ $c->{states} }), 'which the state has, too');
	is(outcomes($c, message($c)), '0', 'others go on');
	is(state_of($c), $UP, 'and it is up');

	# many at once are one report
	my $before = @{ $c->{states} };
	my @ids = map { sprintf '01900000-0000-7000-8001-%012x', $_ } 1 .. 100;
	@sent = map { message($c, id => $_, to => 'elsewhere', key => 'k') } @ids;
	settled($c, @sent);
	is(outcome($c, $sent[0]), 3, '100 to there: blocked');
	is(scalar(grep { outcome($c, $_) !~ /^[35]$/ } @sent), 0, 'all of them blocked or returned');
	cmp_ok(@{ $c->{states} } - $before, '<=', 3, 'it is not said 100 times');
	$broker->mend('elsewhere');
	is(outcomes($c, message($c, id => $ids[0], to => 'elsewhere', key => 'k')), '0', 'delivered once that is mended');

	# ---- poison

	$broker->empty('q');
	my ($poison, $why) = $broker->poison;
	@sent = (message($c, body => 'before'), message($c, %$poison), message($c, body => 'after'));
	like(outcomes($c, @sent), qr/^0 2 [05]$/, 'poison: permanent, for that one');
	like(text($c, $sent[1]), $why, 'with the reason');
	is(outcomes($c, message($c, body => 'later')), '0', 'and on it goes');
	ok(!(grep { length $_->{body} > 10 } $broker->take('q', 10)), 'it is not there');
	is(outcomes($c, message($c, to => '')), '2', 'no destination: permanent');

	# ---- credentials

	my $bad = start(url => $url, $broker->login, password => "$canary-not");
	is(outcomes($bad, message($bad)) . state_of($bad), '53', 'wrong password: blocked, nothing sent');
	unlike(join('', map { $_->{text} } @{ $bad->{states} }, @{ $bad->{logs} }), qr/$canary/, 'and the password is not told');
	unlike(slurp("/proc/$bad->{pid}/$_"), qr/$canary/, "no password in $_") for qw(cmdline environ);
	ok(quit($bad), 'quits');
	my $no = start(url => $url, public_only => 'true');
	is(outcomes($no, message($no)) . state_of($no), '53', 'public_only refuses loopback');
	$no = start(url => $broker->url(host => '169.254.169.254'));
	is(outcomes($no, message($no)) . state_of($no), '53', 'link-local is refused');
	$no = start(url => $broker->url(host => 'name.invalid'));
	is(outcomes($no, message($no)) . state_of($no), '52', 'a name that does not resolve: down');

	tls($class, $broker);
	lost_answers($class, $broker);
	black_hole($broker);
	killed($broker, $c);

	# ---- quit drains (that no ticket is answered twice is seen to by IdemCourier)

	@sent = map { message($c, body => "q$_") } 1 .. 500;
	ok(quit($c), 'quits');
	is(scalar(grep { !defined outcome($c, $_) } @sent), 0, 'with an answer for everything');
	$broker->stop;
	is(slurp("$work/stderr"), '', 'nothing on stderr');
	return;
}

sub tls
{
	my ($class, $plain) = @_;
	my $ca = slurp("$work/ca.pem");
	if (!has_tls($plain))
	{
		refused('TLS, which this library has not', qr/has no TLS/, url => $plain->url(tls => 1), tls_ca => $ca);
		diag('no TLS in this library; refusing it was tested');
		return;
	}
	my $broker = $class->new(dir => "$work/tls", tls => { ca => "$work/ca.pem", cert => "$work/srv.pem", key => "$work/srv.key" });
	$broker->start;
	$broker->place('q');
	my $c = start(url => $broker->url(host => 'localhost'), tls_ca => $ca);
	my $body = join '', map { chr(($_ * 7) % 256) } 1 .. 1_500_000;
	is(outcomes($c, message($c, body => $body), map { message($c) } 1 .. 100), join(' ', (0) x 101), 'TLS');
	ok(($broker->take('q', 1))[0]{body} eq $body, 'the same bytes over TLS');
	ok(quit($c), 'quits');
	$broker->empty('q');
	for ([ 'wrong name', '127.0.0.1', $ca ], [ 'other authority', 'localhost', slurp("$work/ca2.pem") ], [ 'system authorities', 'localhost' ])
	{
		my ($name, $host, $pem) = @$_;
		$c = start(url => $broker->url(host => $host), defined $pem ? (tls_ca => $pem) : ());
		is(outcomes($c, message($c)) . state_of($c), '53', "TLS, $name: refused");
		like(reason($c), qr/certificate/, "TLS, $name: says why");
		ok(quit($c), 'quits');
	}
	is(scalar($broker->take('q', 1)), 0, 'and nothing was sent');
	$c = start(url => $plain->url(host => 'localhost', tls => 1), tls_ca => $ca);
	like(outcomes($c, message($c)) . state_of($c), qr/^5[23]$/, 'no falling back to plain');
	$c = start(url => $plain->url(host => 'localhost', tls => 1, port => $broker->{port}) =~ s{s://}{://}r);
	like(outcomes($c, message($c)) . state_of($c), qr/^[45][23]$/, 'plain where TLS is wanted');
	return;
}

# What the broker says gets lost on the way.
sub lost_answers
{
	my ($class, $broker) = @_;
	my $proxy = proxy($broker->{port});
	$broker->empty('q');
	my $c = start(url => $broker->url(port => $proxy->{port}), timeout_ms => 1000);
	is(outcomes($c, message($c)), '0', 'through the proxy');
	$broker->empty('q');
	$proxy->lose;
	my @sent = map { message($c, body => "l$_") } 1 .. 3;
	is(outcomes($c, @sent), '4 4 4', 'answers lost: unknown');
	is(state_of($c), $DOWN, 'and down');
	is(scalar(my @there = $broker->take('q', 10)), 3, 'although they were stored');
	$proxy->restore;
	Broker::await('connection', sub { outcomes($c, message($c)) eq '0' });
	is(state_of($c), $UP, 'connects again');

	# quit while answers do not come
	$proxy->lose;
	my $t = message($c, body => 'last');
	Broker::await('message', sub { grep { $_->{body} eq 'last' } $broker->take('q', 10) });
	ok(quit($c), 'quits within 2 s without answers');
	is(outcome($c, $t), 4, 'and says what is unknown');
	return;
}

# Somebody who accepts connections and says nothing.
sub black_hole
{
	my ($broker) = @_;
	my $hole = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 5) or die $!;
	my $c = start(url => $broker->url(port => $hole->sockport), connect_timeout_ms => 500);
	is(outcomes($c, message($c)) . state_of($c), '52', 'black hole: down, nothing sent');
	$c = start(url => $broker->url(port => $hole->sockport), connect_timeout_ms => 60_000);
	my $t = message($c);
	until_($c, sub { @{ $c->{states} } }, 10);
	ok(quit($c), 'black hole: quits at once all the same');
	is(outcome($c, $t), 5, 'and returns what was not sent');
	return;
}

# The broker is killed under load.
sub killed
{
	my ($broker, $c) = @_;
	$broker->empty('q');
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
	is(join(' ', sort keys %by), '0 4 5', 'killed: some delivered, some unknown, some returned');
	is(outcomes($c, message($c)) . state_of($c), '52', 'down');
	$broker->start;
	is(outcomes($c, message($c, body => 'again')), '0', 'up again');
	my %there;
	while (my @some = $broker->take('q', 1000)) { $there{ $_->{body} =~ s/ .*//r }++ for @some }
	is(scalar(grep { !$there{$_} } @{ $by{0} // [] }), 0, 'every delivered message is there');
	is(scalar(grep { $there{$_} } @{ $by{5} // [] }), 0, 'no returned message is');
	return;
}

# ---- from outbox_enqueue through the relay

sub relay
{
	my ($name, %more) = @_;
	my $class = $CLASS{$name};
	require PostgreSQL::Test::Utils;
	my $secrets = "$work/secrets";
	mkdir $secrets;
	my $canary = "canary-$$-sesame";
	put_file("$secrets/right", "$canary\n", 0600);
	put_file("$secrets/wrong", "$canary-not\n", 0600);
	my $broker = $class->new(dir => "$work/relayed", password => $canary);
	my %login = $broker->login;
	my $url = $broker->url;
	my $node = relay_cluster($name, $secrets);

	my $server = sub {
		my ($server, $pattern, $options, $destination) = @_;
		sql("CREATE SERVER $server FOREIGN DATA WRAPPER idem OPTIONS (\"user\" '$login{user}', "
			  . "retry_min '20ms', retry_max '200ms', $options)");
		sql("SELECT idem.route_add('$pattern', '$server', '$destination')");
	};
	my $status = sub { return sql("SELECT $_[1] FROM idem.relay_status WHERE server = '$_[0]'") };
	my $await_status = sub {
		my ($what, $server, $columns, $expected) = @_;
		return await_sql($what, "SELECT $columns FROM idem.relay_status WHERE server = '$server'", $expected);
	};
	my $take_one = sub {
		my ($place) = @_;
		my @got;
		await_that("a message in $place", sub { @got = $broker->take($place, 1) });
		return @got;
	};

	# ---- down at the start

	$server->('bus', 'q.*', "url '$url', password_file 'right'", 'q');
	sql(q(SELECT idem.outbox_enqueue('q.early', '{"n":  1}'::json)));
	$await_status->('no broker: backing off', 'bus', 'state, parked, dead', 'backing off|0|0');
	$broker->start;
	$broker->place($_) for qw(q lossy dead wrong);
	$await_status->('delivered when it is there', 'bus', 'state, sent, dead', 'running|1|0');
	is(($take_one->('q'))[0]{body}, '{"n":  1}', 'the same bytes');

	# ---- content, byte for byte

	my @bodies = (
		[ q(SELECT decode(string_agg(lpad(to_hex(i), 2, '0'), '' ORDER BY i), 'hex') FROM generate_series(0, 255) i), join '', map { chr } 0 .. 255 ],
		[ q(SELECT '\\x'::bytea), '' ],
		[ q(SELECT convert_to(repeat('0123456789abcdef', 65536), 'UTF8')), '0123456789abcdef' x 65536 ],
		[ q(SELECT convert_to(U&'\\00E4\\20AC\\+01F418', 'UTF8')), $UTF8 ]);
	for my $body (@bodies)
	{
		my $id = sql("SELECT idem.outbox_enqueue('q.content', ($body->[0]), key => 'k', content_type => 'application/x; y=1',"
			  . q{ headers => jsonb_build_object('h', U&'x\00E4\20AC', 'n', 7))});
		my $length = length $body->[1];
		my ($got) = $take_one->('q');
		ok($got->{body} eq $body->[1], "$length bytes: the same");
		is("$got->{id}|$got->{topic}|$got->{content_type}|$got->{key}", "$id|q.content|application/x; y=1|k", "$length bytes: what is known");
		is_deeply($got->{headers}, { h => "x\xc3\xa4\xe2\x82\xac", n => '7' }, "$length bytes: headers");
	}

	# ---- broker and courier killed under load

	my $load = sub {
		my ($load, $options, $exact) = @_;
		my $enqueued = 0;
		my $fill = sub {
			my ($n) = @_;
			my ($from, $to) = ($enqueued + 1, $enqueued + $n);
			$enqueued = $to;
			sql("SELECT idem.outbox_enqueue_batch('$load.x', array_agg(to_jsonb(i || ' k' || i % 7)::text), array_agg('k' || i % 7))"
				  . " FROM generate_series($from, $to) i");
		};
		$server->($load, "$load.*", "url '$url', password_file 'right' $options", $load);
		$broker->place($load);
		$fill->(10000);
		await_that('some have arrived', sub { $status->($load, 'sent') > 500 });
		$broker->kill9;
		my $sent = $status->($load, 'sent');
		$fill->(2000);
		$await_status->('broker killed: down', $load, 'state, parked, dead', 'backing off|0|0');
		note "killed after $sent of 10000";
		$broker->start;
		$await_status->('all are sent, none is dead', $load, 'state, unsent_at_most, dead', 'running|0|0');
		my $postmaster = sql('SELECT pg_postmaster_start_time()');
		for my $signal (qw(KILL SEGV))
		{
			my $pid = $status->($load, 'courier');
			$fill->(5000);
			ok(kill($signal, $pid), "courier gets SIG$signal under load");
			$fill->(1000);
			$await_status->("SIG$signal: all are sent, none is dead", $load, 'state, unsent_at_most, dead', 'running|0|0');
			isnt($status->($load, 'courier'), $pid, "SIG$signal: by another courier");
		}
		is(sql('SELECT pg_postmaster_start_time()'), $postmaster, 'PostgreSQL did not notice');
		my @got;
		while (my @some = $broker->take($load, 1000)) { push @got, map { $_->{body} =~ /(\d+) k(\d+)/ ? [ $2, $1 ] : () } @some }
		my %distinct = map { $_->[1] => 1 } @got;
		is(scalar keys %distinct, $enqueued, 'nothing is lost');
		cmp_ok(@got - $enqueued, '<=', 3000, 'no more than a window came twice for each failure');
		is(scalar @got, $enqueued, "nothing came twice $options") if $exact;
		note 'twice: ' . (@got - $enqueued) . ', unknown: ' . $status->($load, 'unknown');
		ok(in_key_order(@got), 'the order of each key held');
	};
	$load->('load', '', defined $more{exact} && $more{exact} eq '');
	$load->('exact', ", $more{exact}", 1) if $more{exact};

	# ---- answers get lost: unknown, and sent again with the same id

	my $proxy = proxy($broker->{port});
	$server->('lossy', 'l.*', 'url \'' . $broker->url(port => $proxy->{port}) . q(', password_file 'right', timeout_ms '500'), 'lossy');
	sql(q(SELECT idem.outbox_enqueue('l.first', '{}'::json)));
	$await_status->('through the proxy', 'lossy', 'sent, unknown', '1|0');
	$take_one->('lossy');
	$proxy->lose;
	my $lost = sql(q(SELECT idem.outbox_enqueue('l.lost', '{}'::json)));
	await_that('no answer: unknown', sub { $status->('lossy', 'unknown') >= 1 });
	$proxy->restore;
	$await_status->('sent again', 'lossy', 'state, sent, unsent_at_most, dead', 'running|2|0|0');
	my @twice = $broker->take('lossy', 10);
	cmp_ok(scalar @twice, '>=', 1, 'it is there');
	is(join(' ', grep { $_ ne $lost } map { $_->{id} } @twice), '', 'always with the same id');

	# ---- the place is not there; poison

	my $reason = $broker->obstacle('strict');
	$server->('strict', 's.*', "url '$url', password_file 'right'", 'strict');
	sql(q(SELECT idem.outbox_enqueue('s.x', to_jsonb(i), key => 's') FROM generate_series(1, 3) i));
	$await_status->('obstacle: blocked', 'strict', 'state, sent, dead', 'blocked|0|0');
	like($status->('strict', 'reason'), $reason, 'with the reason');
	$broker->mend('strict');
	$await_status->('mended: it goes on', 'strict', 'state, sent, dead', 'running|3|0');
	is(join(' ', map { $_->{body} } $broker->take('strict', 10)), '1 2 3', 'in order');

	my ($poison, $pattern) = $broker->poison;
	$server->('dead', 'd.*', "url '$url', password_file 'right'", 'dead');
	sql(q(SELECT idem.outbox_enqueue('d.x', '1'::json, key => 'd')));
	sql(sprintf q(SELECT idem.outbox_enqueue('d.x', convert_to(repeat('x', %d), 'UTF8'), key => 'd', content_type => 'text/plain')), length $poison->{body});
	sql(q(SELECT idem.outbox_enqueue('d.x', '3'::json, key => 'd')));
	$await_status->('poison: dead, and on it goes', 'dead', 'state, sent, dead, unsent_at_most', 'running|2|1|0');
	like(sql(q(SELECT reason FROM idem.dead_letter WHERE name = 'dead')), $pattern, 'with the reason');
	is(join(' ', map { $_->{body} } $broker->take('dead', 10)), '1 3', 'the others in order');

	# ---- wrong credentials

	$server->('login', 'w.*', "url '$url', password_file 'wrong'", 'wrong');
	sql(q(SELECT idem.outbox_enqueue('w.x', '"let in"'::json)));
	$await_status->('wrong password: blocked', 'login', 'state, sent, dead', 'blocked|0|0');
	sql(q(ALTER SERVER login OPTIONS (SET password_file 'right')));
	$await_status->('right password: goes on', 'login', 'state, sent', 'running|1');

	# ---- nothing is given away; and stop, with somebody who does not answer

	is(leaks($canary), '', 'the secret shows nowhere');
	my $hole = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 5) or die $!;
	$server->('hole', 'h.*', 'url \'' . $broker->url(port => $hole->sockport) . q(', password_file 'right'), 'hole');
	sql(q(SELECT idem.outbox_enqueue('h.x', '{}'::json)));
	my $held = $hole->accept;
	my $begin = time;
	$node->stop('fast');
	cmp_ok(time - $begin, '<', 10, 'fast stop with a black hole');
	unlike(PostgreSQL::Test::Utils::slurp_file($node->logfile), qr/TRAP:|PANIC|server process .* terminated by signal/, 'nothing has crashed');
	$broker->stop;
	return;
}

1;

# Memory, descriptors and threads of the couriers and of the relay stay level,
# however many messages have gone through: 1 million to each broker, 200,000 to
# nginx.  This takes minutes: IDEM_SOAK=1 TEST_TIMEOUT=3600 make
# check TIERS=tap TESTS=190_soak, or some of them: IDEM_SOAK="http amqp kafka nats redis"
use strict;
use warnings;
use POSIX ();
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(time usleep);
use IdemCourier qw(free_port);
use IdemRelay;
use Idem;
use BrokerTable ();
use Kafka;
use RabbitMQ;

plan skip_all => 'IDEM_SOAK is not set' unless $ENV{IDEM_SOAK};
sub wanted { my ($name) = @_; return $ENV{IDEM_SOAK} eq '1' || grep { $_ eq $name } split ' ', $ENV{IDEM_SOAK} }

my $dir = PostgreSQL::Test::Utils::tempdir;
mkdir "$dir/secrets";
my $node = relay_cluster('soak', "$dir/secrets");

# of a process: memory in kB, descriptors, threads
sub figures
{
	my ($pid) = @_;
	my $status = slurp_file("/proc/$pid/status");
	my ($rss) = $status =~ /^VmRSS:\s+(\d+)/m;
	# what is shared is PostgreSQL's buffers
	my ($shared) = $status =~ /^RssShmem:\s+(\d+)/m;
	my ($threads) = $status =~ /^Threads:\s+(\d+)/m;
	# files of tables are the server's cache of them
	my @fds = grep { (readlink($_) // '') !~ m{/(?:base|global|pg_\w+)/} } glob "/proc/$pid/fd/*";
	return ($rss - ($shared // 0), scalar @fds, $threads);
}

sub soak
{
	my ($server, $n) = @_;
	my (%first, %last);
	my ($courier, $begin);
	my $sent = 0;
	# Feed it in portions, so that there is always something to do.
	for my $portion (1 .. 10)
	{
		sql("SELECT idem.outbox_enqueue_batch('$server.x', array_agg(to_jsonb(i || repeat('x', 290))::text), array_agg('k' || i % 1000))"
			  . ' FROM generate_series(1, ' . $n / 100 . ') i, generate_series(1, 10) j');
		$begin //= time;
		my $goal = $n / 10 * $portion;
		my $end = time + 180;
		usleep(50_000) until sql("SELECT sent FROM idem.relay_status WHERE server = '$server'") >= $goal || time > $end;
		my %pid = (
			courier => sql("SELECT courier FROM idem.relay_status WHERE server = '$server'"),
			relay => sql(q(SELECT pid FROM pg_stat_activity WHERE backend_type ~ 'idem.*relay' LIMIT 1)));
		for my $what (sort keys %pid)
		{
			my @figures = figures($pid{$what});
			$first{$what} //= [@figures] if $portion == 2;
			$last{$what} = [@figures];
			diag("$server, $goal messages, $what: $figures[0] kB, $figures[1] descriptors, $figures[2] threads");
		}
		$courier //= $pid{courier};
		is($pid{courier}, $courier, "$server: $goal messages, the same courier");
	}
	my $rate = int($n / (time - $begin));
	diag("$server: $n messages, $rate per second, enqueueing included");
	is(sql("SELECT sent, dead, unknown FROM idem.relay_status WHERE server = '$server'"), "$n|0|0", "$server: all delivered");
	for my $what (qw(courier relay))
	{
		cmp_ok($last{$what}[0], '<', $first{$what}[0] + 4096, "$server: memory of the $what stays level");
		cmp_ok($last{$what}[1], '<=', $first{$what}[1] + 2, "$server: descriptors of the $what");
		is($last{$what}[2], $first{$what}[2], "$server: threads of the $what");
	}
	return;
}

SKIP:
{
	skip 'http is not asked for', 1 unless wanted('http');
	my ($nginx) = grep { -x } map { "$_/nginx" } '/usr/sbin', split /:/, $ENV{PATH};
	skip 'nginx is not installed', 1 unless $nginx;
	my $port = free_port();
	put_file("$dir/nginx.conf", <<"CONF");
daemon off; master_process off; pid $dir/nginx.pid; error_log $dir/nginx.log;
events { worker_connections 200; }
http {
	access_log off; client_body_temp_path $dir/tmp1; proxy_temp_path $dir/tmp2; fastcgi_temp_path $dir/tmp3;
	uwsgi_temp_path $dir/tmp4; scgi_temp_path $dir/tmp5; keepalive_requests 1000;
	server { listen 127.0.0.1:$port; location / { return 204; } }
}
CONF
	my $pid = fork // die $!;
	if ($pid == 0)
	{
		open STDERR, '>>', "$dir/nginx.err";
		exec $nginx, '-e', "$dir/nginx.log", '-p', $dir, '-c', "$dir/nginx.conf" or POSIX::_exit(1);
	}
	IdemCourier::await(sub { IO::Socket::INET->new("127.0.0.1:$port") }, 20) or die 'nginx does not start';
	sql("CREATE SERVER http FOREIGN DATA WRAPPER idem OPTIONS (url 'http://127.0.0.1:$port')");
	sql(q(SELECT idem.route_add('http.*', 'http')));
	eval { soak('http', 200_000); 1 } or fail($@);
	kill KILL => $pid;
	waitpid $pid, 0;
}

SKIP:
{
	skip 'amqp is not asked for', 1 unless wanted('amqp');
	my $why = RabbitMQ::missing();
	skip $why, 1 if $why;
	my $broker = RabbitMQ->new(dir => "$dir/rabbit");
	$broker->start;
	# old messages go when there are more than that; they have been confirmed
	$broker->queue('q', 'x-max-length' => 1000);
	sql("CREATE SERVER amqp FOREIGN DATA WRAPPER idem OPTIONS (url 'amqp://127.0.0.1:$broker->{port}')");
	sql(q(SELECT idem.route_add('amqp.*', 'amqp', 'q')));
	eval { soak('amqp', 1_000_000); 1 } or fail($@);
	$broker->stop;
}

SKIP:
{
	skip 'kafka is not asked for', 1 unless wanted('kafka');
	my $why = Kafka::missing() // Kafka::missing_tools();
	skip $why, 1 if $why;
	my $broker = Kafka->new(dir => "$dir/kafka");
	$broker->start;
	$broker->create('q', 3, 'segment.bytes' => 20_000_000, 'retention.bytes' => 20_000_000);
	sql("CREATE SERVER kafka FOREIGN DATA WRAPPER idem OPTIONS (url 'kafka://$broker->{servers}')");
	sql(q(SELECT idem.route_add('kafka.*', 'kafka', 'q')));
	eval { soak('kafka', 1_000_000); 1 } or fail($@);
	$broker->stop;
}

for my $name (sort keys %BrokerTable::CLASS)
{
	SKIP:
	{
		skip "$name is not asked for", 1 unless wanted($name);
		my $class = $BrokerTable::CLASS{$name};
		require "$class.pm";
		my $why = $class->missing;
		skip $why, 1 if $why;
		my $broker = $class->new(dir => "$dir/$name");
		$broker->start;
		my $short = $broker->short('q');
		sql("CREATE SERVER $name FOREIGN DATA WRAPPER idem OPTIONS (url '" . $broker->url . "'$short)");
		sql("SELECT idem.route_add('$name.*', '$name', 'q')");
		eval { soak($name, 1_000_000); 1 } or fail($@);
		$broker->stop;
	}
}

$node->stop;
done_testing();

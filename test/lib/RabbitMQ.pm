# A private RabbitMQ on the loopback interface, for tests: its own folder, ports,
# node name, cookie and epmd; whatever is started here is ended by its pid.
#
#   my $why = RabbitMQ::missing();                  # undef: there is one
#   my $broker = RabbitMQ->new(dir => $folder, config => '...');
#   $broker->start; $broker->ctl('list_queues'); $broker->kill9; $broker->stop;
package RabbitMQ;

use strict;
use warnings;
use HTTP::Tiny;
use IO::Socket::INET;
use JSON::PP ();
use MIME::Base64 ();
use POSIX ':sys_wait_h';
use Time::HiRes qw(time usleep);

my $home = '/usr/lib/rabbitmq/bin';

# What is missing for a broker, or undef.
sub missing
{
	return 'rabbitmq-server is not installed' unless -x "$home/rabbitmq-server";
	for my $program (qw(epmd amqp-get amqp-consume))
	{
		return "$program is not installed"
		  unless grep { -x "$_/$program" } split /:/, $ENV{PATH};
	}
	return 'RabbitMQ does not run as root' if $> == 0;
	return;
}

# A port of the loopback interface that nobody uses now.
sub free_port
{
	my $socket = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 1, ReuseAddr => 1)
	  or die "no port: $!";
	return $socket->sockport;
}

# new(dir => ..., tls => { ca, cert, key }): files of PEM; config => more lines
sub new
{
	my ($class, %args) = @_;
	my $self = bless { owner => $$, %args }, $class;
	my $dir = $self->{dir};

	my %seen;
	for my $name (qw(port tls_port dist_port epmd_port http_port))
	{
		do { $self->{$name} = free_port() } while $seen{ $self->{$name} }++;
	}
	$self->{node} = "idem$$\@localhost";
	mkdir $_ for $dir, "$dir/home", "$dir/mnesia", "$dir/log";
	put("$dir/home/.erlang.cookie", join '', map { chr(65 + int rand 26) } 1 .. 20);
	chmod 0400, "$dir/home/.erlang.cookie";
	put("$dir/env.conf", '');
	put("$dir/plugins", "[rabbitmq_management].\n");
	put("$dir/rabbitmq.conf", "listeners.tcp.1 = 127.0.0.1:$self->{port}\n"
		  . "management.tcp.ip = 127.0.0.1\nmanagement.tcp.port = $self->{http_port}\n"
		  . ($self->{config} // '')
		  . ($self->{tls} ? <<"TLS" : ''));
listeners.ssl.1 = 127.0.0.1:$self->{tls_port}
ssl_options.cacertfile = $self->{tls}{ca}
ssl_options.certfile = $self->{tls}{cert}
ssl_options.keyfile = $self->{tls}{key}
ssl_options.verify = verify_none
TLS
	return $self;
}

sub put
{
	my ($name, $text) = @_;
	open my $file, '>', $name or die "$name: $!";
	print $file $text;
	close $file;
	return;
}

sub environment
{
	my ($self) = @_;
	my $dir = $self->{dir};
	return (
		HOME => "$dir/home",
		RABBITMQ_NODENAME => $self->{node},
		RABBITMQ_MNESIA_BASE => "$dir/mnesia",
		RABBITMQ_LOG_BASE => "$dir/log",
		RABBITMQ_CONFIG_FILE => "$dir/rabbitmq.conf",
		RABBITMQ_CONF_ENV_FILE => "$dir/env.conf",
		RABBITMQ_ENABLED_PLUGINS_FILE => "$dir/plugins",
		RABBITMQ_PID_FILE => "$dir/pid",
		RABBITMQ_DIST_PORT => $self->{dist_port},
		RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS => '-kernel inet_dist_use_interface {127,0,0,1}',
		ERL_EPMD_PORT => $self->{epmd_port},
		ERL_EPMD_ADDRESS => '127.0.0.1',
		# makes the start script become the server, so that its pid is ours
		detached => 1);
}

sub spawn
{
	my ($self, @command) = @_;
	my $pid = fork // die "fork: $!";
	return $pid if $pid;
	%ENV = (%ENV, $self->environment);
	open STDIN, '<', '/dev/null';
	open STDOUT, '>>', "$self->{dir}/log/out";
	open STDERR, '>&', \*STDOUT;
	chdir $self->{dir};
	exec @command or POSIX::_exit(127);
}

# Is it listening?
sub answers
{
	my ($self, $port) = @_;
	return !!IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $port, Timeout => 1);
}

sub await
{
	my ($what, $done) = @_;
	my $deadline = time + 120;
	until ($done->())
	{
		die "$what: waited too long" if time > $deadline;
		usleep(50_000);
	}
	return;
}

sub start
{
	my ($self) = @_;
	if (!$self->{epmd})
	{
		$self->{epmd} = $self->spawn('epmd', '-address', '127.0.0.1', '-port', $self->{epmd_port});
		await('epmd', sub { $self->answers($self->{epmd_port}) });
	}
	$self->{pid} = $self->spawn("$home/rabbitmq-server");
	await('RabbitMQ', sub {
			die "RabbitMQ ended, see $self->{dir}/log" if waitpid($self->{pid}, WNOHANG) != 0;
			$self->answers($self->{port});
		});
	return if system_quiet($self, 'rabbitmqctl', 'await_startup') == 0;
	die 'RabbitMQ does not start';
}

sub system_quiet
{
	my ($self, $program, @args) = @_;
	my $pid = $self->spawn("$home/$program", '-q', @args);
	waitpid $pid, 0;
	return $?;
}

# What rabbitmqctl prints.
sub ctl
{
	my ($self, @args) = @_;
	my $pid = open my $out, '-|';
	die "fork: $!" unless defined $pid;
	if (!$pid)
	{
		%ENV = (%ENV, $self->environment);
		open STDERR, '>&', \*STDOUT;
		exec "$home/rabbitmqctl", '-q', @args or POSIX::_exit(127);
	}
	my $text = do { local $/; <$out> } // '';
	close $out or die "rabbitmqctl @args: $text";
	return $text;
}

# The management interface: api('PUT', 'queues/%2f/q', { durable => JSON::PP::true })
sub api
{
	my ($self, $method, $path, $body) = @_;
	my $answer = HTTP::Tiny->new->request($method,
		"http://guest:guest\@127.0.0.1:$self->{http_port}/api/$path",
		{ content => JSON::PP->new->utf8->encode($body // {}),
			headers => { 'content-type' => 'application/json' } });
	die "$method $path: $answer->{status} $answer->{content}" unless $answer->{success};
	return length $answer->{content} ? JSON::PP->new->utf8->decode($answer->{content}) : undef;
}

sub queue
{
	my ($self, $name, %arguments) = @_;
	$self->api('PUT', "queues/%2f/$name", { durable => JSON::PP::true, arguments => \%arguments });
	return;
}

# Take up to so many messages from a queue; {body} is what was published.
sub take
{
	my ($self, $queue, $count) = @_;
	my $got = $self->api('POST', "queues/%2f/$queue/get",
		{ count => $count, ackmode => 'ack_requeue_false', encoding => 'base64' });
	$_->{body} = MIME::Base64::decode_base64($_->{payload}) for @$got;
	return @$got;
}

sub kill9
{
	my ($self) = @_;
	kill KILL => $self->{pid};
	waitpid $self->{pid}, 0;
	delete $self->{pid};
	return;
}

sub stop
{
	my ($self) = @_;
	for my $name (qw(pid epmd))
	{
		my $pid = delete $self->{$name} or next;
		my $deadline = time + 15;
		kill TERM => $pid;
		while (waitpid($pid, WNOHANG) == 0)
		{
			kill KILL => $pid if time > $deadline;
			usleep(20_000);
		}
	}
	return;
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $@, $!);
	# not in a child that was forked meanwhile
	$self->stop if $self->{owner} == $$ && $self->{pid};
	return;
}

1;

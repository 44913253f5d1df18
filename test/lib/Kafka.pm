# A private Kafka on the loopback interface, for tests: one node, its own folder
# and ports; whatever is started here is ended by its pid.
#
#   my $why = Kafka::missing();                 # undef: there is one
#   my $broker = Kafka->new(dir => $folder);
#   $broker->start; $broker->create('topic', 3); $broker->kill9; $broker->stop;
#   my $mock = Kafka->mock(dir => $folder);     # the mock cluster of librdkafka
package Kafka;

use strict;
use warnings;
use IO::Handle;
use IO::Socket::INET;
use POSIX ':sys_wait_h';
use Time::HiRes qw(time usleep);

# What is missing for a broker, or undef.  test/run sets IDEM_KAFKA (see test/kafka).
sub missing
{
	return 'Apache Kafka is not here: test/kafka says why' unless $ENV{IDEM_KAFKA};
	return 'java is not installed' unless grep { -x "$_/java" } split /:/, $ENV{PATH};
	return missing_tools();
}

# What is missing to do anything with Kafka, or undef.
sub missing_tools
{
	for my $program (qw(kcat cc))
	{
		return "$program is not installed" unless grep { -x "$_/$program" } split /:/, $ENV{PATH};
	}
	return;
}

sub free_port
{
	my $socket = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 1, ReuseAddr => 1)
	  or die "no port: $!";
	return $socket->sockport;
}

sub put
{
	my ($name, $text) = @_;
	open my $file, '>', $name or die "$name: $!";
	print $file $text;
	close $file or die "$name: $!";
	return;
}

# new(dir => ...)
#   password => of user relay, who may do everything; user poor, with the same, may
#               do nothing until allow(); listener sasl_port, PLAIN and SCRAM-SHA-256
#   tls => { cert, key }: files of PEM, for listener tls_port; localhost is its name
#   proxied => a port: what is told to those who come to proxied_port
#   config => more lines; heap => '1g'
sub new
{
	my ($class, %args) = @_;
	my $self = bless { owner => $$, heap => '256m', %args }, $class;
	my $dir = $self->{dir};
	my %seen;
	for my $name (qw(port controller_port sasl_port tls_port proxied_port))
	{
		do { $self->{$name} //= free_port() } while $seen{ $self->{$name} }++ && do { delete $self->{$name}; 1 };
	}
	$self->{servers} = "127.0.0.1:$self->{port}";
	mkdir $_ for $dir, "$dir/data";
	$self->make_admin;

	my @listeners = ([ 'OPEN', 'PLAINTEXT', $self->{port} ]);
	my $more = '';
	if (defined $self->{password})
	{
		push @listeners, [ 'SASL', 'SASL_PLAINTEXT', $self->{sasl_port} ];
		$more .= <<"SASL";
listener.name.sasl.sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-256
listener.name.sasl.plain.sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required user_relay="$self->{password}" user_poor="$self->{password}";
listener.name.sasl.scram-sha-256.sasl.jaas.config=org.apache.kafka.common.security.scram.ScramLoginModule required;
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:relay
SASL
	}
	if ($self->{tls})
	{
		push @listeners, [ 'TLS', 'SSL', $self->{tls_port}, "localhost:$self->{tls_port}" ];
		put("$dir/tls.pem", slurp($self->{tls}{key}) . slurp($self->{tls}{cert}));
		$more .= "listener.name.tls.ssl.keystore.type=PEM\nlistener.name.tls.ssl.keystore.location=$dir/tls.pem\n";
	}
	push @listeners, [ 'PROXIED', 'PLAINTEXT', $self->{proxied_port}, "127.0.0.1:$self->{proxied}" ]
	  if $self->{proxied};
	put("$dir/properties", <<"CONF" . $more . ($self->{config} // ''));
process.roles=broker,controller
node.id=1
controller.quorum.voters=1\@127.0.0.1:$self->{controller_port}
listeners=${\ join ',', "CONTROL://127.0.0.1:$self->{controller_port}", map { "$_->[0]://127.0.0.1:$_->[2]" } @listeners}
advertised.listeners=${\ join ',', map { "$_->[0]://" . ($_->[3] // "127.0.0.1:$_->[2]") } @listeners}
listener.security.protocol.map=${\ join ',', 'CONTROL:PLAINTEXT', map { "$_->[0]:$_->[1]" } @listeners}
controller.listener.names=CONTROL
inter.broker.listener.name=OPEN
log.dirs=$dir/data
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
CONF
	$self->run_java("$dir/format.log", 'kafka.tools.StorageTool', 'format', '-t', 'aWRlbSB0ZXN0IGJyb2tlcg', '-c',
		"$dir/properties", defined $self->{password} ? ('--add-scram', "SCRAM-SHA-256=[name=relay,password=$self->{password}]") : ());
	waitpid $self->{pid}, 0;
	die "Kafka's storage cannot be made, see $dir/format.log" if $?;
	delete $self->{pid};
	return $self;
}

# The same without Java: has topics as they are asked for, and forgets all at its end.
sub mock
{
	my ($class, %args) = @_;
	my $self = bless { owner => $$, %args }, $class;
	mkdir $self->{dir};
	$self->make_admin;
	pipe my $orders, $self->{orders} or die $!;
	$self->{orders}->autoflush(1);
	$self->{pid} = open my $out, '-|';
	die "fork: $!" unless defined $self->{pid};
	if (!$self->{pid})
	{
		open STDIN, '<&', $orders;
		CORE::close $self->{orders};
		open STDERR, '>>', "$self->{dir}/mock.log";
		exec $self->{admin}, 'mock' or POSIX::_exit(127);
	}
	chomp($self->{servers} = <$out> // die 'no mock cluster');
	$self->{answers} = $out;
	return $self;
}

# The mock refuses the next request to write with this error.
sub refuse
{
	my ($self, $code) = @_;
	print { $self->{orders} } "$code\n";
	readline $self->{answers};
	return;
}

sub slurp { my ($f) = @_; local $/; open my $h, '<', $f or die "$f: $!"; return scalar <$h> }

# A program for topics and rights, since Kafka's own take seconds each.
sub make_admin
{
	my ($self) = @_;
	(my $source = __FILE__) =~ s{lib/Kafka\.pm$}{courier/kafka_admin.c};
	$self->{admin} = "$self->{dir}/kafka_admin";
	system("cc -O1 -o $self->{admin} $source -lrdkafka") == 0 or die "$source does not compile";
	return;
}

sub run_java
{
	my ($self, $log, @command) = @_;
	$self->{pid} = fork // die "fork: $!";
	return if $self->{pid};
	$ENV{CLASSPATH} = "$ENV{IDEM_KAFKA}/*";
	open STDIN, '<', '/dev/null';
	open STDOUT, '>>', $log;
	open STDERR, '>&', \*STDOUT;
	chdir $self->{dir};
	exec 'java', "-Xmx$self->{heap}", ($self->{heap} eq '256m' ? ('-XX:TieredStopAtLevel=1', '-XX:+UseSerialGC') : ()),
	  '-Djava.net.preferIPv4Stack=true', @command
	  or POSIX::_exit(127);
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
	$self->run_java("$self->{dir}/log", 'kafka.Kafka', "$self->{dir}/properties");
	await('Kafka', sub {
			die "Kafka ended, see $self->{dir}/log" if waitpid($self->{pid}, WNOHANG) != 0;
			IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $self->{port}, Timeout => 1)
			  && `kcat -L -m 2 -b $self->{servers} 2>/dev/null` =~ /^ 1 brokers/m;
		});
	return;
}

sub admin
{
	my ($self, @args) = @_;
	system($self->{admin}, $self->{servers}, @args) == 0 or die "kafka_admin @args";
	return;
}

# create(topic, partitions, name => value, ...)
sub create
{
	my ($self, $topic, $partitions, %config) = @_;
	$self->admin('create', $topic, $partitions // 1, map { "$_=$config{$_}" } sort keys %config);
	# the broker knows of it a moment later than the controller
	await("topic $topic", sub { `kcat -L -t $topic -b $self->{servers} 2>/dev/null` =~ /partition 0, leader \d/ });
	return;
}

sub delete
{
	my ($self, $topic) = @_;
	$self->admin('delete', $topic);
	await("topic $topic to go", sub { `kcat -L -b $self->{servers} 2>/dev/null` !~ /topic "$topic"/ });
	return;
}

# All that is in a topic, in order per partition: { partition, offset, key, body, headers }.
# Read with kcat.  With skip => { partition => offset }, from there on.
sub read
{
	my ($self, $topic) = @_;
	open my $out, '-|:raw', "kcat -C -e -q -o beginning -t $topic -b $self->{servers}"
	  . q( -f '%p %o %K %S\n%k%s%h\001\002\n' 2>/dev/null) or die "kcat: $!";
	my $all = do { local $/; <$out> } // '';
	close $out;
	my @messages;
	while ($all =~ /\G(\d+) (\d+) (-?\d+) (-?\d+)\n/gc)
	{
		my %m = (partition => $1, offset => $2);
		my ($key_len, $len, $at) = ($3 > 0 ? $3 : 0, $4 > 0 ? $4 : 0, pos $all);
		$m{key} = $3 < 0 ? undef : substr $all, $at, $key_len;
		$m{body} = substr $all, $at + $key_len, $len;
		my $end = index $all, "\001\002\n", $at + $key_len + $len;
		die 'kcat: no end of headers' if $end < 0;
		my $headers = substr $all, $at + $key_len + $len, $end - $at - $key_len - $len;
		$m{raw} = $headers;
		$m{headers} = { map { /^([^=]*)=(.*)$/s } split /,(?=[^,=]*=)/, $headers };
		pos($all) = $end + 3;
		push @messages, \%m;
	}
	die 'kcat: not all is understood' if (pos($all) // 0) < length $all;
	return @messages;
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
	my $pid = delete $self->{pid} or return;
	my $deadline = time + 15;
	kill TERM => $pid;
	while (waitpid($pid, WNOHANG) == 0)
	{
		kill KILL => $pid if time > $deadline;
		usleep(20_000);
	}
	return;
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $@, $!);
	# not in a child that was forked meanwhile
	$self->kill9 if $self->{owner} == $$ && $self->{pid};
	return;
}

1;

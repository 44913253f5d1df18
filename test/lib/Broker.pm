# A private broker on the loopback interface, for tests: what all have in common.
# Its own folder and ports; what is started here is ended by its pid.
#
# A class of it has, beside what is here:
#   missing()             why there can be none, or nothing
#   courier()             the scheme: its courier is idem-courier-SCHEME
#   command()             what to run; it is in {dir}, and listens on {port}
#   url(host => ..., port => ...)
#   login()               options for a user who may just send, by {password}
#   place($name)          make the destination $name, unless it is there
#   empty($name)          and empty it
#   short($name)          make the destination $name so that old messages go; returns
#                         options of a server for that, which begin with a comma
#   take($name, $n)       take away up to $n messages, oldest first: {id}, {topic},
#                         {key}, {content_type}, {headers}, {body}
#   obstacle($name)       make something of which the broker refuses messages to
#                         $name; returns a pattern for the reason
#   mend($name)           remove that
#   poison()              a message that is refused for ever, and a pattern
#   refusals()            options that are refused: [what, pattern, options...]
package Broker;

use strict;
use warnings;
use IO::Socket::INET;
use POSIX ':sys_wait_h';
use Time::HiRes qw(time usleep);

# new(dir => ..., tls => { ca, cert, key }, password => ...): files are PEM
sub new
{
	my ($class, %args) = @_;
	my $self = bless { owner => $$, %args }, $class;
	mkdir $self->{dir};
	$self->{port} = free_port();
	$self->configure;
	return $self;
}

# A port that nobody uses now.
sub free_port
{
	my $socket = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 1, ReuseAddr => 1)
	  or die "no port: $!";
	return $socket->sockport;
}

# Where a program is, or nothing.
sub which
{
	my ($program) = @_;
	return (grep { -x } map { "$_/$program" } split(/:/, $ENV{PATH}), '/usr/sbin')[0];
}

sub put
{
	my ($name, $text) = @_;
	open my $file, '>:raw', $name or die "$name: $!";
	print $file $text;
	close $file;
	return;
}

sub await
{
	my ($what, $done) = @_;
	my $deadline = time + 60;
	until ($done->())
	{
		die "$what: waited too long" if time > $deadline;
		usleep(20_000);
	}
	return;
}

sub start
{
	my ($self) = @_;
	my $pid = fork // die "fork: $!";
	if ($pid == 0)
	{
		open STDIN, '<', '/dev/null';
		open STDOUT, '>>', "$self->{dir}/out";
		open STDERR, '>&', \*STDOUT;
		chdir $self->{dir};
		my @command = $self->command;
		{ no warnings; exec { $command[0] } @command; }
		POSIX::_exit(127);
	}
	$self->{pid} = $pid;
	await($self->courier, sub {
			die ref($self) . " ended, see $self->{dir}/out" if waitpid($pid, WNOHANG) != 0;
			$self->answers;
		});
	return;
}

sub answers
{
	my ($self) = @_;
	return !!IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $self->{port}, Timeout => 1);
}

sub kill9
{
	my ($self) = @_;
	my $pid = delete $self->{pid} or return;
	kill KILL => $pid;
	waitpid $pid, 0;
	return;
}

sub stop
{
	my ($self) = @_;
	my $pid = delete $self->{pid} or return;
	my $deadline = time + 10;
	kill TERM => $pid;
	while (waitpid($pid, WNOHANG) == 0)
	{
		kill KILL => $pid if time > $deadline;
		usleep(10_000);
	}
	return;
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $@, $!);
	# not in a child that was forked meanwhile
	$self->kill9 if $self->{owner} == $$;
	return;
}

1;

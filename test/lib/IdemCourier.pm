# A relay for one courier: starts it, speaks the protocol, notes what it says.
# And an HTTP server that does as it is told.
package IdemCourier;

use strict;
use warnings;
use Exporter 'import';
use Fcntl;
use IO::Select;
use IO::Socket::INET;
use POSIX ();
use Socket;
use Storable ();
use Time::HiRes qw(time usleep);

our @EXPORT = qw(http_sink free_port await);
our %OUTCOME = (
	delivered => 0, transient => 1, permanent => 2,
	blocked => 3, unknown => 4, returned => 5);
our $TIMEOUT = 30;

sub str { return defined $_[0] ? pack('N/a*', $_[0]) : pack('N', 0xFFFFFFFF) }
sub framed { return pack('N/a*', $_[0] . $_[1]) }

# Wait until the code is true.
sub await
{
	my ($code, $seconds) = @_;
	my $end = time + ($seconds // $TIMEOUT);
	until ($code->())
	{
		return 0 if time > $end;
		usleep(5_000);
	}
	return 1;
}

# start(program...): the process and its socket, no hello yet.
sub start
{
	my ($class, @command) = @_;
	socketpair(my $ours, my $theirs, AF_UNIX, SOCK_STREAM, PF_UNSPEC) or die "socketpair: $!";
	my $pid = fork // die "fork: $!";
	if ($pid == 0)
	{
		open STDIN, '<', '/dev/null';
		open STDOUT, '>', '/dev/null';
		open STDERR, '>>', $ENV{COURIER_STDERR} // '/dev/null';
		if (fileno($theirs) == 3) { fcntl($theirs, F_SETFD, 0) }
		else { POSIX::dup2(fileno($theirs), 3) }
		{ no warnings; exec { $command[0] } @command; }
		POSIX::_exit(127);
	}
	close $theirs;
	return bless {
		pid => $pid, socket => $ours, in => '', ticket => 0,
		settled => {}, order => [], states => [], logs => []
	}, $class;
}

# connect(program, options): started and greeted; dies unless it is ready.
sub connect
{
	my ($class, $program, %options) = @_;
	my $self = $class->start(ref $program ? @$program : $program);
	$self->hello(%options);
	my $frame = $self->frame // die "$program ended";
	die "$program: $frame->{type} $frame->{text}" if $frame->{type} ne 'h';
	$self->{program} = $frame->{text};
	return $self;
}

sub write
{
	my ($self, $bytes) = @_;
	local $SIG{PIPE} = 'IGNORE';
	my $at = 0;
	while ($at < length $bytes)
	{
		# it may have to tell us something before it reads on
		my ($read, $write) = IO::Select->select(IO::Select->new($self->{socket}),
			IO::Select->new($self->{socket}), undef, $TIMEOUT);
		die 'courier does not read' unless $write || $read;
		$self->receive if $read && @$read;
		next unless $write && @$write;
		my $n = send($self->{socket}, substr($bytes, $at, 262144), MSG_DONTWAIT);
		if (defined $n) { $at += $n }
		elsif (!$!{EAGAIN}) { return 0 }
	}
	return 1;
}

sub hello
{
	my ($self, %options) = @_;
	my $body = pack('N', 1) . str($options{server} // 'test');
	delete $options{server};
	$body .= pack('N', scalar keys %options);
	$body .= str($_) . str($options{$_}) for sort keys %options;
	return $self->write(framed('H', $body));
}

sub uuid { return sprintf '019abcde-0000-7000-8000-%012x', $_[0] }

# The frame of a message; its ticket is the next one.
sub message
{
	my ($self, %m) = @_;
	my $ticket = ++$self->{ticket};
	my $bytes = framed('M', pack('Q>', $ticket) . str($m{id} // uuid($ticket))
		  . str($m{destination} // '') . str($m{topic} // 'topic') . str($m{key})
		  . str($m{content_type} // 'application/json') . str($m{headers})
		  . pack('Q>N', $m{enqueued_at} // 1_700_000_000_123_456, $m{attempt} // 1)
		  . str($m{body} // '{}'));
	return ($ticket, $bytes);
}

sub send_message
{
	my ($self, %m) = @_;
	my ($ticket, $bytes) = $self->message(%m);
	$self->write($bytes);
	return $ticket;
}

sub quit { my ($self) = @_; return $self->write(framed('Q', '')) }
sub close { my ($self) = @_; close $self->{socket}; return }

# Take in what there is; false at the end.
sub receive
{
	my ($self) = @_;
	my $n = sysread $self->{socket}, $self->{in}, 262144, length $self->{in};
	return $n ? 1 : 0;
}

# The next frame, or nothing at the end (or when time is up).
sub frame
{
	my ($self, $seconds) = @_;
	my $end = time + ($seconds // $TIMEOUT);
	until (length $self->{in} >= 4 && length $self->{in} >= 4 + unpack('N', $self->{in}))
	{
		my $left = $end - time;
		return if $left <= 0 || !IO::Select->new($self->{socket})->can_read($left);
		return unless $self->receive;
	}
	my $body = unpack 'N/a', $self->{in};
	substr $self->{in}, 0, 4 + length $body, '';
	my $type = substr $body, 0, 1, '';
	my %frame = (type => $type);
	if ($type eq 'h') { @frame{qw(version text)} = unpack 'N N/a', $body }
	elsif ($type eq 'd')
	{
		my ($n, @tickets) = unpack 'N Q>*', $body;
		die 'malformed d' if $n != @tickets;
		$frame{tickets} = \@tickets;
	}
	elsif ($type eq 'o')
	{
		@frame{qw(ticket outcome retry code text)} = unpack 'Q> C N N N/a', $body;
	}
	elsif ($type eq 's')
	{
		@frame{qw(state retry text)} = unpack 'C N N/a', $body;
		push @{ $self->{states} }, \%frame;
	}
	elsif ($type eq 'l')
	{
		@frame{qw(level text)} = unpack 'C N/a', $body;
		push @{ $self->{logs} }, \%frame;
	}
	else { die "frame of type $type" }

	for my $ticket ($type eq 'd' ? @{ $frame{tickets} } : $type eq 'o' ? $frame{ticket} : ())
	{
		die "ticket $ticket settled twice" if exists $self->{settled}{$ticket};
		die "ticket $ticket was not given" if $ticket < 1 || $ticket > $self->{ticket};
		$self->{settled}{$ticket} =
		  $type eq 'o' ? \%frame : { outcome => 0, code => 0, text => '', retry => 0 };
		push @{ $self->{order} }, $ticket;
	}
	return \%frame;
}

# Read on until all these tickets are settled, or else the last one given.
sub settle
{
	my ($self, @tickets) = @_;
	my $end = time + $TIMEOUT;
	@tickets = ($self->{ticket}) unless @tickets;
	while (grep { !exists $self->{settled}{$_} } @tickets)
	{
		return if time > $end || !$self->frame;
	}
	return $self->{settled}{ $tickets[0] };
}

# The exit status, or "running".
sub ended
{
	my ($self, $seconds) = @_;
	return $self->{status} if exists $self->{status};
	await(sub { waitpid($self->{pid}, POSIX::WNOHANG()) == $self->{pid} && do { $self->{status} = $?; 1 } },
		$seconds) or return 'running';
	return $self->{status};
}

# All that is still to be read.
sub rest
{
	my ($self) = @_;
	my @frames;
	while (my $frame = $self->frame) { push @frames, $frame }
	return @frames;
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $!);
	return if exists $self->{status} || $self->{pid} <= 0;
	kill KILL => $self->{pid};
	waitpid $self->{pid}, 0;
	return;
}

sub free_port
{
	my $socket = IO::Socket::INET->new(Listen => 1, LocalAddr => '127.0.0.1') or die $!;
	return $socket->sockport;
}

# http_sink($file): an HTTP server, in another process, that appends what it got
# to a file.  What it answers depends on the path:
#   /status/503         that status           /retry/7       503, Retry-After: 7
#   /hang               nothing               /drop          closes the connection
#   /slow/50            200 after 50 ms       /once/503/x    503 once, then 200
#   /echo               200 and the body      /cut           half of an answer
#   /drop2              closes, unless it is the connection's first request
sub http_sink
{
	my ($file) = @_;
	my $listen = IO::Socket::INET->new(
		Listen => 100, LocalAddr => '127.0.0.1', ReuseAddr => 1) or die "listen: $!";
	my $parent = $$;
	my $pid = fork // die "fork: $!";
	if ($pid == 0)
	{
		$SIG{PIPE} = 'IGNORE';
		eval { sink_loop($listen, $file, $parent) };
		warn $@ if $@;
		POSIX::_exit(1);
	}
	my $port = $listen->sockport;
	CORE::close $listen;
	return bless { pid => $pid, port => $port, file => $file, url => "http://127.0.0.1:$port" },
	  'IdemCourier::Sink';
}

sub sink_loop
{
	my ($listen, $file, $parent) = @_;
	my $select = IO::Select->new($listen);
	my (%client, %once, %busy, @later);
	open my $log, '>>', $file or die "$file: $!";
	binmode $log;
	$log->autoflush(1);

	my $answer = sub {
		my ($c, $status, $headers, $body) = @_;
		$busy{ $c->{key} }-- if defined $c->{key};
		my $bytes = "HTTP/1.1 $status X\r\n${headers}Content-Length: " . length($body) . "\r\n\r\n$body";
		$c->{socket}->blocking(1);
		syswrite $c->{socket}, $bytes;
		$c->{busy} = 0;
	};
	my $drop = sub {
		my ($c) = @_;
		$busy{ $c->{key} }-- if defined $c->{key};
		$select->remove($c->{socket});
		delete $client{ $c->{socket} };
		CORE::close $c->{socket};
	};

	while (getppid == $parent)
	{
		my @ready = $select->can_read(@later ? 0.005 : 0.2);
		for my $due (grep { $_->[0] <= time } @later) { $answer->($due->[1], 200, '', '') }
		@later = grep { $_->[0] > time } @later;
		for my $socket (@ready)
		{
			if ($socket == $listen)
			{
				my $new = $listen->accept or next;
				$select->add($new);
				$client{$new} = { socket => $new, in => '', n => 0 };
				next;
			}
			my $c = $client{$socket} or next;
			unless (sysread $socket, $c->{in}, 262144, length $c->{in})
			{
				@later = grep { $_->[1] != $c } @later;
				delete $c->{key} unless $c->{busy};
				$drop->($c);
				next;
			}
			next unless $c->{in} =~ /\A(.*?)\r\n\r\n/s;
			my $head = $1;
			my ($length) = $head =~ /^content-length: *(\d+)/mi;
			next if length $c->{in} < length($head) + 4 + ($length // 0);
			my $body = substr $c->{in}, length($head) + 4, $length // 0;
			substr $c->{in}, 0, length($head) + 4 + ($length // 0), '';
			my ($line, @lines) = split /\r\n/, $head;
			my ($method, $path) = split / /, $line;
			my %headers;
			for (@lines)
			{
				my ($name, $value) = /^([^:]*): *(.*)$/s;
				push @{ $headers{ lc $name } }, $value;
			}
			$c->{n}++;
			$c->{busy} = 1;
			$c->{key} = $headers{'ce-partitionkey'} ? $headers{'ce-partitionkey'}[0] : undef;
			my $same = defined $c->{key} ? ++$busy{ $c->{key} } : 0;
			my $record = Storable::freeze({
					method => $method, path => $path, body => $body, same_key => $same,
					headers => { map { $_ => join '|', @{ $headers{$_} } } keys %headers }
				});
			print $log pack('N/a*', $record);

			if ($path =~ m{^/status/(\d+)}) { $answer->($c, $1, "Location: http://127.0.0.1:1/\r\n", 'because') }
			elsif ($path =~ m{^/retry/(.*)})
			{
				(my $after = $1) =~ s/%([0-9A-F]{2})/chr hex $1/ge;
				$answer->($c, 503, "Retry-After: $after\r\n", '');
			}
			elsif ($path =~ m{^/hang}) { }
			elsif ($path =~ m{^/drop2} ? $c->{n} > 1 : $path =~ m{^/drop}) { $drop->($c) }
			elsif ($path =~ m{^/slow/(\d+)}) { push @later, [ time + $1 / 1000, $c ] }
			elsif ($path =~ m{^/once/(\d+)} && !$once{$path}++) { $answer->($c, $1, '', '') }
			elsif ($path =~ m{^/echo}) { $answer->($c, 200, '', $body) }
			elsif ($path =~ m{^/cut})
			{
				syswrite $socket, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf";
				$drop->($c);
			}
			else { $answer->($c, 200, '', '') }
		}
	}
	POSIX::_exit(0);
}

package IdemCourier::Sink;

# The requests since the last call.
sub requests
{
	my ($self) = @_;
	open my $log, '<:raw', $self->{file} or return;
	seek $log, $self->{at} // 0, 0;
	local $/;
	my $all = <$log> // '';
	my @requests;
	while (length $all >= 4 && length $all >= 4 + unpack 'N', $all)
	{
		my $one = unpack 'N/a', $all;
		substr $all, 0, 4 + length $one, '';
		$self->{at} += 4 + length $one;
		push @requests, Storable::thaw($one);
	}
	return @requests;
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $!);
	kill KILL => $self->{pid};
	waitpid $self->{pid}, 0;
	return;
}

1;

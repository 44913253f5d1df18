# A private Redis, read with redis-cli.  See Broker.pm.
package RedisServer;

use strict;
use warnings;
use parent 'Broker';

sub courier { return 'redis' }

sub missing
{
	for my $program (qw(redis-server redis-cli))
	{
		return "$program is not installed" unless Broker::which($program);
	}
	return;
}

# Each command is on disk before its answer; so what was acknowledged survives.
sub configure
{
	my ($self) = @_;
	my $tls = $self->{tls};
	my $password = $self->{password} // 'sesame';
	Broker::put("$self->{dir}/redis.conf", join "\n",
		'bind 127.0.0.1', 'port ' . ($tls ? 0 : $self->{port}), "dir $self->{dir}",
		'save ""', 'appendonly yes', 'appendfsync always', 'auto-aof-rewrite-min-size 64mb', 'proto-max-bulk-len 2mb',
		"user relay on >$password ~* -\@all +xadd +select +evalsha +script|load +exists +set",
		'user humble on >humble ~q* -@all +xadd',
		($tls ? ("tls-port $self->{port}", "tls-cert-file $tls->{cert}",
				"tls-key-file $tls->{key}", "tls-ca-cert-file $tls->{ca}", 'tls-auth-clients no') : ()),
		$self->{config} // '', '');
	return;
}

sub command { my ($self) = @_; return (Broker::which('redis-server'), "$self->{dir}/redis.conf") }

sub answers
{
	my ($self) = @_;
	return 0 unless $self->Broker::answers;
	return $self->{tls} || $self->cli('PING') =~ /PONG/;	# it may still be loading
}

sub url
{
	my ($self, %at) = @_;
	return ($self->{tls} || $at{tls} ? 'rediss' : 'redis') . '://' . ($at{host} // '127.0.0.1') . ':' . ($at{port} // $self->{port});
}

sub login { my ($self) = @_; return (user => 'relay', password => $self->{password} // 'sesame') }

# What redis-cli prints, strings in quotes.
sub cli
{
	my ($self, @command) = @_;
	my @tls = $self->{tls} ? ('--tls', '--cacert', $self->{tls}{ca}, '-h', 'localhost') : ();
	my $pid = open my $out, '-|';
	die "fork: $!" unless defined $pid;
	if (!$pid)
	{
		open STDERR, '>&', \*STDOUT;
		exec(Broker::which('redis-cli'), '-p', $self->{port}, @tls, '--no-raw', @command) or POSIX::_exit(127);
	}
	my $text = do { local $/; <$out> };
	close $out;
	return $text // '';
}

sub unquote
{
	my ($s) = @_;
	my %escape = (n => "\n", r => "\r", t => "\t", a => "\a", b => "\b");
	$s =~ s/\\(?:x([0-9a-f]{2})|(.))/defined $1 ? chr hex $1 : $escape{$2} \/\/ $2/ge;
	return $s;
}

# The entries of a stream: { entry, id, topic, ... }
sub entries
{
	my ($self, $name, $n) = @_;
	my (@entries, @fields);
	my $finish = sub {
		my %field = @fields or return;
		my $e = $entries[-1];
		$e->{$_} = $field{$_} for qw(id topic key content_type enqueued_at body);
		$e->{headers} = { map { /^header\.(.*)/s ? ($1 => $field{$_}) : () } keys %field };
		@fields = ();
	};
	for my $line (split /\n/, $self->cli('XRANGE', $name, '-', '+', 'COUNT', $n))
	{
		my ($numbers, $string) = $line =~ /^([\s\d)]*)"(.*)"$/ or next;
		if ($numbers =~ /^\s*\d+\) 1\) $/) { $finish->(); push @entries, { entry => $string } }
		else { push @fields, unquote($string) }
	}
	$finish->();
	return @entries;
}

sub place { return }
# For many messages; nothing is killed there.
sub short
{
	my ($self) = @_;
	$self->cli(qw(CONFIG SET appendfsync no));
	return ", maxlen '1000'";
}

sub empty { my ($self, $name) = @_; $self->cli('DEL', $name); return }

sub take
{
	my ($self, $name, $n) = @_;
	my @entries = $self->entries($name, $n);
	my @ids = map { $_->{entry} } @entries;
	while (my @some = splice @ids, 0, 500) { $self->cli('XDEL', $name, @some) }
	return @entries;
}

sub obstacle { my ($self, $name) = @_; $self->cli('SET', $name, 'no stream'); return qr/\Q$name\E.*WRONGTYPE/ }
sub mend { my ($self, $name) = @_; $self->cli('DEL', $name); return }
sub poison { return ({ body => 'x' x 2_200_000 }, qr/invalid bulk length/) }

sub refusals
{
	my ($self) = @_;
	my $url = $self->url;
	return ([ 'database', qr/database/, url => "$url/x" ], [ 'user alone', qr/password/, url => $url, user => 'x' ],
		[ 'maxlen', qr/maxlen/, url => $url, maxlen => 'many' ], [ 'exact alone', qr/maxlen/, url => $url, maxlen_exact => 'on' ]);
}

1;

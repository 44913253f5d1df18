# A private NATS with JetStream, read with the client for Python.  See Broker.pm.
package NatsServer;

use strict;
use warnings;
use parent 'Broker';
use FindBin;
use IPC::Open2;
use JSON::PP ();
use MIME::Base64 ();

my $json = JSON::PP->new->utf8;
my $here = __FILE__ =~ s{[^/]*$}{}r;

sub courier { return 'nats' }

sub missing
{
	return 'nats-server is not installed' unless Broker::which('nats-server');
	return 'python3 is not installed' unless Broker::which('python3');
	$ENV{PYTHONPATH} = "$here/../../.deps/python";
	return "no client for NATS: python3 has no nats-py, and pip could not get it (make deps)"
	  if system(q(python3 -c 'import nats' >/dev/null 2>&1)) != 0;
	return;
}

sub configure
{
	my ($self) = @_;
	my $tls = $self->{tls};
	my $password = $self->{password} // 'sesame';
	my $authorization = $self->{authorization} // <<"USERS";
authorization {
	users = [
		{ user: nobody, password: nobody }
		{ user: relay, password: "$password",
			permissions: { publish: { deny: ["forbidden"] } } }
	]
}
no_auth_user: nobody
USERS
	Broker::put("$self->{dir}/nats.conf", <<"CONF" . $authorization . ($tls ? <<"TLS" : ''));
listen: "127.0.0.1:$self->{port}"
max_payload: 2000000
jetstream { store_dir: "$self->{dir}/store" }
CONF
tls { cert_file: "$tls->{cert}", key_file: "$tls->{key}" }
TLS
	return;
}

sub command { my ($self) = @_; return (Broker::which('nats-server'), '-c', "$self->{dir}/nats.conf") }

sub url
{
	my ($self, %at) = @_;
	return ($self->{tls} || $at{tls} ? 'natss' : 'nats') . '://' . ($at{host} // '127.0.0.1') . ':' . ($at{port} // $self->{port});
}

sub login { my ($self) = @_; return (user => 'relay', password => $self->{password} // 'sesame') }

# Have the client do something; it connects for each.
sub ask
{
	my ($self, %what) = @_;
	unless ($self->{client})
	{
		$self->{client} = open2(my $from, my $to, 'python3', "$here/nats_client.py",
			$self->{port}, $self->{tls} ? $self->{tls}{ca} : ());
		@$self{qw(from to)} = ($from, $to);
		$to->autoflush(1);
	}
	my ($from, $to) = @$self{qw(from to)};
	print $to $json->encode(\%what), "\n";
	my $line = <$from> // die 'the client for NATS ended';
	my $answer = $json->decode($line);
	die "NATS: $answer->{error}" if $answer->{error};
	return $answer->{result};
}

sub place { my ($self, $name) = @_; $self->ask(do => 'place', name => $name); return }
sub short
{
	my ($self, $name) = @_;
	$self->ask(do => 'stream', config => { name => $name, subjects => [$name], max_msgs => 1000 });
	return '';
}

sub empty { my ($self, $name) = @_; $self->ask(do => 'empty', name => $name); return }

sub take
{
	my ($self, $name, $n) = @_;
	my @got;
	for my $m (@{ $self->ask(do => 'take', name => $name, count => $n) })
	{
		my ($version, @lines) = split /\r\n/, MIME::Base64::decode_base64($m->{headers});
		my %h = map { /^([^:]*): ?(.*)$/s } @lines;
		my %known;
		@known{qw(id topic key content_type dedup)} =
		  delete @h{qw(Idem-Id Idem-Topic Idem-Key Content-Type Nats-Msg-Id)};
		# what is the same is not said twice
		$known{id} //= $known{dedup};
		$known{topic} //= $name;
		push @got, { %known, headers => \%h, body => MIME::Base64::decode_base64($m->{body}) };
	}
	return @got;
}

sub obstacle { my ($self, $name) = @_; return qr/no stream takes subject "\Q$name\E"/ }
sub mend { my ($self, $name) = @_; $self->place($name); return }
sub poison { return ({ body => 'x' x 2_200_000 }, qr/max_payload/) }

sub refusals
{
	my ($self) = @_;
	my $url = $self->url;
	return ([ 'path', qr/url/, url => "$url/x" ], [ 'user alone', qr/password/, url => $url, user => 'x' ],
		[ 'two ways to log in', qr/exclude/, url => $url, token => 'x', user => 'u', password => 'p' ],
		[ 'bad credentials', qr/creds/, url => $url, creds => 'x' ]);
}

sub DESTROY
{
	my ($self) = @_;
	local ($?, $@, $!);
	if ($self->{client} && $self->{owner} == $$)
	{
		close $self->{to};
		kill TERM => $self->{client};
		waitpid $self->{client}, 0;
	}
	$self->SUPER::DESTROY;
	return;
}

1;

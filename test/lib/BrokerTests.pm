# What the tests of couriers with a broker share: a courier and what it says,
# certificates, and bodies that are easily mangled.
package BrokerTests;

use strict;
use warnings;
use Exporter 'import';
use POSIX ();
use Time::HiRes qw(time);
use IdemCourier ();

our @EXPORT = qw(courier_program courier until_ message outcome text settled outcomes state_of
  reason quit slurp certificates bodies persist);

my $program;
my $uuid = 0;

# The courier of this name, as it was built; undef if it was not.
sub courier_program
{
	my ($name) = @_;
	($program) = grep { -x } $ENV{ 'IDEM_COURIER_' . uc $name } // (),
	  map { "$_/idem-courier-$name" } split /:/, $ENV{PATH};
	return $program;
}

sub courier
{
	my (%options) = @_;
	my $c = IdemCourier->start($program);
	$c->hello(server => 'bus', %options);
	return $c;
}

# Read frames until done() or the deadline.
sub until_
{
	my ($c, $done, $seconds) = @_;
	my $deadline = time + ($seconds // 30);
	until ($done->())
	{
		my $left = $deadline - time;
		my $frame = $left > 0 ? $c->frame($left) : undef;
		return 0 unless $frame;
		$c->{ready} = $frame->{text} if $frame->{type} eq 'h';
	}
	return 1;
}

# message($c, to => ..., key => ..., body => ..., id, topic, type, headers)
sub message
{
	my ($c, %m) = @_;
	return $c->send_message(
		id => $m{id} // sprintf('01900000-0000-7000-8000-%012x', ++$uuid), destination => $m{to} // 'q',
		topic => $m{topic} // 'orders.created', key => $m{key}, content_type => $m{type}, headers => $m{headers},
		enqueued_at => 1_700_000_000_000_000, body => $m{body});
}

sub outcome { my ($c, $t) = @_; return $c->{settled}{$t} ? $c->{settled}{$t}{outcome} : undef }
sub text { my ($c, $t) = @_; return $c->{settled}{$t}{text} }
sub settled { my ($c, @t) = @_; return until_($c, sub { !grep { !$c->{settled}{$_} } @t }, 60) }
sub outcomes { my ($c, @t) = @_; settled($c, @t); return join ' ', map { outcome($c, $_) // '-' } @t }
sub state_of { my ($c) = @_; return @{ $c->{states} } ? $c->{states}[-1]{state} : '-' }
sub reason { my ($c) = @_; return @{ $c->{states} } ? $c->{states}[-1]{text} : undef }

# Like the relay: what comes back as returned, transient or unknown is sent again, in
# order.  Takes messages as for message(), and returns the last outcome of each.
sub persist
{
	my ($c, @messages) = @_;
	my @outcomes;
	$_->{id} //= sprintf('01900000-0000-7000-8000-%012x', ++$uuid) for @messages;
	for my $round (1 .. 30)
	{
		my @left = grep { ($outcomes[$_] // 5) =~ /[145]/ } 0 .. $#messages or last;
		my %ticket = map { $_ => message($c, %{ $messages[$_] }) } @left;
		settled($c, values %ticket);
		$outcomes[$_] = outcome($c, $ticket{$_}) for @left;
	}
	return @outcomes;
}

# Ends within two seconds, and well.
sub quit
{
	my ($c) = @_;
	my $begin = time;
	$c->quit;
	$c->rest;
	return $c->ended(10) eq '0' && time - $begin < 2.5;
}

sub slurp { my ($f) = @_; local $/; open my $h, '<:raw', $f or die "$f: $!"; return scalar <$h> }

# certificates($dir): ca.pem; srv.pem and srv.key for localhost; ca2.pem, which has
# signed nothing.  False where openssl is not installed.
sub certificates
{
	my ($dir) = @_;
	return 0 unless grep { -x "$_/openssl" } split /:/, $ENV{PATH};
	my $openssl = sub { system("openssl @_ >>$dir/openssl.log 2>&1") == 0 or die "openssl @_" };
	$openssl->("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=idem-test-ca -keyout $dir/ca.key -out $dir/ca.pem");
	$openssl->("req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout $dir/srv.key -out $dir/srv.csr");
	open my $ext, '>', "$dir/ext" or die $!;
	print $ext "subjectAltName=DNS:localhost\n";
	close $ext;
	$openssl->("x509 -req -days 2 -in $dir/srv.csr -CA $dir/ca.pem -CAkey $dir/ca.key -CAcreateserial -extfile $dir/ext -out $dir/srv.pem");
	$openssl->("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=other-ca -keyout $dir/ca2.key -out $dir/ca2.pem");
	return 1;
}

# JSON, nothing, binary, UTF-8, 1 MB
sub bodies
{
	return ('{"a":1}', '', "\0\xff\xfe\r\n\0", "\xc3\xa4\xe2\x82\xac\xf0\x9f\x90\x98",
		join('', map { chr($_ % 256) } 1 .. 1_048_576));
}

1;

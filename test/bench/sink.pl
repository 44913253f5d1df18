#!/usr/bin/env perl
# An HTTP server for relay.sh: sink.pl FOLDER writes its port to FOLDER/port,
# and for each document {"at": SECONDS} that it gets, how many microseconds ago
# that was, to FOLDER/latency; until standard input ends.
use strict;
use warnings;
use IO::Select;
use IO::Socket::INET;
use Socket qw(IPPROTO_TCP TCP_NODELAY);
use Time::HiRes qw(time);

my ($dir) = @ARGV;
my $listener = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Listen => 16)
	or die "could not listen: $!";
open my $latency, '>>', "$dir/latency" or die "$dir/latency: $!";
$latency->autoflush;
open my $port, '>', "$dir/port.tmp" or die "$dir/port.tmp: $!";
print $port $listener->sockport, "\n";
close $port;
rename "$dir/port.tmp", "$dir/port" or die "$dir/port: $!";

my $select = IO::Select->new($listener, \*STDIN);
my %got;
while (1) {
	for my $socket ($select->can_read) {
		if ($socket == $listener) {
			my $client = $listener->accept or next;
			$client->setsockopt(IPPROTO_TCP, TCP_NODELAY, 1);
			$select->add($client);
			next;
		}
		my $n = sysread $socket, $got{$socket}, 65536, length($got{$socket} // '');
		exit 0 if fileno($socket) == 0;
		if (!$n) {
			delete $got{$socket};
			$select->remove($socket);
			close $socket;
			next;
		}
		my $now = time;
		while ($got{$socket} =~ /^(.*?\r\n\r\n)/s) {
			my $head = $1;
			my ($length) = $head =~ /^content-length: *(\d+)/im;
			last if length $got{$socket} < length($head) + $length;
			my $body = substr $got{$socket}, length $head, $length;
			substr $got{$socket}, 0, length($head) + $length, '';
			printf $latency "%.0f\n", ($now - $1) * 1e6 if $body =~ /"at" *: *([\d.]+)/;
			syswrite $socket, "HTTP/1.1 204 No Content\r\n\r\n";
		}
	}
}

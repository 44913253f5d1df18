#!/usr/bin/env perl
# A private RabbitMQ with a queue "bench" for brokers.sh: broker.pl FOLDER writes
# its port to FOLDER/port when it is up, and ends it when standard input ends.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/../lib";
use RabbitMQ;

my ($dir) = @ARGV;
my $why = RabbitMQ::missing();
if ($why) {
	print STDERR "$why\n";
	exit 3;
}
my $broker = RabbitMQ->new(dir => $dir);
$broker->start;
$broker->queue('bench');
open my $port, '>', "$dir/port.tmp" or die "$dir/port.tmp: $!";
print $port "$broker->{port}\n";
close $port;
rename "$dir/port.tmp", "$dir/port" or die "$dir/port: $!";

# "purge" empties the queue, and says so by removing the file of that name
while (<STDIN>) {
	$broker->api('DELETE', 'queues/%2f/bench/contents') if /^purge/;
	unlink "$dir/purge";
}
$broker->stop;

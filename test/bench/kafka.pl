#!/usr/bin/env perl
# A private Kafka with a topic "bench" for brokers.sh: kafka.pl FOLDER writes its
# address to FOLDER/servers when it is up, and ends it when standard input ends.
use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/../lib";
use Kafka;

my ($dir) = @ARGV;
my $why = Kafka::missing() // Kafka::missing_tools();
if ($why) {
	print STDERR "$why\n";
	exit 3;
}
my $broker = Kafka->new(dir => $dir, heap => '1g');
$broker->start;
$broker->create('bench', 3);
open my $servers, '>', "$dir/servers.tmp" or die "$dir/servers.tmp: $!";
print $servers "$broker->{servers}\n";
close $servers;
rename "$dir/servers.tmp", "$dir/servers" or die "$dir/servers: $!";

# "purge" empties the topic, and says so by removing the file of that name
while (<STDIN>) {
	if (/^purge/) {
		$broker->delete('bench');
		$broker->create('bench', 3);
	}
	unlink "$dir/purge";
}
$broker->stop;

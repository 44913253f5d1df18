# The courier for Redis Streams, against a real Redis.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use BrokerTests;

my $class = BrokerTests::begin('redis');
BrokerTests::courier('redis');

BrokerTests::relay('redis');
done_testing();

# The courier for NATS JetStream, against a real server.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use BrokerTests;

my $class = BrokerTests::begin('nats');
BrokerTests::courier('nats');

BrokerTests::relay('nats');
done_testing();

# Helpers of the tests of consumers and handlers: a cluster, and what to do there.
package Handlers;

use strict;
use warnings;
use Exporter 'import';
use Idem ();
use Test::More;
use Time::HiRes qw(usleep time);

our @EXPORT = qw(handler_cluster work_on sql await store handler);

my $node;

# handler_cluster($name, \%options, @settings): as Idem::cluster(); the others
# work on that.
sub handler_cluster
{
	return work_on(Idem::cluster(@_));
}

# From here on, all of this is about another cluster.
sub work_on
{
	($node) = @_;
	return $node;
}

sub sql { return $node->safe_psql('postgres', $_[0]) }
sub await
{
	my ($what, $query, $expected, $seconds) = @_;
	local $Test::Builder::Level = $Test::Builder::Level + 1;
	my $end = time + ($seconds // 30);
	my ($rc, $is);
	do
	{
		usleep(20_000) if defined $is;
		($rc, $is) = $node->psql('postgres', $query, on_error_stop => 0);
		$is //= '';
	} while ($is ne $expected && time < $end);
	is($is, $expected, $what)
	  or diag($node->psql('postgres', 'SELECT consumer, state, reason, pending, parked FROM idem.consumer_status; SELECT consumer, seq, msg_id, key, state, attempts, due - now(), last_error FROM idem.inbox_parked LIMIT 20'));
	return;
}
sub store
{
	my ($consumer, $id, $payload) = @_;
	return sql("SELECT idem.inbox_store('$consumer', '$id', '" . ($payload // '{}') . "')");
}
sub handler
{
	my ($name, $body, $returns) = @_;
	$returns //= 'void';
	sql("CREATE OR REPLACE FUNCTION $name(m idem.message) RETURNS $returns LANGUAGE plpgsql AS \$f\$ $body \$f\$");
	return;
}

# A role that owns consumers, and a handler that notes what it did, and fails,
# or takes its time, if the message says so.
sub handler_setup
{
sql(<<'S');
CREATE TABLE effect (consumer text, msg_id text, attempt integer, who text, at timestamptz DEFAULT clock_timestamp());
CREATE TABLE trace (what text);
CREATE ROLE app;
GRANT USAGE, CREATE ON SCHEMA public TO app;
GRANT USAGE ON SCHEMA idem TO app;
GRANT ALL ON effect, trace TO app;
GRANT EXECUTE ON FUNCTION idem.consumer_create(text, regproc, text[], interval, integer, interval, interval, integer, text, text, interval, text[], interval) TO app;
CREATE SEQUENCE tries;
GRANT ALL ON tries TO app;
S
handler('h', q(
	BEGIN
		INSERT INTO effect VALUES (m.consumer, m.msg_id, m.attempt, current_user);
		IF m.payload->>'fail' IS NOT NULL AND m.attempt <= (m.payload->>'times')::int THEN
			RAISE EXCEPTION 'no good' USING ERRCODE = m.payload->>'fail';
		END IF;
		PERFORM pg_sleep((m.payload->>'sleep')::float);
		RETURN jsonb_build_object('attempt', m.attempt);
	END), 'jsonb');
	return;
}

1;

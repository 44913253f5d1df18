# Whatever goes wrong between a commit and its acknowledgement: nothing is
# lost, nothing comes that was not committed, order holds, and what comes twice
# was on its way when it happened.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);
use Idem;
use FileCourier;

my $window = 50;
my $node = cluster('faults', {}, "idem.site = 'here'", 'max_worker_processes = 20', 'restart_after_crash = on');
install_courier($node);
sql(file_server('bus', ''));
sql(qq(ALTER SERVER bus OPTIONS (ADD window_messages '$window')));
sql(q(SELECT idem.route_add('t', 'bus')));
if (sql(q(SELECT count(*) FROM pg_settings WHERE name = 'idem.fault')) eq '0')
{
	plan skip_all => 'this build has no fault points (make IDEM_FAULTS=1)';
}

sub fault
{
	my ($setting) = @_;
	$node->append_conf('postgresql.conf', "idem.fault = '$setting'");
	$node->reload;
}
# is there a server again?
sub await_server
{
	my $end = time + 60;
	usleep(50_000) while $node->psql('postgres', 'SELECT 1', on_error_stop => 0) != 0 && time < $end;
}
# log_has($pattern, $from): does the log have it since then?
sub log_has
{
	my ($pattern, $from) = @_;
	return slurp_file($node->logfile, $from) =~ $pattern;
}

my $n = 0;
for my $place (qw(relay-read relay-sent relay-acknowledged relay-recording relay-recorded))
{
	for my $action (qw(error exit kill wait))
	{
		my $what = "$action at $place";
		my $from = -s $node->logfile;
		my $first = $n + 1;
		truncate_file('bus');
		sql(qq(BEGIN; SELECT idem.outbox_enqueue('t', '"rolled back"'::json); ROLLBACK));
		fault("$place:$action");
		$n += 200;
		# The server may crash between the commit and its answer to us.
		$node->psql('postgres', qq(SELECT idem.outbox_enqueue('t', to_json(i), key => (i % 5)::text) FROM generate_series($first, $n) i));

		# It happens, at least once.
		my %trace = (
			error => qr/fault at $place/,
			exit => qr/background worker "idem relay"[^\n]* exited with exit code 1/,
			kill => qr/was terminated by signal 9/,
			wait => qr/waiting at $place/);
		await("$what: it happens", sub { log_has($trace{$action}, $from) });
		if ($action eq 'wait')
		{
			# Caught there, the whole server dies.
			$node->stop('immediate');
			$node->start;
		}
		fault('');
		await_server();
		# It may have struck before the commit, because of what was rolled back.
		sql(qq(SELECT idem.outbox_enqueue('t', to_json(i), key => (i % 5)::text) FROM generate_series($first, $n) i))
			if sql(qq(SELECT count(*) FROM idem.outbox WHERE convert_from(body, 'UTF8') = '$n')) eq '0';
		my %seen;
		await("$what: everything arrives", sub { %seen = (); $seen{$_}++ for bodies('bus'); keys %seen == 200 });
		await_sql("$what: and is written down", q(SELECT unsent_at_most, in_flight FROM idem.relay_status), '0|0');
		# It may have happened several times.
		my $happened = () = slurp_file($node->logfile, $from) =~ /$trace{$action}/g;
		%seen = ();
		$seen{$_}++ for bodies('bus');
		is_deeply([ sort { $a <=> $b } keys %seen ], [ $first .. $n ], "$what: and nothing else");
		my $again = 0;
		$again += $_ - 1 for values %seen;
		cmp_ok($again, '<=', $window * ($happened + 1), "$what: at most a window comes twice each time");
		my (%last, %first);
		my $in_order = 1;
		for my $line (lines('bus'))
		{
			my ($key, $body) = ($line->[2], $line->[4]);
			next if $first{$body}++;
			$in_order = 0 if ($last{$key} // 0) > $body;
			$last{$key} = $body;
		}
		ok($in_order, "$what: in order per key");
	}
}
is(sql('SELECT count(*) FROM idem.dead_letter'), '0', 'nothing was given up');
is(sql('SELECT count(*) FROM idem.relay_parked'), '0', 'nothing stays parked');

$node->stop;
done_testing();

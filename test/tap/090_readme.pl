# Every SQL example in the README runs, in order, and prints what stands there;
# and the README names whatever a user can meet.
use strict;
use warnings;
use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils;
use Test::More;

my $readme = slurp_file('README.md');

# The examples: a block of SQL, and the output that follows it, if any.
my @examples;
while ($readme =~ /^```(\w+)\n(.*?)^```$/msg)
{
	my ($language, $text) = ($1, $2);
	if ($language eq 'sql')
	{
		push @examples, { sql => $text };
	}
	elsif ($language eq 'text')
	{
		$examples[-1]{output} = $text;
	}
}
cmp_ok(scalar(grep { defined $_->{output} } @examples), '>', 10, 'the README has examples');

my $node = PostgreSQL::Test::Cluster->new('readme');
$node->init;
$node->append_conf('postgresql.conf', "shared_preload_libraries = 'idem'");
$node->start;

my $script = join('', map { "$examples[$_]{sql}\n\\echo example $_ ends\n" } 0 .. $#examples);
my ($rc, $stdout, $stderr) = $node->psql('postgres', $script,
	on_error_stop => 1, extra_params => ['-P', 'format=aligned', '-P', 'tuples_only=off']);
is($rc, 0, 'all examples run') or diag($stderr);
# Whether there is anything to notice may depend on how far the workers are.
is(join("\n", grep { !/NOTICE:|HINT:/ } split /\n/, $stderr), '', 'without a warning');

# Spaces at the end of a line and empty lines say nothing.
sub plain
{
	my ($text) = @_;
	$text =~ s/[ \t]+$//mg;
	$text =~ s/^\n+//mg;
	$text =~ s/\n+\z//;
	return $text;
}

my @printed = split(/^example \d+ ends\n?/m, $stdout);
for my $i (0 .. $#examples)
{
	next unless defined $examples[$i]{output};
	my ($first) = grep { /\S/ } split(/\n/, $examples[$i]{sql});
	is(plain($printed[$i] // ''), plain($examples[$i]{output}), "prints what it says: $first");
}

# Nothing that a user can meet is missing.
my %internal = map { $_ => 1 } qw(consumer_changed consumer_work handler_workers handler_workers_rows inbox_notice stat_rows worker_status
	relay_check_server relay_notice relay_stat relay_whereabouts relay_worker server_validator);
for my $name (split /\n/, $node->safe_psql('postgres', q{
	SELECT DISTINCT proname FROM pg_proc WHERE pronamespace = 'idem'::regnamespace ORDER BY 1}))
{
	like($readme, qr/`$name\(/, "describes function $name") unless $internal{$name};
}
like($readme, qr/`$_`/, "describes setting $_")
  for split /\n/, $node->safe_psql('postgres', q{SELECT name FROM pg_settings WHERE name LIKE 'idem.%' AND name <> 'idem.fault' ORDER BY 1});
like($readme, qr/`$_`/, "describes view $_")
  for split /\n/, $node->safe_psql('postgres', q{SELECT viewname FROM pg_views WHERE schemaname = 'idem' ORDER BY 1});
for my $label (split /\n/, $node->safe_psql('postgres', q{
	SELECT DISTINCT enumlabel FROM pg_enum e JOIN pg_type t ON t.oid = e.enumtypid
	WHERE typnamespace = 'idem'::regnamespace ORDER BY 1}))
{
	like($readme, qr/`$label`/, "describes status $label");
}

$node->stop;
done_testing();

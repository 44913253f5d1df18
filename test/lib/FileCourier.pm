# A relay with a courier that writes to a file and fails on demand, for tests.
package FileCourier;
use strict;
use warnings;
use Cwd 'abs_path';
use Exporter 'import';
use File::Basename;
use File::Copy;
use PostgreSQL::Test::Utils;
use Test::More;
use Time::HiRes qw(usleep time);

our @EXPORT = qw(install_courier sql lines bodies await await_bodies await_sql set_mode truncate_file file_server courier_program);

my ($node, $dir, $program);

# install_courier($node): put idem-courier-file where the server looks for it
sub install_courier
{
	($node) = @_;
	my ($postgres) = grep { -x } map { "$_/postgres" } split /:/, $ENV{PATH};
	$program = dirname($postgres) . '/idem-courier-file';
	copy(dirname(abs_path($0)) . '/../courier/idem-courier-file', $program) or die $!;
	chmod 0755, $program;
	$dir //= PostgreSQL::Test::Utils::tempdir;
}

sub courier_program { return $program }

# file_server($name, $options): CREATE SERVER, writing to a file of its own
sub file_server
{
	my ($name, $options) = @_;
	return qq(CREATE SERVER $name FOREIGN DATA WRAPPER idem OPTIONS (url 'file://x', "file.path" '$dir/$name', "file.mode" '$dir/$name.mode', retry_min '20ms', retry_max '200ms', max_attempts '5')$options);
}

sub sql { return $node->safe_psql('postgres', $_[0]) }

# lines($server): what has arrived, as [id, destination, key, attempt, body]
sub lines
{
	open(my $f, '<', "$dir/$_[0]") or return ();
	my @lines = map { chomp; [ split /\t/, $_, 5 ] } <$f>;
	return @lines;
}
sub bodies { return map { $_->[4] } lines($_[0]) }

# await($what, $condition): poll, for a while at most
sub await
{
	my ($what, $condition) = @_;
	my $end = time + ($PostgreSQL::Test::Utils::timeout_default // 180) / 6;
	my $result;
	usleep(20_000) while !($result = $condition->()) && time < $end;
	ok($result, $what) or diag(sql('SELECT * FROM idem.relay_status'));
	return $result;
}
sub await_bodies
{
	my ($what, $server, @expected) = @_;
	await($what, sub { "@{[bodies($server)]}" eq "@expected" });
	is_deeply([ bodies($server) ], \@expected, "$what: exactly these");
}
sub await_sql
{
	my ($what, $query, $expected) = @_;
	await($what, sub { sql($query) eq $expected }) or diag(sql($query));
}
sub set_mode
{
	my ($server, $mode) = @_;
	open(my $f, '>', "$dir/$server.mode") or die $!;
	print $f "$mode\n";
	close $f;
}
sub truncate_file { truncate("$dir/$_[0]", 0) if -e "$dir/$_[0]" }

1;

# shellcheck shell=bash
# What the parts of the bench share.

raw=$WORK/raw          # one measurement per line, for report
scripts=$WORK/scripts  # of pgbench

CLIENTS=8
BATCH=100
DEFINES=()             # variables of the scripts

# measured WHAT WORKLOAD CONTESTANT VALUE: by the part under way
measured() { (IFS=$'\t' && echo "$part"$'\t'"$*") >>"$raw"; }
sql() { psql -XqAt -v ON_ERROR_STOP=1 "$@"; }

# prepare_cluster NAME SETTING...: nothing may go on in the background that
# falls on one contestant by chance.  Text compares fastest in the locale C,
# which is to the advantage of the others.
prepare_cluster() {
	cluster_start "$@" "autovacuum = off" "idem.maintenance = off" \
		"checkpoint_timeout = '1d'" "max_wal_size = '32GB'" "min_wal_size = '2GB'" \
		"shared_buffers = '512MB'"
	createdb -T template0 -l "${BENCH_LOCALE:-C}" bench
	export PGDATABASE=bench
	sql -c "CREATE EXTENSION idem"
}

# bench_run WORKLOAD CONTESTANT OPTION...: run pgbench; its output is $WORK/pgbench
bench_run() {
	local script=$scripts/$1.$2
	shift 2
	if ! guard "$WORK/pgbench" pgbench -n -M prepared "${DEFINES[@]}" -f "$script" "$@" ||
		! grep -q '^number of failed transactions: 0 ' "$WORK/pgbench"; then
		cat "$WORK/pgbench" >&2
		return 1
	fi
}

# What the last pgbench said.
bench_tps() { sed -n 's/^tps = \([0-9.]*\) .*/\1/p' "$WORK/pgbench"; }
bench_count() { sed -n 's/^number of transactions actually processed: \([0-9]*\).*/\1/p' "$WORK/pgbench"; }

# reversed WORD...: the same from the end
reversed() { printf '%s\n' "$@" | tac | paste -sd ' '; }

#
# Counting instructions.  The count of a backend that has run a script a few
# times is subtracted from that of another that has run it many times.  This
# leaves out connecting, filling caches and planning.
#

# callgrind_start CLUSTER: start it again, under callgrind
callgrind_start() {
	cluster_stop "$1"
	mkdir -p "$WORK/cg"
	valgrind --tool=callgrind --trace-children=yes --toggle-collect=PostgresMain \
		--callgrind-out-file="$WORK/cg/%p" postgres -D "$WORK/$1" \
		</dev/null >"$WORK/$1.callgrind.log" 2>&1 &
	callgrind_pid=$!
	until pg_isready -q; do
		kill -0 $callgrind_pid 2>/dev/null || { tail "$WORK/$1.callgrind.log" >&2; return 1; }
		sleep 0.2
	done
	sleep 5 # the background processes are starting
}

children() { xargs <"/proc/$callgrind_pid/task/$callgrind_pid/children"; }

# backend_cost WORKLOAD CONTESTANT TIMES: sets cost to the instructions of the
# backend that ran it, and leaves callgrind's file in $WORK/callgrind.out
backend_cost() {
	local before file n
	before=$(children)
	rm -f "$WORK"/cg/*
	bench_run "$1" "$2" -c 1 -t "$3"
	# The file is there when the backend has ended.
	while grep -qvwE "${before// /|}" <<<"$(children | tr ' ' '\n' | grep .)"; do
		kill -0 $callgrind_pid 2>/dev/null || die "the server under callgrind has ended"
		sleep 0.1
	done
	# pgbench opens another connection before, but does nothing there.
	cost=0
	for file in "$WORK"/cg/*; do
		n=$(sed -n 's/^totals: //p' "$file")
		if [ "$n" -gt $cost ]; then
			cost=$n
			cp "$file" "$WORK/callgrind.out"
		fi
	done
}

# profile TITLE CLAIMS: the top functions of the last run
profile() {
	[ -n "${BENCH_PROFILE:-}" ] || return 0
	local inclusive
	for inclusive in yes no; do
		echo "== $1: instructions per claim, inclusive: $inclusive"
		callgrind_annotate --inclusive=$inclusive --threshold=100 "$WORK/callgrind.out" |
			CLAIMS=$2 perl -ne '
				next unless s{^ *([\d,]+) \([\d. ]+%\) +}{};
				my $cost = $1 =~ tr/,//dr / $ENV{CLAIMS};
				s{\[?[^\s:]*/}{}g; s{^\?\?\?:}{}; s{ postgres\]}{}; s{\]$}{};
				printf "%8.0f  %s", $cost, $_ if !$seen{$_}++ && $n++ < 70'
		echo
	done >&8
}

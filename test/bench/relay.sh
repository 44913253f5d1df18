# shellcheck shell=bash
# The relay: how fast it reads, how soon it is awake, what a held snapshot does.

MESSAGES=1000000   # of a backlog
BODY=300           # bytes of each

# relay_cluster NAME SETTING...: with server bin, which discards
relay_cluster() {
	local name=$1
	shift
	prepare_cluster "$name" "max_worker_processes = 32" "$@"
	sql -f "$SRC/test/bench/outbox.sql" >/dev/null
}

#
# Backlog: what was enqueued while nobody sent is read and handed to a courier
# that throws it away.
#
part_relay_backlog() {
	local i rate
	relay_cluster backlog
	sql -c "ALTER SERVER bin OPTIONS (ADD window_messages '$BACKLOG_WINDOW')"
	for ((i = 1; i <= BENCH_PAIRS; i++)); do
		sql -c "CALL backlog('bin', $MESSAGES, $BODY)" -c CHECKPOINT
		rate=$(sql -c "CALL drain('bin', $MESSAGES, NULL)")
		measured relay_backlog drain idem "$rate"
	done
	cluster_stop backlog
}
BACKLOG_WINDOW=8000

# percentile P: of the numbers, one per line, on standard input
percentile() { sort -n | awk -v p="$1" '{ v[NR] = $1 } END { i = int(NR * p / 100 + 0.999999); print v[i < 1 ? 1 : i] }'; }

#
# Latency on an idle system.  Awake: from before the commit, which does not wait
# for the disk here, until the relay takes a tick, which is somewhat after it
# woke up.  Broker: from before an enqueue that does wait for the disk until a
# program that we send to by HTTP has the message.
#
part_relay_latency() {
	local dir=$WORK/sink pid pair n=$((BENCH_SECONDS * 20))
	mkdir -p "$dir"
	mkfifo "$dir/in"
	"$SRC/test/bench/sink.pl" "$dir" <"$dir/in" &
	pid=$!
	exec 7>"$dir/in"
	wait_for_file "$dir/port" $pid || die "the sink does not run"
	relay_cluster latency
	only_server web "http://127.0.0.1:$(cat "$dir/port")" "" hook
	sql -c "CALL trickle(20, '{}')" >/dev/null # warm up
	for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
		PGOPTIONS="-c synchronous_commit=off" sql -c "CALL trickle($n, '{}')" | tr -d '{}' | tr , '\n' >"$WORK/awake"
		: >"$dir/latency"
		sql -c "CALL trickle($n, '{}')" -c "CALL drained('web', $(outbox_enqueued))" >/dev/null
		[ "$(wc -l <"$dir/latency")" -eq $n ] || die "the sink has not got what was sent"
		measured relay_latency awake50 idem "$(percentile 50 <"$WORK/awake")"
		measured relay_latency awake99 idem "$(percentile 99 <"$WORK/awake")"
		measured relay_latency broker50 idem "$(percentile 50 <"$dir/latency")"
		measured relay_latency broker99 idem "$(percentile 99 <"$dir/latency")"
	done
	cluster_stop latency
	exec 7>&-
	wait $pid || true
}

# only_server NAME URL OPTIONS DESTINATION: in place of those that are there
only_server() {
	sql -c "SELECT idem.route_drop(id, true) FROM idem.routes" -c "DROP SERVER bin" \
		-c "CREATE SERVER $1 FOREIGN DATA WRAPPER idem OPTIONS (url '$2'$3)" \
		-c "SELECT idem.route_add('orders.**', '$1', '$4')" >/dev/null
}

#
# What it costs those who enqueue that there is a relay to be woken: one that has
# a server, reads what they write, and finds that nobody wants it; against none.
#
part_relay_wake() {
	local pair turn turns=$(((BENCH_SECONDS + 1) / 2)) commit c list
	local -A tps
	outbox_cluster wake
	sql -c "SELECT idem.route_drop(id, true) FROM idem.routes" \
		-c "SELECT idem.route_add('nothing.**', 'bin')" >/dev/null
	bench_run one idem -c $CLIENTS -j 2 -T 2 # warm up
	for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
		for commit in on off; do
			tps=()
			for ((turn = 0; turn < turns; turn++)); do
				list="idem off"
				if [ $(((pair + turn) % 2)) -eq 0 ]; then list="off idem"; fi
				for c in $list; do
					relay_switch "$c"
					PGOPTIONS="-c synchronous_commit=$commit" bench_run one idem -c $CLIENTS -j 2 -T 2
					tps[$c]="${tps[$c]:-0} + $(bench_tps)"
				done
			done
			for c in idem off; do
				measured relay_wake $commit $c "$(awk "BEGIN { print (${tps[$c]}) / $turns }")"
			done
		done
	done
	cluster_stop wake
}

# relay_switch idem|off: have the relay of the database run, up to date, or not
relay_switch() {
	local setting=on running=true
	if [ "$1" = off ]; then setting=off running=false; fi
	sql -c "ALTER SYSTEM SET idem.relay = $setting" -c "SELECT pg_reload_conf()" >/dev/null
	sql -c "CALL relay_is($running)"
}

#
# A snapshot that somebody holds, at 3,000 messages per second.  What can be
# drained is measured with a backlog of 200,000, before it and at its end.
#
HELD_MESSAGES=200000
HELD_RATE=3000

part_relay_snapshot() {
	local i load holder other count per grown
	outbox_cluster snapshot
	sql -c "ALTER SYSTEM SET autovacuum = on" -c "ALTER SYSTEM SET autovacuum_naptime = '5s'" \
		-c "SELECT pg_reload_conf()" >/dev/null
	bench_run one idem -c $CLIENTS -j 2 -T 2 # warm up
	bench_run one idem -c $CLIENTS -j 2 -R $HELD_RATE -T $((BENCH_HOLD + 60)) &
	load=$!
	sleep 5
	held_drains before
	psql -XqAt -c "BEGIN ISOLATION LEVEL REPEATABLE READ" -c "SELECT 1" -c "SELECT pg_sleep(100000)" >/dev/null 2>&1 &
	holder=$!
	other=$(sql -c "SELECT other_bytes()")
	count=$(outbox_enqueued)
	per=$(sql -c "SELECT log_bytes()")
	sleep $((BENCH_HOLD > 20 ? BENCH_HOLD - 20 : 0))
	grown=$(($(sql -c "SELECT other_bytes()") - other))
	measured relay_growth bytes idem "$(awk "BEGIN { print $grown / ($(outbox_enqueued) - $count) / $per }")"
	held_drains idem
	kill $holder
	wait $holder || true
	kill $load
	wait $load || true
	cluster_stop snapshot
}

held_drains() {
	local i
	for ((i = 1; i <= 5; i++)); do
		sql -c "CALL backlog('bin', $HELD_MESSAGES, $BODY)"
		measured relay_held drain "$1" "$(sql -c "CALL drain('bin', $HELD_MESSAGES, NULL)")"
	done
}

#
# Many servers: what an enqueue costs in a session, and how long it takes when
# the machine is not busy.  Every server has its own messages, and looks at all.
#
part_relay_servers() {
	local n pair few
	outbox_cluster servers_cg "synchronous_commit = off" "idem.relay = off"
	if command -v valgrind >/dev/null; then
		callgrind_start servers_cg
		for n in 1 4 16; do
			more_servers $n
			backend_cost one idem 300 # warm up
			backend_cost one idem 300
			few=$cost
			backend_cost one idem 1300
			measured relay_servers_instructions enqueue $n $(((cost - few) / 1000))
		done
	else
		measured skip relay_servers_instructions "valgrind is not installed"
	fi
	cluster_stop servers_cg
	outbox_cluster servers
	for n in 1 4 16; do
		more_servers $n
		bench_run one idem -c $CLIENTS -j 2 -T 1 # warm up
		for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
			bench_run one idem -c $CLIENTS -j 2 -T 2 -R $HELD_RATE
			measured relay_servers_latency enqueue $n "$(awk "BEGIN { print 1000 * ($(bench_latency)) }")"
		done
	done
	cluster_stop servers
}

# more_servers N: there are at least so many servers
more_servers() {
	local i
	for ((i = 2; i <= $1; i++)); do
		sql -c "DO \$\$ BEGIN IF NOT EXISTS (SELECT FROM pg_foreign_server WHERE srvname = 'bin$i') THEN
			CREATE SERVER bin$i FOREIGN DATA WRAPPER idem OPTIONS (url 'discard://');
			PERFORM idem.route_add('orders$i.**', 'bin$i'); END IF; END \$\$"
	done
}

# What the last pgbench with a rate took for a transaction, without the wait for
# its time, in milliseconds.
bench_latency() {
	sed -n 's/^latency average = \([0-9.]*\) ms/\1/p; s/^rate limit schedule lag: avg \([0-9.]*\) .*/- \1/p' "$WORK/pgbench" | paste -sd ' '
}

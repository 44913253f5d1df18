# shellcheck shell=bash
# Consumers with handlers, against a job queue for PostgreSQL; see work.sql.
#
#   idem       idem.inbox_store(), and a handler in PL/pgSQL
#   graphile   graphile_worker.add_jobs(), and processes of graphile-worker, each
#              of which does 10 jobs at a time by calling a function in PL/pgSQL
#   batches    the same, but they fetch 500 jobs at once, and complete them together
#
# What either does for a message is to insert a row.  Nobody but those who store
# waits for the disk.

GRAPHILE_JOBS=10    # at a time, of each of its processes
GRAPHILE_BATCH=500

# install_graphile: into a cache folder; what is in there goes on as file 5
install_graphile() {
	local cache=${IDEM_CACHE:-$HOME/.cache/idem}/npm
	command -v npm >/dev/null || return 0
	if [ ! -d "$cache/node_modules/graphile-worker" ]; then
		say "bench: installing graphile-worker"
		mkdir -p "$cache"
		npm install --no-audit --no-fund --prefix "$cache" graphile-worker@0.17 </dev/null >"$cache/log" 2>&1 ||
			{ say "bench: graphile-worker cannot be had, see $cache/log; it does not take part"; return 0; }
	fi
	tar -C "$cache" -cf "$cache/packed.tar" node_modules
	exec 5<"$cache/packed.tar"
}

# work_contestants: graphile-worker takes part if it could be installed
work_contestants() {
	if [ -d "$WORK/npm/node_modules/graphile-worker" ]; then echo idem graphile batches; else echo idem; fi
}

work_cluster() {
	prepare_cluster "$@" "max_worker_processes = 32"
	sql -f "$SRC/test/bench/work.sql"
	# the workers are there when they have seen the extension
	sql -c "SELECT idem.consumer_create('bench', handler => 'handle', topics => ARRAY['work.*'], concurrency => 2)" >/dev/null
	sql -c "CALL handlers_run(2)"
}

# work_warm_up CONTESTANT: sets rate to a first idea of how fast it is
work_warm_up() {
	rate=$(sql -c "CALL stored_and_processed('$1', 2000, NULL)")
}

# handlers N: have so many processes run handlers
handlers() {
	sql -c "ALTER SYSTEM SET idem.handler_workers = $1" -c "SELECT pg_reload_conf()" >/dev/null
	sql -c "CALL handlers_run($1)"
}

#
# Storing and processing at the same time.
#
part_work_throughput() {
	local pair c list workers n rate
	local -A fast=()
	mkdir -p "$WORK/npm"
	if [ -e /dev/fd/5 ]; then tar -C "$WORK/npm" -xf - <&5; fi
	work_cluster work
	if [[ $(work_contestants) = *graphile* ]]; then
		prepare_graphile
	else
		measured skip graphile-worker "it is not installed, or npm is not there"
	fi
	for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
		say "repetition $pair of $BENCH_PAIRS"
		for workers in 1 2; do
			list=$(work_contestants)
			if [ $((pair % 2)) -eq 0 ]; then list=$(reversed $list); fi
			for c in $list; do
				"work_start_$c" $workers
				work_warm_up "$c"
				n=${fast[$c$workers]:=$(awk "BEGIN { print int($rate * $BENCH_SECONDS) }")}
				sql -c CHECKPOINT
				rate=$(sql -c "CALL stored_and_processed('$c', $n, NULL)")
				measured work_throughput $workers "$c" "$rate"
				"work_stop_$c"
			done
		done
	done
	cluster_stop work
}

# Its schema and a function that stores as ours does.
prepare_graphile() {
	(cd "$WORK" && NODE_PATH=$WORK/npm/node_modules \
		guard "$WORK/graphile.log" "$WORK/npm/node_modules/.bin/graphile-worker" --schema-only -c "socket:$PGHOST?db=$PGDATABASE") ||
		{ cat "$WORK/graphile.log" >&2; return 1; }
	sql <<-'SQL'
		CREATE FUNCTION store_graphile(many integer) RETURNS bigint LANGUAGE sql VOLATILE AS $$
			SELECT count(*) FROM graphile_worker.add_jobs(ARRAY(
				SELECT ('bench', json_build_object('n', nextval('numbers')), NULL, NULL, NULL, NULL, NULL, NULL)::graphile_worker.job_spec
				FROM generate_series(1, many)))
		$$;
		CREATE FUNCTION store_batches(many integer) RETURNS bigint LANGUAGE sql VOLATILE RETURN store_graphile(many);
	SQL
}

work_start_idem() { handlers "$1"; }
work_stop_idem() { :; }

work_start_graphile() { graphile_start "$1" 1; }
work_stop_graphile() { graphile_stop; }
work_start_batches() { graphile_start "$1" $GRAPHILE_BATCH; }
work_stop_batches() { graphile_stop; }

# graphile_start PROCESSES BATCH
graphile_start() {
	local i deadline=$((SECONDS + 60))
	graphile_pids=()
	for ((i = 1; i <= $1; i++)); do
		: >"$WORK/graphile.$i.log"
		NODE_PATH=$WORK/npm/node_modules PGOPTIONS="-c synchronous_commit=off" \
			node "$SRC/test/bench/graphile.js" $GRAPHILE_JOBS "$2" >"$WORK/graphile.$i.log" 2>&1 </dev/null &
		graphile_pids+=($!)
		until grep -q running "$WORK/graphile.$i.log"; do
			if [ $SECONDS -gt $deadline ] || ! kill -0 $! 2>/dev/null; then
				cat "$WORK/graphile.$i.log" >&2
				die "graphile-worker does not run"
			fi
			sleep 0.1
		done
	done
}

graphile_stop() {
	kill "${graphile_pids[@]}"
	wait "${graphile_pids[@]}" || true
}

#
# How soon a message is processed that finds everything idle.
#
part_work_latency() {
	local pair n=$((BENCH_SECONDS * 20))
	work_cluster work_latency "track_commit_timestamp = on"
	sql -c "CALL enqueue_slowly(50)" # warm up
	for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
		sql -c "CALL enqueue_slowly($n)"
		sql -c "SELECT (extract(epoch FROM pg_xact_commit_timestamp(xmin)) - began) * 1e6 FROM effect" >"$WORK/latency"
		measured work_latency p50 idem "$(percentile 50 <"$WORK/latency")"
		measured work_latency p99 idem "$(percentile 99 <"$WORK/latency")"
	done
	cluster_stop work_latency
}

#
# A snapshot that somebody holds, while messages are stored and processed one by
# one.  What can be drained is measured with a backlog, before it and at its end.
#
WORK_BACKLOG=50000
WORK_RATE=1000

part_work_snapshot() {
	local load holder
	work_cluster work_snapshot
	sql -c "ALTER SYSTEM SET autovacuum = on" -c "ALTER SYSTEM SET autovacuum_naptime = '5s'" \
		-c "SELECT pg_reload_conf()" >/dev/null
	# While 'bench' has no handler, this one keeps the processes there.
	sql -c "SELECT idem.consumer_create('other', handler => 'handle')" >/dev/null
	mkdir -p "$scripts"
	echo "SELECT store_idem(1);" >"$scripts/store.idem"
	PGOPTIONS="-c synchronous_commit=off" pgbench -n -M prepared -f "$scripts/store.idem" \
		-c 4 -j 1 -R $WORK_RATE -T 100000 >"$WORK/load.log" 2>&1 &
	load=$!
	sleep 5
	work_drains before
	psql -XqAt -c "BEGIN ISOLATION LEVEL REPEATABLE READ" -c "SELECT 1" -c "SELECT pg_sleep(100000)" >/dev/null 2>&1 &
	holder=$!
	sleep $((BENCH_HOLD > 20 ? BENCH_HOLD - 20 : BENCH_HOLD))
	work_drains idem
	kill $holder $load
	wait $holder $load || true
	cluster_stop work_snapshot
}

work_drains() {
	local i rate
	for ((i = 1; i <= 5; i++)); do
		rate=$(sql -c "CALL backlog_drained($WORK_BACKLOG, NULL)")
		measured work_held drain "$1" "$rate"
	done
}

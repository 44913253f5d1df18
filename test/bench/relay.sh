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

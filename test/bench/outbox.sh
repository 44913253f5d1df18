# shellcheck shell=bash
# Enqueueing against what people write without idem; see outbox.sql.
#
#   idem   idem.outbox_enqueue(), idem.outbox_enqueue_batch(), with the relay
#          running and a courier that discards
#   bare   INSERT into a table with a primary key
#   pgq    pgq.insert_event(); nobody consumes

OUTBOX_PAYLOAD='{"order": 4711, "customer": "9f0c3a52-7d1e", "items": [{"sku": "A-1001", "count": 2, "price": 19.95}, {"sku": "B-2002", "count": 1, "price": 5.00}], "currency": "EUR", "note": "leave at the door, please"}'

# outbox_contestants: PgQ takes part if its package is there
outbox_contestants() {
	if [ -e "$(pg_config --sharedir)/extension/pgq.control" ]; then
		echo idem bare pgq
	else
		echo idem bare
	fi
}

outbox_cluster() {
	relay_cluster "$@" "idem.outbox_retention = '1s'"
	mkdir -p "$scripts"
	if [[ $(outbox_contestants) = *pgq* ]]; then
		sql -c "CREATE EXTENSION pgq" -c "SELECT pgq.create_queue('bench')" >/dev/null
	else
		measured skip pgq "package postgresql-$(pg_config --version | sed 's/^[A-Za-z]* \([0-9]*\).*/\1/')-pgq3 is not installed"
	fi
	DEFINES=(-D topic=orders.created -D payload="$OUTBOX_PAYLOAD"
		-D payloads="$(many "$OUTBOX_PAYLOAD")" -D keys="{$(seq -s , 1 $BATCH)}")
	cat >"$scripts/one.idem" <<-'SQL'
		\set key random(1, 100000)
		SELECT idem.outbox_enqueue(:topic, :payload::json, :key);
	SQL
	cat >"$scripts/one.bare" <<-'SQL'
		\set key random(1, 100000)
		INSERT INTO bare_outbox (topic, key, payload, enqueued_at) VALUES (:topic, :key, :payload, now());
	SQL
	cat >"$scripts/one.pgq" <<-'SQL'
		\set key random(1, 100000)
		SELECT pgq.insert_event('bench', :topic, :payload, :key, NULL, NULL, NULL);
	SQL
	cat >"$scripts/batch.idem" <<-'SQL'
		SELECT cardinality(idem.outbox_enqueue_batch(:topic, :payloads::json[], :keys::text[]));
	SQL
	cat >"$scripts/batch.bare" <<-'SQL'
		INSERT INTO bare_outbox (topic, key, payload, enqueued_at) SELECT :topic, k, p, now() FROM unnest(:keys::text[], :payloads::jsonb[]) AS u (k, p);
	SQL
	cat >"$scripts/batch.pgq" <<-'SQL'
		SELECT count(pgq.insert_event('bench', :topic, p, k, NULL, NULL, NULL)) FROM unnest(:keys::text[], :payloads::text[]) AS u (k, p);
	SQL
}

# many JSON: an array of so many as a batch has
many() {
	JSON=$1 N=$BATCH perl -e '
		my $s = $ENV{JSON} =~ s/(["\\])/\\$1/gr;
		print "{", join(",", ("\"$s\"") x $ENV{N}), "}"'
}

# messages WORKLOAD: how many a script enqueues
messages() { if [ "$1" = batch ]; then echo "$BATCH"; else echo 1; fi; }

part_outbox_instructions() {
	local workload c few many n times=3000
	if ! command -v valgrind >/dev/null; then
		measured skip outbox_instructions "valgrind is not installed"
		return
	fi
	outbox_cluster outbox_cg "synchronous_commit = off" "idem.relay = off"
	callgrind_start outbox_cg
	for workload in one batch; do
		n=$((times / $(messages $workload)))
		for c in $(outbox_contestants); do
			backend_cost $workload "$c" $((n / 3))   # warm up
			backend_cost $workload "$c" $((n / 3))
			few=$cost
			backend_cost $workload "$c" $((n / 3 + n))
			many=$cost
			profile "outbox $workload, $c" $((times / 3 + times))
			measured outbox_instructions $workload "$c" $(((many - few) / times))
		done
	done
	cluster_stop outbox_cg
}

#
# Throughput, with the relay running.  After its turn idem waits until the
# relay has sent everything, so that the others do not pay for it; how much
# that was is told.
#
part_outbox_throughput() {
	local pair workload commit c
	outbox_cluster outbox
	for c in $(outbox_contestants); do # warm up
		bench_run one "$c" -c $CLIENTS -j 2 -T 2
		bench_run batch "$c" -c $CLIENTS -j 2 -T 1
	done
	for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
		say "repetition $pair of $BENCH_PAIRS"
		for workload in one batch; do
			for commit in on off; do outbox_repetition $workload $commit "$pair"; done
		done
	done
	cluster_stop outbox
}

# outbox_empty: the state from which a repetition starts
outbox_empty() {
	sql -c "TRUNCATE bare_outbox"
	if [[ $(outbox_contestants) = *pgq* ]]; then
		sql -c "SELECT pgq.drop_queue('bench')" -c "SELECT pgq.create_queue('bench')" >/dev/null
	fi
	sql -c CHECKPOINT
}

outbox_enqueued() { sql -c "SELECT pg_sequence_last_value('idem.outbox_seq')"; }

# outbox_repetition WORKLOAD COMMIT NUMBER
outbox_repetition() {
	local c turn turns=$(((BENCH_SECONDS + 1) / 2)) order list before left
	local -A tps=()
	order=$(outbox_contestants)
	outbox_empty
	for ((turn = 0; turn < turns; turn++)); do
		list=$order
		if [ $((($3 + turn) % 2)) -eq 0 ]; then list=$(reversed $order); fi
		for c in $list; do
			before=$(outbox_enqueued)
			PGOPTIONS="-c synchronous_commit=$2" bench_run "$1" "$c" -c $CLIENTS -j 2 -T 2
			tps[$c]="${tps[$c]:-0} + $(bench_tps)"
			[ "$c" = idem ] || continue
			left=$(sql -c "SELECT unsent_at_most FROM idem.relay_status")
			measured outbox_behind "$1-$2" idem "$(awk "BEGIN { print $left / ($(bench_tps) * $(messages "$1")) * 1000 }")"
			[ $(($(outbox_enqueued) - before)) -eq $(($(bench_count) * $(messages "$1"))) ] ||
				die "$1, idem: messages lost"
			sql -c "CALL drained('bin', $(outbox_enqueued))"
		done
	done
	for c in $order; do
		measured outbox_throughput "$1-$2" "$c" "$(awk "BEGIN { print (${tps[$c]}) / $turns * $(messages "$1") }")"
	done
}

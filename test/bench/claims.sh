# shellcheck shell=bash
# Claims against what people write without idem; see claims.sql.
#
#   idem       idem.inbox_try_claim(), idem.inbox_claim_batch()
#   bare       INSERT ... ON CONFLICT DO NOTHING
#   by_hand    a function in PL/pgSQL

CONTESTANTS="idem bare by_hand"
ROWS=100000            # in a table before a measurement of throughput,
ROWS_CALLGRIND=10000   # of instructions,
ROWS_BYTES=1000000     # and at the end of one of bytes

table_of() { if [ "$1" = idem ]; then echo idem.inbox_claim; else echo "$1"; fi; }

claims_cluster() {
	DEFINES=(-D consumer=billing)
	prepare_cluster "$@" "idem.relay = off"
	sql -f "$SRC/test/bench/claims.sql"
}

# fill KIND N CONTESTANT...: the state from which a measurement starts.  All
# pages are newer than the last checkpoint, so that nobody writes images of them.
fill() {
	local kind=$1 n=$2 c
	shift 2
	sql -c CHECKPOINT
	for c in "$@"; do
		sql -c "CALL fill('$c', '$kind', $n)" -c "VACUUM ANALYZE $(table_of "$c")"
	done
}

# write_scripts N: one for each workload and contestant; N ids are in the tables
write_scripts() {
	local c id=":a::text || '-0000-4000-8000-' || :b::text"
	mkdir -p "$scripts"
	for c in $CONTESTANTS; do
		{
			echo "\\set a random(10000000, 99999998)"
			echo "\\set b random(200000000000, 999999999998)"
			claim "$c" "$id"
		} >"$scripts/fresh.$c"
		{
			echo "\\set i random(1, $1)"
			echo "\\set a 10000000 + :i * :i * 48271 % 89999999"
			echo "\\set b 100000000000 + :i"
			claim "$c" "$id"
		} >"$scripts/duplicate.$c"
		cat "$scripts/fresh.$c" "$scripts/duplicate.$c" >"$scripts/half.$c"
		batch "$c" "ARRAY(SELECT fresh_id() FROM generate_series(1, $BATCH))" >"$scripts/batch.$c"
	done
}

# claim CONTESTANT ID: the statement that claims one id
claim() {
	case $1 in
		idem) echo "SELECT idem.inbox_try_claim(:consumer, $2);" ;;
		bare) echo "INSERT INTO bare (consumer, msg_id) VALUES (:consumer, $2) ON CONFLICT DO NOTHING;" ;;
		by_hand) echo "SELECT claim_by_hand(:consumer, $2);" ;;
	esac
}

# batch CONTESTANT IDS: the statement that claims an array of ids; all return
# equally little to the client
batch() {
	case $1 in
		idem) echo "SELECT count(*) FROM idem.inbox_claim_batch(:consumer, $2);" ;;
		bare) echo "WITH claimed AS (INSERT INTO bare SELECT :consumer, unnest($2)" \
			"ON CONFLICT DO NOTHING RETURNING msg_id) SELECT count(*) FROM claimed;" ;;
	esac
}

# contestants WORKLOAD: those who take part
contestants() { if [ "$1" = batch ]; then echo idem bare; else echo "$CONTESTANTS"; fi; }

# claims WORKLOAD: how many a script makes
claims() { case $1 in batch) echo "$BATCH" ;; half) echo 2 ;; *) echo 1 ;; esac; }

# fresh WORKLOAD: how many of these are not duplicates
fresh() { if [ "$1" = batch ]; then echo "$BATCH"; else echo 1; fi; }

#
# Instructions.  The count of a backend that has run a script a few times is
# subtracted from that of another that has run it many times.  This leaves out
# connecting, filling caches and planning.
#
part_claims_instructions() {
	local workload c few many n times=3000
	if ! command -v valgrind >/dev/null; then
		measured skip claims_instructions "valgrind is not installed"
		return
	fi
	claims_cluster callgrind "synchronous_commit = off"
	write_scripts $ROWS_CALLGRIND
	fill uuid $ROWS_CALLGRIND $CONTESTANTS
	callgrind_start callgrind
	for workload in fresh duplicate batch; do
		n=$((times / $(claims $workload)))
		for c in $(contestants $workload); do
			backend_cost $workload "$c" $((n / 3))   # warm up
			backend_cost $workload "$c" $((n / 3))
			few=$cost
			backend_cost $workload "$c" $((n / 3 + n))
			many=$cost
			profile "$workload, $c" $((times / 3 + times))
			measured claims_instructions $workload "$c" $(((many - few) / times))
		done
	done
	cluster_stop callgrind
}

#
# Bytes
#
part_claims_bytes() {
	local kind c
	claims_cluster bytes
	for kind in uuid text; do
		for c in idem bare; do
			fill $kind $ROWS_BYTES "$c"
			measured claims_bytes $kind "$c" "$(sql -c "
				SELECT pg_total_relation_size('$(table_of "$c")')::float8 / $ROWS_BYTES")"
		done
	done
	cluster_stop bytes
}

#
# Throughput.  In a repetition the contestants run for short times in turn, with
# tables that were filled anew, until each has had its seconds.  The order is
# reversed from turn to turn.
#
part_claims_throughput() {
	local pair workload commit c
	claims_cluster throughput
	write_scripts $ROWS
	fill uuid $ROWS $CONTESTANTS
	for c in $CONTESTANTS; do # warm up
		bench_run half "$c" -c $CLIENTS -j 2 -T 2
	done
	for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
		say "repetition $pair of $BENCH_PAIRS"
		for workload in fresh half batch; do
			for commit in on off; do claims_repetition $workload $commit "$pair"; done
		done
	done
	cluster_stop throughput
}

# claims_repetition WORKLOAD COMMIT NUMBER
claims_repetition() {
	local c turn turns=$(((BENCH_SECONDS + 1) / 2)) order reversed lost before idle
	local -A tps=() count=() flushes=() idles=()
	order=$(contestants "$1")
	reversed=$(printf '%s\n' $order | tac)
	fill uuid $ROWS $order
	for ((turn = 0; turn < turns; turn++)); do
		for c in $(if [ $((($3 + turn) % 2)) -eq 0 ]; then echo "$reversed"; else echo "$order"; fi); do
			before=$(wal_flushes)
			idle=$(cpu_idle)
			PGOPTIONS="-c synchronous_commit=$2" bench_run "$1" "$c" -c $CLIENTS -j 2 -T 2
			idles[$c]=$((${idles[$c]:-0} + $(cpu_idle) - idle))
			flushes[$c]=$((${flushes[$c]:-0} + $(wal_flushes) - before))
			tps[$c]="${tps[$c]:-0} + $(bench_tps)"
			count[$c]=$((${count[$c]:-0} + $(bench_count)))
		done
	done
	for c in $order; do
		# Did it do the work?  Now and then two ids are the same by chance.
		lost=$((ROWS + ${count[$c]} * $(fresh "$1") - $(sql -c "SELECT count(*) FROM $(table_of "$c")")))
		if [ $lost -lt 0 ] || [ $lost -gt 20 ]; then die "$1, $c: $lost of ${count[$c]} claims lost"; fi
		measured claims_throughput "$1-$2" "$c" "$(awk "BEGIN { print (${tps[$c]}) / $turns * $(claims "$1") }")"
		measured claims_flushes "$1-$2" "$c" "$(awk "BEGIN { print ${flushes[$c]} / (${count[$c]} * $(fresh "$1")) }")"
		measured claims_idle "$1-$2" "$c" "$(awk "BEGIN { print ${idles[$c]} / ($turns * 2 * $(nproc) * $(getconf CLK_TCK)) }")"
	done
}

# wal_flushes: how often WAL was flushed
wal_flushes() {
	if [ "$(sql -c "SHOW server_version_num")" -ge 180000 ]; then
		sql -c "SELECT sum(fsyncs) FROM pg_stat_io WHERE object = 'wal'"
	else
		sql -c "SELECT wal_sync FROM pg_stat_wal"
	fi
}

# cpu_idle: how long the processors had nothing to do, in ticks
cpu_idle() { awk '/^cpu / { print $5 + $6 }' /proc/stat; }

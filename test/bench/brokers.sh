# shellcheck shell=bash
# Brokers: draining a backlog through the relay against a plain program that
# uses the same library, the same confirmations and the same window.

BROKER_MESSAGES=200000
BROKER_WINDOW=1000       # unconfirmed at once; the default of a server
BROKER_CONNECTIONS=16    # of HTTP

# wait_for_file FILE PID: until it is there; false if the process ends before
wait_for_file() {
	local deadline=$((SECONDS + 120))
	until [ -e "$1" ]; do
		kill -0 "$2" 2>/dev/null || return 1
		[ $SECONDS -lt $deadline ] || return 1
		sleep 0.1
	done
}

# broker_turns NAME RAW...: idem and the command take turns; the order changes.
# The command prints messages per second.
broker_turns() {
	local name=$1 pair c rate
	shift
	for ((pair = 1; pair <= BENCH_PAIRS; pair++)); do
		for c in $(if [ $((pair % 2)) -eq 0 ]; then echo raw idem; else echo idem raw; fi); do
			"before_$name"
			if [ "$c" = idem ]; then
				sql -c "CALL backlog('$name', $BROKER_MESSAGES, $BODY)" -c CHECKPOINT
				rate=$(sql -c "CALL drain('$name', $BROKER_MESSAGES, NULL)")
			else
				rate=$("$@")
			fi
			measured broker "$name" "$c" "$rate"
		done
	done
}

# broker_cluster NAME URL OPTIONS DESTINATION: with one server of that name
broker_cluster() {
	relay_cluster "$1"
	only_server "$@"
}

part_broker_amqp() {
	local dir=$WORK/rabbit pid port
	mkdir -p "$dir"
	mkfifo "$dir/orders"
	"$SRC/test/bench/broker.pl" "$dir" <"$dir/orders" 2>"$dir/errors" &
	pid=$!
	exec 7>"$dir/orders"
	if ! wait_for_file "$dir/port" $pid; then
		exec 7>&-
		measured skip broker_amqp "RabbitMQ does not run: $(head -n 1 "$dir/errors")"
		return
	fi
	port=$(cat "$dir/port")
	cc -O2 -o "$WORK/raw_amqp" "$SRC/test/bench/raw_amqp.c" -lrabbitmq
	broker_cluster amqp "amqp://127.0.0.1:$port" "" bench
	broker_turns amqp "$WORK/raw_amqp" 127.0.0.1 "$port" bench $BROKER_MESSAGES $BODY $BROKER_WINDOW
	cluster_stop amqp
	exec 7>&-
	wait $pid || true
}

before_amqp() {
	touch "$WORK/rabbit/purge"
	echo purge >&7
	while [ -e "$WORK/rabbit/purge" ]; do sleep 0.1; done
}

part_broker_http() {
	local dir=$WORK/nginx port pid nginx
	nginx=$(PATH=$PATH:/usr/sbin command -v nginx) || {
		measured skip broker_http "nginx is not installed"
		return
	}
	mkdir -p "$dir"
	port=$(perl -MIO::Socket::INET -e 'print IO::Socket::INET->new(LocalAddr => "127.0.0.1", Listen => 1)->sockport')
	cat >"$dir/nginx.conf" <<-CONF
		daemon off; master_process off; pid $dir/pid; error_log $dir/error.log;
		events { worker_connections 256; }
		http {
			access_log off;
			keepalive_requests 100000000;
			client_body_temp_path $dir/body; proxy_temp_path $dir/proxy;
			fastcgi_temp_path $dir/fastcgi; uwsgi_temp_path $dir/uwsgi; scgi_temp_path $dir/scgi;
			server { listen 127.0.0.1:$port; location / { return 204; } }
		}
	CONF
	"$nginx" -e "$dir/error.log" -p "$dir" -c "$dir/nginx.conf" </dev/null >/dev/null 2>&1 &
	pid=$!
	if ! wait_for_file "$dir/pid" $pid; then
		measured skip broker_http "nginx does not run: $(head -n 1 "$dir/error.log")"
		return
	fi
	cc -O2 -o "$WORK/raw_http" "$SRC/test/bench/raw_http.c" -lcurl
	broker_cluster http "http://127.0.0.1:$port" ", connections '$BROKER_CONNECTIONS'" hook
	broker_turns http "$WORK/raw_http" "http://127.0.0.1:$port/hook" $BROKER_MESSAGES $BODY $BROKER_CONNECTIONS
	cluster_stop http
	kill $pid
	wait $pid || true
}

before_http() { :; }

part_broker_kafka() {
	local dir=$WORK/kafka-bench pid servers BROKER_MESSAGES=500000
	mkdir -p "$dir"
	mkfifo "$dir/orders"
	"$SRC/test/bench/kafka.pl" "$dir" <"$dir/orders" 2>"$dir/errors" &
	pid=$!
	exec 7>"$dir/orders"
	if ! wait_for_file "$dir/servers" $pid; then
		exec 7>&-
		measured skip broker_kafka "Kafka does not run: $(head -n 1 "$dir/errors")"
		return
	fi
	servers=$(cat "$dir/servers")
	cc -O2 -o "$WORK/raw_kafka" "$SRC/test/bench/raw_kafka.c" -lrdkafka
	broker_cluster kafka "kafka://$servers" "" bench
	# the first runs of a new Java process are those of its compiler
	"$WORK/raw_kafka" "$servers" bench $BROKER_MESSAGES $BODY $BROKER_WINDOW >/dev/null
	broker_turns kafka "$WORK/raw_kafka" "$servers" bench $BROKER_MESSAGES $BODY $BROKER_WINDOW
	cluster_stop kafka
	exec 7>&-
	wait $pid || true
}

before_kafka() {
	touch "$WORK/kafka-bench/purge"
	echo purge >&7
	while [ -e "$WORK/kafka-bench/purge" ]; do sleep 0.1; done
}

/*-------------------------------------------------------------------------
 *
 * raw_kafka.c
 *		What Kafka takes from a plain program: the measure for the courier.
 *
 *	raw_kafka servers topic messages size window [property=value...]
 *
 * An idempotent producer with acks=all gives away keyed messages with an id, never
 * more than a window of them unacknowledged, and prints messages per second.
 *
 * cc -O2 -o raw_kafka raw_kafka.c -lrdkafka
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <librdkafka/rdkafka.h>

static unsigned long long acknowledged;

static void
delivery_report(rd_kafka_t *rk, const rd_kafka_message_t *message, void *arg)
{
	(void) rk;
	(void) arg;
	if (message->err)
	{
		fprintf(stderr, "%s\n", rd_kafka_err2str(message->err));
		exit(1);
	}
	acknowledged++;
}

static void
set(rd_kafka_conf_t *conf, const char *name, const char *value)
{
	char		why[256];

	if (rd_kafka_conf_set(conf, name, value, why, sizeof(why)) != RD_KAFKA_CONF_OK)
	{
		fprintf(stderr, "%s\n", why);
		exit(1);
	}
}

int
main(int argc, char **argv)
{
	unsigned long long messages;
	unsigned long long window;
	size_t		size;
	char	   *body;
	char		why[256];
	rd_kafka_conf_t *conf = rd_kafka_conf_new();
	rd_kafka_t *rk;
	rd_kafka_topic_t *topic;
	struct timespec begin;
	struct timespec end;
	double		seconds;

	if (argc < 6)
	{
		fprintf(stderr, "usage: raw_kafka servers topic messages size window [property=value...]\n");
		return 2;
	}
	messages = strtoull(argv[3], NULL, 10);
	size = strtoul(argv[4], NULL, 10);
	window = strtoull(argv[5], NULL, 10);
	body = malloc(size + 1);
	memset(body, 'x', size);

	set(conf, "bootstrap.servers", argv[1]);
	set(conf, "enable.idempotence", "true");
	set(conf, "acks", "all");
	set(conf, "linger.ms", "0.5");
	set(conf, "partitioner", "murmur2_random");
	set(conf, "socket.nagle.disable", "true");
	for (int i = 6; i < argc; i++)
	{
		char	   *value = strchr(argv[i], '=');

		if (value == NULL)
			return 2;
		*value++ = '\0';
		set(conf, argv[i], value);
	}
	rd_kafka_conf_set_dr_msg_cb(conf, delivery_report);
	rk = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof(why));
	if (rk == NULL)
	{
		fprintf(stderr, "%s\n", why);
		return 1;
	}
	topic = rd_kafka_topic_new(rk, argv[2], NULL);

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (unsigned long long n = 1; n <= messages; n++)
	{
		char		id[37];
		char		key[24];
		rd_kafka_headers_t *headers = rd_kafka_headers_new(1);

		snprintf(id, sizeof(id), "01900000-0000-7000-8000-%012llx", n & 0xffffffffffffULL);
		rd_kafka_header_add(headers, "message-id", -1, id, -1);
		snprintf(key, sizeof(key), "%llu", n);
		if (rd_kafka_producev(rk, RD_KAFKA_V_RKT(topic), RD_KAFKA_V_KEY(key, strlen(key)),
							  RD_KAFKA_V_VALUE(body, size), RD_KAFKA_V_HEADERS(headers),
							  RD_KAFKA_V_END))
		{
			fprintf(stderr, "not accepted\n");
			return 1;
		}
		while (n - acknowledged >= window)
			rd_kafka_poll(rk, 1000);
	}
	while (acknowledged < messages)
		rd_kafka_poll(rk, 1000);
	clock_gettime(CLOCK_MONOTONIC, &end);

	seconds = (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9;
	printf("%.0f\n", messages / seconds);
	return 0;
}

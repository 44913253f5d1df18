/*-------------------------------------------------------------------------
 *
 * raw_redis.c
 *		What Redis takes from a plain program: the measure for the courier.
 *
 *	raw_redis host port stream messages size window
 *
 * Adds entries with the fields that the courier writes, pipelined, never more
 * than a window of them unanswered, and prints messages per second.
 *
 * cc -O2 -o raw_redis raw_redis.c -lhiredis
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <hiredis/hiredis.h>

static redisContext *connection;

static void
take_answer(void)
{
	redisReply *reply;

	if (redisGetReply(connection, (void **) &reply) != REDIS_OK)
	{
		fprintf(stderr, "%s\n", connection->errstr);
		exit(1);
	}
	if (reply->type == REDIS_REPLY_ERROR)
	{
		fprintf(stderr, "%s\n", reply->str);
		exit(1);
	}
	freeReplyObject(reply);
}

int
main(int argc, char **argv)
{
	char		id[37];
	char		key[24];
	const char *args[] = {
		"XADD", NULL, "*", "id", id, "topic", "orders.created", "key", key,
		"enqueued_at", "1700000000123456", "content_type", "application/json",
		"body", NULL
	};
	enum
	{
		NARGS = sizeof(args) / sizeof(args[0])
	};
	size_t		lengths[NARGS];
	unsigned long long messages;
	unsigned long long window;
	unsigned long long answered = 0;
	size_t		size;
	char	   *body;
	struct timespec begin;
	struct timespec end;
	double		seconds;

	if (argc != 7)
	{
		fprintf(stderr, "usage: raw_redis host port stream messages size window\n");
		return 2;
	}
	messages = strtoull(argv[4], NULL, 10);
	size = strtoul(argv[5], NULL, 10);
	window = strtoull(argv[6], NULL, 10);
	body = malloc(size + 1);
	memset(body, 'x', size);
	args[1] = argv[3];
	args[NARGS - 1] = body;

	connection = redisConnect(argv[1], atoi(argv[2]));
	if (connection == NULL || connection->err)
	{
		fprintf(stderr, "could not connect\n");
		return 1;
	}

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (unsigned long long n = 1; n <= messages; n++)
	{
		snprintf(id, sizeof(id), "01900000-0000-7000-8000-%012llx", n & 0xffffffffffffULL);
		snprintf(key, sizeof(key), "%llu", n);
		for (int i = 0; i < NARGS - 1; i++)
			lengths[i] = strlen(args[i]);
		lengths[NARGS - 1] = size;
		if (redisAppendCommandArgv(connection, NARGS, args, lengths) != REDIS_OK)
		{
			fprintf(stderr, "%s\n", connection->errstr);
			return 1;
		}
		while (n - answered >= window)
		{
			take_answer();
			answered++;
		}
	}
	for (; answered < messages; answered++)
		take_answer();
	clock_gettime(CLOCK_MONOTONIC, &end);

	seconds = (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9;
	printf("%.0f\n", messages / seconds);
	redisFree(connection);
	return 0;
}

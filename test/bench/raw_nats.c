/*-------------------------------------------------------------------------
 *
 * raw_nats.c
 *		What JetStream takes from a plain program: the measure for the courier.
 *
 *	raw_nats url subject messages size window
 *
 * Publishes messages with ids, with the library's own asynchronous publishing,
 * never more than a window of them unacknowledged, and prints messages per
 * second.  With 0 messages it makes the stream "bench", new and empty.
 *
 * cc -O2 -o raw_nats raw_nats.c -lnats
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <nats/nats.h>

static void
check(natsStatus s, const char *what)
{
	if (s == NATS_OK)
		return;
	fprintf(stderr, "%s: %s\n", what, natsStatus_GetText(s));
	exit(1);
}

static void
not_stored(jsCtx *js, jsPubAckErr *error, void *arg)
{
	(void) js;
	(void) arg;
	fprintf(stderr, "not stored: %s\n", error->ErrText ? error->ErrText : natsStatus_GetText(error->Err));
	exit(1);
}

static void
make_stream(jsCtx *js, const char *subject)
{
	jsStreamConfig config;
	const char *subjects[] = {subject};

	(void) js_DeleteStream(js, "bench", NULL, NULL);
	jsStreamConfig_Init(&config);
	config.Name = "bench";
	config.Subjects = subjects;
	config.SubjectsLen = 1;
	check(js_AddStream(NULL, js, &config, NULL, NULL), "stream");
}

int
main(int argc, char **argv)
{
	natsOptions *options;
	natsConnection *connection;
	jsCtx	   *js;
	jsOptions	js_options;
	jsPubOptions publish;
	unsigned long long messages;
	int			size;
	char	   *body;
	struct timespec begin;
	struct timespec end;
	double		seconds;

	if (argc != 6)
	{
		fprintf(stderr, "usage: raw_nats url subject messages size window\n");
		return 2;
	}
	messages = strtoull(argv[3], NULL, 10);
	size = atoi(argv[4]);
	body = malloc(size + 1);
	memset(body, 'x', size);

	check(natsOptions_Create(&options), "options");
	check(natsOptions_SetURL(options, argv[1]), "url");
	check(natsConnection_Connect(&connection, options), "connect");
	jsOptions_Init(&js_options);
	js_options.PublishAsync.MaxPending = strtoll(argv[5], NULL, 10);
	js_options.PublishAsync.StallWait = 10000;
	js_options.PublishAsync.ErrHandler = not_stored;
	check(natsConnection_JetStream(&js, connection, &js_options), "JetStream");
	jsPubOptions_Init(&publish);
	if (messages == 0)
	{
		make_stream(js, argv[2]);
		return 0;
	}

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (unsigned long long n = 1; n <= messages; n++)
	{
		char		id[37];

		snprintf(id, sizeof(id), "01900000-0000-7000-8000-%012llx", n & 0xffffffffffffULL);
		publish.MsgId = id;
		check(js_PublishAsync(js, argv[2], body, size, &publish), "publish");
	}
	check(js_PublishAsyncComplete(js, NULL), "complete");
	clock_gettime(CLOCK_MONOTONIC, &end);

	seconds = (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9;
	printf("%.0f\n", messages / seconds);
	return 0;
}

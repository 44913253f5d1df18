/*-------------------------------------------------------------------------
 *
 * kafka_admin.c
 *		Topics and rights of a Kafka cluster, for tests.
 *
 *	kafka_admin servers create topic partitions [name=value...]
 *	kafka_admin servers delete topic
 *	kafka_admin servers allow user topic		may write to it
 *	kafka_admin mock
 *
 * Kafka's own programs for this take seconds to start.
 *
 * mock: librdkafka's mock cluster.  Prints its servers and lives until the end
 * of standard input; each line there is an error code, with which the next
 * request to write is refused.
 *
 * cc -o kafka_admin kafka_admin.c -lrdkafka
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <librdkafka/rdkafka.h>
#include <librdkafka/rdkafka_mock.h>

#define PRODUCE		0			/* number of the request */

static char why[512];

static void
die(const char *what)
{
	fprintf(stderr, "kafka_admin: %s\n", what);
	exit(1);
}

/* The error of whatever was asked for. */
static const char *
result_of(rd_kafka_event_t *event)
{
	const rd_kafka_topic_result_t **topics = NULL;
	size_t		n = 0;

	if (rd_kafka_event_error(event))
		return rd_kafka_event_error_string(event);
	if (rd_kafka_event_type(event) == RD_KAFKA_EVENT_CREATETOPICS_RESULT)
		topics = rd_kafka_CreateTopics_result_topics(rd_kafka_event_CreateTopics_result(event), &n);
	else if (rd_kafka_event_type(event) == RD_KAFKA_EVENT_DELETETOPICS_RESULT)
		topics = rd_kafka_DeleteTopics_result_topics(rd_kafka_event_DeleteTopics_result(event), &n);
	else
	{
		const rd_kafka_acl_result_t **acls =
			rd_kafka_CreateAcls_result_acls(rd_kafka_event_CreateAcls_result(event), &n);

		for (size_t i = 0; i < n; i++)
			if (rd_kafka_acl_result_error(acls[i]))
				return rd_kafka_error_string(rd_kafka_acl_result_error(acls[i]));
		return NULL;
	}
	for (size_t i = 0; i < n; i++)
		if (rd_kafka_topic_result_error(topics[i]))
			return rd_kafka_topic_result_error_string(topics[i]);
	return NULL;
}

static int
mock(rd_kafka_t *rk)
{
	rd_kafka_mock_cluster_t *cluster = rd_kafka_mock_cluster_new(rk, 1);
	char		line[32];

	if (cluster == NULL)
		die("no mock cluster");
	printf("%s\n", rd_kafka_mock_cluster_bootstraps(cluster));
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin) != NULL)
	{
		rd_kafka_mock_push_request_errors(cluster, PRODUCE, 1, (rd_kafka_resp_err_t) atoi(line));
		printf("ok\n");
		fflush(stdout);
	}
	return 0;
}

int
main(int argc, char **argv)
{
	rd_kafka_conf_t *conf = rd_kafka_conf_new();
	rd_kafka_t *rk;
	rd_kafka_queue_t *queue;
	rd_kafka_event_t *event;

	if (argc < 4 && !(argc == 2 && strcmp(argv[1], "mock") == 0))
		die("see the source for how to use it");
	if (argc > 2)
		rd_kafka_conf_set(conf, "bootstrap.servers", argv[1], NULL, 0);
	rk = rd_kafka_new(RD_KAFKA_PRODUCER, conf, why, sizeof(why));
	if (rk == NULL)
		die(why);
	if (argc == 2)
		return mock(rk);
	queue = rd_kafka_queue_new(rk);
	if (strcmp(argv[2], "create") == 0 && argc >= 5)
	{
		rd_kafka_NewTopic_t *topic = rd_kafka_NewTopic_new(argv[3], atoi(argv[4]), 1, why, sizeof(why));

		if (topic == NULL)
			die(why);
		for (int i = 5; i < argc; i++)
		{
			char	   *value = strchr(argv[i], '=');

			if (value == NULL)
				die("name=value is wanted");
			*value++ = '\0';
			rd_kafka_NewTopic_set_config(topic, argv[i], value);
		}
		rd_kafka_CreateTopics(rk, &topic, 1, NULL, queue);
	}
	else if (strcmp(argv[2], "delete") == 0)
	{
		rd_kafka_DeleteTopic_t *topic = rd_kafka_DeleteTopic_new(argv[3]);

		rd_kafka_DeleteTopics(rk, &topic, 1, NULL, queue);
	}
	else if (strcmp(argv[2], "allow") == 0 && argc == 5)
	{
		char		principal[256];
		rd_kafka_AclBinding_t *acl;

		snprintf(principal, sizeof(principal), "User:%s", argv[3]);
		acl = rd_kafka_AclBinding_new(RD_KAFKA_RESOURCE_TOPIC, argv[4],
									  RD_KAFKA_RESOURCE_PATTERN_LITERAL, principal, "*",
									  RD_KAFKA_ACL_OPERATION_WRITE,
									  RD_KAFKA_ACL_PERMISSION_TYPE_ALLOW, why, sizeof(why));
		if (acl == NULL)
			die(why);
		rd_kafka_CreateAcls(rk, &acl, 1, NULL, queue);
	}
	else
		die("see the source for how to use it");

	event = rd_kafka_queue_poll(queue, 30000);
	if (event == NULL)
		die("no answer");
	if (result_of(event) != NULL)
		die(result_of(event));
	return 0;
}

/*-------------------------------------------------------------------------
 *
 * raw_amqp.c
 *		What RabbitMQ takes from a plain program: the measure for the courier.
 *
 *	raw_amqp host port queue messages size window
 *
 * Publishes persistent, mandatory messages with confirms through the default
 * exchange, never more than a window of them unconfirmed, as guest, and prints
 * messages per second.  They have the properties that the courier's have: what
 * RabbitMQ can take depends on that more than on anything the client does.
 *
 * cc -O2 -o raw_amqp raw_amqp.c -lrabbitmq
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <sys/time.h>

#include <amqp.h>
#include <amqp_tcp_socket.h>

static amqp_connection_state_t connection;
static unsigned long long confirmed;

static void
check(amqp_rpc_reply_t reply, const char *what)
{
	if (reply.reply_type == AMQP_RESPONSE_NORMAL)
		return;
	fprintf(stderr, "%s failed\n", what);
	exit(1);
}

/* Read confirms: wait for one, or take just what is there. */
static void
take_confirms(int wait)
{
	struct timeval none = {0, 0};
	amqp_frame_t frame;
	int			rc;

	while ((rc = amqp_simple_wait_frame_noblock(connection, &frame,
												wait ? NULL : &none)) == AMQP_STATUS_OK)
	{
		wait = 0;
		if (frame.frame_type != AMQP_FRAME_METHOD)
			continue;
		if (frame.payload.method.id != AMQP_BASIC_ACK_METHOD)
		{
			fprintf(stderr, "not an acknowledgement: method %x\n", frame.payload.method.id);
			exit(1);
		}
		/* single ones may come out of order, which matters not for counting */
		if (((amqp_basic_ack_t *) frame.payload.method.decoded)->multiple)
			confirmed = ((amqp_basic_ack_t *) frame.payload.method.decoded)->delivery_tag;
		else
			confirmed++;
		amqp_maybe_release_buffers(connection);
	}
	if (rc != AMQP_STATUS_TIMEOUT)
	{
		fprintf(stderr, "%s\n", amqp_error_string2(rc));
		exit(1);
	}
}

int
main(int argc, char **argv)
{
	unsigned long long messages;
	unsigned long long window;
	amqp_bytes_t body;
	amqp_basic_properties_t properties = {0};
	amqp_socket_t *socket;
	struct timespec begin;
	struct timespec end;
	double		seconds;

	if (argc != 7)
	{
		fprintf(stderr, "usage: raw_amqp host port queue messages size window\n");
		return 2;
	}
	messages = strtoull(argv[4], NULL, 10);
	window = strtoull(argv[6], NULL, 10);
	body.len = strtoul(argv[5], NULL, 10);
	body.bytes = malloc(body.len + 1);
	memset(body.bytes, 'x', body.len);

	connection = amqp_new_connection();
	socket = amqp_tcp_socket_new(connection);
	if (amqp_socket_open(socket, argv[1], atoi(argv[2])) != AMQP_STATUS_OK)
	{
		fprintf(stderr, "could not connect\n");
		return 1;
	}
	check(amqp_login(connection, "/", 0, AMQP_DEFAULT_FRAME_SIZE, 0,
					 AMQP_SASL_METHOD_PLAIN, "guest", "guest"), "login");
	amqp_channel_open(connection, 1);
	check(amqp_get_rpc_reply(connection), "channel.open");
	amqp_confirm_select(connection, 1);
	check(amqp_get_rpc_reply(connection), "confirm.select");

	properties._flags = AMQP_BASIC_CONTENT_TYPE_FLAG | AMQP_BASIC_DELIVERY_MODE_FLAG |
		AMQP_BASIC_MESSAGE_ID_FLAG | AMQP_BASIC_TIMESTAMP_FLAG |
		AMQP_BASIC_APP_ID_FLAG | AMQP_BASIC_TYPE_FLAG;
	properties.content_type = amqp_cstring_bytes("application/json");
	properties.delivery_mode = AMQP_DELIVERY_PERSISTENT;
	properties.timestamp = time(NULL);
	properties.app_id = amqp_cstring_bytes("idem");
	properties.type = amqp_cstring_bytes("orders.created");

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (unsigned long long n = 1; n <= messages; n++)
	{
		char		id[37];
		int			rc;

		snprintf(id, sizeof(id), "01900000-0000-7000-8000-%012llx", n & 0xffffffffffffULL);
		properties.message_id = amqp_cstring_bytes(id);
		rc = amqp_basic_publish(connection, 1, amqp_empty_bytes,
								amqp_cstring_bytes(argv[3]), 1, 0, &properties, body);
		if (rc != AMQP_STATUS_OK)
		{
			fprintf(stderr, "%s\n", amqp_error_string2(rc));
			return 1;
		}
		while (n - confirmed >= window)
			take_confirms(1);
	}
	while (confirmed < messages)
		take_confirms(1);
	clock_gettime(CLOCK_MONOTONIC, &end);

	seconds = (end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9;
	printf("%.0f\n", messages / seconds);
	amqp_connection_close(connection, AMQP_REPLY_SUCCESS);
	amqp_destroy_connection(connection);
	return 0;
}

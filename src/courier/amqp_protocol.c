/*-------------------------------------------------------------------------
 *
 * amqp_protocol.c
 *		What the courier for RabbitMQ says to the broker, and what it hears.
 *
 * Frames and methods of AMQP 0-9-1, encoded and decoded by librabbitmq: the
 * handshake from connection.start to confirm.select-ok, and the place from
 * which everything later goes to the messages it is about.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "amqp_parts.h"

void
amqp_put_uint(char *p, uint64_t value, int bytes)
{
	while (bytes-- > 0)
	{
		p[bytes] = (char) (value & 0xff);
		value >>= 8;
	}
}

/* Finish a frame whose payload of this size lies 7 bytes after p. */
void
amqp_put_frame(char *p, int type, int channel, size_t size)
{
	amqp_put_uint(p, type, 1);
	amqp_put_uint(p + 1, channel, 2);
	amqp_put_uint(p + 3, size, 4);
	amqp_put_uint(p + 7 + size, AMQP_FRAME_END, 1);
	amqp.out_len += size + 8;
}

/* Returns false if it does not fit. */
bool
amqp_put_method(int channel, amqp_method_number_t id, void *decoded)
{
	char	   *p = amqp_reserve(amqp.frame_max);
	amqp_bytes_t space = {amqp.frame_max - 12, p + 11};
	int			size = amqp_encode_method(id, decoded, space);

	if (size < 0)
		return false;
	amqp_put_uint(p + 7, id, 4);
	amqp_put_frame(p, AMQP_FRAME_METHOD, channel, size + 4);
	return true;
}

amqp_bytes_t
amqp_text(const char *s)
{
	amqp_bytes_t b = {strlen(s), (void *) s};

	return b;
}

void
amqp_open_channel(void)
{
	amqp_channel_open_t open = {amqp_empty_bytes};

	amqp_put_method(CHANNEL, AMQP_CHANNEL_OPEN_METHOD, &open);
	amqp.phase = PHASE_CHANNEL;
	amqp.deadline = idem_courier_now() + amqp.connect_timeout;
}

static void
connection_closed(IdemCourier *courier, amqp_connection_close_t *close)
{
	bool		refused = close->reply_code == AMQP_ACCESS_REFUSED ||
		close->reply_code == AMQP_NOT_ALLOWED;
	char		why[300];
	amqp_connection_close_ok_t ok = {0};

	snprintf(why, sizeof(why), "%.*s", (int) close->reply_text.len,
			 (char *) close->reply_text.bytes);
	amqp_put_method(0, AMQP_CONNECTION_CLOSE_OK_METHOD, &ok);
	if (!amqp.ssl)
		(void) !send(amqp.fd, amqp.out + amqp.out_off, amqp.out_len - amqp.out_off, MSG_NOSIGNAL);
	amqp_lose(courier, refused ? IDEM_STATE_BLOCKED : IDEM_STATE_DOWN,
		 "the broker closed the connection: %s", why);
}

/* Our answer to connection.start. */
static void
log_in(void)
{
	static const char *const able[] = {
		"publisher_confirms", "basic.nack", "connection.blocked",
		"authentication_failure_close"
	};
	amqp_table_entry_t can[4];
	amqp_table_entry_t about[2];
	amqp_connection_start_ok_t ok;
	size_t		user_len = strlen(amqp.user);
	size_t		password_len = strlen(amqp.password);
	char	   *response = idem_alloc(user_len + password_len + 2);

	for (int i = 0; i < 4; i++)
	{
		can[i].key = amqp_text(able[i]);
		can[i].value.kind = AMQP_FIELD_KIND_BOOLEAN;
		can[i].value.value.boolean = 1;
	}
	about[0].key = amqp_text("product");
	about[0].value.kind = AMQP_FIELD_KIND_UTF8;
	about[0].value.value.bytes = amqp_text("idem-courier-amqp " IDEM_COURIER_VERSION);
	about[1].key = amqp_text("capabilities");
	about[1].value.kind = AMQP_FIELD_KIND_TABLE;
	about[1].value.value.table.num_entries = 4;
	about[1].value.value.table.entries = can;

	memcpy(response + 1, amqp.user, user_len);
	memcpy(response + user_len + 2, amqp.password, password_len);
	ok.client_properties.num_entries = 2;
	ok.client_properties.entries = about;
	ok.mechanism = amqp_text("PLAIN");
	ok.response.len = user_len + password_len + 2;
	ok.response.bytes = response;
	ok.locale = amqp_text("en_US");
	amqp_put_method(0, AMQP_CONNECTION_START_OK_METHOD, &ok);
	explicit_bzero(response, user_len + password_len + 2);
	free(response);
}

/* A method.  Returns false if the connection is no more. */
static bool
method(IdemCourier *courier, amqp_method_number_t id, void *decoded)
{
	switch (id)
	{
		case AMQP_CONNECTION_START_METHOD:
			if (amqp.phase != PHASE_START)
				break;
			log_in();
			amqp.phase = PHASE_TUNE;
			return true;

		case AMQP_CONNECTION_TUNE_METHOD:
			{
				amqp_connection_tune_t *tune = decoded;
				amqp_connection_tune_ok_t ok;
				amqp_connection_open_t open = {amqp_text(amqp.vhost), amqp_empty_bytes, 1};

				if (amqp.phase != PHASE_TUNE)
					break;
				amqp.frame_max = FRAME_MAX;
				if (tune->frame_max >= AMQP_FRAME_MIN_SIZE && tune->frame_max < FRAME_MAX)
					amqp.frame_max = tune->frame_max;
				amqp.beat = amqp.heartbeat;
				ok.channel_max = 1;
				ok.frame_max = amqp.frame_max;
				ok.heartbeat = amqp.beat;
				amqp_tune_connection(amqp.codec, 1, amqp.frame_max, 0);
				amqp_put_method(0, AMQP_CONNECTION_TUNE_OK_METHOD, &ok);
				amqp_put_method(0, AMQP_CONNECTION_OPEN_METHOD, &open);
				amqp.phase = PHASE_OPEN;
				return true;
			}

		case AMQP_CONNECTION_OPEN_OK_METHOD:
			if (amqp.phase != PHASE_OPEN)
				break;
			amqp_open_channel();
			return true;

		case AMQP_CHANNEL_OPEN_OK_METHOD:
			{
				amqp_confirm_select_t select = {0};

				if (amqp.phase != PHASE_CHANNEL)
					break;
				amqp_put_method(CHANNEL, AMQP_CONFIRM_SELECT_METHOD, &select);
				amqp.phase = PHASE_CONFIRM;
				return true;
			}

		case AMQP_CONFIRM_SELECT_OK_METHOD:
			if (amqp.phase != PHASE_CONFIRM)
				break;
			amqp.phase = PHASE_UP;
			amqp.next_tag = 1;
			/* after "blocked", only a delivered message proves the contrary */
			if (!amqp.blocked)
				idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
			return true;

		case AMQP_BASIC_ACK_METHOD:
			{
				amqp_basic_ack_t *ack = decoded;

				amqp_confirmed(courier, ack->delivery_tag, ack->multiple, true);
				return true;
			}

		case AMQP_BASIC_NACK_METHOD:
			{
				amqp_basic_nack_t *nack = decoded;

				amqp_confirmed(courier, nack->delivery_tag, nack->multiple, false);
				return true;
			}

		case AMQP_BASIC_RETURN_METHOD:
			{
				amqp_basic_return_t *back = decoded;

				/* copied: the decoder's memory may go before the next frame */
				amqp_bytes_free(amqp.return_exchange);
				amqp_bytes_free(amqp.return_key);
				amqp.return_exchange = amqp_bytes_malloc_dup(back->exchange);
				amqp.return_key = amqp_bytes_malloc_dup(back->routing_key);
				amqp.return_code = back->reply_code;
				amqp.in_return = true;
				return true;
			}

		case AMQP_CHANNEL_CLOSE_METHOD:
			amqp_channel_closed(courier, decoded);
			return true;

		case AMQP_CONNECTION_CLOSE_METHOD:
			connection_closed(courier, decoded);
			return false;

		case AMQP_CONNECTION_BLOCKED_METHOD:
			{
				amqp_connection_blocked_t *blocked = decoded;
				char		why[300];

				snprintf(why, sizeof(why), "the broker takes no messages: %.*s",
						 (int) blocked->reason.len, (char *) blocked->reason.bytes);
				amqp.throttled = true;
				idem_courier_state(courier, IDEM_STATE_DOWN, BLOCKED_RETRY_MS, "%s", why);
				amqp_return_waiting(courier, why);
				return true;
			}

		case AMQP_CONNECTION_UNBLOCKED_METHOD:
			amqp.throttled = false;
			if (amqp.phase == PHASE_UP)
				idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
			return true;

		case AMQP_CHANNEL_CLOSE_OK_METHOD:
		case AMQP_CONNECTION_CLOSE_OK_METHOD:
			return true;
	}
	amqp_lose(courier, IDEM_STATE_DOWN, "the broker sent a method out of place: %s",
		 amqp_method_name(id) ? amqp_method_name(id) : "?");
	return false;
}

/* A frame.  Returns false if the connection is no more. */
bool
amqp_take_frame(IdemCourier *courier, amqp_frame_t *f)
{
	switch (f->frame_type)
	{
		case 'A':			/* the broker answers with a header of its own */
			amqp_lose(courier, IDEM_STATE_BLOCKED, "the broker does not speak AMQP 0-9-1");
			return false;
		case AMQP_FRAME_METHOD:
			return method(courier, f->payload.method.id, f->payload.method.decoded);
		case AMQP_FRAME_HEADER:
			if (amqp.in_return)
				amqp_returned(f->payload.properties.decoded, f->payload.properties.body_size);
			return true;
		default:
			return true;		/* heartbeats, and the bodies of what comes back */
	}
}

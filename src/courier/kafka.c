/*-------------------------------------------------------------------------
 *
 * kafka.c
 *		The courier for Kafka.
 *
 * One idempotent producer with acks=all.  Its delivery reports say what became
 * of each message, and whether it can have been stored; kafka.md says what
 * follows from that.  While a broker cannot be reached the library goes on
 * trying, which costs no duplicates, until the oldest message has waited for
 * timeout_ms.
 *
 * Whatever else goes wrong ends the producer: nothing more is handed to it,
 * what it holds is taken back from it, and the next message gets a new one.  A
 * producer that left out a message and went on would let those behind it
 * overtake.
 *
 * The library has its own threads.  All callbacks but connect_cb are called in
 * ours, from rd_kafka_poll(), which an eventfd tells us to call.  Only ending
 * a producer may wait (for the resolution of a name, say), so a thread does it.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "kafka_parts.h"

#define TICK_MS		20
#define GRACE_MS	1000		/* for what is on the wire, when something failed */
#define DRAIN_MS	1500		/* likewise, on quit */
#define STUCK_MS	30000		/* nothing to be had from the library */
#define MAX_ENDING	3			/* producers being ended */

typedef enum Phase
{
	PHASE_NONE,					/* no producer */
	PHASE_CONNECTING,			/* not known to be connected */
	PHASE_UP,
	PHASE_ENDING				/* takes nothing more */
} Phase;

typedef struct Queue
{
	IdemMessage *head;
	IdemMessage *tail;
} Queue;

static IdemCourier *courier;
static int	event_fd = -1;
static rd_kafka_t *producer;
static Phase phase;
static Queue waiting;			/* not yet given to the library */
static Queue sent;				/* given to it; tag is when */
static int64_t now;				/* about */
static int64_t opened_at;
static int64_t delivered_at;
static bool lost;				/* no broker could be reached, last we heard */
static int	solo;				/* so many are to be sent one by one */
static int	alone;				/* message->data of these points here */
static char trouble[512];		/* what the library said last */

/* While a producer ends. */
static char why[768];
static bool failed;				/* a message came back */
static bool said;				/* and the relay knows the state that comes of it */
static bool aged;				/* because some were too old */
static int64_t ending_at;
static int64_t purge_at;		/* when what is on the wire is given up */

/* Shared with the library's threads, and those that end producers. */
static const char *volatile refused_address;
static int	n_ending;

static void
queue_append(Queue *q, IdemMessage *m)
{
	m->prev = q->tail;
	m->next = NULL;
	if (q->tail != NULL)
		q->tail->next = m;
	else
		q->head = m;
	q->tail = m;
}

static void
queue_remove(Queue *q, IdemMessage *m)
{
	if (m->prev != NULL)
		m->prev->next = m->next;
	else
		q->head = m->next;
	if (m->next != NULL)
		m->next->prev = m->prev;
	else
		q->tail = m->prev;
	m->prev = m->next = NULL;
}

static void
return_waiting(const char *reason)
{
	IdemMessage *m;

	while ((m = waiting.head) != NULL)
	{
		queue_remove(&waiting, m);
		idem_courier_outcome(courier, m, IDEM_RETURNED, 0, 0, "%s", reason);
	}
}

/*
 * The end of a producer
 */

static void *
end_producer(void *arg)
{
	uint64_t	one = 1;

	rd_kafka_destroy(arg);
	__atomic_sub_fetch(&n_ending, 1, __ATOMIC_SEQ_CST);
	(void) !write(event_fd, &one, sizeof(one));
	return NULL;
}

/* All it held has been reported. */
static void
let_go(void)
{
	pthread_t	thread;

	kafka_forget_topics();
	__atomic_add_fetch(&n_ending, 1, __ATOMIC_SEQ_CST);
	if (pthread_create(&thread, NULL, end_producer, producer) != 0)
		abort();
	pthread_detach(thread);
	producer = NULL;
	phase = PHASE_NONE;

	/*
	 * What came meanwhile may be behind something that failed only then; the
	 * relay has both, and sends them in order.
	 */
	if (failed)
		return_waiting(why);
}

/* Take no more, and give what is on the wire so much time to be answered. */
static void
begin_ending(int grace_ms, const char *reason)
{
	if (phase == PHASE_ENDING)
		return;
	phase = PHASE_ENDING;
	failed = true;
	said = false;
	snprintf(why, sizeof(why), "%s", reason);
	ending_at = now;
	purge_at = ending_at + grace_ms;
}

/* Nothing can be sent: say so, and give everything back. */
static void
lose(IdemState state, const char *reason)
{
	begin_ending(0, reason);
	said = true;
	idem_courier_state(courier, state, 0, "%s", why);
	return_waiting(why);
}

static void
go_on_ending(void)
{
	if (sent.head == NULL)
		let_go();
	else if (now > ending_at + STUCK_MS)
	{
		idem_courier_log(courier, IDEM_LOG_WARNING, "the library does not give messages back");
		abort();
	}
	else
		rd_kafka_purge(producer, RD_KAFKA_PURGE_F_QUEUE | RD_KAFKA_PURGE_F_NON_BLOCKING |
					   (now >= purge_at ? RD_KAFKA_PURGE_F_INFLIGHT : 0));
}

/*
 * What the library says
 */

/* What becomes of a message that surely was not stored. */
static IdemOutcome
not_stored(IdemMessage *m, rd_kafka_resp_err_t error, char *text, size_t size)
{
	snprintf(text, size, "%s", rd_kafka_err2str(error));
	switch (error)
	{
		case RD_KAFKA_RESP_ERR__PURGE_QUEUE:
		case RD_KAFKA_RESP_ERR__PURGE_INFLIGHT:
			snprintf(text, size, "%s", why);
			if (aged && (int64_t) m->tag + kafka_options.timeout_ms <= ending_at)
				return IDEM_TRANSIENT;
			return IDEM_RETURNED;

		case RD_KAFKA_RESP_ERR__FATAL:
		case RD_KAFKA_RESP_ERR__GAPLESS_GUARANTEE:
			return IDEM_RETURNED;

		case RD_KAFKA_RESP_ERR__UNKNOWN_TOPIC:
		case RD_KAFKA_RESP_ERR__UNKNOWN_PARTITION:
		case RD_KAFKA_RESP_ERR_UNKNOWN_TOPIC_OR_PART:
			snprintf(text, size, "topic \"%s\" does not exist", m->destination);
			return IDEM_BLOCKED;

		case RD_KAFKA_RESP_ERR_TOPIC_AUTHORIZATION_FAILED:
			snprintf(text, size, "not allowed to write to topic \"%s\"", m->destination);
			return IDEM_BLOCKED;

		case RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED:
		case RD_KAFKA_RESP_ERR_POLICY_VIOLATION:
		case RD_KAFKA_RESP_ERR_INVALID_REQUIRED_ACKS:
		case RD_KAFKA_RESP_ERR_UNSUPPORTED_VERSION:
		case RD_KAFKA_RESP_ERR_UNSUPPORTED_FOR_MESSAGE_FORMAT:
		case RD_KAFKA_RESP_ERR_UNSUPPORTED_COMPRESSION_TYPE:
			return IDEM_BLOCKED;

		case RD_KAFKA_RESP_ERR_TOPIC_EXCEPTION:
			return IDEM_PERMANENT;

			/*
			 * The broker refuses a whole batch for one message in it.  Which
			 * one, we know when they have been sent one by one.
			 */
		case RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE:
		case RD_KAFKA_RESP_ERR_RECORD_LIST_TOO_LARGE:
		case RD_KAFKA_RESP_ERR_INVALID_MSG:
		case RD_KAFKA_RESP_ERR_INVALID_MSG_SIZE:
		case RD_KAFKA_RESP_ERR_INVALID_RECORD:
		case RD_KAFKA_RESP_ERR_INVALID_TIMESTAMP:
			if (m->data == &alone)
				return IDEM_PERMANENT;
			solo++;
			return IDEM_RETURNED;

		default:
			return IDEM_TRANSIENT;
	}
}

/* A message, in no queue any more, that was not delivered. */
static void
fail(IdemMessage *m, rd_kafka_resp_err_t error, rd_kafka_msg_status_t status)
{
	char		text[sizeof(why)];
	uint32_t	code = error > 0 ? (uint32_t) error : 0;
	IdemOutcome outcome;

	if (status == RD_KAFKA_MSG_STATUS_POSSIBLY_PERSISTED)
	{
		outcome = IDEM_UNKNOWN;
		snprintf(text, sizeof(text), "%s", phase == PHASE_ENDING ? why : rd_kafka_err2str(error));
	}
	else
		outcome = not_stored(m, error, text, sizeof(text));

	/* The relay learns first that it is not about this message, lest it goes on. */
	begin_ending(GRACE_MS, text);
	if (outcome == IDEM_BLOCKED && !said)
	{
		said = true;
		snprintf(why, sizeof(why), "%s", text);
		idem_courier_state(courier, IDEM_STATE_BLOCKED, 0, "%s", why);
		return_waiting(why);
	}
	idem_courier_outcome(courier, m, outcome, 0, code, "%s", text);
}

static void
delivery_report(rd_kafka_t *rk, const rd_kafka_message_t *report, void *arg)
{
	IdemMessage *m = report->_private;
	rd_kafka_msg_status_t status;

	(void) rk;
	(void) arg;
	queue_remove(&sent, m);
	if (m->data == &alone && solo > 0)
		solo--;
	status = report->err == RD_KAFKA_RESP_ERR_NO_ERROR ?
		RD_KAFKA_MSG_STATUS_PERSISTED : rd_kafka_message_status(report);
	if (status == RD_KAFKA_MSG_STATUS_PERSISTED)
	{
		if (phase == PHASE_CONNECTING)
			phase = PHASE_UP;
		if (phase == PHASE_UP)
			idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
		lost = false;
		delivered_at = now;
		idem_courier_delivered(courier, m);
	}
	else
		fail(m, report->err, status);
}

/* Trouble that is about no message. */
static void
error_report(rd_kafka_t *rk, int error, const char *reason, void *arg)
{
	char		fatal[256];

	(void) arg;
	if (rk != producer || phase == PHASE_ENDING)
		return;
	if (error == RD_KAFKA_RESP_ERR__FATAL)
	{
		error = rd_kafka_fatal_error(rk, fatal, sizeof(fatal));
		reason = fatal;
		if (error == RD_KAFKA_RESP_ERR__GAPLESS_GUARANTEE)
		{
			/* a message has failed; its own report says how */
			begin_ending(GRACE_MS, "a message before it failed");
			return;
		}
	}
	switch (error)
	{
		case RD_KAFKA_RESP_ERR__AUTHENTICATION:
		case RD_KAFKA_RESP_ERR__UNSUPPORTED_FEATURE:
		case RD_KAFKA_RESP_ERR_SASL_AUTHENTICATION_FAILED:
		case RD_KAFKA_RESP_ERR_UNSUPPORTED_SASL_MECHANISM:
		case RD_KAFKA_RESP_ERR_CLUSTER_AUTHORIZATION_FAILED:
		case RD_KAFKA_RESP_ERR_TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
		case RD_KAFKA_RESP_ERR_UNSUPPORTED_VERSION:
			lose(IDEM_STATE_BLOCKED, reason);
			return;

		case RD_KAFKA_RESP_ERR__SSL:
			/* it will be no better next time */
			if (strstr(reason, "certificate") != NULL)
			{
				lose(IDEM_STATE_BLOCKED, reason);
				return;
			}
			break;

		case RD_KAFKA_RESP_ERR__ALL_BROKERS_DOWN:
			if (phase == PHASE_CONNECTING)
				lose(IDEM_STATE_DOWN, *trouble != '\0' ? trouble : reason);
			else if (sent.head == NULL)
			{
				/* nobody waits for it */
				begin_ending(0, trouble);
				failed = false;
			}
			else
			{
				lost = true;
				idem_courier_state(courier, IDEM_STATE_CONNECTING, 0, "%s", trouble);
			}
			return;

		default:
			break;
	}
	if (rd_kafka_fatal_error(rk, NULL, 0) != RD_KAFKA_RESP_ERR_NO_ERROR)
	{
		idem_courier_log(courier, IDEM_LOG_LOG, "the producer is made anew: %s", reason);
		begin_ending(GRACE_MS, reason);
		return;
	}
	snprintf(trouble, sizeof(trouble), "%s", reason);
	if (refused_address != NULL)
	{
		snprintf(fatal, sizeof(fatal), "a broker's host has a %s", refused_address);
		lose(IDEM_STATE_BLOCKED, fatal);
	}
}

/* In one of the library's threads.  Addresses that brokers name come here, too. */
static int
connect_checked(int fd, const struct sockaddr *address, int len, const char *id, void *arg)
{
	const char *no = idem_address_refused(address, kafka_options.public_only);

	(void) id;
	(void) arg;
	if (no != NULL)
	{
		refused_address = no;
		return EACCES;
	}
	if (connect(fd, address, (socklen_t) len) == 0 || errno == EINPROGRESS)
		return 0;
	return errno;
}

static void
no_log(const rd_kafka_t *rk, int level, const char *facility, const char *text)
{
	(void) rk;
	(void) level;
	(void) facility;
	(void) text;
}

void
kafka_conf_callbacks(rd_kafka_conf_t *conf)
{
	rd_kafka_conf_set_dr_msg_cb(conf, delivery_report);
	rd_kafka_conf_set_error_cb(conf, error_report);
	rd_kafka_conf_set_connect_cb(conf, connect_checked);
	rd_kafka_conf_set_log_cb(conf, no_log);
}

/*
 * Sending
 */

static void
open_producer(void)
{
	static const uint64_t one = 1;
	rd_kafka_conf_t *conf = rd_kafka_conf_dup(kafka_options.conf);
	rd_kafka_queue_t *queue;

	refused_address = NULL;
	lost = false;
	aged = false;
	trouble[0] = '\0';
	idem_courier_state(courier, IDEM_STATE_CONNECTING, 0, "connecting");
	producer = rd_kafka_new(RD_KAFKA_PRODUCER, conf, trouble, sizeof(trouble));
	if (producer == NULL)
	{
		/* the same options have been accepted before: no threads, no memory */
		rd_kafka_conf_destroy(conf);
		idem_courier_state(courier, IDEM_STATE_DOWN, 0, "could not make a producer: %s", trouble);
		return_waiting(trouble);
		return;
	}
	queue = rd_kafka_queue_get_main(producer);
	rd_kafka_queue_io_event_enable(queue, event_fd, &one, sizeof(one));
	rd_kafka_queue_destroy(queue);
	phase = PHASE_CONNECTING;
	opened_at = now;
}

/* Give a message, the first that waits, to the library.  False: not now. */
static bool
produce(IdemMessage *m)
{
	rd_kafka_topic_t *topic = kafka_topic(producer, m->destination);
	rd_kafka_headers_t *headers;
	rd_kafka_resp_err_t error;
	const char *never = NULL;
	size_t		key_len = m->key != NULL ? strlen(m->key) : 0;

	if (topic == NULL)
		never = "the destination is no name that a topic can have";
	else if ((headers = kafka_headers(m)) == NULL)
		never = "the headers cannot be sent";
	else
	{
		m->data = solo > 0 ? &alone : NULL;
		error = rd_kafka_producev(producer, RD_KAFKA_V_RKT(topic),
								  RD_KAFKA_V_MSGFLAGS(0),
								  RD_KAFKA_V_KEY(m->key, key_len),
								  RD_KAFKA_V_VALUE((void *) m->body, m->body_len),
								  RD_KAFKA_V_HEADERS(headers),
								  RD_KAFKA_V_OPAQUE(m), RD_KAFKA_V_END);
		if (error != RD_KAFKA_RESP_ERR_NO_ERROR)
			rd_kafka_headers_destroy(headers);
		if (error == RD_KAFKA_RESP_ERR__QUEUE_FULL && sent.head != NULL)
			return false;
		queue_remove(&waiting, m);
		if (error == RD_KAFKA_RESP_ERR_NO_ERROR)
		{
			m->tag = (uint64_t) now;
			queue_append(&sent, m);
			return true;
		}
		if (error == RD_KAFKA_RESP_ERR__QUEUE_FULL || error == RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE)
			idem_courier_outcome(courier, m, IDEM_PERMANENT, 0,
								 RD_KAFKA_RESP_ERR_MSG_SIZE_TOO_LARGE, "the message is too large");
		else
			fail(m, error, RD_KAFKA_MSG_STATUS_NOT_PERSISTED);
		return true;
	}
	queue_remove(&waiting, m);
	idem_courier_outcome(courier, m, IDEM_PERMANENT, 0, 0, "%s", never);
	return true;
}

/* Look at what takes too long. */
static void
check_time(void)
{
	char		text[768];

	if (phase == PHASE_CONNECTING)
	{
		char	   *cluster = rd_kafka_clusterid(producer, 0);

		if (cluster != NULL)
		{
			rd_kafka_mem_free(producer, cluster);
			phase = PHASE_UP;
			delivered_at = now;
			idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
		}
		else if (now >= opened_at + kafka_options.connect_timeout_ms)
		{
			snprintf(text, sizeof(text), "no answer from the brokers within %d ms%s%s",
					 kafka_options.connect_timeout_ms, *trouble != '\0' ? ": " : "", trouble);
			lose(IDEM_STATE_DOWN, text);
		}
	}
	else if (phase == PHASE_UP && sent.head != NULL &&
			 now >= (int64_t) sent.head->tag + kafka_options.timeout_ms)
	{
		snprintf(text, sizeof(text), "no acknowledgement within %d ms%s%s",
				 kafka_options.timeout_ms, lost ? ": " : "", lost ? trouble : "");
		if (now < delivered_at + kafka_options.timeout_ms / 2)
		{
			/* others were acknowledged: a partition has no leader, perhaps */
			aged = true;
			begin_ending(0, text);
		}
		else
			lose(IDEM_STATE_DOWN, text);
	}
}

static void
set_timer(void)
{
	int64_t		next = -1;

	if (phase == PHASE_CONNECTING || phase == PHASE_ENDING)
		next = now + TICK_MS;
	else if (phase == PHASE_UP && sent.head != NULL)
		next = (int64_t) sent.head->tag + kafka_options.timeout_ms;
	idem_courier_timer(courier, next < 0 ? -1 : next > now ? next - now : 0);
}

/* Do whatever can be done now. */
static void
pump(IdemCourier *c)
{
	(void) c;
	now = idem_courier_now();
	if (phase == PHASE_NONE && waiting.head != NULL)
	{
		if (idem_courier_quitting(courier))
			return_waiting("quitting");
		else if (__atomic_load_n(&n_ending, __ATOMIC_SEQ_CST) < MAX_ENDING)
			open_producer();
	}
	while ((phase == PHASE_CONNECTING || phase == PHASE_UP) && waiting.head != NULL &&
		   !(solo > 0 && sent.head != NULL))
		if (!produce(waiting.head))
			break;
	if (phase == PHASE_ENDING)
	{
		go_on_ending();
		if (phase == PHASE_NONE && waiting.head != NULL)
		{
			pump(courier);
			return;
		}
	}
	set_timer();
}

static void
listen_to_library(IdemCourier *c, int fd, short revents, void *arg)
{
	uint64_t	count;

	(void) c;
	(void) revents;
	(void) arg;
	(void) !read(fd, &count, sizeof(count));
	now = idem_courier_now();
	if (producer != NULL)
		rd_kafka_poll(producer, 0);
	pump(courier);
}

/*
 * The runtime's callbacks
 */

static void
kafka_start(IdemCourier *c)
{
	courier = c;
	kafka_read_options(c);
	event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (event_fd < 0)
		abort();
	idem_courier_watch(c, event_fd, POLLIN, listen_to_library, NULL);
}

static void
kafka_message(IdemCourier *c, IdemMessage *m)
{
	(void) c;
	queue_append(&waiting, m);
}

static void
kafka_timer(IdemCourier *c)
{
	now = idem_courier_now();
	if (producer != NULL)
		rd_kafka_poll(producer, 0);
	check_time();
	pump(c);
}

static void
kafka_drain(IdemCourier *c)
{
	now = idem_courier_now();
	return_waiting("quitting");
	if (phase != PHASE_CONNECTING && phase != PHASE_UP)
	{
		if (purge_at > now + DRAIN_MS)
			purge_at = now + DRAIN_MS;
		return;
	}
	begin_ending(DRAIN_MS, "quit before the broker answered");
	pump(c);
}

/* The library's threads are running; they must not meet exit()'s handlers. */
static void
kafka_stop(IdemCourier *c)
{
	(void) c;
	_exit(0);
}

static const char *
kafka_library(void)
{
	static char name[64];

	snprintf(name, sizeof(name), "librdkafka/%s", rd_kafka_version_str());
	return name;
}

const IdemTransport idem_transport = {
	.program = "idem-courier-kafka",
	.library = kafka_library,
	.options = kafka_option_names,
	.start = kafka_start,
	.message = kafka_message,
	.round = pump,
	.timer = kafka_timer,
	.drain = kafka_drain,
	.stop = kafka_stop,
};

/*-------------------------------------------------------------------------
 *
 * discard.c
 *		A courier that says "delivered" and throws messages away.
 *
 * For tests and measurements.  Option delay_ms: how long each message takes;
 * fail_every: every so-manieth message fails for now.
 *
 *-------------------------------------------------------------------------
 */
#include <limits.h>

#include "courier.h"

static int	delay_ms;
static int	fail_every;
static int	count;
static IdemMessage *first;		/* by time; tag is when it is due */
static IdemMessage *last;

static void
discard_start(IdemCourier *courier)
{
	delay_ms = idem_option_int(courier, "delay_ms", 0, 0, 3600 * 1000);
	fail_every = idem_option_int(courier, "fail_every", 0, 0, INT_MAX);
}

static void
finish(IdemCourier *courier, IdemMessage *message)
{
	idem_courier_state(courier, IDEM_STATE_UP, 0, "discarding");
	if (fail_every > 0 && ++count % fail_every == 0)
		idem_courier_outcome(courier, message, IDEM_TRANSIENT, 0, 0, "as asked for");
	else
		idem_courier_delivered(courier, message);
}

static void
discard_message(IdemCourier *courier, IdemMessage *message)
{
	if (delay_ms == 0)
	{
		finish(courier, message);
		return;
	}
	message->tag = (uint64_t) (idem_courier_now() + delay_ms);
	if (first == NULL)
	{
		first = message;
		idem_courier_timer(courier, delay_ms);
	}
	else
		last->next = message;
	last = message;
}

static void
discard_timer(IdemCourier *courier)
{
	int64_t		now = idem_courier_now();

	while (first != NULL && (int64_t) first->tag <= now)
	{
		IdemMessage *message = first;

		first = message->next;
		finish(courier, message);
	}
	if (first != NULL)
		idem_courier_timer(courier, (int64_t) first->tag - now);
}

static const char *const options[] = {"delay_ms", "fail_every", NULL};

const IdemTransport idem_transport = {
	.program = "idem-courier-discard",
	.options = options,
	.start = discard_start,
	.message = discard_message,
	.timer = discard_timer,
};

/*-------------------------------------------------------------------------
 *
 * redis_reply.c
 *		What Redis answers, and what it means.
 *
 * Answers come in the order of the commands.  An error says by its first word
 * what is wrong: that decides whether it is about this message, about us, or
 * about the server, which then takes nothing for a while.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "redis_parts.h"

typedef enum Meaning
{
	MEANS_LATER,				/* not now; nothing is wrong with the message */
	MEANS_AGAIN,				/* not over this connection */
	MEANS_BLOCKED,				/* we are refused, or misconfigured */
	MEANS_NEVER					/* this message is refused for ever */
} Meaning;

static const struct
{
	const char *code;
	Meaning		meaning;
}			meanings[] =
{
	{"OOM", MEANS_LATER},		/* memory is full, and nothing may be evicted */
	{"LOADING", MEANS_LATER},
	{"BUSY", MEANS_LATER},		/* a script runs for too long */
	{"MISCONF", MEANS_LATER},	/* it cannot write its files */
	{"NOREPLICAS", MEANS_LATER},
	{"CLUSTERDOWN", MEANS_LATER},
	{"TRYAGAIN", MEANS_LATER},
	{"MASTERDOWN", MEANS_AGAIN},
	{"READONLY", MEANS_AGAIN},	/* has become a replica: look who is master now */
	{"UNBLOCKED", MEANS_AGAIN},
	{"NOSCRIPT", MEANS_AGAIN},	/* scripts were flushed: load ours again */
	{"NOAUTH", MEANS_BLOCKED},
	{"WRONGPASS", MEANS_BLOCKED},
	{"NOPERM", MEANS_BLOCKED},
	{"DENIED", MEANS_BLOCKED},	/* protected mode */
	{"WRONGTYPE", MEANS_BLOCKED},	/* there is something else than a stream */
	{"MOVED", MEANS_BLOCKED},	/* a cluster, which we do not know our way in */
	{"ASK", MEANS_BLOCKED},
	{"CROSSSLOT", MEANS_BLOCKED},
	{"ERR unknown command", MEANS_BLOCKED},
	{"ERR invalid password", MEANS_BLOCKED},
	{"ERR Protocol error", MEANS_NEVER},	/* a body above proto-max-bulk-len */
	{"ERR Elements are too large", MEANS_NEVER},
	{"ERR string exceeds", MEANS_NEVER},
	{"ERR too many results to unpack", MEANS_NEVER},
};

/* Does this error have that code?  Before Redis 7 it is in the midst of what a script says. */
static bool
has_code(const char *error, const char *code)
{
	size_t		len = strlen(code);

	if (strncmp(error, code, len) == 0)
		return error[len] == ' ' || error[len] == '\0' || strchr(code, ' ') != NULL;
	if (strncmp(error, "ERR Error running script", 24) == 0)
	{
		const char *found = strstr(error, code);

		return found && (found[-1] == ' ' || found[-1] == '-');
	}
	return false;
}

/* Returns -1 for an error that is not known: it may pass. */
static int
meaning_of(const char *error)
{
	for (size_t i = 0; i < sizeof(meanings) / sizeof(meanings[0]); i++)
		if (has_code(error, meanings[i].code))
			return meanings[i].meaning;
	return -1;
}

/*
 * A message, in no queue any more, has failed: whatever waits behind it with
 * the same key must not overtake it.
 */
static void
fail(IdemCourier *courier, IdemMessage *m, IdemOutcome outcome, const char *why)
{
	if (m->key && outcome != IDEM_PERMANENT)
		idem_list_return(courier, &redis.waiting, m->key,
						 "a message with the same key failed");
	idem_courier_outcome(courier, m, outcome, 0, 0, "%s", why);
}

/* What was sent before this was reported fails for the same reason. */
static void
report_trouble(IdemCourier *courier, const IdemMessage *m, IdemState state, const char *why)
{
	if (redis.trouble && m->tag <= redis.trouble_tag)
		return;
	redis.trouble = true;
	redis.trouble_tag = redis.next_tag - 1;
	idem_courier_state(courier, state, 0, "%s", why);
}

/* The answer to the first message that has none. */
bool
redis_answer(IdemCourier *courier, const redisReply *reply)
{
	IdemMessage *m = redis.sent.head;
	char		why[512];

	if (!m)
	{
		if (reply->type == REDIS_REPLY_ERROR)
			redis_lose(courier, meaning_of(reply->str) == MEANS_BLOCKED ?
					   IDEM_STATE_BLOCKED : IDEM_STATE_DOWN, "%s", reply->str);
		else
			redis_lose(courier, IDEM_STATE_DOWN, "the server answers what was not asked");
		return false;
	}
	idem_list_remove(&redis.sent, m);
	if (reply->type != REDIS_REPLY_ERROR)
	{
		if (redis.trouble && m->tag > redis.trouble_tag)
		{
			redis.trouble = false;
			idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
		}
		idem_courier_delivered(courier, m);
		return true;
	}

	snprintf(why, sizeof(why), "stream \"%.200s\": %.280s", m->destination, reply->str);
	switch (meaning_of(reply->str))
	{
		case MEANS_AGAIN:
			redis.dying = true;
			snprintf(redis.why, sizeof(redis.why), "%.250s", reply->str);
			/* FALLTHROUGH */
		case MEANS_LATER:
			report_trouble(courier, m, IDEM_STATE_DOWN, why);
			idem_courier_outcome(courier, m, IDEM_RETURNED, 0, 0, "%s", why);
			idem_list_return(courier, &redis.waiting, NULL, why);
			break;
		case MEANS_BLOCKED:
			report_trouble(courier, m, IDEM_STATE_BLOCKED, why);
			idem_courier_outcome(courier, m, IDEM_BLOCKED, 0, 0, "%s", why);
			idem_list_return(courier, &redis.waiting, NULL, why);
			break;
		case MEANS_NEVER:
			fail(courier, m, IDEM_PERMANENT, why);
			if (has_code(reply->str, "ERR Protocol error"))
			{
				/* the server has read nothing behind it, and hangs up */
				while ((m = redis.sent.head))
				{
					idem_list_remove(&redis.sent, m);
					idem_courier_outcome(courier, m, IDEM_RETURNED, 0, 0,
										 "the server hung up because of another message");
				}
				redis_lose(courier, IDEM_STATE_DOWN, "the server hung up because of a message");
				return false;
			}
			break;
		default:
			fail(courier, m, IDEM_TRANSIENT, why);
	}
	return true;
}

/* The answer to a command of the login. */
bool
redis_login_answer(IdemCourier *courier, const redisReply *reply)
{
	int			ask = redis.asked & -redis.asked;

	redis.asked -= ask;
	if (reply->type == REDIS_REPLY_ERROR)
	{
		int			meaning = meaning_of(reply->str);

		/* nobody needs a name; but without password this is the first to be refused */
		if (ask != ASK_NAME || meaning == MEANS_LATER ||
			has_code(reply->str, "NOAUTH") || has_code(reply->str, "DENIED"))
		{
			redis_lose(courier, meaning == MEANS_LATER || meaning == MEANS_AGAIN ?
					   IDEM_STATE_DOWN : IDEM_STATE_BLOCKED,
					   "the server refuses to let us in: %s", reply->str);
			return false;
		}
	}
	else if (ask == ASK_SCRIPT && reply->type == REDIS_REPLY_STRING)
		redis_script_known(reply->str);
	if (redis.asked == 0)
	{
		redis.phase = PHASE_UP;
		idem_courier_state(courier, IDEM_STATE_UP, 0, "connected");
	}
	return true;
}

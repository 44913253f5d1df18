/*-------------------------------------------------------------------------
 *
 * consumer.h
 *		Consumers: their numbers, their retention, their figures.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CONSUMER_H
#define IDEM_CONSUMER_H

#include "lib/ilist.h"
#include "utils/timestamp.h"

#include "input.h"
#include "stat.h"

/* Columns, as in consumer.sql. */
#define Anum_inbox_consumer_id		1
#define Anum_inbox_consumer_name	2
#define Natts_inbox_consumer		2

#define Anum_consumer_name			1
#define Anum_consumer_retention		2
#define Anum_consumer_floor			3
#define Anum_consumer_id			5
#define Anum_consumer_owner			6
#define Anum_consumer_search_path	7
#define Anum_consumer_handler		8
#define Anum_consumer_topics		9
#define Anum_consumer_first_seq		10
#define Anum_consumer_max_attempts	11
#define Anum_consumer_backoff		12
#define Anum_consumer_backoff_max	13
#define Anum_consumer_concurrency	14
#define Anum_consumer_ordering		15
#define Anum_consumer_timeout		16
#define Anum_consumer_never_retry	17
#define Anum_consumer_not_yet_for	18
#define Natts_consumer				18

/* What a session remembers of a consumer. */
typedef struct IdemConsumer
{
	char		name[IDEM_MAX_NAME + 1];	/* must be first */
	IdemStat	stat;

	/* private */
	int32		id;				/* 0: not looked up yet */
	slist_node	uncommitted;	/* member of the list if we made the id */
	bool		loaded;			/* are the following known? */
	bool		has_retention;
	Interval	retention;
	TimestampTz floor;
} IdemConsumer;

extern void idem_consumer_init(void);
extern IdemConsumer *idem_consumer(const text *name);
extern int32 idem_consumer_id(IdemConsumer *consumer);
extern TimestampTz idem_consumer_horizon(IdemConsumer *consumer);

#endif							/* IDEM_CONSUMER_H */

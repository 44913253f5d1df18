/*-------------------------------------------------------------------------
 *
 * take.h
 *		Taking messages that wait for a consumer, and saying what came of them.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_TAKE_H
#define IDEM_TAKE_H

#include "access/htup.h"
#include "nodes/pg_list.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"

#include "declared.h"

/* Columns of idem.inbox_message, and the first ones of idem.inbox_parked. */
#define Anum_message_consumer		1
#define Anum_message_seq			2
#define Anum_message_claim			3
#define Anum_message_claimed		4
#define Anum_message_replayed		5
#define Anum_message_stored_at		6
#define Anum_message_enqueued_at	7
#define Anum_message_msg_id			8
#define Anum_message_topic			9
#define Anum_message_key			10
#define Anum_message_content_type	11
#define Anum_message_headers		12
#define Anum_message_source			13
#define Anum_message_type			14
#define Anum_message_body			15
#define Natts_message				15

/* A message that this transaction has locked. */
typedef struct IdemTaken
{
	int64		seq;
	bool		parked;			/* it lies in inbox_parked */
	ItemPointerData tid;		/* if not */
	Datum		values[Natts_message];
	bool		isnull[Natts_message];
	pg_uuid_t	claim;
	bool		claimed;
	bool		replayed;
	TimestampTz stored_at;
	int			attempts;		/* so far */
	TimestampTz not_yet_since;	/* 0: never */
	bool		running;		/* written down as being processed */
	bool		was_running;	/* or as leased, and nobody has it */
	bool		buried;			/* it is a dead letter now */
} IdemTaken;

/* What is to be written about a message that waits on. */
typedef struct IdemWait
{
	const char *state;
	int			attempts;
	TimestampTz due;			/* 0: none */
	const pg_uuid_t *token;		/* or NULL */
	TimestampTz not_yet_since;
	const char *sqlstate;		/* or NULL, as all that follows */
	const char *error;
} IdemWait;

extern List *idem_take(const IdemDeclared *c, int max, TimestampTz *next_due);
extern IdemTaken *idem_take_leased(const IdemDeclared *c, const char *msg_id,
								   const pg_uuid_t *token);
extern IdemTaken *idem_take_seq(const IdemDeclared *c, int64 seq);
extern char *idem_taken_text(const IdemTaken *t, int column);
extern void idem_taken_done(const IdemDeclared *c, IdemTaken *t);
extern void idem_taken_park(const IdemDeclared *c, IdemTaken *t, const IdemWait *wait);
extern void idem_taken_bury(const IdemDeclared *c, IdemTaken *t,
							const char *sqlstate, const char *error);
extern void idem_taken_failed(const IdemDeclared *c, IdemTaken *t,
							  const char *sqlstate, const char *error,
							  int64 delay);
extern Datum idem_taken_message(const IdemDeclared *c, const IdemTaken *t,
								const pg_uuid_t *token);
extern void idem_take_promote(void);

#endif							/* IDEM_TAKE_H */

/*-------------------------------------------------------------------------
 *
 * link.h
 *		The relay's end of the line to a courier.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_LINK_H
#define IDEM_LINK_H

#include "lib/stringinfo.h"
#include "nodes/pg_list.h"

#include "log.h"

#define IDEM_PROTOCOL_VERSION	1

/* What a courier says came of a message. */
typedef enum IdemOutcome
{
	IDEM_DELIVERED,
	IDEM_TRANSIENT,
	IDEM_PERMANENT,
	IDEM_REFUSED,				/* "blocked": we are refused, not the message */
	IDEM_UNKNOWN,
	IDEM_RETURNED
} IdemOutcome;

typedef enum IdemLinkState
{
	IDEM_LINK_CONNECTING,
	IDEM_LINK_UP,
	IDEM_LINK_DOWN,
	IDEM_LINK_BLOCKED
} IdemLinkState;

/* A frame from a courier, taken apart. */
typedef struct IdemFrame
{
	char		type;
	uint64		ticket;			/* 'o', and 'd' one at a time */
	IdemOutcome outcome;
	IdemLinkState state;
	uint32		retry_after_ms;
	uint32		code;
	char	   *text;
} IdemFrame;

typedef struct IdemLink
{
	pid_t		pid;
	int			sock;
	StringInfoData out;			/* to be written */
	int			out_start;
	StringInfoData in;			/* read, not yet taken */
	int			in_start;
	uint32		delivered_left; /* of a 'd' frame under way */
	bool		ready;			/* it has answered our hello */
	bool		broken;
	char	   *reason;			/* why it is broken */
} IdemLink;

extern IdemLink *idem_link_open(const char *path, const char *server, List *options);
extern void idem_link_send(IdemLink *link, uint64 ticket, const IdemMessage *m,
						   const char *destination, int attempt);
extern void idem_link_quit(IdemLink *link);
extern void idem_link_flush(IdemLink *link);
extern void idem_link_fill(IdemLink *link);
extern bool idem_link_next(IdemLink *link, IdemFrame *frame);
extern int	idem_link_pending(IdemLink *link);
extern char *idem_link_epitaph(IdemLink *link);
extern void idem_link_close(IdemLink *link);

#endif							/* IDEM_LINK_H */

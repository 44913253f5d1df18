/*-------------------------------------------------------------------------
 *
 * route.h
 *		Routes: which topics go to which server.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ROUTE_H
#define IDEM_ROUTE_H

#include "nodes/nodes.h"
#include "nodes/pg_list.h"
#include "utils/timestamp.h"

/* Columns, as in route.sql. */
#define Anum_route_id			1
#define Anum_route_pattern		2
#define Anum_route_server		3
#define Anum_route_destination	4
#define Anum_route_first_seq	5
#define Anum_route_last_seq		6
#define Anum_route_since		8
#define Natts_route				8

typedef struct IdemRoute
{
	int64		id;
	char	   *pattern;
	char	   *server;
	char	   *destination;
	int64		first_seq;
	int64		last_seq;		/* PG_INT64_MAX: open */
	TimestampTz since;			/* DT_NOBEGIN: whenever it was enqueued */
} IdemRoute;

extern List *idem_routes_load(void);
extern bool idem_route_starts_in_past(const char *start, TimestampTz *since);
extern bool idem_route_match(const char *pattern, const char *topic);
extern char *idem_route_destination(const IdemRoute *route, const char *topic,
									const char *key);
extern void idem_route_utility(Node *stmt);

#endif							/* IDEM_ROUTE_H */

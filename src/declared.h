/*-------------------------------------------------------------------------
 *
 * declared.h
 *		Consumers as they were declared.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_DECLARED_H
#define IDEM_DECLARED_H

#include "nodes/pg_list.h"
#include "utils/timestamp.h"

typedef struct IdemDeclared
{
	int32		id;
	char	   *name;
	char	   *owner;
	char	   *search_path;
	char	   *handler;		/* NULL: applications fetch its messages */
	List	   *topics;			/* of char * */
	int64		first_seq;
	int			max_attempts;
	int64		backoff;		/* in microseconds, as all that follows */
	int64		backoff_max;
	int64		retention;
	int64		timeout;		/* 0: none */
	int64		not_yet_for;
	int			concurrency;
	bool		ordered;
	List	   *never_retry;	/* of char * */
} IdemDeclared;

extern List *idem_declared_all(void);
extern void idem_declared_forget(void);
extern IdemDeclared *idem_declared(const char *name);
extern IdemDeclared *idem_declared_by_id(int32 id);
extern IdemDeclared *idem_declared_required(const char *name);
extern bool idem_declared_takes(const IdemDeclared *c, const char *topic, int64 seq);

#endif							/* IDEM_DECLARED_H */

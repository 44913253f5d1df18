/*-------------------------------------------------------------------------
 *
 * handler.h
 *		Runs the handlers of consumers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_HANDLER_H
#define IDEM_HANDLER_H

#include "postgres.h"

extern PGDLLEXPORT void idem_handler_main(Datum arg);
extern const char *idem_handler_check(const char *handler, Oid owner, Oid *function);

#endif							/* IDEM_HANDLER_H */

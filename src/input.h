/*-------------------------------------------------------------------------
 *
 * input.h
 *		Checks of what callers hand in, and small helpers around it.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_INPUT_H
#define IDEM_INPUT_H

#include "fmgr.h"
#include "utils/timestamp.h"

/* Longest name of a consumer or scope, and longest id, in bytes. */
#define IDEM_MAX_NAME	255
#define IDEM_MAX_ID		1024

/* Below this many seconds, a retention is likelier a mistake than a wish. */
#define IDEM_SHORT_RETENTION	3600

extern void idem_require(FunctionCallInfo fcinfo, int arg, const char *what);
extern text *idem_name_arg(FunctionCallInfo fcinfo, int arg, const char *what);
extern text *idem_id_arg(FunctionCallInfo fcinfo, int arg, const char *what);
extern void idem_check_id(const text *id, const char *what);
extern void idem_check_span(const Interval *span, const char *what);
extern Datum idem_enum_datum(Oid type, const char *label);
extern TimestampTz idem_time_plus(TimestampTz t, const Interval *span);
extern int64 idem_span_usecs(const Interval *span);
extern Interval *idem_seconds_interval(int seconds);

#endif							/* IDEM_INPUT_H */

/*-------------------------------------------------------------------------
 *
 * payload.h
 *		Messages in the form in which they are sent.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_PAYLOAD_H
#define IDEM_PAYLOAD_H

#include "fmgr.h"
#include "utils/jsonb.h"

/* Longest headers, in bytes as they are kept. */
#define IDEM_MAX_HEADERS			65536

extern const char *idem_payload_trace;

extern void idem_check_printable(const char *s, int len, const char *what, bool ascii);
extern text *idem_topic_arg(FunctionCallInfo fcinfo, int arg);
extern void idem_check_key(text *key);
extern void idem_check_content_type(text *type);
extern char *idem_payload_trace_of(const char *headers);
extern text *idem_payload_headers(Jsonb *headers);
extern bytea *idem_payload_body(Datum payload, Oid type, text **content_type);

#endif							/* IDEM_PAYLOAD_H */

/*-------------------------------------------------------------------------
 *
 * payload.c
 *		Messages in the form in which they are sent.
 *
 * Whatever could keep a message from being sent is refused when it is handed
 * in.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/json.h"
#include "utils/jsonb.h"

#include "guc.h"
#include "input.h"
#include "payload.h"

#define MAX_CONTENT_TYPE	255
#define JSON_TYPE			"application/json"
#define BINARY_TYPE			"application/octet-stream"

/* The trace context of the message that this process is handling, or NULL. */
const char *idem_payload_trace = NULL;

/* Text of others that ends up in protocols must not control them. */
void
idem_check_printable(const char *s, int len, const char *what, bool ascii)
{
	for (int i = 0; i < len; i++)
	{
		unsigned char c = s[i];

		if (c < 0x20 || c == 0x7F || (ascii && c > 0x7F))
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("%s contains a character that cannot be sent", what),
					 errdetail("The byte at position %d is 0x%02x.", i + 1, c)));
	}
}

text *
idem_topic_arg(FunctionCallInfo fcinfo, int arg)
{
	text	   *topic = idem_name_arg(fcinfo, arg, "topic");

	idem_check_printable(VARDATA_ANY(topic), VARSIZE_ANY_EXHDR(topic), "topic", false);
	return topic;
}

void
idem_check_key(text *key)
{
	idem_check_id(key, "key");
	idem_check_printable(VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key), "key", false);
}

void
idem_check_content_type(text *type)
{
	int			len = VARSIZE_ANY_EXHDR(type);

	if (len == 0 || len > MAX_CONTENT_TYPE)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("content_type must have 1 to %d bytes", MAX_CONTENT_TYPE)));
	idem_check_printable(VARDATA_ANY(type), len, "content_type", true);
}

/* A header's name is a token, as in HTTP. */
static void
check_header_name(const char *name, int len)
{
	if (len == 0 || len > 255)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("name of a header must have 1 to 255 bytes")));
	for (int i = 0; i < len; i++)
	{
		if (!isalnum((unsigned char) name[i]) || (unsigned char) name[i] > 0x7F)
		{
			if (strchr("!#$%&'*+-.^_`|~", name[i]) == NULL || name[i] == '\0')
				ereport(ERROR,
						(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
						 errmsg("name of a header contains a character that cannot be sent"),
						 errhint("Use letters, digits and any of !#$%%&'*+-.^_`|~.")));
		}
	}
}

/* Append a header's value to the text that is kept. */
static void
put_header_value(StringInfo buf, JsonbValue *v)
{
	switch (v->type)
	{
		case jbvString:
			idem_check_printable(v->val.string.val, v->val.string.len, "value of a header", false);
			escape_json(buf, pnstrdup(v->val.string.val, v->val.string.len));
			break;
		case jbvNumeric:
			appendStringInfoString(buf, DatumGetCString(DirectFunctionCall1(numeric_out,
																			NumericGetDatum(v->val.numeric))));
			break;
		case jbvBool:
			appendStringInfoString(buf, v->val.boolean ? "true" : "false");
			break;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
					 errmsg("value of a header must be a string, a number or a boolean")));
	}
}

/*
 * Headers as they are kept, with the trace context of the session if they
 * have none; NULL if there is nothing.
 */
text *
idem_payload_headers(Jsonb *headers)
{
	StringInfoData buf;
	JsonbIterator *it;
	JsonbIteratorToken token;
	JsonbValue	v;
	bool		traced = false;
	const char *trace = idem_traceparent != NULL && idem_traceparent[0] != '\0' ?
		idem_traceparent : idem_payload_trace;

	if (headers == NULL && trace == NULL)
		return NULL;
	if (headers != NULL && !JB_ROOT_IS_OBJECT(headers))
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("headers must be a JSON object")));

	initStringInfo(&buf);
	appendStringInfoChar(&buf, '{');
	if (headers != NULL)
	{
		it = JsonbIteratorInit(&headers->root);
		while ((token = JsonbIteratorNext(&it, &v, true)) != WJB_DONE)
		{
			if (token == WJB_KEY)
			{
				check_header_name(v.val.string.val, v.val.string.len);
				traced |= pg_strncasecmp(v.val.string.val, "traceparent",
										 Max(v.val.string.len, 11)) == 0;
				if (buf.len > 1)
					appendStringInfoChar(&buf, ',');
				escape_json(&buf, pnstrdup(v.val.string.val, v.val.string.len));
				appendStringInfoChar(&buf, ':');
			}
			else if (token == WJB_VALUE)
				put_header_value(&buf, &v);
		}
	}
	if (trace != NULL && !traced)
		appendStringInfo(&buf, "%s\"traceparent\":\"%s\"", buf.len > 1 ? "," : "",
						 trace);
	appendStringInfoChar(&buf, '}');
	if (buf.len == 2)
		return NULL;
	if (buf.len > IDEM_MAX_HEADERS)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("headers are too long"),
				 errdetail("They have %d bytes; the limit is %d.", buf.len, IDEM_MAX_HEADERS)));
	return cstring_to_text_with_len(buf.data, buf.len);
}

static void
hint_about_text(void *arg pg_attribute_unused())
{
	errhint("A text payload must be JSON. Give content_type for other text, or cast the payload to bytea.");
}

/* Raise if this is not JSON. */
static void
check_json(const char *s)
{
	ErrorContextCallback hint;

	hint.callback = hint_about_text;
	hint.arg = NULL;
	hint.previous = error_context_stack;
	error_context_stack = &hint;
	(void) DirectFunctionCall1(json_in, CStringGetDatum(s));
	error_context_stack = hint.previous;
}

/* Text of the database as bytes in UTF-8. */
static bytea *
utf8_body(const char *s, int len)
{
	char	   *utf8 = pg_server_to_any(s, len, PG_UTF8);

	if (utf8 != s)
		len = strlen(utf8);
	else if (GetDatabaseEncoding() != PG_UTF8)
		pg_verify_mbstr(PG_UTF8, utf8, len, false);
	return (bytea *) cstring_to_text_with_len(utf8, len);
}

/*
 * idem_payload_body
 *		The body of a message as it is sent.
 *
 * *content_type is what the caller gave, or NULL; it becomes that of the body,
 * where NULL stands for JSON.
 */
bytea *
idem_payload_body(Datum payload, Oid type, text **content_type)
{
	bytea	   *body = NULL;
	char	   *s;

	switch (type)
	{
		case BYTEAOID:
			body = DatumGetByteaPP(payload);
			if (*content_type == NULL)
				*content_type = cstring_to_text(BINARY_TYPE);
			break;
		case JSONBOID:
			{
				Jsonb	   *jb = DatumGetJsonbP(payload);
				StringInfoData buf;

				initStringInfo(&buf);
				(void) JsonbToCString(&buf, &jb->root, VARSIZE(jb));
				body = utf8_body(buf.data, buf.len);
				break;
			}
		case JSONOID:
			s = TextDatumGetCString(payload);
			body = utf8_body(s, strlen(s));
			break;
		case UNKNOWNOID:
		case TEXTOID:
		case VARCHAROID:
		case BPCHAROID:
			s = type == UNKNOWNOID ? DatumGetCString(payload) :
				TextDatumGetCString(payload);
			if (*content_type == NULL)
				check_json(s);
			body = utf8_body(s, strlen(s));
			break;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_DATATYPE_MISMATCH),
					 errmsg("payload must not be of type %s", format_type_be(type)),
					 errhint("It may be json, jsonb, text or bytea.")));
	}
	if (VARSIZE_ANY_EXHDR(body) > (Size) idem_outbox_max_payload)
		ereport(ERROR,
				(errcode(ERRCODE_PROGRAM_LIMIT_EXCEEDED),
				 errmsg("payload is too large"),
				 errdetail("It has %zu bytes; idem.outbox_max_payload is %d.",
						   (Size) VARSIZE_ANY_EXHDR(body), idem_outbox_max_payload),
				 errhint("Store it elsewhere and send a reference.")));

	/* The default need not be kept. */
	if (*content_type != NULL && VARSIZE_ANY_EXHDR(*content_type) == strlen(JSON_TYPE) &&
		memcmp(VARDATA_ANY(*content_type), JSON_TYPE, strlen(JSON_TYPE)) == 0)
		*content_type = NULL;
	return body;
}

/* The trace context in the headers of a message, or NULL. */
char *
idem_payload_trace_of(const char *headers)
{
	Jsonb	   *jb = DatumGetJsonbP(DirectFunctionCall1(jsonb_in, CStringGetDatum(headers)));
	JsonbIterator *it = JsonbIteratorInit(&jb->root);
	JsonbIteratorToken token;
	JsonbValue	v;
	bool		found = false;

	while ((token = JsonbIteratorNext(&it, &v, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
			found = pg_strncasecmp(v.val.string.val, "traceparent", Max(v.val.string.len, 11)) == 0;
		else if (token == WJB_VALUE && found && v.type == jbvString)
		{
			char	   *trace = pnstrdup(v.val.string.val, v.val.string.len);

			return idem_guc_is_traceparent(trace) ? trace : NULL;
		}
	}
	return NULL;
}

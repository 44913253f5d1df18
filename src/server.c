/*-------------------------------------------------------------------------
 *
 * server.c
 *		Servers: where messages go, and how they are to be treated.
 *
 * A server is a foreign server of our foreign-data wrapper, so that DDL,
 * ownership, GRANT and pg_dump are PostgreSQL's own.  Its options are
 * readable for everybody and end up in dumps: a secret is never among them,
 * only the name of the file that holds it.
 *
 * Here are the options and what they may be.  What is checked when a server
 * is defined is checked again when it is loaded, by the same code, since it
 * may have been defined under another version.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <ctype.h>
#include <limits.h>
#include <unistd.h>

#include "access/genam.h"
#include "access/htup_details.h"
#include "access/reloptions.h"
#include "access/table.h"
#include "catalog/pg_attribute.h"
#include "catalog/pg_foreign_data_wrapper.h"
#include "catalog/pg_foreign_server.h"
#include "catalog/pg_foreign_table.h"
#include "catalog/pg_user_mapping.h"
#include "commands/defrem.h"
#include "fmgr.h"
#include "foreign/foreign.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/formatting.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/varlena.h"

#include "input.h"
#include "secret.h"
#include "server.h"

#define MAX_SCHEME	32
#define MAX_VALUE	8192
#define HOUR_MS		(3600 * 1000)

typedef enum OptionKind
{
	OPTION_URL,
	OPTION_TEXT,
	OPTION_NAMES,				/* a list */
	OPTION_INT,
	OPTION_MS,					/* with or without a unit */
	OPTION_BYTES,				/* likewise */
	OPTION_BOOL,
	OPTION_WORD,				/* one of several */
	OPTION_FILE,				/* whose content is for the courier */
	OPTION_HEADER				/* name ends in what the user chooses */
} OptionKind;

typedef struct OptionDef
{
	const char *schemes;		/* NULL: all of them */
	const char *name;
	OptionKind	kind;
	int			min;
	int			max;
	const char *words;			/* separated by blanks */
	bool		private;		/* not for the courier */
	int			offset;			/* in IdemServer, if > 0 */
} OptionDef;

#define HTTP "http https"
#define AMQP "amqp amqps"
#define KAFKA "kafka kafkas"
#define RANGE(low, high) .min = low, .max = high
#define FIELD(field) .offset = offsetof(IdemServer, field)

static const OptionDef option_defs[] = {
	{NULL, "url", .kind = OPTION_URL, FIELD(url)},
	{NULL, "batch_messages", .kind = OPTION_INT, RANGE(1, 100000), .private = true, FIELD(batch_messages)},
	{NULL, "window_messages", .kind = OPTION_INT, RANGE(1, 1000000), .private = true, FIELD(window_messages)},
	{NULL, "window_bytes", .kind = OPTION_BYTES, RANGE(1024, 1024 * 1024 * 1024), .private = true, FIELD(window_bytes)},
	{NULL, "retry_min", .kind = OPTION_MS, RANGE(1, 24 * HOUR_MS), .private = true, FIELD(retry_min_ms)},
	{NULL, "retry_max", .kind = OPTION_MS, RANGE(1, 24 * HOUR_MS), .private = true, FIELD(retry_max_ms)},
	{NULL, "max_attempts", .kind = OPTION_INT, RANGE(1, INT_MAX), .private = true, FIELD(max_attempts)},
	{NULL, "gate", .kind = OPTION_WORD, .words = "local standby", .private = true, FIELD(gate)},
	{NULL, "standbys", .kind = OPTION_NAMES, .private = true, FIELD(standbys)},
	{NULL, "order", .kind = OPTION_WORD, .words = "key none", FIELD(order)},
	{NULL, "on_unknown", .kind = OPTION_WORD, .words = "resend hold", .private = true, FIELD(on_unknown)},
	{NULL, "keep_answer", .kind = OPTION_BOOL, FIELD(keep_answer)},
	{NULL, "public_only", .kind = OPTION_BOOL, FIELD(public_only)},

	{HTTP, "method", .kind = OPTION_WORD, .words = "POST PUT PATCH"},
	{HTTP, "connections", .kind = OPTION_INT, RANGE(1, 1000)},
	{HTTP, "timeout_ms", .kind = OPTION_INT, RANGE(1, 24 * HOUR_MS)},
	{HTTP " " AMQP, "connect_timeout_ms", .kind = OPTION_INT, RANGE(1, HOUR_MS)},
	{HTTP " " AMQP, "user", .kind = OPTION_TEXT},
	{HTTP " " AMQP, "password_file", .kind = OPTION_FILE},
	{HTTP, "bearer_file", .kind = OPTION_FILE},
	{HTTP, "signing_key_file", .kind = OPTION_FILE},
	{HTTP, "cloudevents", .kind = OPTION_WORD, .words = "off binary"},
	{HTTP, "header.", .kind = OPTION_HEADER},
	{AMQP, "exchange", .kind = OPTION_TEXT},
	{AMQP, "routing_key", .kind = OPTION_TEXT},
	{AMQP, "on_unroutable", .kind = OPTION_WORD, .words = "block dead"},
	{AMQP, "heartbeat", .kind = OPTION_INT, RANGE(0, 3600)},
	{HTTP " " AMQP, "tls_ca_file", .kind = OPTION_FILE},
	{HTTP " " AMQP, "tls_cert_file", .kind = OPTION_FILE},
	{HTTP " " AMQP, "tls_key_file", .kind = OPTION_FILE},
	{KAFKA, "user", .kind = OPTION_TEXT},
	{KAFKA, "password_file", .kind = OPTION_FILE},
	{KAFKA, "sasl_mechanism", .kind = OPTION_WORD, .words = "PLAIN SCRAM-SHA-256 SCRAM-SHA-512"},
	{KAFKA, "connect_timeout_ms", .kind = OPTION_INT, RANGE(1, HOUR_MS)},
	{KAFKA, "timeout_ms", .kind = OPTION_INT, RANGE(100, HOUR_MS)},
	{KAFKA, "tls_ca_file", .kind = OPTION_FILE},
	{KAFKA, "tls_cert_file", .kind = OPTION_FILE},
	{KAFKA, "tls_key_file", .kind = OPTION_FILE},
	{KAFKA, "kafka.", .kind = OPTION_HEADER},
	{"discard", "delay_ms", .kind = OPTION_INT, RANGE(0, HOUR_MS)},
	{"discard", "fail_every", .kind = OPTION_INT, RANGE(0, INT_MAX)},
};

/* The couriers of others check their own options. */
static const OptionDef foreign_text = {.kind = OPTION_TEXT};
static const OptionDef foreign_file = {.kind = OPTION_FILE};

static const IdemServer defaults = {
	.batch_messages = 2000,
	.window_messages = 1000,
	.window_bytes = 8 * 1024 * 1024,
	.retry_min_ms = 100,
	.retry_max_ms = 60 * 1000,
	.max_attempts = 10,
};

/* Why an option is refused; it depends on the caller what comes of it. */
typedef struct Problem
{
	int			sqlstate;
	char	   *message;
	char	   *hint;
} Problem;

static uint64 generation = 1;

PG_FUNCTION_INFO_V1(idem_server_validator);
PG_FUNCTION_INFO_V1(idem_server_check);

static bool
refuse(Problem *problem, int sqlstate, char *message, char *hint)
{
	problem->sqlstate = sqlstate;
	problem->message = message;
	problem->hint = hint;
	return false;
}

/* The number of a word in a list of words, or -1.  Case does not matter. */
static int
word_index(const char *words, const char *word)
{
	size_t		len = strlen(word);

	for (int i = 0; *words != '\0'; i++)
	{
		size_t		n = strcspn(words, " ");

		if (n == len && pg_strncasecmp(words, word, len) == 0)
			return i;
		words += n;
		words += strspn(words, " ");
	}
	return -1;
}

/* The word of that number, as it is spelled in the list. */
static char *
nth_word(const char *words, int n)
{
	while (n-- > 0)
	{
		words += strcspn(words, " ");
		words += strspn(words, " ");
	}
	return pnstrdup(words, strcspn(words, " "));
}

static bool
ends_in_file(const char *name)
{
	size_t		len = strlen(name);

	return len > 5 && strcmp(name + len - 5, "_file") == 0;
}

/* Is there a courier of ours for this scheme? */
static bool
own_scheme(const char *scheme)
{
	for (size_t i = 0; i < lengthof(option_defs); i++)
	{
		if (option_defs[i].schemes && word_index(option_defs[i].schemes, scheme) >= 0)
			return true;
	}
	return false;
}

/* What precedes the options that only the courier of this scheme knows. */
static bool
has_scheme_prefix(const char *name, const char *scheme)
{
	size_t		len = strlen(scheme);

	return strncmp(name, scheme, len) == 0 && name[len] == '.' &&
		name[len + 1] != '\0';
}

/*
 * Would this option hold a secret in clear?  For a header that is known of
 * some; for others the user must know.
 */
static bool
is_clear_secret(const char *name, const char *scheme)
{
	if (strncmp(name, "header.", 7) == 0)
		return word_index("authorization proxy-authorization cookie", name + 7) >= 0;
	/* of librdkafka's: ssl.key.password, sasl.oauthbearer.client.secret, ssl.key.pem */
	if (strncmp(name, "kafka.", 6) == 0)
		return word_index("password secret pem", strrchr(name, '.') + 1) >= 0;
	if (has_scheme_prefix(name, scheme))
		name += strlen(scheme) + 1;
	return word_index("password passwd passphrase secret token bearer api_key"
					  " signing_key private_key tls_key", name) >= 0;
}

static const OptionDef *
find_option(const char *name, const char *scheme)
{
	for (size_t i = 0; i < lengthof(option_defs); i++)
	{
		const OptionDef *def = &option_defs[i];

		if (def->schemes && word_index(def->schemes, scheme) < 0)
			continue;
		if (def->kind == OPTION_HEADER ?
			strncmp(name, def->name, strlen(def->name)) == 0 :
			strcmp(name, def->name) == 0)
			return def;
	}
	if (!own_scheme(scheme))
	{
		if (ends_in_file(name))
			return &foreign_file;
		if (has_scheme_prefix(name, scheme))
			return &foreign_text;
	}
	return NULL;
}

static char *
valid_options(const char *scheme)
{
	StringInfoData buf;

	initStringInfo(&buf);
	appendStringInfo(&buf, "Options for \"%s\" are:", scheme);
	for (size_t i = 0; i < lengthof(option_defs); i++)
	{
		const OptionDef *def = &option_defs[i];

		if (def->schemes == NULL || word_index(def->schemes, scheme) >= 0)
			appendStringInfo(&buf, "%s %s%s", i == 0 ? "" : ",", def->name,
							 def->kind == OPTION_HEADER ? "NAME" : "");
	}
	if (!own_scheme(scheme))
		appendStringInfo(&buf, ", %s.NAME, NAME_file", scheme);
	appendStringInfoChar(&buf, '.');
	return buf.data;
}

/*
 * The scheme of a url, after a look at the rest.  The host is checked by the
 * courier when it connects.
 */
static bool
read_url(const char *url, char **scheme, Problem *problem)
{
	const char *rest = strstr(url, "://");
	size_t		len = rest ? rest - url : 0;
	const char *at;

	if (len == 0 || len > MAX_SCHEME ||
		len != strspn(url, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-") ||
		!isalpha((unsigned char) url[0]))
		return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
					  pstrdup("url does not begin with a scheme"),
					  pstrdup("An example is \"https://example.com/events\"."));
	*scheme = asc_tolower(url, len);

	for (const char *c = url; *c; c++)
	{
		if ((unsigned char) *c <= ' ' || (unsigned char) *c >= 0x7f)
			return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
						  pstrdup("url contains a character that must be percent-encoded"),
						  NULL);
	}

	/* what precedes the last @ of the authority is the user */
	rest += 3;
	len = strcspn(rest, "/?#");
	at = memchr(rest, '@', len);
	if (at != NULL)
	{
		while (memchr(at + 1, '@', rest + len - at - 1) != NULL)
			at = memchr(at + 1, '@', rest + len - at - 1);
		if (memchr(rest, ':', at - rest) != NULL)
			return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
						  pstrdup("url contains a password"),
						  pstrdup("Put it into a file below idem.secrets_dir, and name that in option \"password_file\"."));
		if (word_index(HTTP " " AMQP " " KAFKA, *scheme) >= 0)
			return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
						  pstrdup("url contains a user"),
						  pstrdup("There is option \"user\" for it."));
		len -= at + 1 - rest;
		rest = at + 1;
	}
	if (len == 0 && word_index(HTTP " " AMQP " " KAFKA, *scheme) >= 0)
		return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
					  pstrdup("url contains no host"), NULL);
	return true;
}

/* A name as HTTP defines it. */
static bool
is_header_name(const char *name)
{
	return *name != '\0' &&
		strspn(name, "!#$%&'*+-.^_`|~0123456789"
			   "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ") == strlen(name);
}

/*
 * Check a value.  *normal is the way in which couriers get it, so that they
 * need not know in how many ways PostgreSQL lets people spell a number.
 */
static bool
read_value(const OptionDef *def, const char *name, char *value,
		   IdemServer *server, char **normal, Problem *problem)
{
	void	   *field = def->offset > 0 ? (char *) server + def->offset : NULL;
	const char *hint = NULL;
	List	   *names;
	int			number;
	int			unit = def->kind == OPTION_MS ? GUC_UNIT_MS :
		def->kind == OPTION_BYTES ? GUC_UNIT_BYTE : 0;
	bool		flag;

	*normal = value;
	if (strlen(value) > MAX_VALUE)
		return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
					  psprintf("value of option \"%s\" is longer than %d bytes", name, MAX_VALUE),
					  NULL);
	for (const char *c = value; *c; c++)
	{
		if ((unsigned char) *c < ' ' || *c == 0x7f)
			return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
						  psprintf("value of option \"%s\" contains a control character", name),
						  NULL);
		/* couriers speak UTF-8 */
		if (IS_HIGHBIT_SET(*c) && GetDatabaseEncoding() != PG_UTF8)
			return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
						  psprintf("value of option \"%s\" is not ASCII", name),
						  pstrdup("Other characters can be used in databases with encoding UTF8 only."));
	}

	switch (def->kind)
	{
		case OPTION_URL:		/* has been checked */
		case OPTION_TEXT:
			if (field)
				*(char **) field = value;
			return true;

		case OPTION_NAMES:
			*(char **) field = value;
			if (SplitGUCList(pstrdup(value), ',', &names) && names != NIL)
				return true;
			hint = "It must be a list of names, separated by commas.";
			break;

		case OPTION_INT:
		case OPTION_MS:
		case OPTION_BYTES:
			if (parse_int(value, &number, unit, &hint) &&
				number >= def->min && number <= def->max)
			{
				if (field)
					*(int *) field = number;
				*normal = psprintf("%d", number);
				return true;
			}
			if (hint == NULL)
				hint = psprintf("It must be between %d and %d%s.", def->min, def->max,
								unit == GUC_UNIT_MS ? " milliseconds" :
								unit == GUC_UNIT_BYTE ? " bytes" : "");
			break;

		case OPTION_BOOL:
			if (parse_bool(value, &flag))
			{
				*(bool *) field = flag;
				*normal = pstrdup(flag ? "true" : "false");
				return true;
			}
			hint = "It must be true or false.";
			break;

		case OPTION_WORD:
			number = word_index(def->words, value);
			if (number >= 0)
			{
				if (field)
					*(int *) field = number;
				*normal = nth_word(def->words, number);
				return true;
			}
			hint = psprintf("It must be one of: %s.", def->words);
			break;

		case OPTION_HEADER:
			if (is_header_name(name + strlen(def->name)))
			{
				if (!ends_in_file(name) || idem_secret_name_ok(value))
					return true;
				hint = "It must be the name of a file below idem.secrets_dir.";
				break;
			}
			return refuse(problem, ERRCODE_FDW_INVALID_OPTION_NAME,
						  psprintf("option \"%s\" does not name a header", name), NULL);

		case OPTION_FILE:
			if (idem_secret_name_ok(value))
				return true;
			hint = "It must be the name of a file below idem.secrets_dir.";
			break;
	}
	return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
				  psprintf("invalid value for option \"%s\": \"%s\"", name, value),
				  pstrdup(hint));
}

static void
add_option(IdemServer *server, char *name, char *value)
{
	IdemOption *option = palloc(sizeof(IdemOption));

	option->name = name;
	option->value = value;
	server->options = lappend(server->options, option);
}

/*
 * Check the options of a server, and fill in what they say.  Files are not
 * looked at: a restore must not depend on them.  Raises nothing.
 */
static bool
read_options(List *options, IdemServer *server, Problem *problem)
{
	ListCell   *lc;

	foreach(lc, options)
	{
		DefElem    *option = lfirst(lc);

		if (strcmp(option->defname, "url") == 0)
			server->url = strVal(option->arg);
	}
	if (server->url == NULL)
		return refuse(problem, ERRCODE_FDW_DYNAMIC_PARAMETER_VALUE_NEEDED,
					  pstrdup("option \"url\" is missing"),
					  pstrdup("It says where messages go, for example \"https://example.com/events\"."));
	if (!read_url(server->url, &server->scheme, problem))
		return false;

	foreach(lc, options)
	{
		DefElem    *option = lfirst(lc);
		char	   *name = option->defname;
		const OptionDef *def = find_option(name, server->scheme);
		char	   *value;

		if (is_clear_secret(name, server->scheme))
			return refuse(problem, ERRCODE_FDW_INVALID_OPTION_NAME,
						  psprintf("option \"%s\" would show a secret to everybody", name),
						  psprintf("Put it into a file below idem.secrets_dir, and name that in option \"%s_file\".", name));
		if (def == NULL)
			return refuse(problem, ERRCODE_FDW_INVALID_OPTION_NAME,
						  psprintf("invalid option \"%s\"", name),
						  valid_options(server->scheme));
		if (!read_value(def, name, strVal(option->arg), server, &value, problem))
			return false;
		if (!def->private)
			add_option(server, name, value);
	}

	if (server->retry_min_ms > server->retry_max_ms)
		return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
					  psprintf("retry_min (%d ms) is greater than retry_max (%d ms)",
							   server->retry_min_ms, server->retry_max_ms), NULL);
	if (server->gate == IDEM_GATE_STANDBY && server->standbys == NULL)
		return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
					  pstrdup("option \"standbys\" is missing"),
					  pstrdup("With gate \"standby\" it names the standbys to wait for."));
	if (server->gate != IDEM_GATE_STANDBY && server->standbys != NULL)
		return refuse(problem, ERRCODE_INVALID_PARAMETER_VALUE,
					  pstrdup("option \"standbys\" has no effect with gate \"local\""),
					  pstrdup("Set gate to \"standby\"."));
	return true;
}

/* Put the contents of files in the place of their names. */
static void
resolve_secrets(IdemServer *server)
{
	ListCell   *lc;

	foreach(lc, server->options)
	{
		IdemOption *option = lfirst(lc);

		if (!ends_in_file(option->name))
			continue;
		option->value = idem_secret_read(option->value, &server->error);
		if (option->value == NULL)
			return;
		option->name = pnstrdup(option->name, strlen(option->name) - 5);
	}
}

/*
 * idem_courier_path
 *		The program that delivers to servers with this scheme, or NULL.
 */
char *
idem_courier_path(const char *scheme)
{
	char		dir[MAXPGPATH];
	char	   *path;

	strlcpy(dir, my_exec_path, sizeof(dir));
	get_parent_directory(dir);
	path = psprintf("%s/idem-courier-%s", dir, scheme);
	return access(path, X_OK) == 0 ? path : NULL;
}

/*
 * server_validator(options, catalog)
 *		Called for whatever is created with our foreign-data wrapper.
 */
Datum
idem_server_validator(PG_FUNCTION_ARGS)
{
	List	   *options = untransformRelOptions(PG_GETARG_DATUM(0));
	IdemServer	server = defaults;
	Problem		problem = {0};

	switch (PG_GETARG_OID(1))
	{
		case ForeignServerRelationId:
			break;
		case ForeignDataWrapperRelationId:
			if (options == NIL)
				PG_RETURN_VOID();
			ereport(ERROR,
					(errcode(ERRCODE_FDW_INVALID_OPTION_NAME),
					 errmsg("foreign-data wrapper \"idem\" has no options"),
					 errhint("Give options to its servers.")));
			break;
		case UserMappingRelationId:
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("foreign-data wrapper \"idem\" has no user mappings"),
					 errhint("Put secrets into files below idem.secrets_dir, and name them in options of the server.")));
			break;
		default:
			ereport(ERROR,
					(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
					 errmsg("foreign-data wrapper \"idem\" has no foreign tables"),
					 errhint("Send messages with idem.route_add().")));
	}

	if (!read_options(options, &server, &problem))
		ereport(ERROR,
				(errcode(problem.sqlstate),
				 errmsg_internal("%s", problem.message),
				 problem.hint ? errhint("%s", problem.hint) : 0));

	/* An error would keep dumps from being restored. */
	if (idem_courier_path(server.scheme) == NULL)
		ereport(WARNING,
				(errmsg("courier \"idem-courier-%s\" is not installed", server.scheme),
				 errhint("Install it beside the server's programs. Until then, messages for this server wait.")));
	PG_RETURN_VOID();
}

static IdemServer *
load_server(Oid oid, const char *name, List *options)
{
	IdemServer *server = palloc(sizeof(IdemServer));
	Problem		problem = {0};

	*server = defaults;
	server->oid = oid;
	server->name = pstrdup(name);
	if (!read_options(options, server, &problem))
		server->error = problem.message;
	else if (idem_courier_path(server->scheme) == NULL)
		server->error = psprintf("courier \"idem-courier-%s\" is not installed",
								 server->scheme);
	else
		resolve_secrets(server);
	return server;
}

/*
 * idem_server_oid
 *		The server of this name, if it is one of ours.
 */
Oid
idem_server_oid(const char *name)
{
	ForeignServer *server = GetForeignServerByName(name, true);

	return server != NULL &&
		server->fdwid == get_foreign_data_wrapper_oid("idem", true) ?
		server->serverid : InvalidOid;
}

static void
on_server_change(Datum arg pg_attribute_unused(),
				 int cacheid pg_attribute_unused(),
				 uint32 hash pg_attribute_unused())
{
	generation++;
}

/*
 * idem_servers_generation
 *		What idem_servers_load() returned is good while this stays the same,
 *		but for secrets: nobody tells us when a file changes.
 */
uint64
idem_servers_generation(void)
{
	static bool watching = false;

	if (!watching)
	{
		CacheRegisterSyscacheCallback(FOREIGNSERVEROID, on_server_change, (Datum) 0);
		watching = true;
	}
	return generation;
}

static int
compare_servers(const ListCell *a, const ListCell *b)
{
	return strcmp(((IdemServer *) lfirst(a))->name, ((IdemServer *) lfirst(b))->name);
}

/*
 * idem_servers_load
 *		All our servers, as a list of IdemServer, by name.
 *
 * Caller has a transaction; everything is in CurrentMemoryContext.  What is
 * wrong with a server is said in its "error" and hinders no other.
 */
List *
idem_servers_load(void)
{
	Oid			fdw = get_foreign_data_wrapper_oid("idem", true);
	List	   *servers = NIL;
	Relation	rel;
	ScanKeyData key;
	SysScanDesc scan;
	HeapTuple	tup;

	if (!OidIsValid(fdw))
		return NIL;

	ScanKeyInit(&key, Anum_pg_foreign_server_srvfdw, BTEqualStrategyNumber,
				F_OIDEQ, ObjectIdGetDatum(fdw));
	rel = table_open(ForeignServerRelationId, AccessShareLock);
	scan = systable_beginscan(rel, InvalidOid, false, NULL, 1, &key);
	while (HeapTupleIsValid(tup = systable_getnext(scan)))
	{
		Form_pg_foreign_server form = (Form_pg_foreign_server) GETSTRUCT(tup);
		bool		isnull;
		Datum		options = heap_getattr(tup, Anum_pg_foreign_server_srvoptions,
										   RelationGetDescr(rel), &isnull);

		servers = lappend(servers,
						  load_server(form->oid, NameStr(form->srvname),
									  isnull ? NIL : untransformRelOptions(options)));
	}
	systable_endscan(scan);
	table_close(rel, AccessShareLock);
	list_sort(servers, compare_servers);
	return servers;
}

/* server_check(server) */
Datum
idem_server_check(PG_FUNCTION_ARGS)
{
	char	   *name = text_to_cstring(idem_name_arg(fcinfo, 0, "name of the server"));
	Oid			oid = idem_server_oid(name);
	IdemServer *server;

	if (!OidIsValid(oid))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("server \"%s\" does not exist", name),
				 errhint("Create it with CREATE SERVER ... FOREIGN DATA WRAPPER idem.")));
	server = load_server(oid, name, GetForeignServer(oid)->options);
	if (server->error == NULL)
		PG_RETURN_NULL();
	PG_RETURN_TEXT_P(cstring_to_text(server->error));
}

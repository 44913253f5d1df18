/*-------------------------------------------------------------------------
 *
 * http.c
 *		The courier for http and https: webhooks, CloudEvents.
 *
 * Each message is one request; up to "connections" of them are under way at a
 * time, at most one of each key.  A complete answer with status 2xx is the
 * acknowledgement.  Whether a request can have reached the other side is known
 * from the moment at which libcurl is about to write it (before_request): what
 * fails before that was never sent, what fails after it is unknown.
 *
 * Where requests go is the administrator's business: scheme, host and port
 * come from option url alone, redirects are not followed, proxies are not
 * used, and every address is checked when it is connected to.
 *
 *-------------------------------------------------------------------------
 */
#define _GNU_SOURCE				/* memmem */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#include <curl/curl.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "courier.h"
#include "order.h"

#if LIBCURL_VERSION_NUM < 0x075000
#error "libcurl 7.80 or newer is needed"
#endif

#define KEEP_ANSWER		1024
#define MAX_ANSWER		(1024 * 1024)

/*
 * Headers, one after the other, each with NUL at its end.  They are made for
 * every message, so that they are not worth a list of libcurl's with two
 * allocations for each.
 */
typedef struct Lines
{
	char	   *text;
	size_t		len;
	size_t		size;
	struct curl_slist *list;	/* made by link_lines() */
	size_t		room;
} Lines;

/* A request under way, or the means for one. */
typedef struct Request
{
	struct Request *next;		/* while it is free */
	CURL	   *curl;
	IdemMessage *message;
	char	   *destination;	/* for which libcurl has the URL, or NULL */
	Lines		headers;
	bool		sent;			/* it may have reached the other side */
	bool		too_long;		/* the answer, so that we stopped reading */
	const char *refused;		/* the kind of address that was in the way */
	char		answer[KEEP_ANSWER];
	size_t		answer_len;
	size_t		answer_total;
	char		error[CURL_ERROR_SIZE];
} Request;

static IdemCourier *courier;
static CURLM *multi;
static IdemQueue *queue;
static Request *requests;
static Request *idle;			/* those without a message */

static char *base_url;			/* up to the path, without a slash at the end */
static char *base_query;		/* with its question mark, or empty */
static bool https;
static const char *method;
static int	connections;
static int	timeout_ms;
static int	connect_timeout_ms;
static const char *bearer;
static bool cloudevents;
static bool public_only;
static bool keep_answer;
static unsigned char *signing_key;
static size_t signing_key_len;
static Lines fixed_headers;		/* options header.NAME and the like */
static struct curl_slist *fixed_list;	/* the same for libcurl */
static char *ce_source;

/* Set by ourselves; a message's header of such a name is left out. */
static const char *const own_headers[] = {
	"content-type", "idempotency-key", "user-agent", "accept", "webhook-id",
	"webhook-timestamp", "webhook-signature", NULL
};

static const char *const own_ce_headers[] = {
	"ce-id", "ce-specversion", "ce-type", "ce-time", NULL
};

/* A message that brings these would speak in our name, or break the framing. */
static const char *const refused_headers[] = {
	"host", "content-length", "transfer-encoding", "connection", "keep-alive",
	"upgrade", "te", "trailer", "expect", "authorization", "cookie", NULL
};

static bool
in_list(const char *const *names, const char *name)
{
	for (; *names != NULL; names++)
		if (strcasecmp(*names, name) == 0)
			return true;
	return false;
}

/* A name as RFC 9110 has it: a token. */
static bool
good_name(const char *name)
{
	if (*name == '\0')
		return false;
	for (; *name != '\0'; name++)
		if (!isalnum((unsigned char) *name) && strchr("!#$%&'*+-.^_`|~", *name) == NULL)
			return false;
	return true;
}

/* Nothing that could end the line. */
static bool
good_value(const char *value)
{
	for (; *value != '\0'; value++)
		if (((unsigned char) *value < 0x20 && *value != '\t') || *value == 0x7f)
			return false;
	return true;
}

static void
put(Lines *lines, const char *s, size_t len)
{
	if (lines->size - lines->len < len)
	{
		lines->size = 2 * (lines->size + len) + 256;
		lines->text = idem_realloc(lines->text, lines->size);
	}
	memcpy(lines->text + lines->len, s, len);
	lines->len += len;
}

static void
add_header(Lines *lines, const char *name, const char *value)
{
	put(lines, name, strlen(name));

	/* libcurl takes "Name:" for a header to leave out, "Name;" for an empty one */
	if (value[strspn(value, " \t")] == '\0')
		put(lines, ";", 2);
	else
	{
		put(lines, ": ", 2);
		put(lines, value, strlen(value) + 1);
	}
}

/* The line after this one, or the first; NULL after the last. */
static char *
next_line(const Lines *lines, char *line)
{
	line = line == NULL ? lines->text : line + strlen(line) + 1;
	return line < lines->text + lines->len ? line : NULL;
}

/* Is there one of this name already? */
static bool
has_header(const Lines *lines, const char *name)
{
	size_t		len = strlen(name);

	for (char *line = NULL; (line = next_line(lines, line)) != NULL;)
		if (strncasecmp(line, name, len) == 0 && (line[len] == ':' || line[len] == ';'))
			return true;
	return false;
}

/* The lines as libcurl wants them, with these others behind them. */
static struct curl_slist *
link_lines(Lines *lines, struct curl_slist *others)
{
	size_t		n = 0;

	for (char *line = NULL; (line = next_line(lines, line)) != NULL; n++)
	{
		if (n == lines->room)
		{
			lines->room = 2 * lines->room + 16;
			lines->list = idem_realloc(lines->list, sizeof(struct curl_slist) * lines->room);
		}
		lines->list[n].data = line;
	}
	for (size_t i = 0; i < n; i++)
		lines->list[i].next = i + 1 < n ? &lines->list[i + 1] : others;
	return n > 0 ? lines->list : others;
}

/* Append s, with all but letters, digits and the characters in keep encoded. */
static void
put_encoded(Lines *lines, const char *s, const char *keep)
{
	static const char hex[] = "0123456789ABCDEF";

	for (; *s != '\0'; s++)
	{
		unsigned char c = (unsigned char) *s;
		char		code[3] = {'%', hex[c >> 4], hex[c & 0xF]};

		if (c < 0x80 && (isalnum(c) || strchr(keep, c) != NULL))
			put(lines, s, 1);
		else
			put(lines, code, 3);
	}
}

/* CloudEvents' encoding of values: printable ASCII except space, " and %. */
static void
add_ce_header(Lines *lines, const char *name, const char *value)
{
	if (*value == '\0')
	{
		add_header(lines, name, value);
		return;
	}
	put(lines, name, strlen(name));
	put(lines, ": ", 2);
	put_encoded(lines, value, "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~");
	put(lines, "", 1);
}

/*
 * Options
 */

static void
fixed_header(IdemCourier *c, const char *name, const char *value)
{
	if (!good_name(name) || !good_value(value))
		idem_courier_refuse(c, "option \"header.%s\" is not a header that can be sent", name);
	else if (strcasecmp(name, "content-length") == 0 ||
			 strcasecmp(name, "transfer-encoding") == 0 ||
			 strcasecmp(name, "connection") == 0 ||
			 strcasecmp(name, "host") == 0 || in_list(own_headers, name))
		idem_courier_refuse(c, "header \"%s\" cannot be set by an option", name);
	else
		add_header(&fixed_headers, name, value);
}

/* url: check it, and take it apart. */
static void
read_url(IdemCourier *c, const char *url)
{
	CURLU	   *parsed = curl_url();
	char	   *scheme = NULL;
	char	   *part = NULL;
	size_t		len = strcspn(url, "?");

	if (parsed == NULL)
		abort();
	if (!good_value(url) || strchr(url, ' ') != NULL ||
		curl_url_set(parsed, CURLUPART_URL, url, CURLU_NON_SUPPORT_SCHEME) != CURLUE_OK ||
		curl_url_get(parsed, CURLUPART_SCHEME, &scheme, 0) != CURLUE_OK)
		idem_courier_refuse(c, "option \"url\" is not a valid URL");
	else if (strcmp(scheme, "http") != 0 && strcmp(scheme, "https") != 0)
		idem_courier_refuse(c, "option \"url\" must begin with http:// or https://");
	else if (curl_url_get(parsed, CURLUPART_USER, &part, 0) == CURLUE_OK ||
			 curl_url_get(parsed, CURLUPART_PASSWORD, &part, 0) == CURLUE_OK)
		idem_courier_refuse(c, "option \"url\" must not have a user or a password; there are options for them");
	else if (strchr(url, '#') != NULL)
		idem_courier_refuse(c, "option \"url\" must not have a fragment");
	else
	{
		https = strcmp(scheme, "https") == 0;
		base_query = idem_strdup(url + len);
		while (len > 0 && url[len - 1] == '/')
			len--;
		base_url = idem_strndup(url, len);
	}
	curl_free(scheme);
	curl_free(part);
	curl_url_cleanup(parsed);
}

/* signing_key: bytes, or as Standard Webhooks write them, whsec_ and base64. */
static void
read_signing_key(IdemCourier *c, const char *key)
{
	static const char prefix[] = "whsec_";
	size_t		len;
	int			n;

	if (strncmp(key, prefix, sizeof(prefix) - 1) != 0)
	{
		signing_key = (unsigned char *) idem_strdup(key);
		signing_key_len = strlen(key);
	}
	else
	{
		key += sizeof(prefix) - 1;
		len = strlen(key);
		signing_key = idem_alloc(len + 4);
		n = len % 4 != 0 ? -1 :
			EVP_DecodeBlock(signing_key, (const unsigned char *) key, (int) len);

		/* the padding comes out as zeros */
		for (size_t i = len; n > 0 && i > 0 && key[i - 1] == '='; i--)
			n--;
		signing_key_len = n < 0 ? 0 : (size_t) n;
	}
	if (signing_key_len == 0)
		idem_courier_refuse(c, "option \"signing_key\" is not a key");
}

static void
set_blob(CURL *curl, CURLoption option, const char *pem)
{
	/* the options stay where they are */
	struct curl_blob blob = {.data = (void *) pem,.len = strlen(pem)};

	blob.flags = CURL_BLOB_NOCOPY;
	if (curl_easy_setopt(curl, option, &blob) != CURLE_OK)
		abort();
}

/*
 * libcurl's callbacks
 */

static size_t
take_answer(char *data, size_t size, size_t n, void *arg)
{
	Request    *request = arg;
	size_t		room = KEEP_ANSWER - request->answer_len;
	size_t		some = n < room ? n : room;

	(void) size;				/* always 1 */
	memcpy(request->answer + request->answer_len, data, some);
	request->answer_len += some;
	request->answer_total += n;
	if (request->answer_total > MAX_ANSWER)
	{
		/* The status is in; whoever talks on and on need not be heard out. */
		request->too_long = true;
		return 0;
	}
	return n;
}

static curl_socket_t
open_socket(void *arg, curlsocktype purpose, struct curl_sockaddr *address)
{
	Request    *request = arg;
	const char *refused = idem_address_refused(&address->addr, public_only);

	(void) purpose;
	if (refused != NULL)
	{
		request->refused = refused;
		return CURL_SOCKET_BAD;
	}
	return socket(address->family, address->socktype | SOCK_CLOEXEC, address->protocol);
}

/*
 * Connected, about to send.  libcurl sends again by itself when a connection
 * that it used before breaks without an answer.  But the first request may
 * have had its effect: whether to repeat it is not for libcurl to decide.
 */
static int
before_request(void *arg, char *peer, char *local, int peer_port, int local_port)
{
	Request    *request = arg;

	(void) peer;
	(void) local;
	(void) peer_port;
	(void) local_port;
	if (request->sent)
		return CURL_PREREQFUNC_ABORT;
	request->sent = true;
	return CURL_PREREQFUNC_OK;
}

static void check_finished(void);

static void
socket_ready(IdemCourier *c, int fd, short revents, void *arg)
{
	int			mask = 0;
	int			running;

	(void) c;
	(void) arg;
	if (revents & (POLLIN | POLLHUP))
		mask |= CURL_CSELECT_IN;
	if (revents & POLLOUT)
		mask |= CURL_CSELECT_OUT;
	if (revents & (POLLERR | POLLNVAL))
		mask |= CURL_CSELECT_ERR;
	curl_multi_socket_action(multi, fd, mask, &running);
	check_finished();
}

static int
watch_socket(CURL *curl, curl_socket_t fd, int what, void *arg, void *socket_arg)
{
	short		events = 0;

	(void) curl;
	(void) arg;
	(void) socket_arg;
	if (what == CURL_POLL_IN || what == CURL_POLL_INOUT)
		events |= POLLIN;
	if (what == CURL_POLL_OUT || what == CURL_POLL_INOUT)
		events |= POLLOUT;
	idem_courier_watch(courier, fd, events, socket_ready, NULL);
	return 0;
}

static int
set_timer(CURLM *m, long ms, void *arg)
{
	(void) m;
	(void) arg;
	idem_courier_timer(courier, ms);
	return 0;
}

static void
http_timer(IdemCourier *c)
{
	int			running;

	(void) c;
	curl_multi_socket_action(multi, CURL_SOCKET_TIMEOUT, 0, &running);
	check_finished();
}

/* What is the same for all requests. */
static void
prepare_handle(IdemCourier *c, Request *request)
{
	CURL	   *curl = curl_easy_init();
	const char *protocol = https ? "https" : "http";
	const char *user = idem_option(c, "user");
	const char *password = idem_option(c, "password");
	const char *pem;

	if (curl == NULL)
		abort();
	request->curl = curl;
	curl_easy_setopt(curl, CURLOPT_PRIVATE, request);
	curl_easy_setopt(curl, CURLOPT_ERRORBUFFER, request->error);
	curl_easy_setopt(curl, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(curl, CURLOPT_HTTP_VERSION, (long) CURL_HTTP_VERSION_1_1);
	curl_easy_setopt(curl, CURLOPT_PATH_AS_IS, 1L);
	curl_easy_setopt(curl, CURLOPT_FOLLOWLOCATION, 0L);
	curl_easy_setopt(curl, CURLOPT_PROXY, "");
	curl_easy_setopt(curl, CURLOPT_NOPROXY, "*");
	curl_easy_setopt(curl, CURLOPT_USERAGENT, "idem/" IDEM_COURIER_VERSION);
	curl_easy_setopt(curl, CURLOPT_TIMEOUT_MS, (long) timeout_ms);
	curl_easy_setopt(curl, CURLOPT_CONNECTTIMEOUT_MS, (long) connect_timeout_ms);
	curl_easy_setopt(curl, CURLOPT_WRITEFUNCTION, take_answer);
	curl_easy_setopt(curl, CURLOPT_WRITEDATA, request);
	curl_easy_setopt(curl, CURLOPT_OPENSOCKETFUNCTION, open_socket);
	curl_easy_setopt(curl, CURLOPT_OPENSOCKETDATA, request);
	curl_easy_setopt(curl, CURLOPT_PREREQFUNCTION, before_request);
	curl_easy_setopt(curl, CURLOPT_PREREQDATA, request);
#if LIBCURL_VERSION_NUM >= 0x075500
	curl_easy_setopt(curl, CURLOPT_PROTOCOLS_STR, protocol);
#else
	(void) protocol;
	curl_easy_setopt(curl, CURLOPT_PROTOCOLS,
					 (long) (https ? CURLPROTO_HTTPS : CURLPROTO_HTTP));
#endif
	curl_easy_setopt(curl, CURLOPT_POST, 1L);
	if (strcmp(method, "POST") != 0)
		curl_easy_setopt(curl, CURLOPT_CUSTOMREQUEST, method);
	if (user != NULL)
	{
		curl_easy_setopt(curl, CURLOPT_HTTPAUTH, (long) CURLAUTH_BASIC);
		curl_easy_setopt(curl, CURLOPT_USERNAME, user);
		curl_easy_setopt(curl, CURLOPT_PASSWORD, password != NULL ? password : "");
	}
	if (!https)
		return;
	curl_easy_setopt(curl, CURLOPT_SSL_VERIFYPEER, 1L);
	curl_easy_setopt(curl, CURLOPT_SSL_VERIFYHOST, 2L);
	curl_easy_setopt(curl, CURLOPT_SSLVERSION, (long) CURL_SSLVERSION_TLSv1_2);
	if ((pem = idem_option(c, "tls_ca")) != NULL)
	{
		/* these only, not those of the system as well */
		curl_easy_setopt(curl, CURLOPT_CAINFO, NULL);
		curl_easy_setopt(curl, CURLOPT_CAPATH, NULL);
		set_blob(curl, CURLOPT_CAINFO_BLOB, pem);
	}
	if ((pem = idem_option(c, "tls_cert")) != NULL)
	{
		curl_easy_setopt(curl, CURLOPT_SSLCERTTYPE, "PEM");
		set_blob(curl, CURLOPT_SSLCERT_BLOB, pem);
	}
	if ((pem = idem_option(c, "tls_key")) != NULL)
	{
		curl_easy_setopt(curl, CURLOPT_SSLKEYTYPE, "PEM");
		set_blob(curl, CURLOPT_SSLKEY_BLOB, pem);
	}
}

static void
http_start(IdemCourier *c)
{
	const char *option;

	courier = c;
	curl_global_init(CURL_GLOBAL_DEFAULT);
	read_url(c, idem_option_required(c, "url"));
	method = idem_option(c, "method");
	if (method == NULL)
		method = "POST";
	if (strcmp(method, "POST") != 0 && strcmp(method, "PUT") != 0 &&
		strcmp(method, "PATCH") != 0)
		idem_courier_refuse(c, "option \"method\" must be POST, PUT or PATCH");
	connections = idem_option_int(c, "connections", 16, 1, 1000);
	timeout_ms = idem_option_int(c, "timeout_ms", 30000, 1, 24 * 3600 * 1000);
	connect_timeout_ms = idem_option_int(c, "connect_timeout_ms", 10000, 1, 3600 * 1000);
	public_only = idem_option_bool(c, "public_only", false);
	keep_answer = idem_option_bool(c, "keep_answer", false);

	option = idem_option(c, "cloudevents");
	cloudevents = option == NULL || strcmp(option, "binary") == 0;
	if (!cloudevents && strcmp(option, "off") != 0)
		idem_courier_refuse(c, "option \"cloudevents\" must be binary or off");

	bearer = idem_option(c, "bearer");
	if (bearer != NULL && (*bearer == '\0' || !good_value(bearer)))
		idem_courier_refuse(c, "option \"bearer\" is not a token that can be sent");
	if (bearer != NULL && idem_option(c, "user") != NULL)
		idem_courier_refuse(c, "options \"bearer\" and \"user\" exclude each other");
	if (idem_option(c, "password") != NULL && idem_option(c, "user") == NULL)
		idem_courier_refuse(c, "option \"password\" needs option \"user\"");
	option = idem_option(c, "signing_key");
	if (option != NULL)
		read_signing_key(c, option);
	idem_option_each(c, "header.", fixed_header);

	if ((idem_option(c, "tls_cert") != NULL) != (idem_option(c, "tls_key") != NULL))
		idem_courier_refuse(c, "options \"tls_cert\" and \"tls_key\" need each other");
	if (base_url != NULL && !https &&
		(idem_option(c, "tls_ca") != NULL || idem_option(c, "tls_cert") != NULL))
		idem_courier_refuse(c, "TLS options need a url that begins with https://");

	option = idem_courier_server(c);
	ce_source = idem_alloc(strlen(option) + 10);
	sprintf(ce_source, "urn:idem:%s", option);
	if (bearer != NULL)
	{
		put(&fixed_headers, "Authorization: Bearer ", 22);
		put(&fixed_headers, bearer, strlen(bearer) + 1);
	}

	/* no waiting for "100 Continue" */
	put(&fixed_headers, "Expect:", 8);
	fixed_list = link_lines(&fixed_headers, NULL);

	multi = curl_multi_init();
	if (multi == NULL)
		abort();
	curl_multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, watch_socket);
	curl_multi_setopt(multi, CURLMOPT_TIMERFUNCTION, set_timer);
	curl_multi_setopt(multi, CURLMOPT_MAX_TOTAL_CONNECTIONS, (long) connections);
	curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, (long) connections);
	queue = idem_queue_create();
	requests = idem_alloc(sizeof(Request) * (size_t) connections);
	for (int i = connections - 1; i >= 0; i--)
	{
		requests[i].next = idle;
		idle = &requests[i];
	}
}

/*
 * Requests
 */

/*
 * Set the URL: the destination is a path below option url.  False if it leads
 * elsewhere.
 */
static bool
set_url(Request *request, const char *destination)
{
	Lines		url = {0};
	const char *path = destination + strspn(destination, "/");

	/* mostly it is the same as the last time */
	if (request->destination != NULL && strcmp(request->destination, destination) == 0)
		return true;
	for (const char *p = path; *p != '\0';)
	{
		size_t		len = strcspn(p, "/\\");

		if ((len == 1 && p[0] == '.') || (len == 2 && p[0] == '.' && p[1] == '.'))
			return false;
		p += len;
		p += *p != '\0';
	}
	put(&url, base_url, strlen(base_url));
	if (*path != '\0' || strchr(base_url + 8, '/') == NULL)
		put(&url, "/", 1);
	put_encoded(&url, path, "-._~/");
	put(&url, base_query, strlen(base_query) + 1);
	curl_easy_setopt(request->curl, CURLOPT_URL, url.text);
	free(url.text);
	free(request->destination);
	request->destination = idem_strdup(destination);
	return true;
}

/* Add a header of the message to those of the request, unless it is ours. */
static bool
message_header(void *arg, const char *name, const char *value)
{
	Request    *request = arg;

	if (!good_name(name) || !good_value(value) || in_list(refused_headers, name) ||
		strncasecmp(name, "proxy-", 6) == 0)
	{
		snprintf(request->error, sizeof(request->error),
				 "header \"%.100s\" cannot be sent", good_name(name) ? name : "?");
		return false;
	}
	if (!in_list(own_headers, name) && !has_header(&fixed_headers, name) &&
		!(cloudevents && in_list(own_ce_headers, name)))
		add_header(&request->headers, name, value);
	return true;
}

static void
add_signature(Request *request)
{
	IdemMessage *m = request->message;
	char		stamp[32];
	unsigned char mac[EVP_MAX_MD_SIZE];
	unsigned int mac_len = sizeof(mac);
	char		signature[3 + 4 * ((EVP_MAX_MD_SIZE + 2) / 3) + 1] = "v1,";
	size_t		head;
	char	   *signed_text;

	snprintf(stamp, sizeof(stamp), "%lld", (long long) time(NULL));
	signed_text = idem_alloc(strlen(m->msg_id) + strlen(stamp) + m->body_len + 3);
	head = (size_t) sprintf(signed_text, "%s.%s.", m->msg_id, stamp);
	memcpy(signed_text + head, m->body, m->body_len);
	if (HMAC(EVP_sha256(), signing_key, (int) signing_key_len,
			 (unsigned char *) signed_text, head + m->body_len, mac, &mac_len) == NULL)
		abort();
	free(signed_text);
	EVP_EncodeBlock((unsigned char *) signature + 3, mac, (int) mac_len);
	add_header(&request->headers, "webhook-id", m->msg_id);
	add_header(&request->headers, "webhook-timestamp", stamp);
	add_header(&request->headers, "webhook-signature", signature);
}

/* A time as RFC 3339 has it. */
static const char *
timestamp(int64_t usec)
{
	static char text[64];
	static time_t last = -1;
	static size_t len;
	time_t		second = (time_t) (usec / 1000000);
	struct tm	tm;

	if (second != last)
	{
		len = gmtime_r(&second, &tm) == NULL ? 0 :
			strftime(text, 32, "%Y-%m-%dT%H:%M:%S", &tm);
		last = second;
	}
	snprintf(text + len, sizeof(text) - len, ".%06dZ", (int) (usec % 1000000));
	return text;
}

static void
add_cloudevent(Request *request)
{
	IdemMessage *m = request->message;
	Lines	   *headers = &request->headers;

	add_header(headers, "ce-specversion", "1.0");
	add_header(headers, "ce-id", m->msg_id);
	add_ce_header(headers, "ce-type", m->topic);
	add_header(headers, "ce-time", timestamp(m->enqueued_at));
	if (!has_header(headers, "ce-source"))
		add_ce_header(headers, "ce-source", ce_source);
	if (m->key != NULL && *m->key != '\0' && !has_header(headers, "ce-partitionkey"))
		add_ce_header(headers, "ce-partitionkey", m->key);
}

/* Headers of the request; false if the message cannot be sent, see error. */
static bool
add_headers(Request *request)
{
	IdemMessage *m = request->message;

	request->error[0] = '\0';
	request->headers.len = 0;
	if (!good_value(m->content_type))
	{
		strcpy(request->error, "content type cannot be sent");
		return false;
	}
	if (!idem_headers_each(m->headers, message_header, request))
	{
		if (request->error[0] == '\0')
			strcpy(request->error, "headers cannot be sent");
		return false;
	}
	add_header(&request->headers, "Content-Type", m->content_type);
	add_header(&request->headers, "Idempotency-Key", m->msg_id);
	if (cloudevents)
		add_cloudevent(request);
	if (signing_key != NULL)
		add_signature(request);
	return true;
}

static void
return_all(IdemMessage *list, const char *why)
{
	while (list != NULL)
	{
		IdemMessage *next = list->next;

		idem_courier_outcome(courier, list, IDEM_RETURNED, 0, 0, "%s", why);
		list = next;
	}
}

/* Give a request back; what waits behind its message goes on or comes back. */
static void
finish(Request *request, IdemOutcome outcome, uint32_t retry_after_ms,
	   uint32_t code, const char *text, size_t len)
{
	IdemMessage *message = request->message;
	IdemMessage *behind = idem_queue_done(queue, message, outcome != IDEM_DELIVERED);

	if (outcome == IDEM_DELIVERED && !keep_answer)
		idem_courier_delivered(courier, message);
	else
		idem_courier_answer(courier, message, outcome, retry_after_ms, code, text, len);
	return_all(behind, "a message before it with the same key failed");
	request->message = NULL;
	request->next = idle;
	idle = request;
}

static void
finish_text(Request *request, IdemOutcome outcome, uint32_t code, const char *text)
{
	finish(request, outcome, 0, code, text, strlen(text));
}

/*
 * The whole server is out of order.  The relay learns that first, lest it sends
 * again at once; then this message comes back, and all that are not out.
 */
static void
stop_all(Request *request, IdemState state, IdemOutcome outcome, uint32_t code,
		 const char *why, const char *text, size_t len)
{
	idem_courier_state(courier, state, 0, "%s", why);
	finish(request, outcome, 0, code, text, len);
	return_all(idem_queue_take_all(queue), why);
}

/*
 * nginx says 400 to everybody when it is the connection that it does not like.
 * That is about us, not about the message, and a backlog must not die of it.
 */
static bool
is_about_tls(const Request *request, long status)
{
	static const char *const said[] = {
		"No required SSL certificate was sent",
		"The SSL certificate error",
		"The plain HTTP request was sent to HTTPS port"
	};

	if (status != 400)
		return false;
	for (size_t i = 0; i < sizeof(said) / sizeof(said[0]); i++)
		if (memmem(request->answer, request->answer_len, said[i], strlen(said[i])) != NULL)
			return true;
	return false;
}

static void
answered(Request *request, long status)
{
	char		text[64 + KEEP_ANSWER];
	curl_off_t	seconds = 0;
	uint32_t	retry_after_ms = 0;
	size_t		len;

	if (status >= 200 && status < 300)
	{
		idem_courier_state(courier, IDEM_STATE_UP, 0, "%s", "");
		finish(request, IDEM_DELIVERED, 0, (uint32_t) status,
			   request->answer, request->answer_len);
		return;
	}

	/* Answers may repeat what they were asked, so keep them only if told to. */
	len = (size_t) snprintf(text, sizeof(text), "HTTP status %ld", status);
	if (keep_answer && request->answer_len > 0)
	{
		text[len++] = ':';
		text[len++] = ' ';
		memcpy(text + len, request->answer, request->answer_len);
		len += request->answer_len;
	}

	if (status == 401 || status == 403 || status == 404 ||
		(status >= 300 && status < 400) || is_about_tls(request, status))
	{
		char		why[64];

		snprintf(why, sizeof(why), "HTTP status %ld%s", status,
				 status < 400 ? ": redirects are not followed" :
				 status == 400 ? ": TLS or client certificate required" : "");
		stop_all(request, IDEM_STATE_BLOCKED, IDEM_BLOCKED, (uint32_t) status,
				 why, text, len);
		return;
	}

	idem_courier_state(courier, IDEM_STATE_UP, 0, "%s", "");
	if (status == 408 || status == 409 || status == 425 || status == 429 || status >= 500)
	{
		curl_easy_getinfo(request->curl, CURLINFO_RETRY_AFTER, &seconds);
		if (seconds > 0)
			retry_after_ms = seconds > UINT32_MAX / 1000 ? UINT32_MAX : (uint32_t) seconds * 1000;
		finish(request, IDEM_TRANSIENT, retry_after_ms, (uint32_t) status, text, len);
	}
	else
		finish(request, IDEM_PERMANENT, 0, (uint32_t) status, text, len);
}

/* Will be the same next time, unless somebody changes something. */
static bool
is_tls_refusal(CURLcode result)
{
	return result == CURLE_PEER_FAILED_VERIFICATION ||
		result == CURLE_SSL_CERTPROBLEM || result == CURLE_SSL_CIPHER ||
		result == CURLE_SSL_CACERT_BADFILE || result == CURLE_SSL_ISSUER_ERROR ||
		result == CURLE_SSL_INVALIDCERTSTATUS || result == CURLE_USE_SSL_FAILED ||
		result == CURLE_SSL_ENGINE_NOTFOUND || result == CURLE_SSL_ENGINE_SETFAILED;
}

static void
finished(Request *request, CURLcode result)
{
	char		why[sizeof(request->error) + 64];
	long		status = 0;

	curl_easy_getinfo(request->curl, CURLINFO_RESPONSE_CODE, &status);
	if (result == CURLE_OK || (request->too_long && status >= 200))
	{
		answered(request, status);
		return;
	}

	snprintf(why, sizeof(why), "%s",
			 request->error[0] != '\0' ? request->error : curl_easy_strerror(result));
	if (request->sent)
		finish_text(request, IDEM_UNKNOWN, 0, why);
	else if (request->refused != NULL)
	{
		snprintf(why, sizeof(why), "the host of option \"url\" has a %s", request->refused);
		stop_all(request, IDEM_STATE_BLOCKED, IDEM_BLOCKED, 0, why, why, strlen(why));
	}
	else if (is_tls_refusal(result))
		stop_all(request, IDEM_STATE_BLOCKED, IDEM_BLOCKED, 0, why, why, strlen(why));
	else
		stop_all(request, IDEM_STATE_DOWN, IDEM_RETURNED, 0, why, why, strlen(why));
}

static void
check_finished(void)
{
	CURLMsg    *done;
	int			left;

	while ((done = curl_multi_info_read(multi, &left)) != NULL)
	{
		CURL	   *curl = done->easy_handle;
		CURLcode	result = done->data.result;
		char	   *private;

		if (done->msg != CURLMSG_DONE)
			continue;
		curl_easy_getinfo(curl, CURLINFO_PRIVATE, &private);
		curl_multi_remove_handle(multi, curl);
		finished((Request *) private, result);
	}
}

static void
begin(Request *request, IdemMessage *message)
{
	if (request->curl == NULL)
		prepare_handle(courier, request);
	request->message = message;
	request->sent = false;
	request->too_long = false;
	request->refused = NULL;
	request->answer_len = 0;
	request->answer_total = 0;
	if (!set_url(request, message->destination))
	{
		finish_text(request, IDEM_PERMANENT, 0, "destination has a \"..\" in it");
		return;
	}
	if (!add_headers(request))
	{
		finish_text(request, IDEM_PERMANENT, 0, request->error);
		return;
	}
	request->error[0] = '\0';
	curl_easy_setopt(request->curl, CURLOPT_POSTFIELDS, message->body);
	curl_easy_setopt(request->curl, CURLOPT_POSTFIELDSIZE_LARGE, (curl_off_t) message->body_len);
	curl_easy_setopt(request->curl, CURLOPT_HTTPHEADER,
					 link_lines(&request->headers, fixed_list));
	if (curl_multi_add_handle(multi, request->curl) != CURLM_OK)
		abort();
}

static void
http_message(IdemCourier *c, IdemMessage *message)
{
	(void) c;
	idem_queue_add(queue, message);
}

/* Give idle requests something to do; true if there was any. */
static bool
begin_waiting(void)
{
	bool		begun = false;

	while (idle != NULL && !idem_courier_quitting(courier))
	{
		IdemMessage *message = idem_queue_next(queue);
		Request    *request = idle;

		if (message == NULL)
			break;
		idle = request->next;
		begin(request, message);
		begun = true;
	}
	return begun;
}

static void
http_round(IdemCourier *c)
{
	int			running;

	(void) c;
	if (!begin_waiting())
		return;

	/*
	 * libcurl would begin when its timer goes off, one round later.  That is
	 * soon enough for what can begin because a request is finished at once:
	 * the other connections have their turn first.
	 */
	curl_multi_socket_action(multi, CURL_SOCKET_TIMEOUT, 0, &running);
	check_finished();
	(void) begin_waiting();
}

static void
http_drain(IdemCourier *c)
{
	(void) c;
	return_all(idem_queue_take_all(queue), "quitting");
}

static void
http_stop(IdemCourier *c)
{
	(void) c;
	for (int i = 0; i < connections; i++)
	{
		if (requests[i].curl == NULL)
			continue;
		if (requests[i].message != NULL)
			curl_multi_remove_handle(multi, requests[i].curl);
		curl_easy_cleanup(requests[i].curl);
	}
	curl_multi_cleanup(multi);
}

static const char *
http_library(void)
{
	static char text[64];

	snprintf(text, sizeof(text), "libcurl/%s", curl_version_info(CURLVERSION_NOW)->version);
	return text;
}

static const char *const options[] = {
	"url", "method", "connections", "timeout_ms", "connect_timeout_ms", "bearer",
	"user", "password", "header.", "signing_key", "cloudevents", "tls_ca",
	"tls_cert", "tls_key", "public_only", "keep_answer", NULL
};

const IdemTransport idem_transport = {
	.program = "idem-courier-http",
	.library = http_library,
	.options = options,
	.start = http_start,
	.message = http_message,
	.round = http_round,
	.timer = http_timer,
	.drain = http_drain,
	.stop = http_stop,
};

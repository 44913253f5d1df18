/*-------------------------------------------------------------------------
 *
 * url.c
 *		Urls of brokers: scheme://host:port/path.
 *
 * The url of a server is shown to everybody, so what holds credentials is
 * refused, and no error repeats a word of it.
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "courier.h"

static bool
is_scheme(const char *url, size_t len, const char *scheme)
{
	return len == strlen(scheme) && strncasecmp(url, scheme, len) == 0;
}

bool
idem_url_read(IdemCourier *courier, const char *plain, const char *secure,
			  int port, IdemUrl *url)
{
	const char *text = idem_option_required(courier, "url");
	const char *rest = strstr(text, "://");
	size_t		scheme = rest ? (size_t) (rest - text) : 0;
	const char *end;
	const char *host;
	size_t		host_len;

	if (*text == '\0')
		return false;			/* said already */
	url->tls = rest && is_scheme(text, scheme, secure);
	if (!rest || (!url->tls && !is_scheme(text, scheme, plain)))
	{
		idem_courier_refuse(courier, "the url must begin with %s:// or %s://",
							plain, secure);
		return false;
	}
	rest += 3;
	end = rest + strcspn(rest, "/");
	if (memchr(rest, '@', strlen(rest)))
	{
		idem_courier_refuse(courier, "the url must not hold credentials: "
							"use options user and password");
		return false;
	}

	host = rest;
	host_len = strcspn(rest, ":/");
	rest += host_len;
	if (*host == '[')
	{
		host++;
		host_len = strcspn(host, "]/");
		rest = host + host_len + (host[host_len] == ']');
	}
	if (*rest == ':')
	{
		char	   *after;

		port = (int) strtol(rest + 1, &after, 10);
		rest = after;
	}
	if (host_len == 0 || rest != end || port < 1 || port > 65535 ||
		strpbrk(host, "?#% \t\r\n"))
	{
		idem_courier_refuse(courier, "the url must look like %s://host:port", plain);
		return false;
	}
	url->host = idem_strndup(host, host_len);
	snprintf(url->port, sizeof(url->port), "%d", port);
	url->path = idem_strdup(*end == '/' ? end + 1 : "");
	return true;
}

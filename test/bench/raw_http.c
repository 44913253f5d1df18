/*-------------------------------------------------------------------------
 *
 * raw_http.c
 *		What an HTTP server takes from a plain program: the measure for the
 *		courier.
 *
 *	raw_http url messages size connections
 *
 * Posts JSON documents with libcurl's multi interface, so many at once, each
 * with the headers that the courier sends and its time limits, counts answers
 * with 2xx, and prints messages per second.
 *
 * cc -O2 -o raw_http raw_http.c -lcurl
 *
 *-------------------------------------------------------------------------
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <curl/curl.h>

typedef struct Request
{
	CURL	   *easy;
	struct curl_slist *headers;
} Request;

static char *body;
static long size;
static const char *url;

static size_t
ignore(char *data, size_t n, size_t m, void *arg)
{
	(void) data;
	(void) arg;
	return n * m;
}

/* What the courier sends in CloudEvents' binary mode. */
static void
post(CURLM *multi, Request *request, unsigned long n)
{
	char		line[128];

	curl_slist_free_all(request->headers);
	request->headers = curl_slist_append(NULL, "content-type: application/json");
	snprintf(line, sizeof(line), "ce-id: 01900000-0000-7000-8000-%012lx", n);
	curl_slist_append(request->headers, line);
	snprintf(line, sizeof(line), "idempotency-key: 01900000-0000-7000-8000-%012lx", n);
	curl_slist_append(request->headers, line);
	curl_slist_append(request->headers, "ce-specversion: 1.0");
	curl_slist_append(request->headers, "ce-type: orders.created");
	curl_slist_append(request->headers, "ce-source: urn:idem:http");
	curl_slist_append(request->headers, "ce-time: 2026-01-01T00:00:00.000000Z");
	snprintf(line, sizeof(line), "ce-partitionkey: %lu", n);
	curl_slist_append(request->headers, line);
	curl_slist_append(request->headers, "expect:");
	curl_easy_setopt(request->easy, CURLOPT_URL, url);
	curl_easy_setopt(request->easy, CURLOPT_POST, 1L);
	curl_easy_setopt(request->easy, CURLOPT_POSTFIELDS, body);
	curl_easy_setopt(request->easy, CURLOPT_POSTFIELDSIZE, size);
	curl_easy_setopt(request->easy, CURLOPT_HTTPHEADER, request->headers);
	curl_easy_setopt(request->easy, CURLOPT_WRITEFUNCTION, ignore);
	curl_easy_setopt(request->easy, CURLOPT_NOSIGNAL, 1L);
	curl_easy_setopt(request->easy, CURLOPT_PROXY, "");
	curl_easy_setopt(request->easy, CURLOPT_USERAGENT, "idem/0.1.0");
	curl_easy_setopt(request->easy, CURLOPT_TIMEOUT_MS, 30000L);
	curl_easy_setopt(request->easy, CURLOPT_CONNECTTIMEOUT_MS, 10000L);
	curl_easy_setopt(request->easy, CURLOPT_PRIVATE, request);
	curl_multi_add_handle(multi, request->easy);
}

int
main(int argc, char **argv)
{
	unsigned long messages;
	unsigned long begun = 0;
	unsigned long done = 0;
	long		connections;
	Request    *requests;
	CURLM	   *multi;
	struct timespec begin;
	struct timespec end;

	if (argc != 5)
	{
		fprintf(stderr, "usage: raw_http url messages size connections\n");
		return 2;
	}
	url = argv[1];
	messages = strtoul(argv[2], NULL, 10);
	size = strtol(argv[3], NULL, 10);
	connections = strtol(argv[4], NULL, 10);
	body = malloc(size + 1);
	memset(body, 'x', size);
	body[0] = body[size - 1] = '"';

	curl_global_init(CURL_GLOBAL_DEFAULT);
	multi = curl_multi_init();
	curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, connections);
	requests = calloc(connections, sizeof(Request));

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (long i = 0; i < connections && begun < messages; i++)
	{
		requests[i].easy = curl_easy_init();
		post(multi, &requests[i], begun++);
	}
	while (done < messages)
	{
		CURLMsg    *msg;
		int			left;
		int			running;

		curl_multi_perform(multi, &running);
		while ((msg = curl_multi_info_read(multi, &left)) != NULL)
		{
			CURL	   *easy = msg->easy_handle;
			Request    *request;
			long		code = 0;

			curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &code);
			curl_easy_getinfo(easy, CURLINFO_PRIVATE, &request);
			if (msg->data.result != CURLE_OK || code / 100 != 2)
			{
				fprintf(stderr, "%s, code %ld\n", curl_easy_strerror(msg->data.result), code);
				return 1;
			}
			curl_multi_remove_handle(multi, easy);
			done++;
			if (begun < messages)
				post(multi, request, begun++);
		}
		if (done < messages)
			curl_multi_poll(multi, NULL, 0, 1000, NULL);
	}
	clock_gettime(CLOCK_MONOTONIC, &end);
	printf("%.0f\n", messages / ((end.tv_sec - begin.tv_sec) + (end.tv_nsec - begin.tv_nsec) / 1e9));
	return 0;
}

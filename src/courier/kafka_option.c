/*-------------------------------------------------------------------------
 *
 * kafka_option.c
 *		The options of the courier for Kafka.
 *
 * Any property of librdkafka can be set by an option kafka.PROPERTY, but for
 * those on which what we promise rests, those that have an option of ours,
 * and those that make the library open files, run programs or load code of
 * the server owner's choice.
 *
 *-------------------------------------------------------------------------
 */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "kafka_parts.h"

#define MAX_KBYTES	(256 * 1024)	/* the runtime holds no more */

KafkaOptions kafka_options;

const char *const kafka_option_names[] = {
	"url", "user", "password", "sasl_mechanism", "connect_timeout_ms",
	"timeout_ms", "tls_ca", "tls_cert", "tls_key", "public_only", "kafka.", NULL
};

/* Properties that options may not set; a name that ends in * is a prefix. */
static const struct
{
	const char *name;
	const char *why;
}			refused[] = {
	{"bootstrap.servers", "option \"url\" says it"},
	{"metadata.broker.list", "option \"url\" says it"},
	{"security.protocol", "option \"url\" says it"},
	{"sasl*", "there are options user, password_file and sasl_mechanism"},
	{"enable.sasl*", "there are options user, password_file and sasl_mechanism"},
	{"enable.ssl*", "certificates are always checked"},
	{"ssl.endpoint*", "certificates are always checked"},
	{"ssl*", "there are options tls_ca_file, tls_cert_file and tls_key_file"},
	{"https.*", "files are named by options that end in _file"},
	{"acks", "messages would get lost"},
	{"request.required.acks", "messages would get lost"},
	{"enable.idempotence", "messages would come twice, or out of order"},
	{"enable.gapless.guarantee", "messages would come out of order"},
	{"queuing.strategy", "messages would come out of order"},
	{"message.send.max.retries", "messages would come out of order"},
	{"retries", "messages would come out of order"},
	{"message.timeout.ms", "there is option timeout_ms"},
	{"delivery.timeout.ms", "there is option timeout_ms"},
	{"delivery.report.only.error", "acknowledgements would get lost"},
	{"transactional.id", "there are no transactions"},
	{"plugin.*", "no code is loaded"},
	{"interceptors", "no code is loaded"},
	{"test.*", "it is for tests of the library"},
	{"internal.*", "it is for tests of the library"},
	{"debug", "what the library logs is not kept"},
	{"log*", "what the library logs is not kept"},
	{"statistics.interval.ms", "nobody would read them"},
	{"enabled_events", "it would take acknowledgements away"},
};

/* Fine, although they begin like some that are refused. */
static const char *const harmless[] = {
	"ssl.cipher.suites", "ssl.curves.list", "ssl.sigalgs.list", NULL
};

static const char *
why_refused(const char *name, const char *value)
{
	for (int i = 0; harmless[i] != NULL; i++)
		if (strcmp(name, harmless[i]) == 0)
			return NULL;
	for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++)
	{
		size_t		len = strlen(refused[i].name);

		if (refused[i].name[len - 1] == '*' ?
			strncmp(name, refused[i].name, len - 1) == 0 :
			strcmp(name, refused[i].name) == 0)
			return refused[i].why;
	}
	if (strcmp(name, "partitioner") == 0 && strcmp(value, "random") == 0)
		return "messages would come out of order";
	if (strcmp(name, "queue.buffering.max.kbytes") == 0 && atol(value) > MAX_KBYTES)
		return "it must be 262144 at most";
	return NULL;
}

static void
set(IdemCourier *courier, const char *option, const char *name, const char *value)
{
	char		why[256];

	if (rd_kafka_conf_set(kafka_options.conf, name, value, why, sizeof(why)) != RD_KAFKA_CONF_OK)
		idem_courier_refuse(courier, "option \"%s\" is not accepted: %s", option, why);
}

/* Within what the library takes for all of them. */
static void
set_ms(IdemCourier *courier, const char *name, int ms)
{
	char		value[16];

	snprintf(value, sizeof(value), "%d", ms < 1000 ? 1000 : ms > 300000 ? 300000 : ms);
	set(courier, name, name, value);
}

static void
set_property(IdemCourier *courier, const char *name, const char *value)
{
	char		option[256];
	const char *why = why_refused(name, value);

	snprintf(option, sizeof(option), "kafka.%s", name);
	if (why != NULL)
		idem_courier_refuse(courier, "option \"%s\" is refused: %s", option, why);
	else
		set(courier, option, name, value);
}

/* The servers are taken as they are; the library splits and resolves them. */
static bool
read_url(IdemCourier *courier)
{
	const char *url = idem_option_required(courier, "url");
	const char *rest = strstr(url, "://");
	bool		tls = strncasecmp(url, "kafkas:", 7) == 0;
	size_t		len;
	char	   *servers;

	if (rest == NULL || (!tls && strncasecmp(url, "kafka:", 6) != 0))
	{
		idem_courier_refuse(courier, "the url must begin with kafka:// or kafkas://");
		return false;
	}

	/* the url is shown to everybody, so not a word of it in errors here */
	rest += 3;
	if (strchr(rest, '@') != NULL)
		idem_courier_refuse(courier,
							"the url must not hold credentials: use options user and password");
	len = strlen(rest);
	if (len > 0 && rest[len - 1] == '/')
		len--;
	servers = idem_strndup(rest, len);
	if (len == 0 || servers[0] == ',' || servers[0] == ':')
		idem_courier_refuse(courier, "the url must look like kafka://host:port,host:port");
	for (const char *p = servers; *p != '\0'; p++)
		if (!isalnum((unsigned char) *p) && strchr(".-_:[],%", *p) == NULL)
		{
			idem_courier_refuse(courier, "the url must look like kafka://host:port,host:port");
			break;
		}
	kafka_options.servers = servers;
	return tls;
}

static void
read_tls(IdemCourier *courier, bool tls)
{
	const char *ca = idem_option(courier, "tls_ca");
	const char *cert = idem_option(courier, "tls_cert");
	const char *key = idem_option(courier, "tls_key");

	if (!tls)
	{
		if (ca != NULL || cert != NULL || key != NULL)
			idem_courier_refuse(courier, "tls_ca, tls_cert and tls_key need a kafkas url");
		return;
	}
	if ((cert == NULL) != (key == NULL))
		idem_courier_refuse(courier, "options \"tls_cert\" and \"tls_key\" go together");
	set(courier, "url", "enable.ssl.certificate.verification", "true");
	set(courier, "url", "ssl.endpoint.identification.algorithm", "https");
	if (ca != NULL)
		set(courier, "tls_ca", "ssl.ca.pem", ca);
	if (cert != NULL)
		set(courier, "tls_cert", "ssl.certificate.pem", cert);
	if (key != NULL)
		set(courier, "tls_key", "ssl.key.pem", key);
}

/*
 * Only mechanisms that need a name and a password: Kerberos would run programs,
 * and OAUTHBEARER would fetch what another option names.
 */
static void
read_sasl(IdemCourier *courier, bool tls)
{
	const char *user = idem_option(courier, "user");
	const char *password = idem_option(courier, "password");
	const char *mechanism = idem_option(courier, "sasl_mechanism");

	if ((user == NULL) != (password == NULL))
		idem_courier_refuse(courier, "options \"user\" and \"password\" go together");
	if (user == NULL && mechanism != NULL)
		idem_courier_refuse(courier, "option \"sasl_mechanism\" needs option \"user\"");
	if (mechanism == NULL)
		mechanism = "PLAIN";
	else if (strcmp(mechanism, "PLAIN") != 0 && strcmp(mechanism, "SCRAM-SHA-256") != 0 &&
			 strcmp(mechanism, "SCRAM-SHA-512") != 0)
		idem_courier_refuse(courier,
							"option \"sasl_mechanism\" must be PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512");
	if (user == NULL)
		set(courier, "url", "security.protocol", tls ? "ssl" : "plaintext");
	else
	{
		set(courier, "user", "security.protocol", tls ? "sasl_ssl" : "sasl_plaintext");
		set(courier, "sasl_mechanism", "sasl.mechanisms", mechanism);
		set(courier, "user", "sasl.username", user);
		if (password != NULL)
			set(courier, "password", "sasl.password", password);
	}
}

void
kafka_read_options(IdemCourier *courier)
{
	/*
	 * Ours, before the user's.  The library gives up on no message by itself
	 * and leaves no gap, since those behind it would overtake it.  What a
	 * message may weigh is for the broker to say.  Partitions are chosen as
	 * Java's clients do.  Without any lingering the batches get so small that
	 * the broker takes half as many messages.
	 */
	static const char *const ours[][2] = {
		{"client.id", "idem"},
		{"enable.idempotence", "true"},
		{"enable.gapless.guarantee", "true"},
		{"acks", "all"},
		{"message.timeout.ms", "0"},
		{"partitioner", "murmur2_random"},
		{"queue.buffering.max.kbytes", "65536"},
		{"message.max.bytes", "67108864"},
		{"linger.ms", "0.5"},
		{"reconnect.backoff.max.ms", "1000"},
		{"topic.metadata.propagation.max.ms", "2000"},
		{"socket.nagle.disable", "true"},
		{"socket.keepalive.enable", "true"},
		{"log_level", "0"},
		{NULL, NULL}
	};
	rd_kafka_conf_t *trial;
	rd_kafka_t *rk;
	char		why[512];
	bool		tls;

	kafka_options.conf = rd_kafka_conf_new();
	if (kafka_options.conf == NULL)
		abort();
	kafka_options.connect_timeout_ms =
		idem_option_int(courier, "connect_timeout_ms", 5000, 1, 3600 * 1000);
	kafka_options.timeout_ms = idem_option_int(courier, "timeout_ms", 30000, 100, 3600 * 1000);
	kafka_options.public_only = idem_option_bool(courier, "public_only", false);
	for (int i = 0; ours[i][0] != NULL; i++)
		set(courier, ours[i][0], ours[i][0], ours[i][1]);

	/* time for the library to try again, with nothing sent twice */
	set_ms(courier, "socket.timeout.ms", kafka_options.timeout_ms / 3);
	set_ms(courier, "request.timeout.ms", kafka_options.timeout_ms / 3);

	/* longer than we wait, who can say it better */
	set_ms(courier, "socket.connection.setup.timeout.ms", kafka_options.connect_timeout_ms + 1000);
	set_ms(courier, "api.version.request.timeout.ms", kafka_options.connect_timeout_ms + 1000);
	tls = read_url(courier);
	read_tls(courier, tls);
	read_sasl(courier, tls);
	idem_option_each(courier, "kafka.", set_property);

	/* Whether they go together, the library says when asked for a producer. */
	kafka_conf_callbacks(kafka_options.conf);
	trial = rd_kafka_conf_dup(kafka_options.conf);
	rk = rd_kafka_new(RD_KAFKA_PRODUCER, trial, why, sizeof(why));
	if (rk == NULL)
	{
		idem_courier_refuse(courier, "the options are not accepted: %s", why);
		rd_kafka_conf_destroy(trial);
		return;
	}
	rd_kafka_destroy(rk);
	set(courier, "url", "bootstrap.servers", kafka_options.servers);
}

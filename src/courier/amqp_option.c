/*-------------------------------------------------------------------------
 *
 * amqp_option.c
 *		The options of the courier for RabbitMQ.
 *
 * What is wrong with them is said before anything is connected to.  Of secrets
 * not a word is repeated.
 *
 *-------------------------------------------------------------------------
 */
#include <ctype.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include <openssl/err.h>
#include <openssl/pem.h>

#include "amqp_parts.h"

/* Keys with a passphrase are refused: nobody is there to be asked. */
static int
no_passphrase(char *buf, int size, int rwflag, void *arg)
{
	(void) buf;
	(void) size;
	(void) rwflag;
	(void) arg;
	return 0;
}

static bool
load_ca(const char *pem)
{
	BIO		   *bio = BIO_new_mem_buf(pem, -1);
	X509_STORE *store = SSL_CTX_get_cert_store(amqp.ctx);
	X509	   *cert;
	int			n = 0;

	while ((cert = PEM_read_bio_X509(bio, NULL, no_passphrase, NULL)))
	{
		n += X509_STORE_add_cert(store, cert);
		X509_free(cert);
	}
	BIO_free(bio);
	ERR_clear_error();
	return n > 0;
}

/* A certificate, and those that lead from it to the root. */
static bool
load_cert(const char *pem)
{
	BIO		   *bio = BIO_new_mem_buf(pem, -1);
	X509	   *cert = PEM_read_bio_X509_AUX(bio, NULL, no_passphrase, NULL);
	bool		ok = cert && SSL_CTX_use_certificate(amqp.ctx, cert) == 1;

	X509_free(cert);
	while (ok && (cert = PEM_read_bio_X509(bio, NULL, no_passphrase, NULL)))
		ok = SSL_CTX_add0_chain_cert(amqp.ctx, cert) == 1;
	BIO_free(bio);
	ERR_clear_error();
	return ok;
}

static bool
load_key(const char *pem)
{
	BIO		   *bio = BIO_new_mem_buf(pem, -1);
	EVP_PKEY   *key = PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL);
	bool		ok = key && SSL_CTX_use_PrivateKey(amqp.ctx, key) == 1 &&
		SSL_CTX_check_private_key(amqp.ctx) == 1;

	EVP_PKEY_free(key);
	BIO_free(bio);
	ERR_clear_error();
	return ok;
}

static void
start_tls(IdemCourier *courier)
{
	const char *ca = idem_option(courier, "tls_ca");
	const char *cert = idem_option(courier, "tls_cert");
	const char *key = idem_option(courier, "tls_key");

	if (!amqp.tls)
	{
		if (ca || cert || key)
			idem_courier_refuse(courier, "tls_ca, tls_cert and tls_key need an amqps url");
		return;
	}
	amqp.ctx = SSL_CTX_new(TLS_client_method());
	if (!amqp.ctx)
		abort();
	SSL_CTX_set_min_proto_version(amqp.ctx, TLS1_2_VERSION);
	SSL_CTX_set_verify(amqp.ctx, SSL_VERIFY_PEER, NULL);
	SSL_CTX_set_mode(amqp.ctx, SSL_MODE_ENABLE_PARTIAL_WRITE |
					 SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
	SSL_CTX_set_default_passwd_cb(amqp.ctx, no_passphrase);
	if (ca ? !load_ca(ca) : SSL_CTX_set_default_verify_paths(amqp.ctx) != 1)
		idem_courier_refuse(courier, "option \"tls_ca\" holds no certificate");
	else if (!cert != !key)
		idem_courier_refuse(courier, "options \"tls_cert\" and \"tls_key\" go together");
	else if (cert && !load_cert(cert))
		idem_courier_refuse(courier, "option \"tls_cert\" holds no certificate");
	else if (key && !load_key(key))
		idem_courier_refuse(courier,
							"option \"tls_key\" holds no key without passphrase that fits tls_cert");
}

static void
start_url(IdemCourier *courier)
{
	const char *url = idem_option_required(courier, "url");
	const char *rest;
	struct amqp_connection_info info;
	char	   *copy;

	if (!url)
		return;
	rest = strstr(url, "://");
	if (!rest || (strncasecmp(url, "amqp:", 5) != 0 && strncasecmp(url, "amqps:", 6) != 0))
	{
		idem_courier_refuse(courier, "the url must begin with amqp:// or amqps://");
		return;
	}
	/* the url is shown to everybody, so not a word of it in errors here */
	rest += 3;
	if (memchr(rest, '@', strcspn(rest, "/")))
	{
		idem_courier_refuse(courier,
							"the url must not hold credentials: use options user and password");
		return;
	}
	copy = idem_strdup(url);
	for (char *p = copy; *p != ':'; p++)
		*p = (char) tolower((unsigned char) *p);
	if (strpbrk(rest, "?#@") ||
		amqp_parse_url(copy, &info) != AMQP_STATUS_OK || !info.host[0])
	{
		idem_courier_refuse(courier, "the url must look like amqp://host:port/vhost");
		free(copy);
		return;
	}
	amqp.tls = info.ssl;
	amqp.host = idem_strdup(info.host);
	amqp.vhost = idem_strdup(info.vhost[0] ? info.vhost : "/");
	snprintf(amqp.port, sizeof(amqp.port), "%d", info.port);
	free(copy);
	if (strlen(amqp.vhost) > SHORTSTR_MAX)
		idem_courier_refuse(courier, "the name of the virtual host is longer than 255 bytes");
}

void
amqp_start(IdemCourier *courier)
{
	const char *unroutable = idem_option(courier, "on_unroutable");

	signal(SIGPIPE, SIG_IGN);	/* OpenSSL writes without MSG_NOSIGNAL */

	amqp.user = idem_option(courier, "user");
	amqp.password = idem_option(courier, "password");
	if (!amqp.user && !amqp.password)
		amqp.user = amqp.password = "guest";
	else if (!amqp.user || !amqp.password)
	{
		idem_courier_refuse(courier, "options \"user\" and \"password\" go together");
		return;
	}
	amqp.exchange = idem_option(courier, "exchange");
	if (!amqp.exchange)
		amqp.exchange = "";
	amqp.routing_key = idem_option(courier, "routing_key");
	if (strlen(amqp.exchange) > SHORTSTR_MAX ||
		(amqp.routing_key && strlen(amqp.routing_key) > SHORTSTR_MAX))
		idem_courier_refuse(courier,
							"options \"exchange\" and \"routing_key\" have at most 255 bytes");
	amqp.heartbeat = idem_option_int(courier, "heartbeat", 30, 0, 3600);
	amqp.connect_timeout = idem_option_int(courier, "connect_timeout_ms", 5000, 1, 3600 * 1000);
	amqp.public_only = idem_option_bool(courier, "public_only", false);
	if (unroutable && strcmp(unroutable, "dead") == 0)
		amqp.unroutable_dead = true;
	else if (unroutable && strcmp(unroutable, "block") != 0)
		idem_courier_refuse(courier, "option \"on_unroutable\" must be block or dead");
	start_url(courier);
	start_tls(courier);
}

/*-------------------------------------------------------------------------
 *
 * redis_tls.c
 *		TLS for the courier for Redis, where hiredis has it (since 1.0).
 *
 * Where it has not, a rediss url is refused: there is no falling back to a
 * plain connection.
 *
 *-------------------------------------------------------------------------
 */
#include "redis_parts.h"

#if __has_include(<hiredis/hiredis_ssl.h>)
#include <arpa/inet.h>
#include <hiredis/hiredis_ssl.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>

static SSL_CTX *context;
static SSL *ssl;				/* of the connection; hiredis frees it */

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
	X509	   *cert;
	int			n = 0;

	while ((cert = PEM_read_bio_X509(bio, NULL, no_passphrase, NULL)))
	{
		n += X509_STORE_add_cert(SSL_CTX_get_cert_store(context), cert);
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
	bool		ok = cert && SSL_CTX_use_certificate(context, cert) == 1;

	X509_free(cert);
	while (ok && (cert = PEM_read_bio_X509(bio, NULL, no_passphrase, NULL)))
		ok = SSL_CTX_add0_chain_cert(context, cert) == 1;
	BIO_free(bio);
	ERR_clear_error();
	return ok;
}

static bool
load_key(const char *pem)
{
	BIO		   *bio = BIO_new_mem_buf(pem, -1);
	EVP_PKEY   *key = PEM_read_bio_PrivateKey(bio, NULL, no_passphrase, NULL);
	bool		ok = key && SSL_CTX_use_PrivateKey(context, key) == 1 &&
		SSL_CTX_check_private_key(context) == 1;

	EVP_PKEY_free(key);
	BIO_free(bio);
	ERR_clear_error();
	return ok;
}

static void
make_context(IdemCourier *courier)
{
	const char *ca = idem_option(courier, "tls_ca");
	const char *cert = idem_option(courier, "tls_cert");
	const char *key = idem_option(courier, "tls_key");

	context = SSL_CTX_new(TLS_client_method());
	if (!context)
		abort();
	SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
	SSL_CTX_set_verify(context, SSL_VERIFY_PEER, NULL);
	SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE |
					 SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
	SSL_CTX_set_default_passwd_cb(context, no_passphrase);
	if (ca ? !load_ca(ca) : SSL_CTX_set_default_verify_paths(context) != 1)
		idem_courier_refuse(courier, "option \"tls_ca\" holds no certificate");
	else if (!cert != !key)
		idem_courier_refuse(courier, "options \"tls_cert\" and \"tls_key\" go together");
	else if (cert && !load_cert(cert))
		idem_courier_refuse(courier, "option \"tls_cert\" holds no certificate");
	else if (key && !load_key(key))
		idem_courier_refuse(courier,
							"option \"tls_key\" holds no key without passphrase that fits tls_cert");
}

/* Begin the handshake; hiredis goes on with it as it reads and writes. */
bool
redis_tls_begin(void)
{
	const char *host = redis.url.host;
	struct in6_addr ip;

	ssl = SSL_new(context);
	if (!ssl)
		abort();
	if (inet_pton(AF_INET, host, &ip) == 1 || inet_pton(AF_INET6, host, &ip) == 1)
	{
		if (X509_VERIFY_PARAM_set1_ip_asc(SSL_get0_param(ssl), host) != 1)
			abort();
	}
	else
	{
		SSL_set_hostflags(ssl, X509_CHECK_FLAG_NO_PARTIAL_WILDCARDS);
		if (SSL_set1_host(ssl, host) != 1 || SSL_set_tlsext_host_name(ssl, host) != 1)
			abort();
	}
	/* hiredis frees it with the context, unless this fails at once */
	SSL_up_ref(ssl);
	if (redisInitiateSSL(redis.context, ssl) == REDIS_OK)
		return true;
	SSL_free(ssl);
	return false;
}

/* Why the certificate is not accepted, or NULL. */
const char *
redis_tls_refusal(void)
{
	long		verdict = ssl ? SSL_get_verify_result(ssl) : X509_V_OK;

	return verdict == X509_V_OK ? NULL : X509_verify_cert_error_string(verdict);
}

void
redis_tls_end(void)
{
	if (ssl)
		SSL_free(ssl);
	ssl = NULL;
}

#else							/* hiredis without TLS */

static void
make_context(IdemCourier *courier)
{
	idem_courier_refuse(courier, "this courier was built with a hiredis that has no TLS "
						"(%d.%d; it needs 1.0): rediss is not available",
						HIREDIS_MAJOR, HIREDIS_MINOR);
}

bool
redis_tls_begin(void)
{
	return false;
}

const char *
redis_tls_refusal(void)
{
	return NULL;
}

void
redis_tls_end(void)
{
}

#endif

void
redis_tls_options(IdemCourier *courier)
{
	if (redis.url.tls)
		make_context(courier);
	else if (idem_option(courier, "tls_ca") || idem_option(courier, "tls_cert") ||
			 idem_option(courier, "tls_key"))
		idem_courier_refuse(courier, "tls_ca, tls_cert and tls_key need a rediss url");
}

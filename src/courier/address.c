/*-------------------------------------------------------------------------
 *
 * address.c
 *		Which addresses couriers talk to.
 *
 * The check is made on the address that is about to be connected to, so it
 * does not matter how it was spelled, nor what a name resolved to before.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "courier.h"

typedef struct Range4
{
	uint32_t	network;
	int			bits;
	const char *what;
} Range4;

static const Range4 never4[] = {
	{0xa9fe0000, 16, "link-local address"},
	{0, 0, NULL}
};

/* What the registry of special-purpose addresses does not call global. */
static const Range4 not_public4[] = {
	{0x00000000, 8, "unspecified address"},
	{0x0a000000, 8, "private address"},
	{0x64400000, 10, "shared address"},
	{0x7f000000, 8, "loopback address"},
	{0xac100000, 12, "private address"},
	{0xc0000000, 24, "reserved address"},
	{0xc0a80000, 16, "private address"},
	{0xc6120000, 15, "private address"},
	{0xe0000000, 4, "multicast address"},
	{0xf0000000, 4, "reserved address"},
	{0, 0, NULL}
};

static const char *
in_ranges(uint32_t address, const Range4 *ranges)
{
	for (; ranges->what != NULL; ranges++)
		if ((address ^ ranges->network) >> (32 - ranges->bits) == 0)
			return ranges->what;
	return NULL;
}

static const char *
refused4(uint32_t address, bool public_only)
{
	const char *what = in_ranges(address, never4);

	if (what == NULL && public_only)
		what = in_ranges(address, not_public4);
	return what;
}

static uint32_t
read4(const unsigned char *p)
{
	return (uint32_t) p[0] << 24 | (uint32_t) p[1] << 16 | (uint32_t) p[2] << 8 | p[3];
}

static const char *
refused6(const unsigned char *a, bool public_only)
{
	static const unsigned char zero[16];
	static const unsigned char mapped[12] = {[10] = 0xff, [11] = 0xff};
	static const unsigned char nat64[12] = {0x00, 0x64, 0xff, 0x9b};
	static const unsigned char metadata[16] = {
		0xfd, 0x00, 0x0e, 0xc2,[14] = 0x02,[15] = 0x54
	};

	/* The same network as 169.254.0.0/16 may be behind all of these. */
	if (memcmp(a, mapped, 12) == 0 || memcmp(a, nat64, 12) == 0)
		return refused4(read4(a + 12), public_only);
	if (a[0] == 0x20 && a[1] == 0x02)
	{
		const char *what = refused4(read4(a + 2), public_only);

		if (what != NULL)
			return what;
	}
	if (memcmp(a, zero, 12) == 0 && read4(a + 12) > 1)
	{
		const char *what = refused4(read4(a + 12), public_only);

		if (what != NULL)
			return what;
	}

	if (a[0] == 0xfe && (a[1] & 0xc0) == 0x80)
		return "link-local address";
	if (memcmp(a, metadata, 16) == 0)
		return "metadata service's address";
	if (!public_only)
		return NULL;
	if (memcmp(a, zero, 16) == 0)
		return "unspecified address";
	if (memcmp(a, zero, 15) == 0 && a[15] == 1)
		return "loopback address";
	if ((a[0] & 0xfe) == 0xfc || (a[0] == 0xfe && (a[1] & 0xc0) == 0xc0))
		return "private address";
	if (a[0] == 0xff)
		return "multicast address";
	return NULL;
}

const char *
idem_address_refused(const struct sockaddr *address, bool public_only)
{
	if (address->sa_family == AF_INET)
	{
		struct sockaddr_in in;

		memcpy(&in, address, sizeof(in));
		return refused4(ntohl(in.sin_addr.s_addr), public_only);
	}
	if (address->sa_family == AF_INET6)
	{
		struct sockaddr_in6 in6;

		memcpy(&in6, address, sizeof(in6));
		return refused6(in6.sin6_addr.s6_addr, public_only);
	}
	return "address of a strange family";
}

const char *
idem_address_peer_refused(int fd, bool public_only)
{
	struct sockaddr_storage address;
	socklen_t	len = sizeof(address);

	memset(&address, 0, sizeof(address));
	if (getpeername(fd, (struct sockaddr *) &address, &len) != 0)
		return NULL;			/* not connected: nobody to talk to */
	return idem_address_refused((struct sockaddr *) &address, public_only);
}

/* Connect within the time; 0, or what went wrong as errno. */
static int
connect_until(int fd, const struct sockaddr *address, socklen_t len, int64_t deadline)
{
	struct pollfd polled = {.fd = fd, .events = POLLOUT};
	int			error = 0;
	socklen_t	size = sizeof(error);

	if (connect(fd, address, len) == 0)
		return 0;
	if (errno != EINPROGRESS)
		return errno;
	for (;;)
	{
		int64_t		left = deadline - idem_courier_now();
		int			n = left <= 0 ? 0 : poll(&polled, 1, (int) left);

		if (n == 0)
			return ETIMEDOUT;
		if (n > 0)
			break;
		if (errno != EINTR)
			return errno;
	}
	if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0)
		return errno;
	return error;
}

int
idem_address_dial(const char *host, const char *port, bool public_only,
				  int timeout_ms, char *why, size_t why_size)
{
	struct addrinfo hints = {.ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
	struct addrinfo *all;
	int64_t		deadline = idem_courier_now() + timeout_ms;
	int			result = IDEM_DIAL_DOWN;
	int			error = getaddrinfo(host, port, &hints, &all);

	if (error != 0)
	{
		snprintf(why, why_size, "could not resolve host \"%s\": %s", host,
				 gai_strerror(error));
		return IDEM_DIAL_DOWN;
	}
	snprintf(why, why_size, "host \"%s\" has no address", host);
	for (struct addrinfo *ai = all; ai != NULL; ai = ai->ai_next)
	{
		const char *what = idem_address_refused(ai->ai_addr, public_only);
		int			fd;

		if (what != NULL)
		{
			/* one that is merely down tells more */
			if (result == IDEM_DIAL_DOWN && ai == all)
			{
				snprintf(why, why_size, "host \"%s\" has a %s", host, what);
				result = IDEM_DIAL_REFUSED;
			}
			continue;
		}
		fd = socket(ai->ai_family, ai->ai_socktype, ai->ai_protocol);
		if (fd >= 0 && fcntl(fd, F_SETFD, FD_CLOEXEC) == 0 &&
			fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) == 0)
			error = connect_until(fd, ai->ai_addr, ai->ai_addrlen, deadline);
		else
			error = errno;
		if (error == 0)
		{
			result = fd;
			break;
		}
		if (fd >= 0)
			close(fd);
		snprintf(why, why_size, "could not connect to \"%s\" port %s: %s", host, port,
				 strerror(error));
		result = IDEM_DIAL_DOWN;
	}
	freeaddrinfo(all);
	return result;
}

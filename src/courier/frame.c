/*-------------------------------------------------------------------------
 *
 * frame.c
 *		Frames of the courier protocol: buffers, writing, reading.
 *
 * A frame is a length (u32), a type (u8) and a body; numbers are big endian,
 * strings have their length (u32) before them.  Nothing that comes from the
 * other side is trusted: a frame that is too long, or whose contents do not
 * fit into it, is bad, and nothing outside of it is ever read.
 *
 *-------------------------------------------------------------------------
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "courier.h"
#include "frame.h"

#define CHUNK	(64 * 1024)
#define KEEP	(1024 * 1024)	/* an empty buffer above this is given back */

/*
 * idem_buffer_reserve
 *		Make room for len more bytes; returns where they go.
 */
char *
idem_buffer_reserve(IdemBuffer *buffer, size_t len)
{
	if (buffer->begin == buffer->end)
	{
		buffer->begin = buffer->end = 0;
		if (buffer->size > KEEP && len < KEEP)
		{
			free(buffer->data);
			buffer->data = NULL;
			buffer->size = 0;
		}
	}
	if (buffer->size - buffer->end < len)
	{
		size_t		used = buffer->end - buffer->begin;

		/* Moving is cheap only if little is left and much is gained. */
		if (buffer->begin >= used && buffer->size - used >= len)
			memcpy(buffer->data, buffer->data + buffer->begin, used);
		else
		{
			size_t		size = buffer->size == 0 ? CHUNK : buffer->size;
			char	   *data;

			while (size - used < len)
				size *= 2;
			data = idem_realloc(NULL, size);
			if (used > 0)
				memcpy(data, buffer->data + buffer->begin, used);
			free(buffer->data);
			buffer->data = data;
			buffer->size = size;
		}
		buffer->begin = 0;
		buffer->end = used;
	}
	return buffer->data + buffer->end;
}

/*
 * idem_buffer_receive
 *		Read what is there, as far as the buffer and a chunk more go.
 */
IdemFrameResult
idem_buffer_receive(IdemBuffer *buffer, int fd)
{
	char	   *room = idem_buffer_reserve(buffer, CHUNK);
	ssize_t		n;

	do
		n = recv(fd, room, buffer->size - buffer->end, MSG_DONTWAIT);
	while (n < 0 && errno == EINTR);

	if (n > 0)
	{
		buffer->end += (size_t) n;
		return IDEM_FRAME_OK;
	}
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return IDEM_FRAME_MORE;

	/* A relay that died without reading all we wrote resets the socket. */
	return n == 0 || errno == ECONNRESET ? IDEM_FRAME_EOF : IDEM_FRAME_BAD;
}

/*
 * idem_buffer_send
 *		Write as much as the socket takes.  OK means all of it.
 */
IdemFrameResult
idem_buffer_send(IdemBuffer *buffer, int fd)
{
	while (buffer->begin < buffer->end)
	{
		ssize_t		n = send(fd, buffer->data + buffer->begin,
							 buffer->end - buffer->begin, MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n >= 0)
			buffer->begin += (size_t) n;
		else if (errno == EAGAIN || errno == EWOULDBLOCK)
			return IDEM_FRAME_MORE;
		else if (errno != EINTR)
			return IDEM_FRAME_EOF;
	}
	return IDEM_FRAME_OK;
}

/* Begin a frame; what this returns is for idem_frame_end(). */
size_t
idem_frame_begin(IdemBuffer *buffer, char type)
{
	size_t		offset;

	idem_frame_put_u32(buffer, 0);
	offset = buffer->end - buffer->begin;
	idem_frame_put_u8(buffer, (uint8_t) type);
	return offset;
}

void
idem_frame_end(IdemBuffer *buffer, size_t begin)
{
	char	   *body = buffer->data + buffer->begin + begin;
	uint32_t	len = (uint32_t) (buffer->end - buffer->begin - begin);

	for (int i = 0; i < 4; i++)
		body[i - 4] = (char) (len >> (24 - 8 * i));
}

void
idem_frame_put_u8(IdemBuffer *buffer, uint8_t value)
{
	*idem_buffer_reserve(buffer, 1) = (char) value;
	buffer->end += 1;
}

void
idem_frame_put_u32(IdemBuffer *buffer, uint32_t value)
{
	char	   *p = idem_buffer_reserve(buffer, 4);

	for (int i = 0; i < 4; i++)
		p[i] = (char) (value >> (24 - 8 * i));
	buffer->end += 4;
}

void
idem_frame_put_u64(IdemBuffer *buffer, uint64_t value)
{
	idem_frame_put_u32(buffer, (uint32_t) (value >> 32));
	idem_frame_put_u32(buffer, (uint32_t) value);
}

void
idem_frame_put_str(IdemBuffer *buffer, const char *s, size_t len)
{
	if (s == NULL)
	{
		idem_frame_put_u32(buffer, IDEM_FRAME_NULL);
		return;
	}
	idem_frame_put_u32(buffer, (uint32_t) len);
	memcpy(idem_buffer_reserve(buffer, len), s, len);
	buffer->end += len;
}

/*
 * idem_frame_next
 *		Take the next whole frame out of a buffer, if there is one.
 *
 * The reader points into the buffer, and is good until that changes.
 */
IdemFrameResult
idem_frame_next(IdemBuffer *buffer, char *type, IdemReader *reader)
{
	size_t		used = buffer->end - buffer->begin;
	uint32_t	len;

	if (used < 4)
		return IDEM_FRAME_MORE;
	reader->p = buffer->data + buffer->begin;
	reader->end = reader->p + 4;
	reader->bad = false;
	len = idem_frame_get_u32(reader);
	if (len < 1 || len > IDEM_FRAME_MAX)
		return IDEM_FRAME_BAD;
	if (used - 4 < len)
	{
		/* so that a long frame is not moved again and again */
		idem_buffer_reserve(buffer, len - (used - 4));
		return IDEM_FRAME_MORE;
	}
	*type = *reader->p++;
	reader->end = reader->p + (len - 1);
	buffer->begin += 4 + (size_t) len;
	return IDEM_FRAME_OK;
}

static const char *
take(IdemReader *reader, size_t len)
{
	const char *p = reader->p;

	if (reader->bad || (size_t) (reader->end - p) < len)
	{
		reader->bad = true;
		return NULL;
	}
	reader->p += len;
	return p;
}

uint8_t
idem_frame_get_u8(IdemReader *reader)
{
	const char *p = take(reader, 1);

	return p == NULL ? 0 : (uint8_t) *p;
}

uint32_t
idem_frame_get_u32(IdemReader *reader)
{
	const unsigned char *p = (const unsigned char *) take(reader, 4);

	return p == NULL ? 0 :
		(uint32_t) p[0] << 24 | (uint32_t) p[1] << 16 | (uint32_t) p[2] << 8 | p[3];
}

uint64_t
idem_frame_get_u64(IdemReader *reader)
{
	uint64_t	high = idem_frame_get_u32(reader);

	return high << 32 | idem_frame_get_u32(reader);
}

/* A string, which does not end with NUL; NULL and len 0 for a NULL string. */
const char *
idem_frame_get_str(IdemReader *reader, size_t *len)
{
	uint32_t	n = idem_frame_get_u32(reader);
	const char *s;

	*len = 0;
	if (reader->bad || n == IDEM_FRAME_NULL)
		return NULL;
	s = take(reader, n);
	if (s != NULL)
		*len = n;
	return s;
}

/*-------------------------------------------------------------------------
 *
 * frame.h
 *		Frames of the courier protocol: buffers, writing, reading.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_FRAME_H
#define IDEM_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define IDEM_FRAME_MAX	(64 * 1024 * 1024)	/* longest frame, its length not counted */
#define IDEM_FRAME_NULL	UINT32_C(0xFFFFFFFF)	/* length of a NULL string */

/* Bytes [begin, end) are in use. */
typedef struct IdemBuffer
{
	char	   *data;
	size_t		begin;
	size_t		end;
	size_t		size;
} IdemBuffer;

/* What is left of a frame's body.  Once bad, everything read is 0 or NULL. */
typedef struct IdemReader
{
	const char *p;
	const char *end;
	bool		bad;
} IdemReader;

/* The answers of idem_frame_next() and idem_buffer_receive(). */
typedef enum IdemFrameResult
{
	IDEM_FRAME_OK,
	IDEM_FRAME_MORE,			/* nothing (more) for now */
	IDEM_FRAME_EOF,
	IDEM_FRAME_BAD				/* not our protocol, or a broken socket */
} IdemFrameResult;

extern char *idem_buffer_reserve(IdemBuffer *buffer, size_t len);
extern IdemFrameResult idem_buffer_receive(IdemBuffer *buffer, int fd);
extern IdemFrameResult idem_buffer_send(IdemBuffer *buffer, int fd);

extern size_t idem_frame_begin(IdemBuffer *buffer, char type);
extern void idem_frame_end(IdemBuffer *buffer, size_t begin);
extern void idem_frame_put_u8(IdemBuffer *buffer, uint8_t value);
extern void idem_frame_put_u32(IdemBuffer *buffer, uint32_t value);
extern void idem_frame_put_u64(IdemBuffer *buffer, uint64_t value);
extern void idem_frame_put_str(IdemBuffer *buffer, const char *s, size_t len);

extern IdemFrameResult idem_frame_next(IdemBuffer *buffer, char *type, IdemReader *reader);
extern uint8_t idem_frame_get_u8(IdemReader *reader);
extern uint32_t idem_frame_get_u32(IdemReader *reader);
extern uint64_t idem_frame_get_u64(IdemReader *reader);
extern const char *idem_frame_get_str(IdemReader *reader, size_t *len);

#endif							/* IDEM_FRAME_H */

/*-------------------------------------------------------------------------
 *
 * link.c
 *		The relay's end of the line to a courier.
 *
 * A courier is a child process that talks to one broker.  It may crash, hang
 * or start threads: what it shares with us is one socket.  Nothing here waits
 * for it, and nothing it sends can do more than break the line.
 *
 * The protocol is described in courier/README.md.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <ctype.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "libpq/pqformat.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/memutils.h"

#include "link.h"
#include "server.h"

/* What a courier may send at most in one frame: acknowledgements, short texts. */
#define MAX_FRAME_IN	(1024 * 1024)
#define MAX_TEXT		1024
#define READ_CHUNK		65536
#define COURIER_FD		3

/*
 * In the child, between fork and exec: only what is safe there.  It inherits
 * no descriptor but its socket, no signal setting, no environment.
 */
static void
become_courier(const char *path, int sock)
{
	char	   *argv[2];
	char	   *envp[] = {"PATH=/usr/bin:/bin", "LANG=C.UTF-8", NULL};
	sigset_t	none;
	int			null;

	argv[0] = unconstify(char *, path);
	argv[1] = NULL;

	/* A group of its own: cancelling the relay signals the relay's group. */
	(void) setpgid(0, 0);
	for (int sig = 1; sig < NSIG; sig++)
		(void) signal(sig, SIG_DFL);
	sigemptyset(&none);
	(void) sigprocmask(SIG_SETMASK, &none, NULL);

	null = open("/dev/null", O_RDWR);
	if (null < 0 || dup2(null, 0) < 0 || dup2(null, 1) < 0 || dup2(null, 2) < 0)
		_exit(126);
	if (sock != COURIER_FD && dup2(sock, COURIER_FD) < 0)
		_exit(126);
	if (fcntl(COURIER_FD, F_SETFD, 0) < 0)
		_exit(126);
	closefrom(COURIER_FD + 1);
	execve(path, argv, envp);
	_exit(127);
}

static void
set_nonblocking(int fd)
{
	int			flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ||
		fcntl(fd, F_SETFD, FD_CLOEXEC) < 0)
		ereport(ERROR,
				(errcode_for_socket_access(),
				 errmsg("could not set up a socket for a courier: %m")));
}

/*
 * The line is of no more use.  What the courier has not answered is unknown.
 */
static void
break_link(IdemLink *link, const char *reason)
{
	if (link->broken)
		return;
	link->broken = true;
	link->reason = MemoryContextStrdup(GetMemoryChunkContext(link), reason);
}

/* Frames: begin with a place for the length, and fill it in at the end. */
static int
begin_frame(StringInfo buf, char type)
{
	int			start = buf->len;

	pq_sendint32(buf, 0);
	pq_sendbyte(buf, type);
	return start;
}

static void
end_frame(StringInfo buf, int start)
{
	uint32		len = pg_hton32(buf->len - start - sizeof(uint32));

	memcpy(buf->data + start, &len, sizeof(uint32));
}

static void
put_bytes(StringInfo buf, const char *data, int len)
{
	if (data == NULL)
	{
		pq_sendint32(buf, PG_UINT32_MAX);
		return;
	}
	pq_sendint32(buf, len);
	appendBinaryStringInfoNT(buf, data, len);
}

static void
put_string(StringInfo buf, const char *s)
{
	put_bytes(buf, s, s != NULL ? strlen(s) : 0);
}

/*
 * idem_link_open
 *		Start a courier and greet it.
 *
 * The result lives in the current context.
 */
IdemLink *
idem_link_open(const char *path, const char *server, List *options)
{
	IdemLink   *link;
	int			socks[2];
	pid_t		pid;
	int			start;
	ListCell   *lc;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, socks) < 0)
		ereport(ERROR,
				(errcode_for_socket_access(),
				 errmsg("could not create a socket for a courier: %m")));
	pid = fork();
	if (pid == 0)
		become_courier(path, socks[1]);
	close(socks[1]);
	if (pid < 0)
	{
		close(socks[0]);
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_RESOURCES),
				 errmsg("could not start a courier: %m")));
	}

	link = palloc0(sizeof(IdemLink));
	link->pid = pid;
	link->sock = socks[0];
	initStringInfo(&link->out);
	initStringInfo(&link->in);
	set_nonblocking(link->sock);

	start = begin_frame(&link->out, 'H');
	pq_sendint32(&link->out, IDEM_PROTOCOL_VERSION);
	put_string(&link->out, server);
	pq_sendint32(&link->out, list_length(options));
	foreach(lc, options)
	{
		IdemOption *option = lfirst(lc);

		put_string(&link->out, option->name);
		put_string(&link->out, option->value);
	}
	end_frame(&link->out, start);
	return link;
}

/* Put a message on the line; it leaves with idem_link_flush(). */
void
idem_link_send(IdemLink *link, uint64 ticket, const IdemMessage *m,
			   const char *destination, int attempt)
{
	StringInfo	buf = &link->out;
	int			start = begin_frame(buf, 'M');
	static const int64 epoch_shift =
	(int64) (POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * USECS_PER_DAY;
	static const char hex[] = "0123456789abcdef";
	char		id[36];

	for (int i = 0, pos = 0; i < UUID_LEN; i++)
	{
		if (i == 4 || i == 6 || i == 8 || i == 10)
			id[pos++] = '-';
		id[pos++] = hex[m->id.data[i] >> 4];
		id[pos++] = hex[m->id.data[i] & 0xF];
	}

	pq_sendint64(buf, ticket);
	put_bytes(buf, id, sizeof(id));
	put_string(buf, destination);
	put_string(buf, m->topic);
	put_string(buf, m->key);
	put_string(buf, m->content_type != NULL ? m->content_type : "application/json");
	put_string(buf, m->headers);
	pq_sendint64(buf, m->enqueued_at + epoch_shift);
	pq_sendint32(buf, attempt);
	put_bytes(buf, m->body, m->body_len);
	end_frame(buf, start);
}

void
idem_link_quit(IdemLink *link)
{
	end_frame(&link->out, begin_frame(&link->out, 'Q'));
}

/* How many bytes wait to be written. */
int
idem_link_pending(IdemLink *link)
{
	return link->out.len - link->out_start;
}

/* Write as much as the courier takes now. */
void
idem_link_flush(IdemLink *link)
{
	while (!link->broken && idem_link_pending(link) > 0)
	{
		ssize_t		n = send(link->sock, link->out.data + link->out_start,
							 idem_link_pending(link), MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			break;
		if (n <= 0)
			break_link(link, "courier ended");
		else
			link->out_start += n;
	}
	if (idem_link_pending(link) == 0)
	{
		resetStringInfo(&link->out);
		link->out_start = 0;
	}
	else if (link->out_start > link->out.len / 2)
	{
		memmove(link->out.data, link->out.data + link->out_start,
				idem_link_pending(link));
		link->out.len -= link->out_start;
		link->out_start = 0;
	}
}

/* Read what has come, as far as it is of a reasonable size. */
void
idem_link_fill(IdemLink *link)
{
	StringInfo	in = &link->in;

	if (link->in_start > 0)
	{
		memmove(in->data, in->data + link->in_start, in->len - link->in_start);
		in->len -= link->in_start;
		link->in_start = 0;
	}
	while (!link->broken && in->len < 2 * MAX_FRAME_IN)
	{
		ssize_t		n;

		enlargeStringInfo(in, READ_CHUNK);
		n = recv(link->sock, in->data + in->len, READ_CHUNK, 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			return;
		if (n <= 0)
			break_link(link, "courier ended");
		else
			in->len += n;
	}
}

/*
 * Taking a frame apart.  Each of these moves *p on; a frame that is too short
 * makes *p NULL, and everything after it is zero.
 */
static uint64
get_int(const char **p, const char *end, int size)
{
	uint64		result = 0;

	if (*p == NULL || end - *p < size)
	{
		*p = NULL;
		return 0;
	}
	for (int i = 0; i < size; i++)
		result = result << 8 | (unsigned char) *(*p)++;
	return result;
}

/* Text of a courier: cut to size, and without anything that is not text. */
static char *
get_text(const char **p, const char *end)
{
	uint32		len = get_int(p, end, 4);
	char	   *raw;
	bool		ascii;

	if (*p == NULL || len == PG_UINT32_MAX || (uint64) (end - *p) < len)
	{
		if (len != PG_UINT32_MAX)
			*p = NULL;
		return pstrdup("");
	}
	raw = pnstrdup(*p, pg_encoding_mbcliplen(PG_UTF8, *p, len, MAX_TEXT));
	*p += len;
	ascii = GetDatabaseEncoding() != PG_UTF8 ||
		!pg_verify_mbstr(PG_UTF8, raw, strlen(raw), true);
	for (char *c = raw; *c; c++)
	{
		if ((unsigned char) *c < ' ' || *c == 0x7f || (ascii && IS_HIGHBIT_SET(*c)))
			*c = ' ';
	}
	return raw;
}

/*
 * idem_link_next
 *		Take the next frame, if a whole one has come.
 *
 * A 'd' frame is handed out ticket by ticket.  Text is in the current context.
 */
bool
idem_link_next(IdemLink *link, IdemFrame *frame)
{
	const char *p;
	const char *end;
	uint32		len;

	memset(frame, 0, sizeof(IdemFrame));
	if (link->delivered_left > 0)
	{
		p = link->in.data + link->in_start;
		end = link->in.data + link->in.len;
		frame->type = 'd';
		frame->ticket = get_int(&p, end, 8);
		link->in_start += 8;
		link->delivered_left--;
		return true;
	}

	if (link->in.len - link->in_start < 4)
		return false;
	p = link->in.data + link->in_start;
	end = p + 4;
	len = get_int(&p, end, 4);
	if (len < 1 || len > MAX_FRAME_IN)
	{
		break_link(link, "courier sent a frame of an impossible length");
		link->in_start = link->in.len;
		return false;
	}
	if ((uint32) (link->in.len - link->in_start - 4) < len)
		return false;

	end = p + len;
	frame->type = *p++;
	switch (frame->type)
	{
		case 'h':
			if (get_int(&p, end, 4) != IDEM_PROTOCOL_VERSION)
				p = NULL;
			frame->text = get_text(&p, end);
			link->ready = p != NULL;
			break;
		case 'd':
			link->delivered_left = get_int(&p, end, 4);
			if (p != NULL && (uint64) (end - p) != (uint64) link->delivered_left * 8)
				p = NULL;
			if (p == NULL)
			{
				link->delivered_left = 0;
				break;
			}
			link->in_start += 4 + 1 + 4;
			return idem_link_next(link, frame);
		case 'o':
			frame->ticket = get_int(&p, end, 8);
			frame->outcome = get_int(&p, end, 1);
			frame->retry_after_ms = get_int(&p, end, 4);
			frame->code = get_int(&p, end, 4);
			frame->text = get_text(&p, end);
			if (frame->outcome > IDEM_RETURNED)
				p = NULL;
			break;
		case 's':
			frame->state = get_int(&p, end, 1);
			frame->retry_after_ms = get_int(&p, end, 4);
			frame->text = get_text(&p, end);
			if (frame->state > IDEM_LINK_BLOCKED)
				p = NULL;
			break;
		case 'l':
			frame->code = get_int(&p, end, 1);
			frame->text = get_text(&p, end);
			break;
		default:
			p = NULL;
			break;
	}
	link->in_start += 4 + len;
	if (p == NULL)
	{
		break_link(link, psprintf("courier sent a malformed frame of type \"%c\"",
								  isprint((unsigned char) frame->type) ? frame->type : '?'));
		link->in_start = link->in.len;
		return false;
	}
	return true;
}

/*
 * idem_link_epitaph
 *		Say what became of a courier whose line broke.
 *
 * It is given a moment, for its end to be seen by us.
 */
char *
idem_link_epitaph(IdemLink *link)
{
	int			status = 0;
	pid_t		pid = 0;

	for (int i = 0; i < 50 && pid == 0; i++)
	{
		pid = waitpid(link->pid, &status, WNOHANG);
		if (pid == 0)
			pg_usleep(1000);
	}
	if (pid != link->pid)
		return pstrdup(link->reason);
	link->pid = 0;
	if (WIFSIGNALED(status))
		return psprintf("courier was terminated by signal %d: %s",
						WTERMSIG(status), pg_strsignal(WTERMSIG(status)));
	return psprintf("courier exited with code %d", WEXITSTATUS(status));
}

/*
 * idem_link_close
 *		Hang up, and make sure that the courier is gone.
 *
 * The end of the line is its order to go; it has had its time to drain, so it
 * is also killed.  Its exit is collected here, which takes no time then.
 */
void
idem_link_close(IdemLink *link)
{
	int			status;

	close(link->sock);
	if (link->pid != 0)
	{
		(void) kill(-link->pid, SIGKILL);
		(void) kill(link->pid, SIGKILL);
		while (waitpid(link->pid, &status, 0) < 0 && errno == EINTR)
			;
	}
	pfree(link->out.data);
	pfree(link->in.data);
	if (link->reason != NULL)
		pfree(link->reason);
	pfree(link);
}

/*-------------------------------------------------------------------------
 *
 * secret.c
 *		Secrets, which live in files below idem.secrets_dir.
 *
 * Whoever defines a server chooses the name of the file, and need not be a
 * superuser; so a name must not lead anywhere else.  A symbolic link that
 * stays within the directory is followed, because that is how orchestrators
 * mount secrets.
 *
 * Nothing here raises an error: one secret that cannot be read must not keep
 * other servers from working.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <fcntl.h>
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

#include "mb/pg_wchar.h"

#include "guc.h"
#include "secret.h"

/*
 * idem_secret_name_ok
 *		Is this a relative name without "." or ".." in it?
 */
bool
idem_secret_name_ok(const char *name)
{
	const char *part = name;

	if (strlen(name) > IDEM_MAX_SECRET_NAME)
		return false;
	for (;;)
	{
		size_t		len = strcspn(part, "/");

		if (len == 0 || (len == 1 && part[0] == '.') ||
			(len == 2 && part[0] == '.' && part[1] == '.'))
			return false;
		if (part[len] == '\0')
			return true;
		part += len + 1;
	}
}

/*
 * Open a file below a directory, following no symbolic link: what lies in the
 * way may have changed since it was looked at.
 */
static int
open_below(const char *dir, char *path)
{
	int			fd = open(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	char	   *part = path;

	while (fd >= 0 && part != NULL)
	{
		char	   *slash = strchr(part, '/');
		int			parent = fd;
		int			save_errno;

		if (slash != NULL)
			*slash = '\0';
		/* must not wait for the other end of a pipe */
		fd = openat(parent, part, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK |
					(slash != NULL ? O_DIRECTORY : 0));
		save_errno = errno;
		close(parent);
		errno = save_errno;
		part = slash != NULL ? slash + 1 : NULL;
	}
	return fd;
}

/* Read an open file into the buffer; return how long it is, or why not. */
static char *
read_open(int fd, const char *name, char *buf, size_t *len)
{
	struct stat st;

	if (fstat(fd, &st) != 0)
		return psprintf("could not read secret file \"%s\": %m", name);
	if (!S_ISREG(st.st_mode))
		return psprintf("secret file \"%s\" is not a regular file", name);
	if (st.st_mode & (S_IROTH | S_IWOTH))
		return psprintf("secret file \"%s\" can be read or written by everybody", name);

	for (*len = 0; *len <= IDEM_MAX_SECRET;)
	{
		ssize_t		got = read(fd, buf + *len, IDEM_MAX_SECRET + 1 - *len);

		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return psprintf("could not read secret file \"%s\": %m", name);
		if (got == 0)
			return NULL;
		*len += got;
	}
	return psprintf("secret file \"%s\" is larger than %d bytes", name,
					IDEM_MAX_SECRET);
}

/*
 * idem_secret_read
 *		The content of a secret file, less one newline at its end.
 *
 * Returns NULL and says why in *problem, which never holds any content.  Both
 * are in CurrentMemoryContext.
 */
char *
idem_secret_read(const char *name, char **problem)
{
	char		dir[PATH_MAX];
	char		path[PATH_MAX + IDEM_MAX_SECRET_NAME + 1];
	char		real[PATH_MAX];
	char	   *content;
	size_t		len;
	int			fd;

	if (idem_secrets_dir == NULL || idem_secrets_dir[0] == '\0')
	{
		*problem = psprintf("secret file \"%s\" cannot be read: idem.secrets_dir is not set", name);
		return NULL;
	}
	if (!idem_secret_name_ok(name))
	{
		*problem = psprintf("\"%s\" is not a relative file name", name);
		return NULL;
	}
	if (realpath(idem_secrets_dir, dir) == NULL)
	{
		*problem = psprintf("could not open idem.secrets_dir: %m");
		return NULL;
	}
	snprintf(path, sizeof(path), "%s/%s", dir, name);
	if (realpath(path, real) == NULL)
	{
		*problem = psprintf("could not open secret file \"%s\": %m", name);
		return NULL;
	}
	len = strcmp(dir, "/") == 0 ? 0 : strlen(dir);
	if (strncmp(real, dir, len) != 0 || real[len] != '/')
	{
		*problem = psprintf("secret file \"%s\" leads out of idem.secrets_dir", name);
		return NULL;
	}

	content = palloc(IDEM_MAX_SECRET + 1);
	fd = open_below(dir, real + len + 1);
	if (fd < 0)
	{
		*problem = psprintf("could not open secret file \"%s\": %m", name);
		return NULL;
	}
	*problem = read_open(fd, name, content, &len);
	close(fd);
	if (*problem != NULL)
		return NULL;

	if (len > 0 && content[len - 1] == '\n')
		len--;
	content[len] = '\0';
	if (len == 0)
		*problem = psprintf("secret file \"%s\" is empty", name);
	else if (memchr(content, '\0', len) != NULL ||
			 pg_encoding_verifymbstr(PG_UTF8, content, len) != (int) len)
		*problem = psprintf("secret file \"%s\" is not text in UTF-8", name);
	return *problem == NULL ? content : NULL;
}

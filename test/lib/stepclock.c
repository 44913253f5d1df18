/*
 * A clock that can be set while a program runs, for tests: preloaded, it adds
 * to the time of day the number of seconds (an int64) in the file that
 * STEPCLOCK names.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset;

__attribute__((constructor)) static void
map_offset(void)
{
	const char *name = getenv("STEPCLOCK");
	int			fd = name != NULL ? open(name, O_RDONLY | O_CLOEXEC) : -1;
	void	   *p = fd >= 0 ? mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;

	if (p != MAP_FAILED)
		offset = p;
	if (fd >= 0)
		close(fd);
}

int
gettimeofday(struct timeval *restrict tv, void *restrict tz)
{
	int			rc = syscall(SYS_gettimeofday, tv, tz);

	if (rc == 0 && tv != NULL && offset != NULL)
		tv->tv_sec += *offset;
	return rc;
}

int
clock_gettime(clockid_t id, struct timespec *ts)
{
	int			rc = syscall(SYS_clock_gettime, id, ts);

	if (rc == 0 && id == CLOCK_REALTIME && offset != NULL)
		ts->tv_sec += *offset;
	return rc;
}

time_t
time(time_t *t)
{
	struct timespec ts;

	(void) clock_gettime(CLOCK_REALTIME, &ts);
	if (t != NULL)
		*t = ts.tv_sec;
	return ts.tv_sec;
}

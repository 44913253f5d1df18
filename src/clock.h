/*-------------------------------------------------------------------------
 *
 * clock.h
 *		Time for pauses: a clock that nobody sets.
 *
 * What is stored, and what users see or ask for, goes by GetCurrentTimestamp().
 * Set back by an hour, that would make a pause of a second last an hour.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CLOCK_H
#define IDEM_CLOCK_H

#include <time.h>

#include "utils/timestamp.h"

/* Microseconds; the same in all processes, and never 0. */
static inline TimestampTz
idem_clock(void)
{
	struct timespec t;

	(void) clock_gettime(CLOCK_MONOTONIC, &t);
	return (TimestampTz) t.tv_sec * USECS_PER_SEC + t.tv_nsec / 1000 + 1;
}

#endif							/* IDEM_CLOCK_H */

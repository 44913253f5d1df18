/*-------------------------------------------------------------------------
 *
 * sweep.h
 *		Finds expired claims without an index on their time.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SWEEP_H
#define IDEM_SWEEP_H

#include "storage/block.h"
#include "utils/hsearch.h"

/* How long the claims of each consumer are kept, in seconds. */
typedef struct IdemKeep
{
	HTAB	   *by_id;			/* number of a consumer -> seconds */
	HTAB	   *held;			/* claims of messages that wait, or are dead letters */
	int64		other;			/* for consumers that declared nothing */
	int64		least;			/* the shortest of all */
} IdemKeep;

/*
 * For every stretch of the table, the time before which nothing in it can
 * expire.  Lives as long as the worker does.
 */
typedef struct IdemSweep
{
	BlockNumber stretch;		/* blocks per stretch */
	int			nstretches;
	int			allocated;
	int64	   *due;			/* seconds since 2000, per stretch */
	int64		checked_at;		/* when the table was last measured */
	IdemKeep	keep;
} IdemSweep;

extern void idem_keep_load(IdemKeep *keep);
extern bool idem_keep_shorter(const IdemKeep *now, const IdemKeep *before);

extern int64 idem_sweep_now(void);
extern int64 idem_sweep_blocks(BlockNumber start, BlockNumber n,
							   const IdemKeep *keep, int64 limit,
							   int64 *next_due);
extern void idem_sweep_measure(IdemSweep *sweep, BlockNumber nblocks);
extern void idem_sweep_forget(IdemSweep *sweep);
extern int	idem_sweep_next(const IdemSweep *sweep, int from, int64 now);

#endif							/* IDEM_SWEEP_H */

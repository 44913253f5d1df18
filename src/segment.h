/*-------------------------------------------------------------------------
 *
 * segment.h
 *		The tables of the log: which to write to, and which to empty.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_SEGMENT_H
#define IDEM_SEGMENT_H

#include "nodes/pg_list.h"

#include "log.h"

extern void idem_segment_tend(List *deliveries, IdemTick *newest);

#endif							/* IDEM_SEGMENT_H */

/*-------------------------------------------------------------------------
 *
 * durable.h
 *		Answers that rest on another transaction's commit.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_DURABLE_H
#define IDEM_DURABLE_H

#include "access/htup_details.h"

extern void idem_ensure_durable(HeapTupleHeader row);

#endif							/* IDEM_DURABLE_H */

/*-------------------------------------------------------------------------
 *
 * durable.c
 *		Answers that rest on another transaction's commit.
 *
 * With synchronous_commit = off a commit is visible before it is on disk.
 * Who is told "already done" on the strength of such a commit may acknowledge
 * the message to its broker; if the server then crashes, the effect is gone
 * and the message with it.  So before we say so, the commit is flushed.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/transam.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "storage/lwlock.h"

#include "compat.h"
#include "durable.h"

/*
 * idem_ensure_durable
 *		Return once the commit of the transaction that wrote this row is on disk.
 *
 * The row must be visible to us.  Hint bits prove nothing here: they may be
 * set before the flush.
 */
void
idem_ensure_durable(HeapTupleHeader row)
{
	TransactionId xid = HeapTupleHeaderGetRawXmin(row);
	XLogRecPtr	lsn = InvalidXLogRecPtr;

	if (!TransactionIdIsNormal(xid) ||
		TransactionIdIsCurrentTransactionId(xid))
		return;

	if (!HeapTupleHeaderXminFrozen(row))
		lsn = TransactionIdGetCommitLSN(xid);
	else
	{
		/*
		 * Even a frozen row's commit may not be flushed yet (VACUUM FREEZE
		 * right after it), but its status may also be gone for long, or the
		 * id have come round again.
		 */
		LWLockAcquire(XactTruncationLock, LW_SHARED);
		if (!TransactionIdPrecedes(xid, idem_oldest_clog_xid()) &&
			TransactionIdPrecedes(xid, ReadNextTransactionId()))
			lsn = TransactionIdGetCommitLSN(xid);
		LWLockRelease(XactTruncationLock);
	}

	if (!XLogRecPtrIsInvalid(lsn) && XLogNeedsFlush(lsn))
		XLogFlush(lsn);
}

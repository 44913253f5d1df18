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
#include "utils/snapmgr.h"

#include "compat.h"
#include "durable.h"

/*
 * Whatever finished before this transaction id is on disk; and the next such
 * id, of which that holds once the log is flushed up to a place.
 */
static TransactionId durable_before = InvalidTransactionId;
static TransactionId next_before = InvalidTransactionId;
static XLogRecPtr next_flush = InvalidXLogRecPtr;

/*
 * Is this transaction long since on disk?  Most are, and to find out from the
 * commit log takes a lock that all committing sessions want.
 *
 * What precedes the xmin of a snapshot has ended, and has written its commit
 * record before the place where the log ends now.
 */
static bool
is_old(TransactionId xid)
{
	TransactionId xmin = GetActiveSnapshot()->xmin;

	/* Transaction ids come round again while a session sleeps. */
	if (TransactionIdIsValid(durable_before) &&
		TransactionIdPrecedes(xmin, durable_before))
		durable_before = InvalidTransactionId;

	if (TransactionIdIsValid(next_before) && !XLogNeedsFlush(next_flush))
	{
		durable_before = next_before;
		next_before = InvalidTransactionId;
	}
	if (TransactionIdIsValid(durable_before) &&
		TransactionIdPrecedes(xid, durable_before))
		return true;

	if (!TransactionIdIsValid(next_before))
	{
		next_before = xmin;
		next_flush = GetXLogInsertRecPtr();
	}
	return false;
}

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
		TransactionIdIsCurrentTransactionId(xid) || is_old(xid))
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

/*-------------------------------------------------------------------------
 *
 * outbox.h
 *		The tables of the outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_OUTBOX_H
#define IDEM_OUTBOX_H

/* Columns of a segment, as in outbox.sql. */
#define Anum_outbox_seq				1
#define Anum_outbox_xid				2
#define Anum_outbox_enqueued_at		3
#define Anum_outbox_deliver_at		4
#define Anum_outbox_msg_id			5
#define Anum_outbox_topic			6
#define Anum_outbox_key				7
#define Anum_outbox_content_type	8
#define Anum_outbox_headers			9
#define Anum_outbox_body			10
#define Natts_outbox				10

extern int64 idem_outbox_forget(int32 max_rows);

#endif							/* IDEM_OUTBOX_H */

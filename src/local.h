/*-------------------------------------------------------------------------
 *
 * local.h
 *		Delivery to consumers in this database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_LOCAL_H
#define IDEM_LOCAL_H

#include "log.h"

extern void idem_local_orders(int64 newest_tick, bool held);
extern bool idem_local_read(int64 newest_tick, bool *hungry);
extern bool idem_local_has_passed(int64 last_seq, uint64 last_xid, int64 adopted_id);
extern int64 idem_local_forget(void);
extern void idem_local_reset(void);

#endif							/* IDEM_LOCAL_H */

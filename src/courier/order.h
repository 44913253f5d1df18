/*-------------------------------------------------------------------------
 *
 * order.h
 *		Order of messages with the same key, when some of them fail.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ORDER_H
#define IDEM_ORDER_H

#include "courier.h"

/*
 * Messages that wait for their turn: at most one of each key is out at a time.
 * A transport whose broker keeps the order of a connection needs none of this.
 */
typedef struct IdemQueue IdemQueue;

extern IdemQueue *idem_queue_create(void);
extern void idem_queue_add(IdemQueue *queue, IdemMessage *message);
extern IdemMessage *idem_queue_next(IdemQueue *queue);
extern IdemMessage *idem_queue_done(IdemQueue *queue, IdemMessage *message, bool failed);
extern IdemMessage *idem_queue_take_all(IdemQueue *queue);

/* For the runtime: messages that the relay sent before it knew of a failure. */
typedef struct IdemFailed IdemFailed;

extern IdemFailed *idem_failed_create(void);
extern void idem_failed_add(IdemFailed *failed, const IdemMessage *message);
extern bool idem_failed_admit(IdemFailed *failed, const IdemMessage *message);

#endif							/* IDEM_ORDER_H */

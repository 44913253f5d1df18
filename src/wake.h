/*-------------------------------------------------------------------------
 *
 * wake.h
 *		How sessions that enqueue meet the relay of their database.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WAKE_H
#define IDEM_WAKE_H

/* The tables idem.outbox_0 and so on. */
#define IDEM_SEGMENTS	8

extern void idem_wake_init(void);
extern void idem_wake_request(void);
extern void idem_wake_startup(void);

/* For sessions that enqueue. */
extern int	idem_wake_segment(void);
extern void idem_wake_enqueued(void);
extern void idem_wake_orders(void);
extern void idem_wake_now(void);
extern void idem_wake_expect_handlers(void);

/* For those who give handlers something to do, and for the handlers. */
extern void idem_wake_handler(void);
extern void idem_wake_handler_attach(int me);
extern void idem_wake_handler_sleeps(int me);
extern void idem_wake_handler_awake(int me);

/* For the relay. */
extern void idem_wake_attach(void);
extern void idem_wake_prepare_sleep(void);
extern void idem_wake_awake(void);
extern bool idem_wake_orders_pending(void);
extern void idem_wake_set_segment(int segment);

#endif							/* IDEM_WAKE_H */

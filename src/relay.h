/*-------------------------------------------------------------------------
 *
 * relay.h
 *		Delivers what is in the outbox.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_RELAY_H
#define IDEM_RELAY_H

extern PGDLLEXPORT void idem_relay_main(Datum arg);

#endif							/* IDEM_RELAY_H */

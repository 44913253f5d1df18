/*-------------------------------------------------------------------------
 *
 * fault.h
 *		Places at which tests make something go wrong.
 *
 * They exist only in builds with IDEM_FAULTS=1, and there the setting
 * idem.fault names a place and what happens: "relay-sent:kill".
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_FAULT_H
#define IDEM_FAULT_H

#ifdef IDEM_FAULTS
extern char *idem_fault_setting;
extern void idem_fault(const char *place);

#define IDEM_FAULT(place) idem_fault(place)
#else
#define IDEM_FAULT(place) ((void) 0)
#endif

#endif							/* IDEM_FAULT_H */

/*-------------------------------------------------------------------------
 *
 * work.h
 *		Messages that applications fetch and process.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_WORK_H
#define IDEM_WORK_H

#include "take.h"

extern bool idem_work_record_lost(void);
extern void idem_work_outcome(const IdemDeclared *c, const IdemTaken *t, Datum result);

#endif							/* IDEM_WORK_H */

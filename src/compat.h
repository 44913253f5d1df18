/*-------------------------------------------------------------------------
 *
 * compat.h
 *		Every difference between PostgreSQL 15, 16, 17 and 18, in one place.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_COMPAT_H
#define IDEM_COMPAT_H

#if PG_VERSION_NUM < 150000 || PG_VERSION_NUM >= 190000
#error "idem supports PostgreSQL 15 to 18"
#endif

#include "access/genam.h"
#include "access/transam.h"
#include "utils/relcache.h"

#if PG_VERSION_NUM >= 180000
#define idem_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0)
#else
#define idem_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, nkeys, 0)
#endif

#if PG_VERSION_NUM >= 180000
#define idem_primary_key_index(rel) RelationGetPrimaryKeyIndex(rel, false)
#else
#define idem_primary_key_index(rel) RelationGetPrimaryKeyIndex(rel)
#endif

#if PG_VERSION_NUM >= 160000
#define idem_owns_extension(oid) object_ownercheck(ExtensionRelationId, oid, GetUserId())
#define idem_owns_server(oid) object_ownercheck(ForeignServerRelationId, oid, GetUserId())
#define idem_server_aclcheck(oid, mode) object_aclcheck(ForeignServerRelationId, oid, GetUserId(), mode)
#else
#define idem_owns_extension(oid) pg_extension_ownercheck(oid, GetUserId())
#define idem_owns_server(oid) pg_foreign_server_ownercheck(oid, GetUserId())
#define idem_server_aclcheck(oid, mode) pg_foreign_server_aclcheck(oid, GetUserId(), mode)
#endif

#if PG_VERSION_NUM >= 170000
#define idem_my_procno() GetNumberFromPGProc(MyProc)
#define idem_my_lxid() (MyProc->vxid.lxid)
#else
#define idem_my_procno() (MyProc->pgprocno)
#define idem_my_lxid() (MyProc->lxid)
#endif

#if PG_VERSION_NUM >= 160000
#define idem_qualified_name(s) stringToQualifiedNameList(s, NULL)
#define idem_may_execute(proc, role) (object_aclcheck(ProcedureRelationId, proc, role, ACL_EXECUTE) == ACLCHECK_OK)
#else
#define idem_qualified_name(s) stringToQualifiedNameList(s)
#define idem_may_execute(proc, role) (pg_proc_aclcheck(proc, role, ACL_EXECUTE) == ACLCHECK_OK)
#endif

#if PG_VERSION_NUM >= 170000
#define idem_oldest_clog_xid() (TransamVariables->oldestClogXid)
#define idem_index_insert_cleanup(index, info) index_insert_cleanup(index, info)
#else
#define idem_index_insert_cleanup(index, info) ((void) 0)
#define idem_oldest_clog_xid() (ShmemVariableCache->oldestClogXid)
#endif

#if PG_VERSION_NUM >= 170000
#define idem_create_wait_event_set(n) CreateWaitEventSet(NULL, n)
#else
#define idem_create_wait_event_set(n) CreateWaitEventSet(CurrentMemoryContext, n)
#endif

#endif							/* IDEM_COMPAT_H */

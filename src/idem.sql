-- complain if the script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

COMMENT ON SCHEMA idem IS
	'idempotent consumers, idempotency keys and version guards';

-- complain if the script is sourced in psql, rather than via CREATE EXTENSION
\echo Use "CREATE EXTENSION idem" to load this file. \quit

-- Nobody else may have put anything here, or be able to: a function of theirs
-- that suits the arguments of a call better than ours would be called instead.
DO $$
BEGIN
	IF EXISTS (SELECT FROM pg_catalog.pg_namespace n JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
			   WHERE n.nspname = 'idem' AND NOT r.rolsuper AND r.rolname <> current_user) THEN
		RAISE EXCEPTION 'schema "idem" belongs to another role'
			USING ERRCODE = 'insufficient_privilege',
				  HINT = 'Drop it or give it another name; CREATE EXTENSION makes it.';
	END IF;
	IF EXISTS (SELECT FROM pg_catalog.pg_class WHERE relnamespace = 'idem'::regnamespace
			   UNION ALL SELECT FROM pg_catalog.pg_proc WHERE pronamespace = 'idem'::regnamespace
			   UNION ALL SELECT FROM pg_catalog.pg_type WHERE typnamespace = 'idem'::regnamespace
			   UNION ALL SELECT FROM pg_catalog.pg_operator WHERE oprnamespace = 'idem'::regnamespace) THEN
		RAISE EXCEPTION 'schema "idem" is not empty'
			USING ERRCODE = 'dependent_objects_still_exist',
				  HINT = 'Drop it or give it another name; CREATE EXTENSION makes it.';
	END IF;
END $$;
COMMENT ON SCHEMA idem IS
	'idempotent consumers, idempotency keys and version guards';

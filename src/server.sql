
--
-- Servers: CREATE SERVER ... FOREIGN DATA WRAPPER idem OPTIONS (url '...').
--
CREATE FUNCTION idem.server_validator(options text[], catalog oid) RETURNS void
	AS 'MODULE_PATHNAME', 'idem_server_validator' LANGUAGE C STRICT VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION idem.server_validator(text[], oid) IS
	'checks the options of a server';

CREATE FOREIGN DATA WRAPPER idem VALIDATOR idem.server_validator;
COMMENT ON FOREIGN DATA WRAPPER idem IS
	'servers that idem delivers messages to';

CREATE FUNCTION idem.server_check(server text) RETURNS text
	AS 'MODULE_PATHNAME', 'idem_server_check' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION idem.server_check(text) IS
	'why a server cannot be used, as far as this can be told without connecting to it; null: nothing is wrong';

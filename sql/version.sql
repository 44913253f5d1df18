-- Version guards: every status.
CREATE EXTENSION idem;

-- the first version seen is applied, whatever it is
SELECT idem.version_advance('view', 'order-1', 5);
SELECT idem.version_advance('view', 'order-1', 5);
SELECT idem.version_advance('view', 'order-1', 4);
SELECT idem.version_advance('view', 'order-1', 9);
SELECT idem.version_advance('view', 'order-1', 6);

-- entities and consumers do not share
SELECT idem.version_advance('view', 'order-2', 1);
SELECT idem.version_advance('other', 'order-1', 1);

-- next: nothing may be missing
SELECT idem.version_advance('log', 'order-1', 1, 'next');
SELECT idem.version_advance('log', 'order-1', 2, 'next');
SELECT idem.version_advance('log', 'order-1', 4, 'next');
SELECT idem.version_advance('log', 'order-1', 2, 'next');
SELECT idem.version_advance('log', 'order-1', 1, mode => 'next');
SELECT idem.version_advance('log', 'order-1', 3, 'next');
SELECT idem.version_advance('log', 'order-1', 4, 'next');

-- the ends of the range
SELECT idem.version_advance('range', 'e', -9223372036854775808);
SELECT idem.version_advance('range', 'e', 9223372036854775807, 'next');
SELECT idem.version_advance('range', 'e', 9223372036854775807);
SELECT idem.version_advance('range', 'e', 9223372036854775807, 'next');
SELECT idem.version_advance('range', 'e', -1);

-- in a transaction, with savepoints
BEGIN;
SELECT idem.version_advance('tx', 'e', 1);
SAVEPOINT s;
SELECT idem.version_advance('tx', 'e', 2);
ROLLBACK TO s;
SELECT idem.version_advance('tx', 'e', 2);
SELECT idem.version_advance('tx', 'e', 2);
ROLLBACK;
SELECT idem.version_advance('tx', 'e', 1);

-- many of one entity in one statement
SELECT status, count(*) FROM (
	SELECT idem.version_advance('many', 'e', i) AS status FROM generate_series(1, 100) i) s GROUP BY status;

-- reset
SELECT idem.version_reset('log', 'order-1');
SELECT idem.version_reset('log', 'order-1');
SELECT idem.version_advance('log', 'order-1', 100, 'next');
SELECT idem.version_reset('view');
SELECT idem.version_reset('nobody');

DROP EXTENSION idem;

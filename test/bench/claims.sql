-- The contestants' tables and functions, in a database of their own.

-- What one writes without idem, at its shortest.
CREATE TABLE bare (
	consumer text,
	msg_id text,
	PRIMARY KEY (consumer, msg_id)
);

-- The same table, and the function that is usually found around it.
CREATE TABLE by_hand (LIKE bare INCLUDING ALL);
CREATE FUNCTION claim_by_hand(c text, m text) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
	IF EXISTS (SELECT FROM by_hand WHERE consumer = c AND msg_id = m) THEN
		RETURN false;
	END IF;
	INSERT INTO by_hand (consumer, msg_id) VALUES (c, m);
	RETURN true;
EXCEPTION
	WHEN unique_violation THEN
		RETURN false;
END
$$;

-- Ids look like uuids, and are made cheaply, since every contestant pays for
-- that: two numbers of 8 and 12 digits, with something in between.

-- fresh_id(): a new one
CREATE FUNCTION fresh_id() RETURNS text LANGUAGE sql VOLATILE
	RETURN (10000000 + (random() * 89999998)::bigint)::text || '-0000-4000-8000-' ||
		(200000000000 + (random() * 799999999998)::bigint)::text;

-- uuid_id(1), uuid_id(2)...: what a table holds at the start of a measurement
CREATE FUNCTION uuid_id(i bigint) RETURNS text LANGUAGE sql IMMUTABLE
	RETURN (10000000 + i * i * 48271 % 89999999)::text || '-0000-4000-8000-' ||
		(100000000000 + i)::text;

-- text_id(1), text_id(2)...: ids of 40 characters
CREATE FUNCTION text_id(i bigint) RETURNS text LANGUAGE sql IMMUTABLE
	RETURN left('order-' || md5(i::text) || md5((-i)::text), 40);

-- fill(contestant, kind of id, n): empty its table and claim ids 1 to n
CREATE PROCEDURE fill(contestant text, kind text, n integer) LANGUAGE plpgsql AS $$
DECLARE
	target regclass := CASE contestant WHEN 'idem' THEN 'idem.inbox_claim' ELSE contestant END;
	ids text[];
BEGIN
	EXECUTE format('TRUNCATE %s', target);
	FOR i IN 1..n BY 1000 LOOP
		EXECUTE format('SELECT array_agg(%I(i)) FROM generate_series($1, $2) i', kind || '_id')
			INTO ids USING i, least(i + 999, n);
		IF contestant = 'idem' THEN
			PERFORM FROM idem.inbox_claim_batch('billing', ids);
		ELSE
			EXECUTE format('INSERT INTO %s SELECT $1, unnest($2)', target) USING 'billing', ids;
		END IF;
		COMMIT;
	END LOOP;
END
$$;

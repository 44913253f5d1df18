
--
-- Reading the log: ticks, and how far each server has got.  Rows are added
-- and, when nobody needs them any more, removed; none is ever changed.
--
CREATE TABLE idem.outbox_tick (
	id bigint NOT NULL,
	snapshot pg_snapshot,
	xid xid8 NOT NULL,
	seq_before bigint NOT NULL,
	seq_after bigint NOT NULL,
	at timestamptz NOT NULL,
	CONSTRAINT outbox_tick_pkey PRIMARY KEY (id)
) USING heap;
CREATE INDEX outbox_tick_adopted ON idem.outbox_tick (id) WHERE snapshot IS NULL;
COMMENT ON TABLE idem.outbox_tick IS
	'moments at which the relay looked at the outbox';
COMMENT ON COLUMN idem.outbox_tick.snapshot IS
	'transactions that had committed; null: everything up to seq_before';
COMMENT ON COLUMN idem.outbox_tick.xid IS
	'transaction of the tick itself';
COMMENT ON COLUMN idem.outbox_tick.seq_before IS
	'last number given to a message before the snapshot';
COMMENT ON COLUMN idem.outbox_tick.seq_after IS
	'last number given to a message after the snapshot';
SELECT pg_catalog.pg_extension_config_dump('idem.outbox_tick', '');

CREATE TABLE idem.relay_position (
	server text COLLATE "C" NOT NULL,
	replay bigint NOT NULL,
	id bigint NOT NULL,
	tick_a bigint NOT NULL,
	tick_b bigint NOT NULL,
	phase smallint NOT NULL,
	seq bigint NOT NULL,
	at timestamptz NOT NULL,
	CONSTRAINT relay_position_pkey PRIMARY KEY (server, replay, id)
) USING heap;
COMMENT ON TABLE idem.relay_position IS
	'how far each server has got; the row with the highest id counts';
COMMENT ON COLUMN idem.relay_position.replay IS
	'of which replay; 0: of ordinary reading';
SELECT pg_catalog.pg_extension_config_dump('idem.relay_position', '');

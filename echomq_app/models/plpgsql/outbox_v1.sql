-- Append on commit: rows of the outbox that the transaction's own commit, or the relay, moves
-- into their streams.
--
-- The stream's lock is then held for the commit alone, however long the transaction was.
-- Streams of the app itself (emq.*) are left to the relay: a busy queue has one such stream,
-- and every enqueue would queue behind its lock and one fsync.
--
-- Whoever writes to the outbox has a transaction number before its row draws an id: the relay's
-- floor relies on it (core/floor.py). What the row comes from has to see to that: it is there
-- before the id is drawn.
CREATE OR REPLACE FUNCTION {schema}.echomq_append_on_commit_v1(
    stream_name text, records jsonb, lock_timeout_ms integer DEFAULT 5000
) RETURNS void
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
BEGIN
    IF stream_name !~ '^[A-Za-z0-9._-]{{1,75}}$' THEN
        RAISE EXCEPTION 'a stream can''t be called %', quote_literal(stream_name)
            USING ERRCODE = 'EQ002',
            HINT = 'Names have 1 to 75 ASCII letters, digits, dots, dashes and underscores.';
    END IF;
    IF echomq_too_deep_v1(records) THEN
        RAISE EXCEPTION 'a record for stream % is nested deeper than 100 levels',
            quote_literal(stream_name)
            USING ERRCODE = 'EQ005',
            HINT = 'Flatten its data and headers, or send the deep part as a string of JSON.';
    END IF;
    -- The commit refuses bad records. Where the relay moves them it is too late for that: one
    -- would be in its way for ever.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted')
        OR starts_with(stream_name, 'emq.')
    THEN
        PERFORM FROM jsonb_array_elements(records) AS e(value)
            WHERE jsonb_typeof(e.value) <> 'object' OR NOT e.value ? 'data'
                OR length(e.value->>'type') > 100 OR length(e.value->>'key') > 255
                OR length(e.value->>'idempotency_key') > 255 LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'a record for stream % can''t be one', quote_literal(stream_name)
                USING ERRCODE = 'EQ005',
                HINT = 'Records are objects with "data"; a type has up to 100, a key up to 255 '
                    'characters.';
        END IF;
    END IF;
    PERFORM set_config('echomq.lock_timeout_ms', lock_timeout_ms::text, true);
    INSERT INTO echomq_outbox (stream, record, xact)
    SELECT stream_name, e.value, CASE WHEN starts_with(stream_name, 'emq.') THEN NULL
                                 ELSE pg_current_xact_id()::text::bigint END
    FROM jsonb_array_elements(records) WITH ORDINALITY AS e(value, n)
    WHERE pg_current_xact_id() IS NOT NULL
    ORDER BY e.n;
END
$$;

-- Move rows of one stream, oldest first; returns how many records they were, and the id of the
-- last row. of_xact null: of any transaction; else only its rows. Above an id: below it are those
-- that were moved, dead but not yet gone.
-- Cut by count and by bytes: one JSON array is held in memory and has a limit of 256 MB. How
-- much a compressed value unpacks to is known only when it is: at most 256 times as much.
-- A row with keys is a record for each (see the model Outbox); only a queue's streams have such.
-- The stream is a range of one name: ordered by both columns of a range, only the index of both
-- will do. With "=" the planner takes the order from the primary key where the stream has a good
-- part of the outbox, and passes all rows of the others.
CREATE OR REPLACE FUNCTION {schema}.echomq_outbox_move_v1(
    stream_name text, of_xact bigint, at_most integer, above bigint DEFAULT 0,
    OUT moved integer, OUT last_id bigint
)
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
DECLARE
    ids bigint[];
    batch jsonb;
    expand boolean := false;
BEGIN
    IF of_xact IS NULL THEN
        SELECT array_agg(id ORDER BY id), jsonb_agg(record ORDER BY id), max(records),
               bool_or(keys IS NOT NULL)
        INTO ids, batch, moved, expand FROM (
            SELECT id, record, keys, sum(bytes * n) OVER up_to AS bytes,
                   sum(n) OVER up_to AS records, row_number() OVER up_to AS nth
            FROM (SELECT id, record, keys,
                      coalesce(cardinality(string_to_array(keys, ',')), 1) AS n,
                      pg_column_size(record)::bigint * CASE
                          WHEN pg_column_compression(record) IS NULL THEN 1 ELSE 256 END AS bytes
                  FROM echomq_outbox
                  WHERE stream >= stream_name AND stream <= stream_name AND id > above
                  ORDER BY stream, id LIMIT at_most) AS front
            WINDOW up_to AS (ORDER BY id)
        ) AS sized WHERE (bytes < 33554432 AND records <= at_most) OR nth = 1;
    ELSE
        SELECT array_agg(id ORDER BY id), jsonb_agg(record ORDER BY id) INTO ids, batch FROM (
            SELECT id, record, sum(bytes) OVER (ORDER BY id) AS bytes,
                   row_number() OVER (ORDER BY id) AS nth
            FROM (SELECT id, record, pg_column_size(record)::bigint * CASE
                      WHEN pg_column_compression(record) IS NULL THEN 1 ELSE 256 END AS bytes
                  FROM echomq_outbox
                  WHERE xact = of_xact AND stream = stream_name AND id > above
                  ORDER BY id LIMIT at_most) AS front
        ) AS sized WHERE bytes < 33554432 OR nth = 1;
    END IF;
    last_id := ids[cardinality(ids)];
    moved := coalesce(moved, cardinality(ids), 0);
    IF expand THEN
        SELECT jsonb_agg(CASE WHEN k.key IS NULL THEN o.record ELSE o.record
                         || jsonb_build_object('key', k.key, 'data', (o.record->'data')
                                               || jsonb_build_object('id', k.key)) END
                         ORDER BY o.id, k.n) INTO batch
        FROM echomq_outbox o
        LEFT JOIN LATERAL unnest(string_to_array(o.keys, ',')) WITH ORDINALITY AS k(key, n) ON true
        WHERE o.id = ANY (ids);
    END IF;
    IF moved > 0 THEN
        PERFORM echomq_append_v1(stream_name, batch);
        DELETE FROM echomq_outbox WHERE id = ANY (ids);
    END IF;
END
$$;

-- Deferred: fires for each row while the transaction commits. The first firing moves all rows of
-- the transaction, in name order (all transactions lock in one order: no deadlock); the later
-- ones find their row gone and return at once.
CREATE OR REPLACE FUNCTION {schema}.echomq_outbox_commit_v1() RETURNS trigger
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
DECLARE
    mine bigint := pg_current_xact_id()::text::bigint;
    saved text := current_setting('lock_timeout');
    next_name text;
    done record;
BEGIN
    PERFORM FROM echomq_outbox WHERE id = NEW.id;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    -- An older snapshot can't see the last position: the relay moves these after the commit.
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RETURN NULL;
    END IF;
    -- statement_timeout doesn't fire inside COMMIT, lock_timeout does.
    PERFORM set_config('lock_timeout', coalesce(
        nullif(current_setting('echomq.lock_timeout_ms', true), ''), '5000'), true);
    FOR next_name IN
        SELECT DISTINCT stream COLLATE "C" FROM echomq_outbox WHERE xact = mine ORDER BY 1
    LOOP
        PERFORM FROM echomq_stream WHERE name = next_name FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND THEN  -- held, or new; a handler costs a subtransaction, so only now
            BEGIN
                PERFORM echomq_lock_stream_v1(next_name);
            EXCEPTION WHEN lock_not_available THEN
                RAISE EXCEPTION 'append on commit waited % for stream %, nothing was written',
                    current_setting('lock_timeout'), quote_literal(next_name)
                    USING ERRCODE = 'lock_not_available',
                    HINT = 'A transaction that appended to it is still open: keep those short, or '
                        'use append_on_commit in them. ECHOMQ[''LOCK_TIMEOUT''] sets how long.';
            END;
        END IF;
        SELECT 0::bigint AS last_id INTO done;
        LOOP
            SELECT * INTO done FROM echomq_outbox_move_v1(next_name, mine, 1000, done.last_id);
            EXIT WHEN done.moved = 0;
        END LOOP;
    END LOOP;
    PERFORM set_config('lock_timeout', saved, true);
    RETURN NULL;
END
$$;

DROP TRIGGER IF EXISTS echomq_outbox_commit_v1 ON {schema}.echomq_outbox;
CREATE CONSTRAINT TRIGGER echomq_outbox_commit_v1
    AFTER INSERT ON {schema}.echomq_outbox
    DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW WHEN (NEW.xact IS NOT NULL)
    EXECUTE FUNCTION {schema}.echomq_outbox_commit_v1();

-- Move committed rows of one stream, in outbox order, under the stream's lock.
--
-- moved: how many, or null when somebody else holds the lock: whoever calls, calls again at the
-- next poll. last_id: of the last one. above, xact, oldest_xact: see core/floor.py. Without a
-- floor that is known to be safe, from the front: a late commit's step would be overtaken by the
-- next one.
CREATE OR REPLACE FUNCTION {schema}.echomq_relay_from_v1(
    stream_name text, at_most integer, above bigint,
    OUT moved integer, OUT last_id bigint, OUT xact bigint, OUT oldest_xact bigint
)
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
BEGIN
    oldest_xact := pg_snapshot_xmin(pg_current_snapshot())::text::bigint;
    moved := 0;
    PERFORM FROM echomq_outbox WHERE stream >= stream_name AND stream <= stream_name AND id > above
        ORDER BY stream, id LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM FROM echomq_stream WHERE name = stream_name;
    IF NOT FOUND THEN
        PERFORM echomq_lock_stream_v1(stream_name);
    END IF;
    PERFORM FROM echomq_stream WHERE name = stream_name FOR NO KEY UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        moved := NULL;
        RETURN;
    END IF;
    SELECT m.moved, m.last_id INTO moved, last_id
        FROM echomq_outbox_move_v1(stream_name, NULL, at_most, above) AS m;
    xact := pg_current_xact_id()::text::bigint;
END
$$;

-- The same for who comes once, or seldom; returns how many were moved.
CREATE OR REPLACE FUNCTION {schema}.echomq_relay_v1(stream_name text, at_most integer DEFAULT 1000)
RETURNS integer
LANGUAGE sql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
    SELECT moved FROM echomq_relay_from_v1(stream_name, at_most, 0)
$$;

-- Append records to a stream, in the caller's transaction.
--
-- records: a JSON array of objects; "data" is required, "type", "key", "headers" and
-- "idempotency_key" are not. Returns one row per element, numbered by n from 1, in order.
-- The stream's row is locked to the end of the transaction, so positions are dense and in
-- commit order. Statements inside see a fresh snapshot each (READ COMMITTED), which is why
-- the last position is looked up in a statement of its own, after the lock.
--
-- A record whose idempotency key is known takes no position: the first receipt comes back
-- with duplicate = true. Then, if anything is left to write and expected_cursor isn't the
-- write cursor, nothing is written and one row comes back with "position" null and the write
-- cursor in its column. (Raising would abort the caller's whole transaction.)
CREATE OR REPLACE FUNCTION {schema}.echomq_append_v1(
    stream_name text, records jsonb, expected_cursor bigint DEFAULT NULL
) RETURNS TABLE (
    n integer, id uuid, "position" bigint, recorded_at timestamptz, duplicate boolean,
    epoch text, write_cursor bigint
)
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    s echomq_stream;
    last_one record;
    base bigint;
    now_at timestamptz;
    milliseconds bigint;
    fresh integer[];
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE EXCEPTION 'append needs READ COMMITTED, the transaction is %',
            upper(current_setting('transaction_isolation'))
            USING ERRCODE = 'EQ001',
            HINT = 'The snapshot is older than the lock. Use echomq_append_on_commit_v1.';
    END IF;
    IF echomq_too_deep_v1(records) THEN
        RAISE EXCEPTION 'a record for stream % is nested deeper than 100 levels',
            quote_literal(stream_name)
            USING ERRCODE = 'EQ005',
            HINT = 'Flatten its data and headers, or send the deep part as a string of JSON.';
    END IF;
    -- As echomq_lock_stream_v1 does: to call it costs more than the look-up.
    SELECT * INTO s FROM echomq_stream WHERE name = stream_name FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        IF expected_cursor > 0 AND jsonb_array_length(records) > 0 THEN
            RETURN QUERY SELECT NULL::integer, NULL::uuid, NULL::bigint, NULL::timestamptz,
                false, NULL::text, 0::bigint;
            RETURN;
        END IF;
        s := echomq_lock_stream_v1(stream_name);
    END IF;
    SELECT r.position, r.recorded_at INTO last_one
        FROM echomq_record r
        WHERE r.stream_id = s.id AND r.position >= s.first_position
        ORDER BY r.position DESC LIMIT 1;
    base := greatest(coalesce(last_one.position + 1, 0), s.first_position);
    now_at := greatest(clock_timestamp(), last_one.recorded_at);
    milliseconds := floor(extract(epoch FROM now_at) * 1000);

    IF jsonb_path_exists(records, '$[*].idempotency_key') THEN
        fresh := echomq_fresh_v1(s.id, records);
        IF expected_cursor <> base AND cardinality(fresh) > 0 THEN
            RETURN QUERY SELECT NULL::integer, NULL::uuid, NULL::bigint, NULL::timestamptz,
                false, s.epoch::text, base;
            RETURN;
        END IF;
        INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,
                                   idempotency_key, recorded_at)
        SELECT echomq_event_id_v1(milliseconds, base + f.k - 1), s.id, base + f.k - 1,
               coalesce(e.value->>'type', ''), coalesce(e.value->>'key', ''), e.value->'data',
               coalesce(nullif(e.value->'headers', 'null'), '{{}}'),
               coalesce(e.value->>'idempotency_key', ''), now_at
        FROM unnest(fresh) WITH ORDINALITY AS f(n, k)
        JOIN jsonb_array_elements(records) WITH ORDINALITY AS e(value, n) ON e.n = f.n
        ORDER BY f.k;
        -- A look-up in an index for each, which LIMIT keeps apart: a join on either condition can
        -- use no index, and reads every record of the stream.
        RETURN QUERY
        SELECT e.n::integer, r.id, r.position, r.recorded_at, f.k IS NULL, s.epoch::text,
               base + cardinality(fresh)
        FROM jsonb_array_elements(records) WITH ORDINALITY AS e(value, n)
        LEFT JOIN unnest(fresh) WITH ORDINALITY AS f(n, k) ON f.n = e.n
        CROSS JOIN LATERAL (
            (SELECT w.id, w.position, w.recorded_at FROM echomq_record w
             WHERE f.k IS NOT NULL AND w.stream_id = s.id AND w.position = base + f.k - 1 LIMIT 1)
            UNION ALL
            (SELECT w.id, w.position, w.recorded_at FROM echomq_record w
             WHERE f.k IS NULL AND w.stream_id = s.id AND w.idempotency_key <> ''
                   AND w.idempotency_key = e.value->>'idempotency_key' LIMIT 1)
        ) AS r
        ORDER BY e.n;
        RETURN;
    END IF;

    IF expected_cursor <> base THEN
        RETURN QUERY SELECT NULL::integer, NULL::uuid, NULL::bigint, NULL::timestamptz, false,
            s.epoch::text, base;
        RETURN;
    END IF;
    RETURN QUERY
    INSERT INTO echomq_record (id, stream_id, position, type, key, data, headers,
                               idempotency_key, recorded_at)
    SELECT echomq_event_id_v1(milliseconds, base + e.n - 1), s.id, base + e.n - 1,
           coalesce(e.value->>'type', ''), coalesce(e.value->>'key', ''), e.value->'data',
           coalesce(nullif(e.value->'headers', 'null'), '{{}}'), '', now_at
    FROM jsonb_array_elements(records) WITH ORDINALITY AS e(value, n)
    RETURNING (echomq_record.position - base + 1)::integer, echomq_record.id,
        echomq_record.position, echomq_record.recorded_at, false, s.epoch::text,
        base + jsonb_array_length(records);
END
$$;

-- Lock a stream's row, made if it isn't there. FOR NO KEY UPDATE makes no new row version.
CREATE OR REPLACE FUNCTION {schema}.echomq_lock_stream_v1(stream_name text)
RETURNS {schema}.echomq_stream
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
DECLARE
    s echomq_stream;
BEGIN
    LOOP
        SELECT * INTO s FROM echomq_stream WHERE name = stream_name FOR NO KEY UPDATE;
        IF FOUND THEN
            RETURN s;
        END IF;
        IF stream_name !~ '^[A-Za-z0-9._-]{{1,75}}$' THEN
            RAISE EXCEPTION 'a stream can''t be called %', quote_literal(stream_name)
                USING ERRCODE = 'EQ002',
                HINT = 'Names have 1 to 75 ASCII letters, digits, dots, dashes, underscores.';
        END IF;
        -- Waits for a transaction that is creating the same stream; the loop then sees its row,
        -- or makes it if that transaction rolled back.
        INSERT INTO echomq_stream (name, epoch, first_position, created_at)
        VALUES (stream_name, left(replace(gen_random_uuid()::text, '-', ''), 16), 0,
                clock_timestamp())
        ON CONFLICT (name) DO NOTHING
        RETURNING * INTO s;
        -- Only after a restore of one table without the other: these would be its history.
        PERFORM FROM echomq_record WHERE stream_id = s.id ORDER BY position LIMIT 1;
        IF FOUND THEN
            RAISE EXCEPTION 'stream % can''t be made: its number % has records of a lost stream',
                stream_name, s.id
                USING ERRCODE = 'EQ004',
                HINT = 'Restore the rows of echomq_stream too, or delete those records.';
        END IF;
    END LOOP;
END
$$;

-- Whether data or headers of a record have arrays and objects inside each other beyond
-- core/payload.py's MAX_DEPTH: not every reader could decode them, and such a record would stand
-- in their way. The array and the record are two levels more.
--
-- Most arrays of records are too short for that (a level takes 8 bytes) and aren't looked into. Of
-- a compressed one the size says nothing. Inlined where it is called, so it sets no search_path.
CREATE OR REPLACE FUNCTION {schema}.echomq_too_deep_v1(records jsonb)
RETURNS boolean
LANGUAGE sql STABLE PARALLEL SAFE
AS $$
    SELECT (pg_column_size(records) > 800 OR pg_column_compression(records) IS NOT NULL)
        AND jsonb_path_exists(
            records, 'strict $.**{{102}} ? (@.type() == "array" || @.type() == "object")')
$$;

-- Ordinals of the records that are new: no key, or the first of a key that isn't known.
CREATE OR REPLACE FUNCTION {schema}.echomq_fresh_v1(of_stream bigint, records jsonb)
RETURNS integer[]
LANGUAGE sql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
    SELECT coalesce(array_agg(n::integer ORDER BY n), '{{}}')
    FROM (
        SELECT e.n, coalesce(e.value->>'idempotency_key', '') AS key,
               row_number() OVER (PARTITION BY e.value->>'idempotency_key' ORDER BY e.n) AS nth
        FROM jsonb_array_elements(records) WITH ORDINALITY AS e(value, n)
    ) AS given
    -- No NOT EXISTS: the planner may hash that, which reads all keys of the stream.
    WHERE given.key = '' OR nth = 1 AND (
        SELECT r.position FROM echomq_record r
        WHERE r.stream_id = of_stream AND r.idempotency_key = given.key
              AND r.idempotency_key <> ''
        LIMIT 1
    ) IS NULL
$$;

-- RFC 9562 UUIDv7: 48 bits milliseconds, 4 version, 12 + 30 bits position with the 2 of the
-- variant between them, 32 random bits. Two integers, since text by text it took 3 us more.
CREATE OR REPLACE FUNCTION {schema}.echomq_event_id_v1(milliseconds bigint, "position" bigint)
RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
AS $$
    SELECT encode(
        int8send((milliseconds << 16) | (7 << 12) | ("position" >> 30))
        || int8send((1::bigint << 63) | (("position" & 1073741823) << 32)
                    | floor(random() * 4294967296)::bigint),
        'hex')::uuid
$$;

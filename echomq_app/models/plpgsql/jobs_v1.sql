-- The text form of a JOB id: 'JOB' and 26 characters of Crockford's base32 (130 bits, of which
-- the first two are 0). A loop in plpgsql takes half the time of string_agg.
CREATE OR REPLACE FUNCTION {schema}.echomq_job_text_v1(id uuid) RETURNS text
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE
AS $$
DECLARE
    bits bit(130) := B'00' || ('x' || replace(id::text, '-', ''))::bit(128);
    text_form text := 'JOB';
BEGIN
    FOR n IN 0..25 LOOP
        text_form := text_form || substr('0123456789ABCDEFGHJKMNPQRSTVWXYZ',
                                         1 + substring(bits FROM 1 + 5 * n FOR 5)::integer, 1);
    END LOOP;
    RETURN text_form;
END
$$;

-- Make parked jobs of a queue eligible again, as many of each group as the group has room for;
-- tells whether any are parked still. Only a hint: the claim decides.
--
-- The groups are found by steps through the index, not by a walk over their jobs: there are at
-- most as many full groups as there are running jobs.
CREATE OR REPLACE FUNCTION {schema}.echomq_unpark_v1(of_queue text) RETURNS boolean
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
DECLARE
    ids uuid[];
BEGIN
    WITH RECURSIVE waiting(key) AS (
        (SELECT j.group_key FROM echomq_job j
         WHERE j.queue = of_queue AND j.parked AND j.state = 'ready' AND j.group_key <> ''
         ORDER BY j.group_key LIMIT 1)
        UNION ALL
        SELECT (SELECT j.group_key FROM echomq_job j
                WHERE j.queue = of_queue AND j.parked AND j.state = 'ready'
                  AND j.group_key <> '' AND j.group_key > w.key
                ORDER BY j.group_key LIMIT 1)
        FROM waiting w WHERE w.key IS NOT NULL
    )
    SELECT array_agg(next.id) INTO ids
    FROM waiting w
    CROSS JOIN LATERAL (
        SELECT j.group_limit AS most FROM echomq_job j
        WHERE j.queue = of_queue AND j.parked AND j.state = 'ready' AND j.group_key = w.key
          AND j.group_key <> ''
        ORDER BY j.priority DESC, j.run_after, j.id LIMIT 1
    ) AS head
    CROSS JOIN LATERAL (
        SELECT (SELECT count(*) FROM echomq_job r
                WHERE r.group_key = w.key AND r.state = 'running' AND r.group_key <> '')
             + (SELECT count(*) FROM (
                    SELECT FROM echomq_job r
                    WHERE r.queue = of_queue AND NOT r.parked AND r.state = 'ready'
                      AND r.group_key = w.key AND r.group_key <> '' LIMIT head.most) AS free)
            AS n
    ) AS used
    CROSS JOIN LATERAL (
        SELECT j.id FROM echomq_job j
        WHERE j.queue = of_queue AND j.parked AND j.state = 'ready' AND j.group_key = w.key
          AND j.group_key <> ''
        ORDER BY j.priority DESC, j.run_after, j.id
        LIMIT greatest(0, head.most - used.n) FOR NO KEY UPDATE OF j SKIP LOCKED
    ) AS next
    WHERE w.key IS NOT NULL;
    IF ids IS NOT NULL THEN
        UPDATE echomq_job SET parked = false WHERE id = ANY (ids);
    END IF;
    RETURN EXISTS (SELECT FROM echomq_job j
                   WHERE j.queue = of_queue AND j.parked AND j.state = 'ready'
                     AND j.group_key <> '');
END
$$;

-- Park ready jobs of a full group, those that would be claimed next first; returns how many, at
-- most a thousand.
CREATE OR REPLACE FUNCTION {schema}.echomq_park_v1(of_queue text, of_group text, but uuid[])
RETURNS integer
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
DECLARE
    parked_now integer;
BEGIN
    UPDATE echomq_job SET parked = true WHERE id IN (
        SELECT j.id FROM echomq_job j
        WHERE j.queue = of_queue AND NOT j.parked AND j.state = 'ready' AND j.group_key = of_group
          AND j.group_key <> '' AND j.id <> ALL (but)
        ORDER BY j.priority DESC, j.run_after, j.id
        LIMIT 1000 FOR NO KEY UPDATE OF j SKIP LOCKED
    );
    GET DIAGNOSTICS parked_now = ROW_COUNT;
    RETURN parked_now;
END
$$;

-- Claim up to at_most ready jobs of a queue for a worker; one round trip. Nothing is claimed for a
-- worker whose lease is lost, or from a paused queue. A claimed job waits in its worker, and
-- echomq_begin_v1 counts its attempt. But for the first ones, count_first at most: their handlers
-- begin right after this, and one statement less for each is much of what a short job costs. Only
-- the first of several attempts is counted here: see jobs/begins.py.
--
-- Rows that somebody holds are passed over. A job that somebody asked to cancel (while it ran
-- before) isn't claimed: whoever sweeps next cancels it.
--
-- floor_priority, floor_run_after: only jobs of this priority, due at or after this time. Behind
-- a snapshot that is held open elsewhere, the index entries of all jobs that were claimed since
-- stay, and a claim from the front would walk over every one of them.
--
-- Groups. Who claims a job of a group has the group's advisory lock to the end of the
-- transaction, and counts what runs after taking it: the one before has committed, so the limit
-- is exact. A group whose lock somebody has is passed over; nobody waits. Jobs of a full group
-- are parked: they leave the index that claims read, so each is met once, however many there
-- are. A row without an id may come last. Its task_path is 'again' (more may be found at once)
-- or 'parked' (jobs wait for their groups).
CREATE OR REPLACE FUNCTION {schema}.echomq_claim_v1(
    of_queue text, for_worker bigint, at_most integer,
    floor_priority integer DEFAULT NULL, floor_run_after timestamptz DEFAULT NULL,
    count_first integer DEFAULT 0
) RETURNS TABLE (
    id uuid, task_path text, arguments jsonb, priority integer, run_after timestamptz,
    attempt integer, max_attempts integer, options jsonb, fence bigint, errors jsonb,
    enqueued_at timestamptz, started_at timestamptz, attempted_at timestamptz, begun boolean
)
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    w record;
    g record;
    ids uuid[];
    grouped boolean;
    taken uuid[] := ARRAY[]::uuid[];
    passed text[] := ARRAY[]::text[];
    used integer;
    n integer;
    any_parked boolean := false;
    again boolean := false;
    now_at timestamptz;
BEGIN
    SELECT name INTO w FROM echomq_worker
        WHERE echomq_worker.id = for_worker AND lost_at IS NULL AND stopped_at IS NULL;
    IF NOT FOUND
        OR EXISTS (SELECT FROM echomq_queue q WHERE q.name = of_queue AND q.paused_at IS NOT NULL)
    THEN
        RETURN;
    END IF;
    IF floor_priority IS NULL THEN
        any_parked := echomq_unpark_v1(of_queue);
    END IF;
    LOOP
        IF floor_priority IS NULL THEN
            SELECT array_agg(front.id), bool_or(front.group_key <> '') INTO ids, grouped FROM (
                SELECT j.id, j.group_key FROM echomq_job j
                WHERE j.queue = of_queue AND j.state = 'ready' AND NOT j.parked
                  AND NOT EXISTS (SELECT FROM echomq_cancelrequest c WHERE c.job_id = j.id)
                  AND j.group_key <> ALL (passed) AND j.id <> ALL (taken)
                ORDER BY j.priority DESC, j.run_after, j.id
                LIMIT at_most - cardinality(taken) FOR NO KEY UPDATE OF j SKIP LOCKED
            ) AS front;
        ELSE
            SELECT array_agg(front.id), bool_or(front.group_key <> '') INTO ids, grouped FROM (
                SELECT j.id, j.group_key FROM echomq_job j
                WHERE j.queue = of_queue AND j.state = 'ready' AND NOT j.parked
                  AND j.priority = floor_priority AND j.run_after >= floor_run_after
                  AND NOT EXISTS (SELECT FROM echomq_cancelrequest c WHERE c.job_id = j.id)
                  AND j.group_key <> ALL (passed) AND j.id <> ALL (taken)
                ORDER BY j.run_after, j.id
                LIMIT at_most - cardinality(taken) FOR NO KEY UPDATE OF j SKIP LOCKED
            ) AS front;
        END IF;
        EXIT WHEN ids IS NULL;
        IF NOT grouped THEN
            taken := taken || ids;
            EXIT;
        END IF;
        -- Fewer than asked for: there are no more behind them.
        n := at_most - cardinality(taken) - cardinality(ids);
        FOR g IN
            SELECT j.group_key AS key, array_agg(j.id ORDER BY o.n) AS ids,
                   array_agg(coalesce(j.group_limit, 1) ORDER BY o.n) AS limits
            FROM unnest(ids) WITH ORDINALITY AS o(id, n) JOIN echomq_job j ON j.id = o.id
            GROUP BY j.group_key
        LOOP
            IF g.key = '' THEN
                taken := taken || g.ids;
                CONTINUE;
            END IF;
            IF NOT pg_try_advisory_xact_lock(hashtextextended('echomq group ' || g.key, 0)) THEN
                passed := passed || g.key;
                again := true;
                CONTINUE;
            END IF;
            SELECT count(*) INTO used FROM echomq_job r
                WHERE r.group_key = g.key AND r.state = 'running' AND r.group_key <> '';
            used := used + (SELECT count(*) FROM echomq_job t
                            WHERE t.id = ANY (taken) AND t.group_key = g.key);
            FOR i IN 1..cardinality(g.ids) LOOP
                IF used < g.limits[i] THEN
                    taken := taken || g.ids[i];
                    used := used + 1;
                ELSE
                    passed := passed || g.key;
                    any_parked := true;
                    again := again OR echomq_park_v1(of_queue, g.key, taken) = 1000;
                    EXIT;
                END IF;
            END LOOP;
        END LOOP;
        EXIT WHEN n > 0 OR again OR cardinality(taken) >= at_most;
    END LOOP;
    -- Here and not before: a job of a group must not begin before its predecessor's end.
    now_at := clock_timestamp();
    RETURN QUERY
    WITH picked AS (
        SELECT j.id, row_number() OVER front <= count_first
               AND bool_and(j.attempt = 0 AND j.max_attempts > 1) OVER front AS begins
        FROM echomq_job j WHERE j.id = ANY (taken)
        WINDOW front AS (ORDER BY j.priority DESC, j.run_after, j.id ROWS UNBOUNDED PRECEDING)
    ), claimed AS (
        UPDATE echomq_job j
        SET state = 'running', fence = j.fence + 1, worker_id = for_worker, worker_name = w.name,
            progress = NULL, progress_note = '', attempt = j.attempt + p.begins::integer,
            begun_fence = CASE WHEN p.begins THEN j.fence + 1 ELSE j.begun_fence END,
            attempted_at = CASE WHEN p.begins THEN now_at ELSE j.attempted_at END,
            started_at = CASE WHEN p.begins THEN coalesce(j.started_at, now_at)
                              ELSE j.started_at END
        FROM picked p WHERE j.id = p.id
        RETURNING j.*
    ), recorded AS (
        INSERT INTO echomq_outbox (stream, record, keys, xact)
        SELECT 'emq.' || of_queue, jsonb_build_object(
            'type', 'started', 'data', jsonb_build_object(
                'task', b.task_path, 'state', 'running', 'attempt', b.attempt,
                'at', to_char(now_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
                'worker', b.worker_name)),
            string_agg(echomq_job_text_v1(b.id), ',' ORDER BY b.nth), NULL
        FROM (SELECT claimed.*, row_number() OVER (
                  PARTITION BY task_path, attempt ORDER BY priority DESC, run_after, id) AS nth
              FROM claimed WHERE begun_fence = fence) AS b
        GROUP BY b.task_path, b.attempt, b.worker_name, (b.nth - 1) / 40  -- KEYS in relaying.py
    )
    SELECT c.id, c.task_path::text, c.arguments, c.priority::integer, c.run_after, c.attempt,
           c.max_attempts, c.options, c.fence, c.errors, c.enqueued_at, c.started_at,
           c.attempted_at, c.begun_fence = c.fence
    FROM claimed c
    ORDER BY c.priority DESC, c.run_after, c.id;
    IF any_parked OR again THEN
        task_path := CASE WHEN again AND cardinality(taken) < at_most THEN 'again'
                          ELSE 'parked' END;
        id := NULL;
        RETURN NEXT;
    END IF;
END
$$;

-- Room in each page for the version of a row that echomq_begin_v1 writes right after the claim's: it
-- changes no indexed column, so beside the old one it needs no entry in any index.
ALTER TABLE IF EXISTS {schema}.echomq_job SET (fillfactor = 60);

-- Count the attempts whose handlers are about to begin, and record that they started; return the
-- jobs that are still claimed with these fences, and the time. The others must not begin: another
-- worker has them, or another transaction holds the row. Calling it again changes nothing.
--
-- The commit doesn't wait for the disk. A worker that is killed loses nothing by that; a server
-- that crashes may lose the counts of its last 0.6 seconds (three times wal_writer_delay).
CREATE OR REPLACE FUNCTION {schema}.echomq_begin_v1(ids uuid[], fences bigint[])
RETURNS TABLE (id uuid, fence bigint, begun_at timestamptz)
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    now_at timestamptz := clock_timestamp();
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    RETURN QUERY
    WITH ours AS (
        SELECT j.id, j.fence FROM unnest(ids, fences) AS given(id, fence)
        JOIN echomq_job j ON j.id = given.id AND j.fence = given.fence
        WHERE j.state = 'running'
        ORDER BY j.id FOR NO KEY UPDATE OF j SKIP LOCKED
    ), begun AS (
        UPDATE echomq_job j
        SET attempt = j.attempt + 1, begun_fence = j.fence, attempted_at = now_at,
            started_at = coalesce(j.started_at, now_at)
        FROM ours WHERE j.id = ours.id AND j.begun_fence <> j.fence
        RETURNING j.id, j.queue, j.task_path, j.attempt, j.worker_name, j.priority, j.run_after
    ), recorded AS (
        INSERT INTO echomq_outbox (stream, record, keys, xact)
        SELECT 'emq.' || b.queue, jsonb_build_object(
            'type', 'started', 'data', jsonb_build_object(
                'task', b.task_path, 'state', 'running', 'attempt', b.attempt,
                'at', to_char(now_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
                'worker', b.worker_name)),
            string_agg(echomq_job_text_v1(b.id), ',' ORDER BY b.nth), NULL
        FROM (SELECT begun.*, row_number() OVER (
                  PARTITION BY queue, task_path, attempt, worker_name
                  ORDER BY priority DESC, run_after, id) AS nth
              FROM begun) AS b
        GROUP BY b.queue, b.task_path, b.attempt, b.worker_name,
                 (b.nth - 1) / 40  -- KEYS in relaying.py
    )
    SELECT ours.id, ours.fence, now_at FROM ours;
END
$$;

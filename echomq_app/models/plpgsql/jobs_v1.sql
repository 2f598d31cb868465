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

-- Claim up to at_most ready jobs of a queue for a worker, and record that they started; one
-- round trip. Nothing is claimed for a worker whose lease is lost.
--
-- Rows that somebody holds are passed over. A job that somebody asked to cancel (while it ran
-- before) isn't claimed: whoever sweeps next cancels it.
--
-- floor_priority, floor_run_after: only jobs of this priority, due at or after this time. Behind
-- a snapshot that is held open elsewhere, the index entries of all jobs that were claimed since
-- stay, and a claim from the front would walk over every one of them.
CREATE OR REPLACE FUNCTION {schema}.echomq_claim_v1(
    of_queue text, for_worker bigint, at_most integer,
    floor_priority integer DEFAULT NULL, floor_run_after timestamptz DEFAULT NULL
) RETURNS TABLE (
    id uuid, task_path text, arguments jsonb, priority integer, run_after timestamptz,
    attempt integer, max_attempts integer, options jsonb, fence bigint, errors jsonb,
    enqueued_at timestamptz, started_at timestamptz, attempted_at timestamptz
)
LANGUAGE plpgsql VOLATILE
SET search_path = {schema}, pg_temp
AS $$
#variable_conflict use_column
DECLARE
    w record;
    ids uuid[];
    now_at timestamptz := clock_timestamp();
BEGIN
    SELECT name INTO w FROM echomq_worker
        WHERE echomq_worker.id = for_worker AND lost_at IS NULL AND stopped_at IS NULL;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF floor_priority IS NULL THEN
        SELECT array_agg(front.id) INTO ids FROM (
            SELECT j.id FROM echomq_job j
            WHERE j.queue = of_queue AND j.state = 'ready' AND NOT j.parked
              AND NOT EXISTS (SELECT FROM echomq_cancelrequest c WHERE c.job_id = j.id)
            ORDER BY j.priority DESC, j.run_after, j.id
            LIMIT at_most FOR NO KEY UPDATE OF j SKIP LOCKED
        ) AS front;
    ELSE
        SELECT array_agg(front.id) INTO ids FROM (
            SELECT j.id FROM echomq_job j
            WHERE j.queue = of_queue AND j.state = 'ready' AND NOT j.parked
              AND j.priority = floor_priority AND j.run_after >= floor_run_after
              AND NOT EXISTS (SELECT FROM echomq_cancelrequest c WHERE c.job_id = j.id)
            ORDER BY j.run_after, j.id
            LIMIT at_most FOR NO KEY UPDATE OF j SKIP LOCKED
        ) AS front;
    END IF;
    IF ids IS NULL THEN
        RETURN;
    END IF;
    RETURN QUERY
    WITH claimed AS (
        UPDATE echomq_job j
        SET state = 'running', fence = j.fence + 1, attempt = j.attempt + 1,
            worker_id = for_worker, worker_name = w.name, attempted_at = now_at,
            started_at = coalesce(j.started_at, now_at), progress = NULL, progress_note = ''
        WHERE j.id = ANY (ids)
        RETURNING j.*
    ), recorded AS (
        INSERT INTO echomq_outbox (stream, record, xact)
        SELECT 'emq.' || of_queue, jsonb_build_object(
            'type', 'started', 'key', t.job, 'data', jsonb_build_object(
                'id', t.job, 'task', c.task_path, 'state', 'running', 'attempt', c.attempt,
                'at', to_char(now_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'),
                'worker', w.name)), NULL
        FROM claimed c, LATERAL (SELECT echomq_job_text_v1(c.id) AS job) AS t
        ORDER BY c.priority DESC, c.run_after, c.id
    )
    SELECT c.id, c.task_path::text, c.arguments, c.priority::integer, c.run_after, c.attempt,
           c.max_attempts, c.options, c.fence, c.errors, c.enqueued_at, c.started_at,
           c.attempted_at
    FROM claimed c
    ORDER BY c.priority DESC, c.run_after, c.id;
END
$$;

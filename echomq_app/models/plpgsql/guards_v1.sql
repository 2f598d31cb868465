-- Append-only, enforced: a record is never changed, and none is deleted that is still retained.
--
-- Writing the same record over itself is passed over: Django does that when it loads a fixture
-- that is loaded already. Fixtures keep milliseconds of a time.
CREATE OR REPLACE FUNCTION {schema}.echomq_record_no_update_v1() RETURNS trigger
LANGUAGE plpgsql AS $$
BEGIN
    IF (OLD.id, OLD.stream_id, OLD."position", OLD.type, OLD.key, OLD.data, OLD.headers,
        OLD.idempotency_key, date_trunc('milliseconds', OLD.recorded_at))
        IS NOT DISTINCT FROM
        (NEW.id, NEW.stream_id, NEW."position", NEW.type, NEW.key, NEW.data, NEW.headers,
        NEW.idempotency_key, date_trunc('milliseconds', NEW.recorded_at))
    THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'stream records are append-only: record % can''t be changed', OLD.id
        USING ERRCODE = 'EQ003', HINT = 'Append a record that corrects it.';
END
$$;
DROP TRIGGER IF EXISTS echomq_record_no_update_v1 ON {schema}.echomq_record;
CREATE TRIGGER echomq_record_no_update_v1 BEFORE UPDATE ON {schema}.echomq_record
    FOR EACH ROW EXECUTE FUNCTION {schema}.echomq_record_no_update_v1();

CREATE OR REPLACE FUNCTION {schema}.echomq_record_no_delete_v1() RETURNS trigger
LANGUAGE plpgsql
SET search_path = {schema}, pg_temp
AS $$
BEGIN
    PERFORM FROM (SELECT stream_id, max("position") AS "position" FROM gone GROUP BY 1) AS g
        JOIN echomq_stream s ON s.id = g.stream_id WHERE g."position" >= s.first_position;
    IF FOUND THEN
        RAISE EXCEPTION 'stream records are append-only: retained records can''t be deleted'
            USING ERRCODE = 'EQ003', HINT = 'Stream(name).trim() moves first_position first.';
    END IF;
    RETURN NULL;
END
$$;
DROP TRIGGER IF EXISTS echomq_record_no_delete_v1 ON {schema}.echomq_record;
CREATE TRIGGER echomq_record_no_delete_v1 AFTER DELETE ON {schema}.echomq_record
    REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION {schema}.echomq_record_no_delete_v1();

-- A stream's row is never lost while its records are kept: a new row would start at 0 again.
CREATE OR REPLACE FUNCTION {schema}.echomq_stream_no_delete_v1() RETURNS trigger
LANGUAGE plpgsql
SET search_path = {schema}, pg_temp
AS $$
BEGIN
    -- What lies below is deleted, but may still have its entries in the index, all of them. In
    -- order: for any record of a stream PostgreSQL may take the table from its front.
    PERFORM FROM echomq_record WHERE stream_id = OLD.id
        AND "position" >= coalesce(OLD.expired_from, OLD.first_position)
        ORDER BY "position" LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'stream % still has records', OLD.name
            USING ERRCODE = 'EQ003', HINT = 'Stream(name).delete() removes both.';
    END IF;
    RETURN OLD;
END
$$;
DROP TRIGGER IF EXISTS echomq_stream_no_delete_v1 ON {schema}.echomq_stream;
CREATE TRIGGER echomq_stream_no_delete_v1 BEFORE DELETE ON {schema}.echomq_stream
    FOR EACH ROW EXECUTE FUNCTION {schema}.echomq_stream_no_delete_v1();

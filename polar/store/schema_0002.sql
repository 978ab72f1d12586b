-- Where a prompt comes from. An engine may tell it only with its answer: then it stands in call_ends. What version 1 did
-- not keep of its calls is NULL; it kept an untold prompt as an empty one.

ALTER TABLE call_starts ADD COLUMN history VARCHAR;
ALTER TABLE call_starts ADD COLUMN history_note VARCHAR;
ALTER TABLE call_starts ADD COLUMN parent_call_id VARCHAR;
ALTER TABLE call_starts ADD COLUMN thread_id VARCHAR;
ALTER TABLE call_ends ADD COLUMN prompt_ids INTEGER[];
ALTER TABLE call_ends ADD COLUMN base_call_id VARCHAR;
ALTER TABLE call_ends ADD COLUMN kept_ids INTEGER;
UPDATE call_starts SET prompt_ids = NULL WHERE len(prompt_ids) = 0 AND base_call_id IS NULL;

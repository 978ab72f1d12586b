"""The admin API: submit, list and cancel tasks; look at sessions, traces, groups, batches, weights and topics.

Its process owns the DuckDB file: the recorder runs in the app's lifespan, and every question goes through here.
"""

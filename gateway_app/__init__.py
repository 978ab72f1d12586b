"""The Litestar apps: the gateway (dialects, capture) and the admin API.

May import `schemas`, `polar`, `streams`, and from `consumers` the recorder, which runs in the admin app's lifespan.
"""

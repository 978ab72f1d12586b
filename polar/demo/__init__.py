"""The demo: a family of small tasks, the run that trains the shipped policy on them, its display and its report.

Talks to the admin API and starts services as processes. May import `schemas` and the rest of `polar`.
"""

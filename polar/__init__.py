"""The domain, as plain Python without Kafka or a web server, and the `polar` command.

May import `schemas` only.
"""

"""Kafka: the one table of topics, codec, producers and consumers, admin, the local broker.

May import `schemas` only.
"""

"""The batch former: which groups make batch k, and which are in none, and why. Pure.

Imports ``schemas`` only.
"""

"""One module per service: scheduler, node, assembler, recorder, batcher, trainer, weight loader.

Each is thin: decode, call a pure function of `polar`, encode. May import `schemas`, `polar`, `streams`.
"""

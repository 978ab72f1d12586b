"""From a session's story to its traces: the fold of its events, its calls made whole, the verdict and the builders.

Pure: no clock, no task, no socket. May import `schemas` only.
"""

from polar.trajectories.assembly import Assembly, assemble
from polar.trajectories.builders import BUILDERS
from polar.trajectories.calls import BrokenCall, Call, whole_calls
from polar.trajectories.story import CallStory, Story

__all__ = ["BUILDERS", "Assembly", "BrokenCall", "Call", "CallStory", "Story", "assemble", "whole_calls"]

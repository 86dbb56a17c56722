"""The engine under random submits, cancels, steps, lost bridges, NaN rows, failing steps, and
adapters that are loaded, loaded again and unloaded.
"""

from fixtures.engine.machine import Reloads
from hypothesis import settings

TestMachine = Reloads.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

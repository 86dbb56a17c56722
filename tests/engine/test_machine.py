"""The engine under random submits, cancels, steps, lost bridges, NaN rows and failing steps."""

from fixtures.engine.machine import Machine
from hypothesis import settings

TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)

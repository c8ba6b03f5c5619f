"""The elastic scheduler: a pure state machine over cells, executions and policy versions, and the shell that runs it.

Owns group membership, attempts, roles and the water level. Never touches bulk: calls, micro-steps and gradients pass
it by. Invariant (elastic, two or more cells): the serving capacity never falls below the water level by an act of the
scheduler.
"""

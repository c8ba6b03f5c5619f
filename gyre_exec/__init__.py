"""Executions: tasks, workspaces, harness processes, the relay they call through, and evaluators.

Owns what happens between an order of cellctl and its outcome. Never decides membership of a group, never reads the
call log; imports gyre_base only.
"""

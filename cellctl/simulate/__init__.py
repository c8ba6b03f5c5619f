"""A cluster in virtual time around the real scheduler: the same core and policies as live, models of everything else.

Seeded: the durations of a group depend on the seed and the group's number alone, so every arm sees the same workload
(common random numbers). No loss, no fault: that is the business of the fault simulation in the tests.
"""

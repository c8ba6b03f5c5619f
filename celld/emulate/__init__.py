"""Engines and trainers that take the time a profile says, in scaled time, over the real sockets.

`engine.kind = "emulate"` puts them in the place of an engine and a rank; every daemon around them is the real one. No
torch here: a machine with two cores holds dozens.
"""

"""The vocabulary every room of gyre shares: ids, messages, wire, journal, clock, config, run directory.

Owns the words. Decides nothing, starts nothing; imports no other room.
"""

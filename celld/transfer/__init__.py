"""Bulk bytes between cells over Mooncake Transfer Engine: read-only slots on one side, checked reads on the other.

Whoever has bytes to give puts them into a slot of its `Shelf`; the bus carries the slot's whereabouts and the digest of
each chunk (`messages.RemoteSlot`); the other side's `Reader` reads them with one-sided reads and believes only chunks
whose digest is right. Nobody writes into another process's memory.
"""

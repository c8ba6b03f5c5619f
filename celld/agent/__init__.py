"""The cell's agent: one engine and the trainer ranks of a cell, and the switch between them."""

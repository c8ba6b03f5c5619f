"""Benches: `python -m bench.NAME [--json] [--quick]`. One object per figure; a figure that could not be measured is
absent.
"""

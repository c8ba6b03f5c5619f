"""trajd: an index over the call log and the ledger of micro-steps. `daemon.run_trajd(run_dir)` starts it."""

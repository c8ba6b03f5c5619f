"""The harnesses that gyre knows by name: what each needs to run headless, offline and patiently behind a relay."""

#!/bin/bash
# Runs apart from the agent, in a sandbox of its own: /app is a copy of what the agent left, /tests is only here.
mkdir -p /logs/verifier
python3 /tests/test_greet.py > /logs/verifier/reward.txt

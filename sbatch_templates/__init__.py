"""Job scripts that `gyre init` fills in: headers and process starts, nothing to decide. Read as package data."""

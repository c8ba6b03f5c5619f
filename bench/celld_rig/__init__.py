"""What `bench.celld` measures with: forests of shape C, an owner of weights, two cells, the peer's side."""

"""What `bench.proxyd` measures with: a fake engine, the peers, CPU and memory of process trees."""

"""The whole cluster in one thread on virtual time: the real decision code, simulated edges, seeded faults."""
